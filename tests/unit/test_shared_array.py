"""Arrays handed to the engine: the same memory, no names, gone with the last mapping."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from quire.engine.loop import EngineLoop
from quire.engine.messages import EmbedsMessage
from quire.engine.shared_array import SharedArray, SharedBuffer
from quire.errors import InvalidArgumentError, UnavailableError
from quire.request.multimodal import PromptEmbeds, check_spans, content_hashes

ROWS = np.arange(12, dtype=np.float32).reshape(4, 3)

_READER = """
import json, sys, msgspec
from quire.engine.shared_array import SharedArray
print(json.dumps(msgspec.convert(json.loads(sys.argv[1]), SharedArray).open().tolist()))
"""


def test_another_process_reads_what_was_written() -> None:
    buffer = SharedBuffer(ROWS)
    message = json.dumps(msgspec.to_builtins(buffer.descriptor()))
    run = subprocess.run([sys.executable, "-c", _READER, message], capture_output=True, text=True, check=True)
    assert json.loads(run.stdout) == ROWS.tolist()


@pytest.mark.row("H3")
def test_it_is_the_same_memory_and_outlives_the_writer() -> None:
    buffer = SharedBuffer(ROWS)
    opened = buffer.descriptor().open()
    buffer.array[0, 0] = 77
    assert opened[0, 0] == 77, "a copy would not see it"
    with pytest.raises(ValueError, match="read-only"):
        opened[0, 0] = 1
    buffer.close()
    assert opened[0, 0] == 77 and opened[3, 2] == 11


def descriptors() -> list[str]:
    """What this process's descriptors of memory are of."""
    links = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            links.append(str(path.readlink()))
    return [link for link in links if link.startswith(("/memfd:", "/dev/shm/"))]


def test_nothing_has_a_name_and_no_descriptor_is_left() -> None:
    before = descriptors()
    for _ in range(3):
        buffer = SharedBuffer(ROWS)
        buffer.descriptor().open()
        assert all(link.startswith("/memfd:") for link in set(descriptors()) - set(before))
        assert len(descriptors()) > len(before)
        buffer.close()
        buffer.close()
    SharedBuffer(ROWS)  # dropped, not closed
    assert descriptors() == before


def test_a_writer_that_is_gone_is_an_error() -> None:
    with pytest.raises(UnavailableError, match="embeddings are gone"):
        SharedArray(2**22 - 1, 3, (1, 1), 1, 2).open()
    assert SharedArray(2**22 - 1, 3, (0, 8), 1, 2).open().shape == (0, 8)


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([(0, 2), (1, 2)], r"image_spans: \[1\] \(1, 2\) must begin at 2"),
        ([(0, 0), (1, 4)], r"image_spans: \[0\]"),
        ([(7, 4)], r"within the prompt of 10 tokens"),
        ([(-1, 4)], r"must begin at 0"),
        ([(0, 3)], r"image_embeds: 4 rows, but image_spans hold 3 tokens"),
    ],
)
def test_spans_must_fit_rows_and_prompt(spans: list[tuple[int, int]], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        check_spans(spans, num_rows=4, num_prompt_tokens=10)


def test_rows_of_a_chunk_and_what_the_prefix_cache_tells_images_by() -> None:
    spans = ((2, 3), (8, 1))
    embeds = PromptEmbeds(ROWS, spans, tuple(content_hashes(ROWS, spans)))
    found = embeds.rows_in(3, 9)
    assert [(token, rows.tolist()) for token, rows in found] == [
        (3, ROWS[1:3].tolist()),
        (8, ROWS[3:].tolist()),
    ]
    assert embeds.rows_in(5, 8) == []
    other = PromptEmbeds(ROWS + 1, spans, tuple(content_hashes(ROWS + 1, spans)))
    moved = PromptEmbeds(ROWS, ((1, 3), (8, 1)), embeds.hashes)
    assert embeds.key_of(0, 2) == other.key_of(0, 2) == moved.key_of(5, 8) == b""
    assert len({e.key_of(0, 4) for e in (embeds, other, moved)}) == 3
    placed = PromptEmbeds(ROWS, spans, embeds.hashes, np.arange(30, dtype=np.int32).reshape(3, 10))
    assert placed.key_of(0, 4) != embeds.key_of(0, 4)
    assert placed.position_delta == 30 - 10


def test_joint_spans_are_not_cut_and_are_told_from_others() -> None:
    spans = ((2, 3), (8, 1))
    hashes = content_hashes(ROWS, spans)
    buffer = SharedBuffer(ROWS)
    message = EmbedsMessage(buffer.descriptor(), list(spans), hashes, is_joint=True)
    request: Any = SimpleNamespace(prompt_token_ids=[1] * 10)
    loop: Any = SimpleNamespace(info=SimpleNamespace(embeds_size=3))
    joint = EngineLoop._open_embeds(loop, request, message)
    plain = PromptEmbeds(ROWS, spans, tuple(hashes))
    assert [joint.last_cut(0, end) for end in range(1, 11)] == [1, 2, 2, 2, 5, 6, 7, 8, 9, 10]
    assert [joint.last_cut(3, end) for end in (4, 5)] == [3, 5], "the beginning is in the prefix cache"
    assert [plain.last_cut(0, end) for end in range(1, 11)] == list(range(1, 11))
    assert joint.key_of(0, 4) != plain.key_of(0, 4), "other keys and values"
    assert joint.key_of(5, 8) == plain.key_of(5, 8) == b"", "the same text"


@pytest.mark.parametrize("kind", ["rows", "file", "pipe", "short"])
def test_a_number_that_is_another_files_by_now_is_an_error(kind: str, tmp_path: Path) -> None:
    """A client went away before the engine had opened its rows: the buffer was closed, its number was the
    next request's, and the engine mapped that one's rows; of another file it would have mapped the bytes,
    and a pipe would have held up the engine for ever."""
    buffer = SharedBuffer(ROWS)
    stale = buffer.descriptor()
    if kind == "short":
        os.ftruncate(stale.fd, 8)
        with pytest.raises(UnavailableError, match="cut off at 8 bytes"):
            stale.open()
        os.ftruncate(stale.fd, ROWS.nbytes)
        return
    buffer.close()
    with pytest.raises(UnavailableError, match="embeddings are gone"):
        buffer.descriptor()
    if kind == "rows":
        other = SharedBuffer(ROWS + 1)
        fds = [other.descriptor().fd]
    elif kind == "file":
        (tmp_path / "other").write_bytes(bytes(1000))
        fds = [os.open(tmp_path / "other", os.O_RDWR)]
    else:
        fds = list(os.pipe())
    assert stale.fd == fds[0], "the number is used again"
    with pytest.raises(UnavailableError, match="embeddings are gone: their buffer was closed"):
        stale.open()
    for fd in fds if kind != "rows" else ():
        os.close(fd)


def test_positions_do_not_read_as_an_image() -> None:
    """48 bytes of positions without an image were the key of an image whose name has them."""
    image = PromptEmbeds(np.zeros((4, 8), np.float32), ((0, 4),), ("f" * 45,))
    name = image.key_of(0, 4)
    assert len(name) == 48
    positions = np.frombuffer(name, np.int32).reshape(3, 4)
    none = PromptEmbeds(np.zeros((0, 8), np.float32), (), (), positions)
    assert none.key_of(0, 4) != name


def test_an_image_is_told_by_all_of_its_rows_and_by_no_others() -> None:
    """Images that began alike were answered with each other's cached blocks."""
    rows = np.arange(48, dtype=np.float32).reshape(6, 8)
    spans = [(0, 3), (5, 3)]
    before = content_hashes(rows, spans)
    assert before[0] != before[1] and content_hashes(rows[3:], [(9, 3)]) == before[1:]
    for row in range(6):
        other = rows.copy()
        other[row, 7] += 1
        changed = [a != b for a, b in zip(before, content_hashes(other, spans), strict=True)]
        assert changed == [row < 3, row >= 3]
