"""TextLimits: limits on the length of prompts, for the models before the generator."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire_common.client_json import check_bytes
from quire_common.errors import InputError
from quire_ensemble import messages as chat
from quire_ensemble.triton_model import integer_parameters

if TYPE_CHECKING:
    from quire_ensemble.chat_format import ChatFormat
    from quire_ensemble.tokenizer import Tokenizer


@dataclass(frozen=True)
class TextLimits:
    """Limits of a prompt. A prompt of too many bytes is refused before it is parsed. A long text of far too
    many tokens is refused as soon as its first pieces show it."""

    max_prompt_bytes: int = chat.MAX_BYTES
    """Most bytes of text_input or messages, and most characters that the chat template may make of messages.
    Messages that hold images may be longer than that by what the images may take."""
    max_model_len: int | None = None
    """Most tokens of a sequence: `max_tokens` of `Tokenizer.encode`, which refuses long texts that certainly
    have more. None: the limit is not known."""

    def encode(self, tokenizer: Tokenizer, text: bytes | None, messages: bytes | None) -> list[int]:
        """Returns the token ids of `text` or of `messages`. Raises InputError if both or none are given, or
        if the limits or the tokenizer refuse the prompt."""
        return self.encode_chat(tokenizer, text, messages)[0]

    def encode_chat(
        self, tokenizer: Tokenizer, text: bytes | None, messages: bytes | None
    ) -> tuple[list[int], ChatFormat | None]:
        """Returns the token ids as `encode` does, and the ChatFormat of messages for the generator; None for
        a text."""
        if text is not None and messages is not None:
            raise InputError("text_input, messages", "exactly one is allowed, both are given")
        if text is not None:
            check_bytes("text_input", text, self.max_prompt_bytes)
            return tokenizer.encode_bytes("text_input", text, max_tokens=self.max_model_len), None
        if messages is not None:
            return tokenizer.encode_chat(
                messages, max_bytes=self.max_prompt_bytes, max_tokens=self.max_model_len
            )
        raise InputError("text_input, messages", "exactly one is needed, none is given")


def text_limits(parameters: Mapping[str, str], checkpoint: Path) -> TextLimits:
    """Returns the limits that a model's parameters state. By default, `max_model_len` is
    `max_position_embeddings` of the checkpoint's config.json or of its `text_config`; without one (as for a
    .gguf file) the number of tokens has no limit.

    Raises:
        ParameterError: a value is no integer of at least 1.
    """
    stated: dict[str, Any] = integer_parameters(parameters, ("max_prompt_bytes", "max_model_len"))
    return TextLimits(**{"max_model_len": _longest_sequence(checkpoint), **stated})


def _longest_sequence(checkpoint: Path) -> int | None:
    """Returns `max_position_embeddings` of config.json or of its `text_config`; None if there is no valid
    one, as in a directory with a tokenizer alone, or for a .gguf file."""
    try:
        config = json.loads((checkpoint / "config.json").read_text("utf-8"))
        found = config.get("max_position_embeddings") or config["text_config"]["max_position_embeddings"]
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return None
    return found if isinstance(found, int) and found > 0 else None
