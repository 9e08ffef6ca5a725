"""Log-probabilities as OpenAI tells them: by the texts of tokens.

The server's entries are `{"token_id": 5, "token": "a", "logprob": -0.1, "top": {"5": -0.1, "7": -2},
"tokens": {"5": "a", "7": "b"}}`, with `"bytes": {"9": [195]}` of tokens that are parts of characters; null
stands for a prompt's first token, before which there is nothing.
"""

from __future__ import annotations

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

    def format(
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
            entries = [entry for part in answer for entry in part]
            if self.is_chat:
                return {"content": [self._described(entry) for entry in entries], "refusal": None}
            if prompt is None or echoed is None:
                return self._columns([([*(prompt or ()), *entries], text)], start)
            return self._columns([(prompt, text[:echoed]), (entries, text[echoed:])], start)
        except (AttributeError, KeyError, TypeError):
            raise ProtocolError("output logprobs: entries must have token_id, logprob and top") from None

    def _described(self, entry: Any) -> dict[str, Any]:
        top = [_token(*likely) for likely in self._top(entry)]
        return {**_token(_text(entry), entry["logprob"], _bytes(entry)), "top_logprobs": top}

    def _columns(self, parts: list[tuple[list[Any], str]], start: int) -> dict[str, Any]:
        """The object, of entries and the texts that they are of."""
        tokens: list[str] = []
        offsets: list[int] = []
        for entries, text in parts:
            known = [_shown(entry) for entry in entries if entry is not None]
            starts = places([_text(entry) for entry in entries if entry is not None], text)
            if entries and entries[0] is None:
                first = starts[0] if starts else len(text)
                known, starts = [text[:first], *known], [0, *starts]
            tokens += known
            offsets += [start + place for place in starts]
            start += len(text)
        told = [entry for entries, _ in parts for entry in entries]
        return {
            "tokens": tokens,
            "token_logprobs": [entry and entry["logprob"] for entry in told],
            "top_logprobs": [entry and self._likely(entry) for entry in told],
            "text_offset": offsets,
        }

    def _likely(self, entry: Any) -> dict[str, float]:
        """The most likely tokens and the entry's own, which may be one more. Of tokens with one text the
        likeliest is told."""
        told: dict[str, float] = {}
        for text, value, parts in self._top(entry):
            told.setdefault(_spelled(text, parts), value)
        told.setdefault(_shown(entry), entry["logprob"])
        return told

    def _top(self, entry: Any) -> list[tuple[str, float, list[int] | None]]:
        """The most likely tokens, best first: text, log-probability, and bytes of a part of a character."""
        best = sorted((entry.get("top") or {}).items(), key=lambda item: -item[1])[: self.num_top]
        texts, parts = entry.get("tokens") or {}, entry.get("bytes") or {}
        return [(texts.get(i, f"token_id:{i}"), value, parts.get(i)) for i, value in best]


def places(tokens: list[str], text: str) -> list[int]:
    """Where each token begins in the text that they make.

    Read from the end. A token that is not in the text (a special one) stands where the next one begins, and
    parts of a character where it begins. Tokens behind the text, which a stop string or a stream holds back,
    follow each other.
    """
    starts = [0] * len(tokens)
    end, loose = len(text), list[int]()

    def settle(begin: int) -> None:
        is_behind = begin == len(text)
        for place in reversed(loose):
            starts[place] = begin
            if is_behind:
                begin += len(tokens[place])

    for place in reversed(range(len(tokens))):
        token = tokens[place]
        gaps = range(min(_num_parts(tokens, loose), end) + 1)
        gap = next((gap for gap in gaps if text.endswith(token, 0, end - gap)), None)
        if gap is None:
            loose.append(place)
            continue
        settle(end - gap)
        end -= gap + len(token)
        starts[place], loose = end, []
    settle(end - min(_num_parts(tokens, loose), end))
    return starts


def _num_parts(tokens: list[str], which: list[int]) -> int:
    """How many are parts of characters."""
    return sum("\ufffd" in tokens[place] for place in which)


def prompt_entries(entries: list[Any] | None, num_top: int) -> list[Any] | None:
    """A prompt's log-probabilities as vLLM tells them: for each token an object by token id, of the token
    itself and the most likely ones.

    Raises:
        ProtocolError: entries of another form.
    """

    def to_vllm(entry: Any) -> dict[str, Any]:
        texts = entry.get("tokens") or {}
        best = sorted((entry.get("top") or {}).items(), key=lambda item: -item[1])[:num_top]
        own = {"logprob": entry["logprob"], "rank": entry.get("rank"), "decoded_token": entry.get("token")}
        others = {
            str(token): {"logprob": value, "rank": rank, "decoded_token": texts.get(token)}
            for rank, (token, value) in enumerate(best, 1)
        }
        return {str(entry["token_id"]): own, **others}

    try:
        return None if entries is None else [entry if entry is None else to_vllm(entry) for entry in entries]
    except (AttributeError, KeyError, TypeError):
        raise ProtocolError("output prompt_logprobs: entries must have token_id, logprob and top") from None


def _text(entry: Any) -> str:
    """A token's text; where the server has none, its id, as vLLM writes it."""
    text = entry.get("token")
    return f"token_id:{entry['token_id']}" if text is None else str(text)


def _bytes(entry: Any) -> list[int] | None:
    """The bytes of a token that is a part of a character, where the server tells them."""
    found: list[int] | None = (entry.get("bytes") or {}).get(str(entry["token_id"]))
    return found


def _shown(entry: Any) -> str:
    return _spelled(_text(entry), _bytes(entry))


def _spelled(text: str, parts: list[int] | None) -> str:
    """A token as OpenAI's completions write it: bytes where it is a part of a character."""
    return text if parts is None else "bytes:" + "".join(f"\\x{byte:02x}" for byte in parts)


def _token(text: str, logprob: float, parts: list[int] | None) -> dict[str, Any]:
    """A token and its log-probability in the form of OpenAI's chat completions. The text of a part of a
    character has the replacement character, and its bytes may be unknown (None)."""
    encoded = parts if "\ufffd" in text else list(text.encode("utf-8", "replace"))
    return {"token": text, "logprob": logprob, "bytes": encoded}
