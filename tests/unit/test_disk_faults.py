"""A disk that is full, read-only or gone under an engine: the tokens are those without it, the log has one
line for each trouble, and blocks are kept again when the disk is back.

The disk is a small tmpfs in a mount namespace of a process of its own, where that may be made; what the
system calls then say is played in the process for everybody else.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quire.kv_tiers.disk as disk_module
from quire import LLM, SamplingParams
from quire.kv_tiers import DiskTier
from quire.kv_tiers.block_file import write_block as real_write_block
from quire.kv_tiers.throttled_warnings import ThrottledWarnings
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.runner_of import runner_of
from tests.unit.test_engine import random_prompts

GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)
PROMPTS = [prompt + prompt for prompt in random_prompts(12, longest=45, seed=5)]
LIMIT_S = 120.0
OPTIONS: dict[str, Any] = {"max_model_len": 128, "num_blocks": 256, "block_size": 8, "num_threads": 1}


class Served:
    """An engine that writes to a directory, and what it generates without one."""

    def __init__(self, checkpoint: Path, directory: Path) -> None:
        plain = LLM(checkpoint, **OPTIONS)
        self.expected = [output.token_ids for output in plain.generate(PROMPTS, GREEDY)]
        plain.core.close()
        disk_module.LOCK_RETRY_S = 0.0
        self.llm = LLM(checkpoint, **OPTIONS, disk_cache_directory=str(directory), disk_cache_size="1GiB")
        self.lines: list[str] = []
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: self.lines.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("quire").addHandler(handler)

    def serve(self) -> dict[str, float]:
        """Generates twice with nothing in the pool; returns by how much the tier's numbers grew.

        Nothing waits for the writer when the second time begins: what waits is loaded, too, whatever the
        disk says.
        """
        core = self.llm.core
        assert core.tiers is not None
        before = core.tiers.stats()
        core.kv.reset()
        for _ in range(2):
            assert [output.token_ids for output in self.llm.generate(PROMPTS, GREEDY)] == self.expected
            core.kv.reset()
            assert core.tiers.flush(LIMIT_S)
        core.scheduler.check_integrity()
        return {key: value - before[key] for key, value in core.tiers.stats().items()}

    def new_lines(self) -> list[str]:
        lines, self.lines = self.lines, []
        return lines


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"))


def on_a_disk(checkpoint: Path, root: Path) -> None:
    """The whole story on a tmpfs; run as root in a mount namespace of its own."""
    disk = root / "disk"
    disk.mkdir()

    def mount(*arguments: str) -> None:
        subprocess.run(["mount", *arguments, str(disk)], check=True, timeout=LIMIT_S)

    mount("-t", "tmpfs", "-o", "size=256k", "tmpfs")
    served = Served(checkpoint, disk / "kv")
    full = served.serve()
    assert full["disk_failed_blocks"] > 20 and full["disk_saved_blocks"] > 0, full
    (line,) = served.new_lines()
    assert "No space left on device" in line, line
    mount("-o", "remount,size=64m")
    assert served.serve()["disk_saved_blocks"] > 20
    warm = served.serve()
    assert warm["disk_loaded_blocks"] > 20 and warm["disk_failed_blocks"] == 0, warm

    mount("-o", "remount,ro")
    assert served.llm.core.tiers is not None
    served.llm.core.tiers.clear()
    read_only = served.serve()
    assert read_only["disk_failed_blocks"] > 20 and read_only["disk_loaded_blocks"] == 0, read_only
    (line,) = served.new_lines()
    assert "Read-only file system" in line, line
    started_on_it = DiskTier(disk / "kv", 2**20, block_bytes=64, fingerprint="0" * 32)
    assert started_on_it.stats()["read_only"]
    started_on_it.close()
    (line,) = served.new_lines()
    assert "Read-only file system" in line, line
    mount("-o", "remount,rw")
    assert served.serve()["disk_saved_blocks"] > 20
    assert served.serve()["disk_loaded_blocks"] > 20

    subprocess.run(["umount", "-l", str(disk)], check=True, timeout=LIMIT_S)
    disk.chmod(0o500)
    gone = served.serve()
    assert gone["disk_saved_blocks"] + gone["disk_lost_blocks"] > 20, gone
    mount("-t", "tmpfs", "-o", "size=64m", "tmpfs")
    assert served.serve()["disk_saved_blocks"] > 20
    assert served.serve()["disk_loaded_blocks"] > 20
    assert list((disk / "kv").rglob("*.kv")), "the new disk is the one that is used"
    assert served.new_lines() == []
    served.llm.core.close()


def _may_mount() -> bool:
    command = ["unshare", "-m", "sh", "-c", "mount -t tmpfs -o size=64k tmpfs /mnt"]
    try:
        return subprocess.run(command, capture_output=True, timeout=LIMIT_S).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def test_a_disk_that_is_full_read_only_and_gone(checkpoint: Path, tmp_path: Path) -> None:
    if not _may_mount():
        pytest.skip("no file system may be mounted here")
    command = ["unshare", "-m", sys.executable, "-m", __name__, str(checkpoint), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout.splitlines()[-1]) == "done"


@pytest.fixture
def served(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(disk_module, "LOCK_RETRY_S", 0.0)
    served = Served(checkpoint, tmp_path / "kv")
    yield served
    served.llm.core.close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_disk_that_refuses_writes_and_comes_back(
    served: Served, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    with monkeypatch.context() as patch:

        def refused(*_: Any, **__: Any) -> None:
            raise OSError(number, os.strerror(number))

        patch.setattr(disk_module, "write_block", refused)
        patch.setattr(Path, "unlink", refused)
        assert served.serve()["disk_failed_blocks"] > 20
        (line,) = served.new_lines()
        assert os.strerror(number) in line
    assert served.serve()["disk_saved_blocks"] > 20
    assert served.serve()["disk_loaded_blocks"] > 20
    assert served.new_lines() == []


def test_a_directory_that_is_removed_is_made_again(served: Served, tmp_path: Path) -> None:
    """Only the folders below the model's were made again: without that one nothing was ever saved."""
    assert served.serve()["disk_saved_blocks"] > 20
    for _ in range(2):
        shutil.rmtree(tmp_path / "kv")
        assert served.serve()["disk_saved_blocks"] > 20
        assert served.serve()["disk_loaded_blocks"] > 20
    assert served.new_lines() == []


def test_a_save_while_the_directory_is_made_again_does_not_shut_its_own_process_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer was no owner for a moment, a save tried for the lock, and found it taken: by the writer. Who
    came second said so, and the tier was read-only for good."""
    monkeypatch.setattr(disk_module, "LOCK_RETRY_S", 0.0)
    tier = DiskTier(tmp_path / "kv", 2**20, block_bytes=1024, fingerprint="0" * 32)
    row = disk_module.np.zeros((1, 1024), dtype="uint8")
    keys = [number.to_bytes(16, "little") for number in range(8)]
    tier.save(keys[:1], row)
    assert tier.flush(LIMIT_S)
    try_lock, savers = tier._try_lock, list[threading.Thread]()

    def while_another_saves() -> bool:
        if threading.current_thread() in savers:
            return try_lock()
        savers.append(threading.Thread(target=tier.save, args=(keys[2:3], row)))
        savers[0].start()
        savers[0].join(0.5)  # it waits for us, or has tried in vain
        return try_lock()

    monkeypatch.setattr(tier, "_try_lock", while_another_saves)
    shutil.rmtree(tmp_path / "kv")
    tier.save(keys[1:2], row)
    assert tier.flush(LIMIT_S)
    savers[0].join(LIMIT_S)
    assert tier.flush(LIMIT_S) and not tier.stats()["read_only"]
    tier.save(keys[3:4], row)
    assert tier.flush(LIMIT_S) and tier.contains(keys[3])
    tier.close()


def test_one_that_another_process_has_made_again_is_only_read(served: Served, tmp_path: Path) -> None:
    """The lock of the removed directory is nobody's: two writers would have used one temporary file."""
    served.serve()
    (directory,) = (path for path in (tmp_path / "kv").iterdir() if path.is_dir())
    shutil.rmtree(directory)
    access = runner_of(served.llm.core).kv_cache.block_bytes
    other = DiskTier(tmp_path / "kv", 2**30, block_bytes=access, fingerprint=directory.name)
    grown = served.serve()
    assert grown["disk_saved_blocks"] == 0 and list(directory.rglob("*.kv")) == []
    other.close()
    assert served.serve()["disk_saved_blocks"] > 20


def test_one_that_is_back_after_it_could_not_be_made_again_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a failed mount: the lock of the time before was still held, by the process itself."""
    monkeypatch.setattr(disk_module, "LOCK_RETRY_S", 0.0)
    tier = DiskTier(tmp_path / "kv", 2**20, block_bytes=1024, fingerprint="0" * 32)
    keys = [bytes([number] * 16) for number in range(3)]
    row = np.zeros((1, 1024), np.uint8)
    (tmp_path / "kv").rename(tmp_path / "elsewhere")
    (tmp_path / "kv").write_text("no directory")
    tier.save(keys[:1], row)
    assert tier.flush(LIMIT_S) and tier.stats()["read_only"]
    (tmp_path / "kv").unlink()
    (tmp_path / "elsewhere").rename(tmp_path / "kv")
    tier.save(keys[1:2], row)
    assert tier.flush(LIMIT_S) and not tier.stats()["read_only"]
    tier.save(keys[2:], row)
    assert tier.flush(LIMIT_S) and tier.contains(keys[2])
    tier.close()


def test_where_nothing_can_be_removed_nothing_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full tier on a disk gone read-only dropped its whole index for one block that it could not write;
    and what was cleared then came back with the next process."""
    tier = DiskTier(tmp_path, 8 * 4096, block_bytes=1024, fingerprint="0" * 32)
    keys = [number.to_bytes(16, "little") for number in range(12)]
    rows = [disk_module.np.full((1, 1024), number, dtype="uint8") for number in range(12)]
    for key, row in zip(keys[:8], rows, strict=False):
        tier.save([key], row)
    assert tier.flush(LIMIT_S) and tier.stats()["blocks"] == 8
    with monkeypatch.context() as patch:

        def refused(*_: Any, **__: Any) -> None:
            raise OSError(errno.EROFS, "Read-only file system")

        patch.setattr(disk_module, "write_block", refused)
        patch.setattr(Path, "unlink", refused)
        tier.save(keys[8:9], rows[8])
        assert tier.flush(LIMIT_S)
        assert [tier.contains(key) for key in keys[:9]] == [True] * 8 + [False]
        tier.drop(keys[:4])
        assert tier.flush(LIMIT_S)
    assert disk_module.write_block is real_write_block
    assert len(list(tmp_path.rglob("*.kv"))) == 8, "nothing was removed"
    tier.save(keys[9:10], rows[9])
    assert tier.flush(LIMIT_S)
    assert len(list(tmp_path.rglob("*.kv"))) == tier.stats()["blocks"] == 5
    tier.close()


def test_a_cause_is_told_once_and_again_after_a_quiet_time(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    warnings = ThrottledWarnings(lambda: now[0])
    for second in range(0, 300, 5):
        now[0] = second
        warnings.warn("full", f"full at {second}")
    warnings.warn("gone", "gone")
    now[0] += 60.0
    warnings.warn("full", "full again")
    assert [message.split(" (")[0] for message in caplog.messages] == ["full at 0", "gone", "full again"]


if __name__ == "__main__":
    on_a_disk(Path(sys.argv[1]), Path(sys.argv[2]))
    print(json.dumps("done"))


def test_a_block_that_an_unforeseen_error_kept_from_the_disk_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stayed findable in memory that was given to the next block: loads had the other one's content."""
    tier = DiskTier(tmp_path, 2**20, block_bytes=4096, fingerprint="0" * 32)
    first, second = b"1" * 16, b"2" * 16
    with monkeypatch.context() as patch:
        # As where the directory was removed and made again by another user.
        patch.setattr(tier, "_holds_lock", lambda: 1 / 0)
        tier.save([first], np.full((1, 4096), 1, np.uint8))
        assert tier.flush(LIMIT_S)
    tier.save([second], np.full((1, 4096), 2, np.uint8))
    out = np.zeros((1, 4096), np.uint8)
    assert not tier.contains(first) and tier.load([first], out) == 0
    assert tier.load([second], out) == 1 and (out == 2).all()
    tier.close()
