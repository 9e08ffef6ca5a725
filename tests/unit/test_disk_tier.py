"""What the disk tier promises beyond the conformance suite: restarts, damage, kills, bounds, neighbours."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quire.kv_tiers.disk as disk_module
from quire.errors import ConfigError
from quire.kv_tiers import DiskTier
from quire.kv_tiers.block_file import HEADER_BYTES, allocated_bytes
from quire.kv_tiers.block_file import write_block as real_write_block
from tests.unit.test_kv_tiers import BLOCK_BYTES, FINGERPRINT, WAIT_S, block, blocks, empty, key, load, save

OTHER = "f" * 32
FILE_BYTES = allocated_bytes(HEADER_BYTES + BLOCK_BYTES)

Open = Callable[..., DiskTier]


@pytest.fixture
def open_tier(tmp_path: Path) -> Iterator[Open]:
    """Opens the tier of a directory; closed after the test."""
    made: list[DiskTier] = []

    def build(capacity: int = 64, *, fingerprint: str = FINGERPRINT, **options: Any) -> DiskTier:
        made.append(
            DiskTier(
                tmp_path, capacity * FILE_BYTES, block_bytes=BLOCK_BYTES, fingerprint=fingerprint, **options
            )
        )
        return made[-1]

    yield build
    for tier in made:
        if tier._writer.is_alive():
            tier.close()


def files(path: Path) -> list[Path]:
    return sorted(path.rglob("*.kv"))


def file_of(path: Path, number: int) -> Path:
    [found] = path.rglob(f"{key(number).hex()}.kv")
    return found


def fill(tier: DiskTier, numbers: list[int]) -> None:
    save(tier, numbers)
    assert tier.flush(WAIT_S)


@pytest.mark.row("C10")
def test_blocks_survive_a_restart(open_tier: Open, tmp_path: Path) -> None:
    tier = open_tier()
    save(tier, [1, 2, 3])  # and what still waits is written by close
    tier.close()
    tier = open_tier()
    assert tier.stats()["blocks"] == 3
    assert load(tier, [1, 2, 3, 4]) == 3


@pytest.mark.row("C10")
@pytest.mark.parametrize("position", [0, 8, 16, 36, HEADER_BYTES - 1, HEADER_BYTES, -1])
@pytest.mark.parametrize("restarts", [False, True])
def test_a_changed_byte_is_found(open_tier: Open, tmp_path: Path, position: int, restarts: bool) -> None:
    tier = open_tier()
    fill(tier, [1, 2])
    if restarts:
        tier.close()
    path = file_of(tmp_path, 1)
    content = bytearray(path.read_bytes())
    content[position] ^= 0x10
    path.write_bytes(content)
    if restarts:
        tier = open_tier()
    assert load(tier, [2, 1]) == 1
    assert not tier.contains(key(1))
    assert tier.stats()["damaged_blocks"] == 1
    assert tier.flush(WAIT_S)
    assert not path.exists()
    fill(tier, [1])
    assert load(tier, [1, 2]) == 2


@pytest.mark.row("C10")
@pytest.mark.parametrize("size", [0, 10, HEADER_BYTES, HEADER_BYTES + 100, HEADER_BYTES + BLOCK_BYTES + 1])
@pytest.mark.parametrize("restarts", [False, True])
def test_a_file_of_wrong_length_is_found(open_tier: Open, tmp_path: Path, size: int, restarts: bool) -> None:
    tier = open_tier()
    fill(tier, [1])
    if restarts:
        tier.close()
    path = file_of(tmp_path, 1)
    os.truncate(path, size)
    if restarts:
        tier = open_tier()
    assert load(tier, [1]) == 0
    assert tier.stats()["damaged_blocks"] == 1
    assert tier.flush(WAIT_S)
    assert not path.exists()


@pytest.mark.row("C10")
def test_another_fingerprint_is_never_read(open_tier: Open, tmp_path: Path) -> None:
    other = open_tier(fingerprint=OTHER)
    fill(other, [1])
    other.close()
    tier = open_tier()
    assert not tier.contains(key(1))
    assert load(tier, [1]) == 0
    assert tier.stats()["foreign_bytes"] == FILE_BYTES
    # Not even if somebody moves the file.
    stray = file_of(tmp_path, 1)
    tier.close()
    target = tmp_path / FINGERPRINT / stray.parent.name / stray.name
    target.parent.mkdir(parents=True)
    stray.rename(target)
    tier = open_tier()
    assert tier.contains(key(1))
    assert load(tier, [1]) == 0
    assert tier.stats()["damaged_blocks"] == 1


def test_a_block_under_another_key_is_refused(open_tier: Open, tmp_path: Path) -> None:
    tier = open_tier()
    fill(tier, [1, 2])
    file_of(tmp_path, 1).write_bytes(file_of(tmp_path, 2).read_bytes())
    assert load(tier, [1]) == 0


WRITER = """
import os, signal, sys
import numpy as np
from quire.kv_tiers import DiskTier, block_file

path, size, first, count = sys.argv[1], *map(int, sys.argv[2:5])
tier = DiskTier(path, 2**40, block_bytes=size, fingerprint="0123456789abcdef" * 2)
print(int(tier.stats()["read_only"]), flush=True)
if len(sys.argv) > 5:  # dies by its own hand, with so many bytes of the block in the file
    num_bytes = int(sys.argv[5])

    class Dying:
        def __init__(self, file):
            self.file = file
        def __enter__(self):
            return self
        def __exit__(self, *error):
            self.file.close()
        def write(self, data):
            if len(data) == block_file.HEADER_BYTES:
                return self.file.write(data)
            self.file.write(bytes(data)[:num_bytes])
            self.file.flush()
            os.kill(os.getpid(), signal.SIGKILL)

    block_file.open = lambda *args, **kwargs: Dying(open(*args, **kwargs))
for number in range(first, first + count):
    data = np.random.default_rng(number).integers(0, 256, (1, size), dtype=np.uint8)
    tier.save([number.to_bytes(16, "little")], data)
    if number % 4 == 0:
        tier.flush()
        print(number, flush=True)
signal.pause()  # until it is killed
"""
WRITTEN = 100
"""Blocks that a writer writes if it is given the time."""


def start_writer(path: Path, size: int, first: int, *more: int) -> subprocess.Popen[str]:
    arguments = [str(path), *map(str, (size, first, WRITTEN, *more))]
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )


def read_line(writer: subprocess.Popen[str]) -> int:
    assert writer.stdout is not None
    return int(writer.stdout.readline())


@pytest.mark.row("C10")
def test_a_writer_that_is_killed_leaves_whole_blocks_only(tmp_path: Path) -> None:
    size = 2**18
    first = 1
    for lines in (1, 4, 2):
        writer = start_writer(tmp_path, size, first)
        assert read_line(writer) == 0, "the lock of the process killed before is free"
        for _ in range(lines):
            last = read_line(writer)
        writer.kill()
        writer.wait(WAIT_S)
        tier = DiskTier(tmp_path, 2**40, block_bytes=size, fingerprint=FINGERPRINT)
        try:
            for number in range(1, last + 1):
                out = empty(1, size)
                assert tier.load([key(number)], out) == 1, "what was on disk before the kill is there"
                assert np.array_equal(out[0], block(number, size))
            rest = [number for number in range(last + 1, first + WRITTEN) if tier.contains(key(number))]
            for number in rest:
                out = empty(1, size)
                assert tier.load([key(number)], out) == 1
                assert np.array_equal(out[0], block(number, size))
            assert tier.stats()["damaged_blocks"] == 0
            assert tier.stats()["blocks"] == last + len(rest)
        finally:
            tier.close()
        first = last + 1


@pytest.mark.row("C10")
@pytest.mark.parametrize("num_bytes", [0, 1, 5000])
def test_a_kill_in_the_middle_of_a_block(tmp_path: Path, num_bytes: int) -> None:
    size = 2**14
    writer = start_writer(tmp_path, size, 1, num_bytes)
    assert read_line(writer) == 0
    assert writer.wait(WAIT_S) == -9
    assert (tmp_path / FINGERPRINT / "write.tmp").stat().st_size == HEADER_BYTES + num_bytes
    assert files(tmp_path) == []
    tier = DiskTier(tmp_path, 2**30, block_bytes=size, fingerprint=FINGERPRINT)
    try:
        assert tier.stats()["blocks"] == 0
        save(tier, [1], size)
        assert tier.flush(WAIT_S)
        out = empty(1, size)
        assert tier.load([key(1)], out) == 1
        assert np.array_equal(out[0], block(1, size))
        assert not (tmp_path / FINGERPRINT / "write.tmp").exists()
    finally:
        tier.close()


@pytest.mark.row("C10")
def test_the_second_process_only_reads_until_the_first_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(disk_module, "LOCK_RETRY_S", 0.0)
    writer = start_writer(tmp_path, BLOCK_BYTES, 1)
    assert read_line(writer) == 0
    assert read_line(writer) == 4
    with caplog.at_level(logging.INFO, logger="quire"):
        tier = DiskTier(tmp_path, 2**30, block_bytes=BLOCK_BYTES, fingerprint=FINGERPRINT)
        try:
            assert "is written by another process, this one only reads it" in caplog.text
            assert load(tier, [1, 2, 3, 4]) == 4
            save(tier, [10**7])
            assert not tier.contains(key(10**7))
            assert tier.stats()["dropped_blocks"] == 1
            assert tier.stats()["read_only"] == 1
            tier.drop([key(1)])
            assert tier.flush(WAIT_S)
            assert file_of(tmp_path, 1).exists(), "a reader removes nothing"
            writer.kill()
            writer.wait(WAIT_S)
            save(tier, [10**7])
            assert tier.flush(WAIT_S)
            assert "has no writer any more" in caplog.text
            assert file_of(tmp_path, 10**7).exists()
            assert load(tier, [1, 2, 10**7]) == 3
            assert tier.stats()["blocks"] == len(files(tmp_path))
        finally:
            writer.kill()
            writer.wait(WAIT_S)
            tier.close()


def test_the_reader_takes_an_evicted_block_for_a_miss(open_tier: Open) -> None:
    writer = open_tier(4)
    fill(writer, [1, 2, 3, 4])
    reader = open_tier(4)
    assert reader.stats()["read_only"] == 1
    fill(writer, [5, 6])
    assert load(reader, [3, 4]) == 2
    assert load(reader, [1]) == 0
    assert not reader.contains(key(1))
    assert reader.stats()["lost_blocks"] == 1
    assert reader.stats()["damaged_blocks"] == 0


@pytest.mark.row("C10")
def test_a_smaller_bound_after_a_restart_keeps_what_was_used_last(open_tier: Open, tmp_path: Path) -> None:
    tier = open_tier()
    fill(tier, list(range(1, 11)))
    for number in range(1, 11):
        os.utime(file_of(tmp_path, number), (1000 + number, 1000 + number))
    assert load(tier, [2, 3]) == 2
    tier.close()
    tier = open_tier(4)
    assert [number for number in range(1, 11) if tier.contains(key(number))] == [2, 3, 9, 10]
    assert len(files(tmp_path)) == 4


@pytest.mark.row("C10")
def test_the_bound_is_that_of_all_models(open_tier: Open, tmp_path: Path) -> None:
    other = open_tier(fingerprint=OTHER)
    fill(other, [1, 2, 3])
    other.close()
    for number in (1, 2, 3):
        os.utime(file_of(tmp_path, number), (1000 + number, 1000 + number))
    tier = open_tier(4)
    fill(tier, [11, 12, 13])
    assert sorted(path.stem for path in files(tmp_path)) == [key(n).hex() for n in (3, 11, 12, 13)]
    assert tier.stats()["foreign_bytes"] == FILE_BYTES
    fill(tier, [14, 15])
    assert sorted(path.stem for path in files(tmp_path)) == [key(n).hex() for n in (12, 13, 14, 15)]
    assert tier.stats()["evicted_blocks"] == 4


def test_two_models_at_work_in_one_directory(open_tier: Open, tmp_path: Path) -> None:
    one, two = open_tier(64), open_tier(64, fingerprint=OTHER)
    assert one.stats()["read_only"] == two.stats()["read_only"] == 0
    for begin in range(0, 200, 2):
        fill(one, [begin, begin + 1])
        fill(two, [begin + 1000, begin + 1001])
    assert len(files(tmp_path)) <= 64 * 17 / 16
    for tier, begin in ((one, 0), (two, 1000)):
        for number in range(begin, begin + 200):
            if tier.contains(key(number)):
                load(tier, [number])
        assert tier.stats()["damaged_blocks"] == 0
        assert load(tier, [begin + 198, begin + 199]) == 2


def test_files_that_are_not_ours_are_left_alone(open_tier: Open, tmp_path: Path) -> None:
    mine = [
        tmp_path / "notes.kv",
        tmp_path / "photos" / "ab" / f"{'00' * 16}.kv",
        tmp_path / OTHER / "ab" / "x.kv",
    ]
    for path in mine:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(10**6))
    tier = open_tier(2)
    fill(tier, [1, 2, 3])
    tier.clear()
    assert tier.flush(WAIT_S)
    assert all(path.stat().st_size == 10**6 for path in mine)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Holds every write: (a write has begun, writes may go on)."""
    began, go_on = threading.Event(), threading.Event()

    def held(*args: Any) -> None:
        began.set()
        assert go_on.wait(WAIT_S)
        real_write_block(*args)

    monkeypatch.setattr(disk_module, "write_block", held)
    yield began, go_on
    go_on.set()


Gate = tuple[threading.Event, threading.Event]


def test_a_full_queue_leaves_saves_out(open_tier: Open, tmp_path: Path, gate: Gate) -> None:
    tier = open_tier(max_queued_bytes=2 * BLOCK_BYTES)
    save(tier, [1, 2, 3, 4])  # returns though nothing can be written
    assert [tier.contains(key(n)) for n in (1, 2, 3, 4)] == [True, True, False, False]
    assert tier.stats()["dropped_blocks"] == 2
    assert load(tier, [1, 2]) == 2
    assert files(tmp_path) == []
    assert not tier.flush(0.001)
    gate[1].set()
    assert tier.flush(WAIT_S)
    assert len(files(tmp_path)) == 2
    fill(tier, [3])
    assert load(tier, [1, 2, 3]) == 3


@pytest.mark.parametrize("saves_again", [False, True])
@pytest.mark.parametrize("clears", [False, True])
def test_dropping_a_block_that_is_being_written(
    open_tier: Open, tmp_path: Path, gate: Gate, saves_again: bool, clears: bool
) -> None:
    began, go_on = gate
    tier = open_tier()
    save(tier, [1])
    assert began.wait(WAIT_S)
    if clears:
        assert tier.clear() == 1
    else:
        tier.drop([key(1)])
    if saves_again:
        tier.save([key(1)], blocks([100]))
    go_on.set()
    assert tier.flush(WAIT_S)
    assert len(files(tmp_path)) == saves_again
    out = empty(1)
    assert tier.load([key(1)], out) == saves_again
    if saves_again:
        assert np.array_equal(out[0], block(100))


def test_a_disk_that_cannot_be_written_costs_the_saves_only(
    open_tier: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tier = open_tier()
    fill(tier, [1])

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk_module, "write_block", full)
    fill(tier, [2, 3])
    assert tier.stats()["failed_blocks"] == 2
    assert caplog.text.count("No space left") == 1
    assert load(tier, [1]) == 1
    assert not tier.contains(key(2))
    monkeypatch.setattr(disk_module, "write_block", real_write_block)
    fill(tier, [2, 3])
    assert load(tier, [1, 2, 3]) == 3


def test_a_failed_write_leaves_no_file(tmp_path: Path) -> None:
    temporary = tmp_path / "write.tmp"
    with pytest.raises(OSError):
        real_write_block(tmp_path / "missing" / "a.kv", temporary, FINGERPRINT, key(1), block(1))
    assert not temporary.exists()


def test_directories_removed_under_it_are_made_again(open_tier: Open, tmp_path: Path) -> None:
    tier = open_tier()
    fill(tier, [1])
    path = file_of(tmp_path, 1)
    path.unlink()
    path.parent.rmdir()
    assert load(tier, [1]) == 0
    assert tier.stats()["lost_blocks"] == 1
    fill(tier, [1])
    fill(tier, [1])
    assert load(tier, [1]) == 1


def test_clear_reaches_the_disk(open_tier: Open, tmp_path: Path) -> None:
    tier = open_tier()
    fill(tier, [1, 2])
    other = open_tier(fingerprint=OTHER)
    fill(other, [3])
    assert tier.clear() == 2
    tier.close()
    assert [path.stem for path in files(tmp_path)] == [key(3).hex()]


def test_only_the_owner_may_look(open_tier: Open, tmp_path: Path) -> None:
    (tmp_path / FINGERPRINT).mkdir(mode=0o777)
    tier = open_tier()
    fill(tier, [1])
    path = file_of(tmp_path, 1)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert (tmp_path / FINGERPRINT).stat().st_mode & 0o777 == 0o700


def test_a_directory_of_another_user_is_refused(
    open_tier: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ConfigError, match="belongs to another user"):
        open_tier()


def test_the_size_must_hold_a_block(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="disk_cache_size=4095 holds no block: one takes 4096 bytes"):
        DiskTier(tmp_path, 4095, block_bytes=BLOCK_BYTES, fingerprint=FINGERPRINT)
