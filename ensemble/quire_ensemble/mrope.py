"""M-RoPE positions of a prompt with images, without torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def mrope_positions(
    length: int, spans: Sequence[tuple[int, int]], grids: Sequence[tuple[int, int, int]], merge: int
) -> np.ndarray:
    """Returns the positions, int32 [3, length]: time, height, width; as `get_rope_index` of Qwen2-VL and
    2.5-VL for images.

    A text token has the same position on all three axes, one more than the text token before it. An image has
    a token for each square of merged patches. These tokens add the square's place in time, height and width
    to the position that a text token would have instead of the image. The text after the image continues at
    that position plus the number of squares along the image's longer side.

    Args:
        length: tokens of the prompt with expanded placeholders.
        spans: first token and number of tokens of each image, in order.
        grids: time, height, width in patches of each image.
        merge: a square of `merge` x `merge` patches makes one token.
    """
    positions = np.empty((3, length), dtype=np.int32)
    done = position = 0
    for (start, count), (t, h, w) in zip(spans, grids, strict=True):
        positions[:, done:start] = np.arange(position, position + start - done)
        position += start - done
        h, w = h // merge, w // merge
        positions[:, start : start + count] = np.indices((t, h, w)).reshape(3, count) + position
        position += max(h, w)
        done = start + count
    positions[:, done:] = np.arange(position, position + length - done)
    return positions
