"""IncrementalDetokenizer: token ids in, text that may be sent out; finds stop strings on the way.

The aim is equality with the whole: up to a stop string, the deltas of a choice concatenate to
`tokenizer.decode(output_ids)`, decoded without the prompt (so a SentencePiece tokenizer strips the first
space, as it does there). Known exceptions are long byte runs (`_MAX_BYTE_RUN`) and special tokens that are
to be shown (`TokenDecoder.showing`). Tokens pass three stages, each of which holds back what it cannot yet
decide:

1. decoding: a window of the newest tokens is decoded again together with new tokens (one at a time if there
   are stop strings). Text after the part that is already decided is new.
   Undecided is a U+FFFD at the end, which may be an incomplete UTF-8 sequence, and a run of byte-fallback
   tokens (`<0xE4>`), which the decoders of SentencePiece models turn into U+FFFD as a whole when one byte of
   it is wrong;
2. `clean_up_tokenization_spaces`, where the tokenizer asks for it;
3. stop strings: a tail that may be the beginning of one is not sent, unless the text keeps its stop string.

`tokenizers.decoders.DecodeStream` is not used: it raises when a later byte makes a byte-fallback run
invalid, holds everything after an invalid byte, and has no way to release the tail.
"""

from __future__ import annotations

import copy
import re
import weakref
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

from quire.frontend.stop_matcher import StopAutomaton, StopMatcher

REPLACEMENT = "\ufffd"

_WINDOW = 12
"""Length in tokens from which on the window is cut after decoding, if what remains has decided text."""
_CONTEXT = 4
"""Number of tokens kept when the window is cut: more than the 3 bytes that an incomplete UTF-8 sequence can
have."""
_MAX_BYTE_RUN = 16
"""Most byte-fallback tokens held back, if the tokenizer has a sentinel. The limit causes a deviation from
the whole decode: complete characters of a longer run are sent and stay, even if a later byte of the same run
is invalid."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@cache
def _byte_letters() -> dict[str, int]:
    """Returns the byte of each letter in GPT-2's names of tokens. Visible Latin-1 characters stand for
    themselves, the other bytes have the letters from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


class TokenDecoder:
    """The part of a tokenizer that turns token ids into text. Requests share it.

    Args:
        tokenizer: a tokenizer of transformers, or a `tokenizers.Tokenizer`.
    """

    _cache: weakref.WeakKeyDictionary[Any, TokenDecoder] = weakref.WeakKeyDictionary()

    def __init__(self, tokenizer: Any) -> None:
        # The Rust tokenizer itself is twice as fast as transformers' wrapper around it.
        rust = getattr(tokenizer, "backend_tokenizer", None)
        if rust is None and hasattr(tokenizer, "get_added_tokens_decoder"):
            rust = tokenizer
        self._name: Callable[[int], str | None]
        self._decode: Callable[[list[int]], str]
        if rust is not None:
            added = rust.get_added_tokens_decoder()
            self._special_ids = frozenset(i for i, token in added.items() if token.special)
            self._name, self._id = rust.id_to_token, rust.token_to_id
            self._decode = partial(rust.decode, skip_special_tokens=False)
        else:
            self._special_ids = frozenset(tokenizer.all_special_ids)
            size = len(tokenizer)
            self._name = lambda i: tokenizer.convert_ids_to_tokens(i) if i < size else None
            self._id = tokenizer.get_vocab().get
            self._decode = partial(
                tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        self.clean_up: Callable[[str], str] | None = None
        """Cleans up the spaces of a text; None: texts stay as they are decoded."""
        if getattr(tokenizer, "clean_up_tokenization_spaces", False):
            forced = getattr(
                tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False
            )
            # transformers ignores the flag for BPE, where it would remove spaces of the text itself.
            if rust is None or type(rust.model).__name__ != "BPE" or forced:
                self.clean_up = tokenizer.clean_up_tokenization
        self._is_visible: tuple[dict[int, bool], dict[int, bool]] = ({}, {})
        """Whether a token is visible, by token id: first without `skip_special_tokens`, then with it. Filled
        when asked."""
        self._texts: dict[int, str] = {}
        """Texts of single tokens by token id; filled when asked."""
        self.byte_fallback = self._has_byte_fallback()
        self._bytes_of_letters = _byte_letters() if self._is_byte_level() else {}
        self.sentinel = self._find_sentinel() if self.byte_fallback else None

    @classmethod
    def for_tokenizer(cls, tokenizer: Any) -> TokenDecoder:
        """Returns a tokenizer's decoder, which is made once; a TokenDecoder is returned itself."""
        if isinstance(tokenizer, TokenDecoder):
            return tokenizer
        decoder = cls._cache.get(tokenizer)
        if decoder is None:
            decoder = cls._cache[tokenizer] = cls(tokenizer)
        return decoder

    def showing(self, names: Iterable[str]) -> tuple[TokenDecoder, frozenset[str]]:
        """Returns a copy of this decoder that never skips some special tokens, and the names of these.

        Args:
            names: names of tokens; those that are no special tokens are ignored.
        """
        found = {name: self._id(name) for name in names}
        shown = {name: i for name, i in found.items() if i is not None and i in self._special_ids}
        decoder = copy.copy(self)
        decoder._special_ids = self._special_ids - set(shown.values())
        decoder._is_visible = ({}, {})
        return decoder, frozenset(shown)

    def visible(self, token_ids: list[int], skip_special_tokens: bool) -> list[int]:
        """Returns the tokens that have a part in the text.

        Left out are special tokens, if they are to be skipped and `showing` has not named them, and ids
        without a token, which a model with padded embeddings can produce.
        """
        known = self._is_visible[skip_special_tokens]
        for token_id in token_ids:
            if token_id not in known:
                is_skipped = skip_special_tokens and token_id in self._special_ids
                known[token_id] = not is_skipped and self._name(token_id) is not None
        return [token_id for token_id in token_ids if known[token_id]]

    def decode(self, visible_ids: list[int]) -> str:
        """Text of tokens that are all visible, not cleaned up."""
        return self._decode(visible_ids)

    def decode_all(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        """Text of any tokens: decodes the visible ones together, and cleans up if that is wanted."""
        text = self.decode(self.visible(token_ids, skip_special_tokens))
        return text if self.clean_up is None else self.clean_up(text)

    def text_of(self, token_id: int) -> str:
        """Text of a token, also of a special one. With byte fallback, it is usually what the token adds to
        a text.

        The text is empty for an id without a token. Bytes that are a part of a character become U+FFFD.
        """
        text = self._texts.get(token_id)
        if text is None:
            before, seen = self.sentinel or (None, "")
            ids = self.visible([token_id], False)
            text = self.decode(ids if before is None else [before, *ids])[len(seen) :]
            self._texts[token_id] = text
        return text

    def byte_of(self, token_id: int) -> int | None:
        """The byte that a byte-fallback token stands for; None for other tokens."""
        match = _BYTE_TOKEN.fullmatch(self._name(token_id) or "") if self.byte_fallback else None
        return None if match is None else int(match[1], 16)

    def bytes_of(self, token_id: int) -> bytes | None:
        """Bytes of a byte-fallback token, or of an ordinary token of a byte-level tokenizer whose name spells
        bytes; else None."""
        if (byte := self.byte_of(token_id)) is not None:
            return bytes([byte])
        name = self._name(token_id) if self._bytes_of_letters and token_id not in self._special_ids else None
        values = [self._bytes_of_letters.get(letter) for letter in name or ""]
        known = [value for value in values if value is not None]
        return bytes(known) if known and len(known) == len(values) else None

    def _is_byte_level(self) -> bool:
        """Whether the names of tokens spell bytes, a letter for each, as GPT-2's do."""
        ids = [self._id(letter) for letter in "Ã©"]
        return None not in ids and self.decode([i for i in ids if i is not None]) == "é"

    def _has_byte_fallback(self) -> bool:
        ids = [self._id(token) for token in ("<0xE4>", "<0xB8>", "<0xAD>")]
        return None not in ids and self.decode([i for i in ids if i is not None]).strip() == "中"

    def _find_sentinel(self) -> tuple[int, str] | None:
        """Finds an ordinary token to stand for the tokens before a window.

        Returns:
            Token id and text; None: none of those that were tried is suitable.
        """
        for token in ("a", "▁a", "e", "▁the", "0", "A"):
            token_id = self._id(token)
            if token_id is not None and token_id not in self._special_ids and self.decode([token_id]).strip():
                return token_id, self.decode([token_id])
        for token_id in range(2048):
            if self.visible([token_id], True) and self.byte_of(token_id) is None:
                text = self.decode([token_id])
                if text.strip() and REPLACEMENT not in text:
                    return token_id, text
        return None


class IncrementalDetokenizer:
    """Text of one choice's output, decoded while its tokens arrive.

    Args:
        tokenizer: a tokenizer of transformers, a `tokenizers.Tokenizer`, or its TokenDecoder.
        skip_special_tokens: as in `tokenizer.decode`.
        stop: strings that end the text, or their automaton, which several texts may share.
        include_stop: keep the stop string in the text.
        min_tokens: a stop string counts only if its last token is at least the `min_tokens`-th.
    """

    __slots__ = (
        "_broken_run",
        "_decoder",
        "_emitted",
        "_finished",
        "_include_stop",
        "_length",
        "_matcher",
        "_min_tokens",
        "_reaches",
        "_run",
        "_settled",
        "_skip_special_tokens",
        "_taken",
        "_token_ids",
        "_uncleaned",
        "_undecided",
        "_untaken",
        "_window",
        "matched_stop",
    )

    def __init__(
        self,
        tokenizer: Any,
        *,
        skip_special_tokens: bool = True,
        stop: tuple[str, ...] | StopAutomaton = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._decoder = TokenDecoder.for_tokenizer(tokenizer)
        self._skip_special_tokens = skip_special_tokens
        automaton = StopAutomaton(stop) if isinstance(stop, tuple) and stop else stop
        self._matcher = StopMatcher(automaton) if isinstance(automaton, StopAutomaton) else None
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._token_ids: list[int] = []
        # Invariant: the first `_emitted` characters of decode(_window) have left the decoding stage, and
        # the last `_run` tokens of the window are bytes of one run, none of whose text has.
        self._window: list[int] = []
        self._emitted = 0
        self._undecided = False
        self._run = bytearray()
        self._broken_run = False
        self._uncleaned = ""
        self._taken: list[str] = []
        self._untaken = ""
        self._finished = False
        # All text of the first `_settled` tokens left the first two stages before the token after them came.
        # Of each token behind them: how long the whole decode up to it can be. `_length` characters left.
        self._settled = 0
        self._reaches: list[int] = []
        self._length = 0
        self.matched_stop: str | None = None
        """The stop string that ended the text; None: none yet. A flush may set it, too."""

    @property
    def text(self) -> str:
        """All text decided so far, up to the stop string, whether `take_delta` has returned it or not."""
        return "".join(self._taken) + self._untaken

    @property
    def num_tokens_used(self) -> int:
        """Number of tokens up to the one that completes the stop string; without one, of all tokens fed."""
        return len(self._token_ids)

    def append(self, token_ids: list[int]) -> str | None:
        """Feeds new output tokens in order; those after a stop string are dropped.

        Returns:
            The stop string that ended the text, or None.
        """
        if self.matched_stop is not None:
            return self.matched_stop
        assert not self._finished, "tokens after the end"
        if self._matcher is None:
            self._token_ids += token_ids
            self._accept(self._clean(self._decode(token_ids), last=False))
            return None
        for token_id in token_ids:
            if not (self._undecided or self._run or self._uncleaned):
                self._settled = len(self._token_ids)
                self._reaches.clear()
            self._token_ids.append(token_id)
            raw = self._decode([token_id])
            if raw:
                self._accept(self._clean(raw, last=False))
                if self.matched_stop is not None:
                    break
            self._reaches.append(self._length + self._undecided + len(self._run) + len(self._uncleaned))
        return self.matched_stop

    def take_delta(self, *, flush: bool = False) -> str:
        """Returns the text that is safe to send and was not returned before.

        Args:
            flush: no more tokens will come, so the text held back is decided and, up to a stop string in it,
                returned. An incomplete UTF-8 sequence becomes what it is in the whole decode.
        """
        if flush and not self._finished:
            raw = self._decoder.decode(self._window)[self._emitted :]
            self._accept(self._clean(raw, last=True))
            self._finished = True
        held = 0
        if self._matcher is not None and not self._finished and not self._include_stop:
            held = self._matcher.held
        end = len(self._untaken) - held
        delta, self._untaken = self._untaken[:end], self._untaken[end:]
        if delta:
            self._taken.append(delta)
        return delta

    # Stage 1: decoding.

    def _decode(self, token_ids: list[int]) -> str:
        """Adds tokens to the window and returns the text that is decided by them."""
        visible = self._decoder.visible(token_ids, self._skip_special_tokens)
        if not self._decoder.byte_fallback:
            self._window += visible
            return self._advance() if visible else ""
        parts: list[str] = []
        is_ahead = False  # whether the window holds tokens whose text was not looked at
        for token_id in visible:
            byte = self._decoder.byte_of(token_id)
            if byte is None:
                self._run.clear()
                self._broken_run = False
                self._window.append(token_id)
                is_ahead = True
            elif self._broken_run:
                parts.append(REPLACEMENT)
            else:
                if is_ahead:
                    parts.append(self._advance())
                    is_ahead = False
                self._window.append(token_id)
                self._run.append(byte)
                if len(self._run) > _MAX_BYTE_RUN:
                    parts.append(self._split_run())
        if is_ahead:
            parts.append(self._advance())
        return "".join(parts)

    def _advance(self) -> str:
        full = self._decoder.decode(self._window)
        self._undecided = full.endswith(REPLACEMENT)
        end = len(full) - self._undecided
        delta = full[self._emitted : end]
        self._emitted = max(self._emitted, end)
        if len(self._window) >= _WINDOW:
            self._cut_window()
        return delta

    def _cut_window(self) -> None:
        """Cuts the window to its newest _CONTEXT tokens, if these have decided text.

        The text of later tokens stays the same. A decoder treats the start of a text specially (a stripped
        first space), but the start is within the context's text. Unfinished bytes are fewer than the context.
        """
        context = self._window[-_CONTEXT:]
        emitted = len(self._decoder.decode(context)) - self._undecided
        if emitted > 0:
            self._window, self._emitted = context, emitted

    def _split_run(self) -> str:
        """Decides the complete characters of a byte run that is too long, and returns their text.

        If the run is invalid already, all its text is returned, and its further bytes become U+FFFD.
        Without a sentinel, nothing is decided.
        """
        if self._decoder.sentinel is None:
            return ""
        sentinel_id, sentinel_text = self._decoder.sentinel
        size, cut = len(self._run), len(self._run)
        try:
            self._run.decode()
        except UnicodeDecodeError as error:
            if error.end == size and error.reason == "unexpected end of data":
                cut = error.start
            else:
                # Decided: whatever follows, every byte of this run is U+FFFD in the whole decode.
                self._broken_run = True
        complete = self._window[: len(self._window) - size + cut]
        text = self._decoder.decode(complete)[self._emitted :]
        rest = self._window[len(complete) :]
        self._window, self._emitted = [sentinel_id, *rest], len(sentinel_text)
        self._undecided = False
        del self._run[:cut]
        return text

    # Stage 2: clean-up of spaces.

    def _clean(self, raw: str, last: bool) -> str:
        if self._decoder.clean_up is None:
            return raw
        self._uncleaned += raw
        cut = len(self._uncleaned) if last else _safe_cut(self._uncleaned)
        text, self._uncleaned = self._uncleaned[:cut], self._uncleaned[cut:]
        return self._decoder.clean_up(text) if text else ""

    # Stage 3: stop strings.

    def _accept(self, text: str) -> None:
        """Appends text that will not change. The first stop string in it that counts (see `min_tokens`) ends
        the output: the text is cut there, and the tokens after it are dropped."""
        before, position = self._untaken, 0
        self._untaken += text
        self._length += len(text)
        if self._matcher is None:
            return
        while (found := self._matcher.feed(text, position)) is not None:
            position, stop = found
            if len(self._token_ids) < self._min_tokens:
                continue
            end = len(before) + position
            used = self._count_tokens("".join(self._taken) + self._untaken[:end])
            if used < self._min_tokens:
                continue
            self.matched_stop, self._finished = stop, True
            del self._token_ids[used:]
            if not self._include_stop:
                assert end >= len(stop), "part of a stop string was sent"
                end -= len(stop)
            self._untaken = self._untaken[:end]
            return

    def _count_tokens(self, text: str) -> int:
        """Returns the least number of leading tokens whose whole decode begins with `text`; the number of all
        tokens if there is none.

        The search goes upwards, as within a byte run a further token can make the decode wrong again. Numbers
        whose decode is too short are skipped, which saves a decode for each token of an undecided tail.
        """
        for count, reach in enumerate(self._reaches, self._settled + 1):
            if reach < len(text):
                continue
            if self._decoder.decode_all(self._token_ids[:count], self._skip_special_tokens).startswith(text):
                return count
        return len(self._token_ids)


def _safe_cut(text: str) -> int:
    """Finds the last index at which, as far as is known here, the two parts, cleaned separately, give the
    cleaned whole; 0: there is none.

    The clean-up of transformers deletes spaces: those that begin one of its patterns (" .", " n't", " 've",
    ...), at most 4 characters long, and the last one of " ' ". So no pattern crosses a point after 4
    characters that are no spaces. Nor does one cross the point before a space if the preceding character is
    no space, no apostrophe, and no n (" n" can meet "'t" when " ' " between them has become an apostrophe).
    """
    for index in range(len(text), 0, -1):
        if index < len(text) and text[index] == " " and text[index - 1] not in " 'n":
            return index
        if index >= 4 and " " not in text[index - 4 : index]:
            return index
    return 0
