"""What may be used of a machine: in faked control groups of both versions, and in a real one if it can be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from quire.config import CacheConfig, SchedulerConfig
from quire.errors import ConfigError
from quire.kv_tiers import host
from quire.worker import kv_cache
from quire_common import machine
from tests.fixtures.perplexity import DEMO

MIB = 1 << 20
HUGE = "9223372036854771712"
"""No limit, in version 1."""


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def mounted(point: str, kind: str, options: str, shown: str = "/") -> str:
    return f"31 23 0:26 {shown} {point} rw,relatime shared:4 - {kind} cgroup rw,{options}\n"


V2 = mounted("/sys/fs/cgroup", "cgroup2", "nsdelegate")
V1 = mounted("/sys/fs/cgroup/memory", "cgroup", "memory") + mounted(
    "/sys/fs/cgroup/cpu,cpuacct", "cgroup", "cpu,cpuacct"
)
SETTINGS = {
    "version 2": {
        "/proc/self/cgroup": "0::/system/quire\n",
        "/proc/self/mountinfo": V2,
        "/sys/fs/cgroup/cpu.stat": "usage_usec 1\n",
        "/sys/fs/cgroup/system/memory.max": f"{1024 * MIB}\n",
        "/sys/fs/cgroup/system/memory.high": "max\n",
        "/sys/fs/cgroup/system/memory.current": f"{700 * MIB}\n",
        "/sys/fs/cgroup/system/memory.stat": f"anon 5\nfile {90 * MIB}\nshmem {20 * MIB}\n"
        f"file_dirty {9 * MIB}\nfile_writeback {MIB}\ninactive_file {20 * MIB}\nactive_file {40 * MIB}\n",
        "/sys/fs/cgroup/system/cpu.max": "250000 100000\n",
        "/sys/fs/cgroup/system/quire/memory.max": "max\n",
        "/sys/fs/cgroup/system/quire/memory.high": f"{4096 * MIB}\n",
        "/sys/fs/cgroup/system/quire/memory.current": f"{600 * MIB}\n",
        "/sys/fs/cgroup/system/quire/memory.stat": f"inactive_file 0\nfile_dirty {4096 * MIB}\n",
        "/sys/fs/cgroup/system/quire/cpu.max": "max 100000\n",
    },
    "version 2 in a container": {
        "/proc/self/cgroup": "0::/\n",
        "/proc/self/mountinfo": V2,
        "/sys/fs/cgroup/memory.max": "max\n",
        "/sys/fs/cgroup/memory.high": f"{424 * MIB}\n",
        "/sys/fs/cgroup/memory.current": f"{100 * MIB}\n",
        "/sys/fs/cgroup/memory.stat": f"active_file {50 * MIB}\n",
        "/sys/fs/cgroup/cpu.max": "200000 100000\n",
    },
    "version 1": {
        "/proc/self/cgroup": "9:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n1:name=systemd:/docker/abc\n",
        "/proc/self/mountinfo": V1,
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": HUGE,
        "/sys/fs/cgroup/memory/memory.usage_in_bytes": f"{9000 * MIB}",
        "/sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes": f"{512 * MIB}",
        "/sys/fs/cgroup/memory/docker/abc/memory.usage_in_bytes": f"{200 * MIB}",
        "/sys/fs/cgroup/memory/docker/abc/memory.stat": "inactive_file 1\nactive_file 2\n"
        f"dirty 3\ntotal_dirty {MIB}\ntotal_inactive_file {60 * MIB}\ntotal_active_file {3 * MIB}\n",
        "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1",
        "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
        "/sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "150000",
        "/sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_period_us": "50000",
    },
    "version 1 whose mount shows the container's part": {
        "/proc/self/cgroup": "9:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n",
        "/proc/self/mountinfo": V1.replace("0:26 / ", "0:26 /docker/abc "),
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": f"{512 * MIB}",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes": f"{138 * MIB}",
        "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "400000",
        "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
    },
    "both versions, less than one processor": {
        "/proc/self/cgroup": "4:memory:/a\n0::/b\n",
        "/proc/self/mountinfo": mounted("/sys/fs/cgroup/unified", "cgroup2", "") + V1,
        "/sys/fs/cgroup/unified/b/cpu.max": "50000 100000\n",
        "/sys/fs/cgroup/memory/a/memory.limit_in_bytes": f"{100 * MIB}",
        "/sys/fs/cgroup/memory/a/memory.usage_in_bytes": f"{120 * MIB}",
    },
    "version 2 without limits": {
        "/proc/self/cgroup": "0::/user.slice\n",
        "/proc/self/mountinfo": V2,
        "/sys/fs/cgroup/user.slice/memory.max": "max\n",
        "/sys/fs/cgroup/user.slice/memory.high": "max\n",
        "/sys/fs/cgroup/user.slice/memory.current": f"{700 * MIB}\n",
        "/sys/fs/cgroup/user.slice/cpu.max": "max 100000\n",
    },
    "files with strange content": {
        "/proc/self/cgroup": "0::/a\n",
        "/proc/self/mountinfo": V2,
        "/sys/fs/cgroup/a/memory.max": "much\n",
        "/sys/fs/cgroup/a/memory.current": "\n",
        "/sys/fs/cgroup/a/cpu.max": "all of it\n",
    },
    "none": {"/proc/self/cgroup": "0::/\n", "/proc/self/mountinfo": "21 1 8:1 / / rw - ext4 /dev/sda rw\n"},
    "no such system": {},
}
EXPECTED = {
    "version 2": (2, 374 * MIB),
    "version 2 in a container": (2, 374 * MIB),
    "version 1": (3, 374 * MIB),
    "version 1 whose mount shows the container's part": (4, 374 * MIB),
    "both versions, less than one processor": (1, 0),
    "version 2 without limits": (64, 999 * MIB),
    "files with strange content": (64, 999 * MIB),
    "none": (64, 999 * MIB),
    "no such system": (64, 999 * MIB),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_limits_of_control_groups_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    """Weights that were read twice are active files: they counted as used, and a restart in a container that
    had just read them found no memory for its pool."""

    class Memory:
        available = 999 * MIB

    monkeypatch.setattr(machine.psutil, "virtual_memory", Memory)
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: set(range(64)))
    root = write(tmp_path, SETTINGS[setting])
    assert (machine.num_cpus(root), machine.available_memory(root)) == EXPECTED[setting]
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: {3})
    Memory.available = 5
    assert (machine.num_cpus(root), machine.available_memory(root)) == (1, min(5, EXPECTED[setting][1]))


def test_the_pool_and_the_host_tier_keep_to_what_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (kv_cache, host):
        monkeypatch.setattr(module, "available_memory", lambda: 100 * MIB)

    def num_blocks(**options: int) -> int:
        return kv_cache.num_blocks_for(
            CacheConfig(**options),
            SchedulerConfig(),
            bytes_per_block=MIB,
            blocks_per_sequence=10,
            max_model_len=160,
            memory=kv_cache.DeviceMemory.measure(torch.device("cpu")),
        )

    assert num_blocks() == 25
    assert num_blocks(num_blocks=100) == 100
    for options in ({"num_blocks": 101}, {"kv_cache_memory": 101 * MIB}):
        with pytest.raises(ConfigError, match="only 100 MiB of memory are available"):
            num_blocks(**options)
    with pytest.raises(ConfigError, match="host_cache_memory asks for 101 MiB, but only 100 MiB"):
        host.HostTier(101 * MIB, MIB)


@pytest.fixture
def limited() -> Iterator[list[Path]]:
    """Files that a process writes its id to, to live in groups with 1 GiB and half of one processor more than
    one; skips where such groups cannot be made."""
    base, name = Path("/sys/fs/cgroup"), f"quire-test-{os.getpid()}"
    made: list[Path] = []
    try:
        if (base / "cgroup.controllers").exists():
            groups = {base / name: {"memory.max": 1 << 30, "cpu.max": "150000 100000"}}
        else:
            groups = {
                base / "memory" / name: {"memory.limit_in_bytes": 1 << 30},
                base / "cpu" / name: {"cpu.cfs_period_us": 100_000, "cpu.cfs_quota_us": 150_000},
            }
        for group, values in groups.items():
            group.mkdir()
            made.append(group)
            for key, value in values.items():
                if not (group / key).exists():
                    pytest.skip(f"no {key} in new control groups")
                (group / key).write_text(str(value))
    except OSError as error:
        for group in made:
            group.rmdir()
        pytest.skip(f"control groups cannot be made here: {error}")
    yield [group / "cgroup.procs" for group in made]
    for group in made:
        group.rmdir()


def test_an_engine_in_a_limited_group_fits_into_it(limited: list[Path]) -> None:
    """The pool was a quarter of the machine's memory, and there was a thread for each of its cores: in a
    container with less the engine was killed while it filled the pool, or stood still half of the time."""
    if psutil.virtual_memory().available < 6 << 30:
        pytest.skip("a quarter of this machine's free memory would fit into the group")
    program = """
import json, pathlib, sys
for file in sys.argv[2:]:
    pathlib.Path(file).write_text("0")
import torch
from quire import LLM, SamplingParams
llm = LLM(sys.argv[1], max_num_seqs=1024)
answers = llm.generate(["Hello", "How are"], SamplingParams(max_tokens=8, temperature=0.0))
print(json.dumps([torch.get_num_threads(), llm.core.info.kv_cache_bytes, len(answers)]))
"""
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    command = [sys.executable, "-c", program, str(DEMO), *map(str, limited)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    threads, pool, answers = json.loads(done.stdout.splitlines()[-1])
    assert threads == 1
    assert 64 * MIB < pool < 256 * MIB, "a quarter of what is left of 1 GiB"
    assert answers == 2
