"""Log-probabilities in OpenAI's form, which names tokens by their texts, and those of prompts in vLLM's.

The server's entries are like `{"token_id": 5, "token": "a", "logprob": -0.1, "top": {"5": -0.1, "7": -2},
"tokens": {"5": "a", "7": "b"}}`. Tokens that are parts of characters may have bytes: `"bytes": {"9": [195]}`.
The entry of a prompt's first token is null, because nothing precedes it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from quire_client.errors import ProtocolError


@dataclass(frozen=True)
class LogprobsFormat:
    """Writes the log-probabilities of one request in OpenAI's form for chats or for completions."""

    is_chat: bool
    num_top: int
    """Number of most likely tokens to return for each position."""

    def format(
        self,
        answer: Iterable[list[Any]],
        prompt: list[Any] | None,
        text: str,
        start: int,
        echoed: int | None = None,
    ) -> Any:
        """Returns the object `logprobs` of a choice, or of one chunk of it.

        Args:
            answer: the server's entries, a list per response.
            prompt: the entries of the prompt if the text begins with it; else None.
            text: the text of the choice or the chunk.
            start: number of the choice's characters before `text`.
            echoed: number of characters of `text` that are the prompt; None: not known, or no prompt.

        Raises:
            ProtocolError: the entries have another form.
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
        """Returns the object for completions, from pairs of entries and the text that they belong to."""
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
        """Returns log-probabilities by token text: the most likely tokens, and the entry's own if it is not
        among them. If several tokens have the same text, the likeliest counts."""
        told: dict[str, float] = {}
        for text, value, parts in self._top(entry):
            told.setdefault(_spelled(text, parts), value)
        told.setdefault(_shown(entry), entry["logprob"])
        return told

    def _top(self, entry: Any) -> list[tuple[str, float, list[int] | None]]:
        """Returns the most likely tokens, best first: text, log-probability, and the bytes, which the server
        sends for parts of characters; None if it sent none."""
        best = sorted((entry.get("top") or {}).items(), key=lambda item: -item[1])[: self.num_top]
        texts, parts = entry.get("tokens") or {}, entry.get("bytes") or {}
        return [(texts.get(i, f"token_id:{i}"), value, parts.get(i)) for i, value in best]


def places(tokens: list[str], text: str) -> list[int]:
    """Returns the position in `text` at which each token begins.

    The text is matched from its end. A token that is not in the text (a special token) usually gets the
    position at which the next token begins. Successive parts of characters get the position of the first of
    these characters. Tokens after the end of the text, which a stop string or a stream holds back, get
    successive positions.
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
    """Returns how many of the tokens at the indices `which` have a replacement character, as parts of
    characters have."""
    return sum("\ufffd" in tokens[place] for place in which)


def prompt_entries(entries: list[Any] | None, num_top: int) -> list[Any] | None:
    """Returns a prompt's log-probabilities in vLLM's form: for each position an object by token id, which
    holds the prompt's own token and the most likely ones, or None for an entry of None. Without entries it
    returns None.

    Raises:
        ProtocolError: the entries have another form.
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
    """Returns a token's text, or `token_id:ID`, as vLLM writes it, if the server sent no text."""
    text = entry.get("token")
    return f"token_id:{entry['token_id']}" if text is None else str(text)


def _bytes(entry: Any) -> list[int] | None:
    """Returns the bytes of the entry's token, which the server sends for parts of characters; None if it sent
    none."""
    found: list[int] | None = (entry.get("bytes") or {}).get(str(entry["token_id"]))
    return found


def _shown(entry: Any) -> str:
    return _spelled(_text(entry), _bytes(entry))


def _spelled(text: str, parts: list[int] | None) -> str:
    """Returns a token as OpenAI's completions write it: as `bytes:...` if `parts` has the bytes of a part of
    a character, else as its text."""
    return text if parts is None else "bytes:" + "".join(f"\\x{byte:02x}" for byte in parts)


def _token(text: str, logprob: float, parts: list[int] | None) -> dict[str, Any]:
    """Returns a token and its log-probability in the form of OpenAI's chat completions. If the token is a
    part of a character, its text has the replacement character, and its bytes may be unknown (None)."""
    encoded = parts if "\ufffd" in text else list(text.encode("utf-8", "replace"))
    return {"token": text, "logprob": logprob, "bytes": encoded}
