"""Multimodal prompts: embeddings of images, and where in the prompt they go. No torch in here."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.errors import InvalidArgumentError


@dataclass(slots=True, eq=False)
class PromptEmbeds:
    """Rows that replace the embeddings of placeholder tokens.

    Row r of `embeds` belongs to the r-th prompt token that lies in a span. The rows are kept until the
    request ends, because a request needs them again after a preemption.
    """

    embeds: Any
    """float32 [rows, embeds_size of the model]: a numpy array, or a torch tensor if it came by CUDA IPC. It
    may lie in memory shared with a frontend, and is never written."""
    spans: tuple[tuple[int, int], ...]
    """(first prompt token, number of tokens) of each image, ascending and without overlap."""
    hashes: tuple[str, ...]
    """Content hash of each image, by which the prefix cache distinguishes images."""
    position_ids: npt.NDArray[np.int32] | None = None
    """Positions [3, prompt tokens] (time, height, width) for models with M-RoPE; None: each position is the
    token's index."""
    is_joint: bool = False
    """Whether the tokens of a span see each other in both directions. One step then computes all tokens of a
    span that are not in a cache."""

    @property
    def position_delta(self) -> int:
        """Difference between the position of a token after the prompt and its index; 0 without
        `position_ids`."""
        if self.position_ids is None:
            return 0
        return int(self.position_ids.max()) + 1 - self.position_ids.shape[1]

    def key_of(self, begin: int, end: int) -> bytes:
        """Returns a key for what this object adds to tokens [begin, end) beside their ids: their images,
        where these begin, whether these are joint, and their `position_ids` if there are any."""
        parts = [
            f"{content_hash}@{start - begin};".encode()
            for (start, length), content_hash in zip(self.spans, self.hashes, strict=True)
            if start < end and start + length > begin
        ]
        if parts and self.is_joint:
            parts.append(b"&")
        if self.position_ids is not None:
            # Behind a mark, so that no positions read as the name of an image.
            parts += b"#", np.ascontiguousarray(self.position_ids[:, begin:end]).tobytes()
        return b"".join(parts)

    def last_cut(self, begin: int, end: int) -> int:
        """Returns where a row of tokens from `begin` on must end, at most at `end`, to cut no joint span.
        `begin`: there is no such row."""
        cut = [start for start, length in self.spans if start < end < start + length and self.is_joint]
        return max(begin, cut[0]) if cut else end

    def rows_in(self, begin: int, end: int) -> list[tuple[int, Any]]:
        """Returns the rows for tokens [begin, end): for each image with tokens there, (the first of these
        tokens, the rows for all of them)."""
        found = []
        first_row = 0
        for start, length in self.spans:
            low, high = max(start, begin), min(start + length, end)
            if low < high:
                found.append((low, self.embeds[first_row + low - start : first_row + high - start]))
            first_row += length
        return found


def content_hashes(embeds: npt.NDArray[np.float32], spans: Sequence[tuple[int, int]]) -> list[str]:
    """Returns a hash of each image's rows; takes about 1 ms per MB."""
    hashes, first_row = [], 0
    for _, length in spans:
        rows = np.ascontiguousarray(embeds[first_row : first_row + length])
        hashes.append(hashlib.blake2b(rows.data, digest_size=16).hexdigest())
        first_row += length
    return hashes


def check_spans(spans: Sequence[tuple[int, int]], *, num_rows: int, num_prompt_tokens: int) -> None:
    """Raises InvalidArgumentError unless the spans (first token, number of tokens) are not empty, ascend
    without overlap, lie in the prompt, and together have `num_rows` tokens."""
    end = 0
    for index, (start, length) in enumerate(spans):
        if start < end or length < 1 or start + length > num_prompt_tokens:
            raise InvalidArgumentError(
                "image_spans",
                f"[{index}] ({start}, {length}) must begin at {end} or later and end within the prompt of "
                f"{num_prompt_tokens} tokens",
            )
        end = start + length
    wanted = sum(length for _, length in spans)
    if wanted != num_rows:
        raise InvalidArgumentError("image_embeds", f"{num_rows} rows, but image_spans hold {wanted} tokens")
