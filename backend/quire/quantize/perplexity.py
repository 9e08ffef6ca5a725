"""Perplexity: how well a model foretells a text."""

from __future__ import annotations

import gc
import math
from pathlib import Path
from typing import Any

from quire.errors import CheckpointError, InvalidArgumentError
from quire_ensemble.tokenizer import Tokenizer

WINDOW = 512
"""Tokens of a text that are computed together, and know nothing of those before them."""
MEASURED_TOKENS = 32 * WINDOW
"""Tokens of a text that perplexity is measured with, at most."""
CALIBRATION_TOKENS = 32 * WINDOW
"""Tokens of a text that a scheme is calibrated with, at most."""
_BATCH = 8


def default_text() -> str:
    """The topics of Python's `help`, in alphabetical order: some 460 000 characters of its reference."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def text_of(file: Path | None) -> str:
    """A file's text, or the default one; raises InvalidArgumentError where it is not UTF-8."""
    if file is None:
        return default_text()
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError("text", f"{file} cannot be read: {error}") from None


def split(text: str) -> tuple[str, str]:
    """A text to calibrate with, and the last quarter, which measures what became of it."""
    cut = len(text) * 3 // 4
    return text[:cut], text[cut:]


def windows(tokenizer: Tokenizer, text: str, size: int, most: int) -> list[list[int]]:
    """Token ids in windows of one size, spread over the text where it has more than `most` tokens.

    Args:
        tokenizer: of the checkpoint; where it puts a token before texts, each window begins with that.
        text: any text.
        size: tokens of a window; a last one of fewer is left out unless it is the only one.
        most: tokens of all windows.
    """
    begin = [one for one in tokenizer.encode("") if one == tokenizer.hf.bos_token_id]
    rest, step = tokenizer.encode(text, add_special_tokens=False), size - len(begin)
    cut = [begin + rest[at : at + step] for at in range(0, len(rest), step)]
    whole = [window for window in cut if len(window) == size] or cut[:1]
    count = min(len(whole), max(1, most // size))
    return [whole[number * len(whole) // count] for number in range(count)]


def perplexity(checkpoint: str | Path, text: str, **options: Any) -> tuple[float, int]:
    """Perplexity of a text, by the engine as it would serve the checkpoint, and the number of its tokens.

    The text is cut into windows of WINDOW tokens (fewer with a smaller `max_model_len`), MEASURED_TOKENS in
    all at most. Each token but a window's first counts. Two runs on one machine give the same number.

    Args:
        checkpoint: as of `LLM`.
        text: any text.
        options: of `LLM`.

    Raises:
        QuireError, HubError, TokenizerError: the checkpoint cannot be loaded, or has no tokenizer.
        InvalidArgumentError: the text has less than two tokens.
    """
    from quire.llm import LLM

    llm = LLM(checkpoint, **{"max_num_seqs": _BATCH, **options})
    try:
        if llm.tokenizer is None:
            raise CheckpointError(f"{checkpoint}: has no tokenizer, so no text can be measured")
        size = min(WINDOW, llm.core.info.max_model_len - 1)
        cut = windows(llm.tokenizer, text, size, MEASURED_TOKENS)
        if not cut or len(cut[0]) < 2:
            raise InvalidArgumentError("text", "has less than two tokens")
        total, count = 0.0, 0
        for first in range(0, len(cut), _BATCH):
            batch = cut[first : first + _BATCH]
            for output in llm.generate(batch, max_tokens=1, temperature=0.0, prompt_logprobs=0):
                assert output.prompt_logprobs is not None
                found = [one.logprobs[0] for one in output.prompt_logprobs if one is not None]
                total, count = total - math.fsum(found), count + len(found)
        return math.exp(total / count), count
    finally:
        del llm
        gc.collect()
