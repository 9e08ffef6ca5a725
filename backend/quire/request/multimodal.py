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
    """Rows that take the place of the embeddings of placeholder tokens.

    Row r of `embeds` belongs to the r-th prompt token that lies in a span. The rows stay until the request
    ends: a preempted one computes them again.
    """

    embeds: Any
    """float32 [rows, embeds_size of the model], numpy, or torch where it came by CUDA IPC; may lie in memory
    shared with a frontend, and is never written."""
    spans: tuple[tuple[int, int], ...]
    """(first prompt token, number of tokens) of each image, ascending and apart."""
    hashes: tuple[str, ...]
    """Content hash of each image: what the prefix cache tells images by."""
    position_ids: npt.NDArray[np.int32] | None = None
    """[3, prompt tokens] (time, height, width) for models with M-RoPE; None: a token's index."""

    @property
    def position_delta(self) -> int:
        """Number to add to the index of a token after the prompt to get its position; 0 without
        `position_ids`."""
        if self.position_ids is None:
            return 0
        return int(self.position_ids.max()) + 1 - self.position_ids.shape[1]

    def key_of(self, begin: int, end: int) -> bytes:
        """Bytes for everything besides token ids that the keys and values of tokens [begin, end) depend on:
        the images among them, where these begin, and positions that are not a token's index."""
        parts = [
            f"{content_hash}@{start - begin};".encode()
            for (start, length), content_hash in zip(self.spans, self.hashes, strict=True)
            if start < end and start + length > begin
        ]
        if self.position_ids is not None:
            # Behind a mark, so that no positions read as the name of an image.
            parts += b"#", np.ascontiguousarray(self.position_ids[:, begin:end]).tobytes()
        return b"".join(parts)

    def rows_in(self, begin: int, end: int) -> list[tuple[int, Any]]:
        """The rows for tokens [begin, end): (token, rows for it and its successors) per image touched."""
        found = []
        first_row = 0
        for start, length in self.spans:
            low, high = max(start, begin), min(start + length, end)
            if low < high:
                found.append((low, self.embeds[first_row + low - start : first_row + high - start]))
            first_row += length
        return found


def content_hashes(embeds: npt.NDArray[np.float32], spans: Sequence[tuple[int, int]]) -> list[str]:
    """A hash of each image's rows; about 1 ms per MB."""
    hashes, first_row = [], 0
    for _, length in spans:
        rows = np.ascontiguousarray(embeds[first_row : first_row + length])
        hashes.append(hashlib.blake2b(rows.data, digest_size=16).hexdigest())
        first_row += length
    return hashes


def check_spans(spans: Sequence[tuple[int, int]], *, num_rows: int, num_prompt_tokens: int) -> None:
    """Raises InvalidArgumentError unless the spans are ascending, apart, in the prompt and hold every row."""
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
