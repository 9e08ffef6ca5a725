"""Log-probabilities as OpenAI tells them: by the texts of tokens.

The server's entries are `{"token_id": 5, "token": "a", "logprob": -0.1, "top": {"5": -0.1, "7": -2},
"tokens": {"5": "a", "7": "b"}}`; null stands for a prompt's first token, before which there is nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from quire_client.errors import ProtocolError


@dataclass(frozen=True)
class LogprobsFormat:
    """The shape of one request's log-probabilities."""

    is_chat: bool
    num_top: int
    """Likely tokens to tell of each position."""

    def of(
        self,
        answer: Iterable[list[Any]],
        prompt: list[Any] | None,
        text: str,
        start: int,
        echoed: int | None = None,
    ) -> Any:
        """The object `logprobs` of a choice, or of one chunk of it.

        Args:
            answer: the entries of each response.
            prompt: those of the prompt, where the text begins with it.
            text: of the choice or the chunk.
            start: characters of the choice before it.
            echoed: characters of the text that are the prompt; None: that is not known.

        Raises:
            ProtocolError: entries of another form.
        """
        try:
            entries = [*(prompt or ()), *(entry for part in answer for entry in part)]
            if self.is_chat:
                return {"content": [self._described(entry) for entry in entries], "refusal": None}
            known = entries if prompt is None or echoed is None else prompt
            return self._columns(entries, text[:echoed], start, len(known))
        except (AttributeError, KeyError, TypeError):
            raise ProtocolError("output logprobs: entries must have token_id, logprob and top") from None

    def _described(self, entry: Any) -> dict[str, Any]:
        top = [_token(*likely) for likely in self._top(entry)]
        return {**_token(_text(entry), entry["logprob"]), "top_logprobs": top}

    def _columns(self, entries: list[Any], text: str, start: int, num_told: int) -> dict[str, Any]:
        """The object, where the first `num_told` entries are of the text: a stop string takes text from an
        answer and none of its tokens."""
        tokens = [_text(entry) for entry in entries if entry is not None]
        if entries and entries[0] is None:
            tokens.insert(0, text[: max(len(text) - sum(map(len, tokens[: num_told - 1])), 0)])
        offsets = [start, *itertools.accumulate(map(len, tokens), initial=start)][1:-1]
        return {
            "tokens": tokens,
            "token_logprobs": [entry and entry["logprob"] for entry in entries],
            "top_logprobs": [entry and dict(self._top(entry)) for entry in entries],
            "text_offset": offsets,
        }

    def _top(self, entry: Any) -> list[tuple[str, float]]:
        """The most likely tokens, best first."""
        best = sorted((entry.get("top") or {}).items(), key=lambda item: -item[1])[: self.num_top]
        texts = entry.get("tokens") or {}
        return [(texts.get(i, f"token_id:{i}"), value) for i, value in best]


def _text(entry: Any) -> str:
    """A token's text; where the server has none, its id, as vLLM writes it."""
    text = entry.get("token")
    return f"token_id:{entry['token_id']}" if text is None else str(text)


def _token(text: str, logprob: float) -> dict[str, Any]:
    """A token's bytes are null where it is a part of a character, whose text is a replacement."""
    encoded = None if "\ufffd" in text else list(text.encode("utf-8", "replace"))
    return {"token": text, "logprob": logprob, "bytes": encoded}
