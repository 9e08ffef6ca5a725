"""Perplexity: how well a model predicts a text."""

from __future__ import annotations

import gc
import math
from pathlib import Path
from typing import Any

from quire.errors import CheckpointError, ConfigError, InvalidArgumentError
from quire_ensemble.tokenizer import Tokenizer

WINDOW = 512
"""Most tokens in a window of a text. The tokens of a window do not see the text before the window."""
MEASURED_TOKENS = 32 * WINDOW
"""Most tokens with which perplexity is measured."""
CALIBRATION_TOKENS = 32 * WINDOW
"""Most tokens with which a scheme is calibrated."""
_BATCH = 8


def default_text() -> str:
    """Returns the texts of all topics of Python's `help`, sorted by the topics' names. The result depends on
    Python's version."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def text_of(file: Path | None) -> str:
    """Returns a file's text, or the default text for None; raises InvalidArgumentError if the file cannot be
    read, or is not UTF-8."""
    if file is None:
        return default_text()
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError("text", f"{file} cannot be read: {error}") from None


def split(text: str) -> tuple[str, str]:
    """Divides a text into (calibration text, text for perplexity). The second is the last quarter."""
    cut = len(text) * 3 // 4
    return text[:cut], text[cut:]


def windows(tokenizer: Tokenizer, text: str, size: int, most: int) -> list[list[int]]:
    """Cuts a text into windows of token ids of equal size. If there are more than `most` tokens, the windows
    are spread over the text.

    Args:
        tokenizer: the checkpoint's tokenizer. If it begins a text with BOS, each window begins with BOS.
        text: the text.
        size: tokens in a window. A shorter last window is left out, unless it is the only one.
        most: most tokens in all windows together, except that one window may have more.
    """
    begin = [one for one in tokenizer.encode("") if one == tokenizer.hf.bos_token_id]
    rest, step = tokenizer.encode(text, add_special_tokens=False), size - len(begin)
    cut = [begin + rest[at : at + step] for at in range(0, len(rest), step)]
    whole = [window for window in cut if len(window) == size] or cut[:1]
    count = min(len(whole), max(1, most // size))
    return [whole[number * len(whole) // count] for number in range(count)]


def perplexity(checkpoint: str | Path, text: str, **options: Any) -> tuple[float, int]:
    """Computes a text's perplexity with the engine, as it would serve the checkpoint. Returns (perplexity,
    number of tokens counted).

    The text is cut into windows of WINDOW tokens (fewer with a smaller `max_model_len`). Windows with at most
    MEASURED_TOKENS tokens in all are used. In each of them, all tokens except the first count.

    Args:
        checkpoint: see `LLM`.
        text: the text.
        options: further arguments of `LLM`.

    Raises:
        QuireError, HubError, InputError, TokenizerError: the checkpoint cannot be loaded or has no tokenizer,
            or the engine cannot compute perplexity.
        InvalidArgumentError: the text has fewer than two tokens, BOS included.
    """
    from quire.llm import LLM

    llm = LLM(checkpoint, **{"max_num_seqs": _BATCH, **options})
    try:
        if llm.tokenizer is None:
            raise CheckpointError(f"{checkpoint}: has no tokenizer, so no text can be measured")
        size = min(WINDOW, llm.core.info.max_model_len - 1)
        if size < 3:  # BOS, a token, and one more
            raise ConfigError(f"max_model_len={size + 1} is too short to measure perplexity: at least 4")
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
