"""What this machine can do at best, now: memory read rate and bf16 matrix rate.

    python -m benchmarks.peers.roofline            # one JSON line

The read rate is that of a loop in C over 1 GiB in huge pages, one slice per thread (torch's sum where there
is no compiler); the matrix rate that of torch's products of 512 to 2048 rows: in bf16, weights packed or not,
and in float32. The best of several goes each: on a shared machine the others only ever take away.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import ROOT
from quire_common.host_memory import aligned_bytes

_SOURCE = """
#include <stddef.h>
#include <stdint.h>
uint64_t sum(const uint64_t *p, size_t n) {
    uint64_t a = 0, b = 0, c = 0, d = 0;
    const size_t quarter = n / 4;
    for (size_t i = 0; i < quarter; i++) {
        a += p[i]; b += p[quarter + i]; c += p[2 * quarter + i]; d += p[3 * quarter + i];
    }
    return a + b + c + d;
}
"""
"""Four streams at a time: one alone leaves the prefetchers of a core idle."""
READ_BYTES = 1 << 30
REPEATS = 8
ROWS = (512, 1024, 2048)
WEIGHTS = ((8192, 2048), (3072, 1024), (2048, 8192))
"""[out features, in features]."""


def measure() -> dict[str, Any]:
    """Rates with 1 and with all usable cores, and how they were found."""
    num_threads = len(os.sched_getaffinity(0))
    rates, method = _read_rates(sorted({1, num_threads}))
    matrix, best = _matrix_rate(num_threads)
    return {
        "read_gb_s": rates,
        "read_method": method,
        "matrix_gflop_s": matrix,
        "matrix_method": best,
        "loadavg": [round(value, 2) for value in os.getloadavg()],
    }


def measure_apart() -> dict[str, Any]:
    """`measure` in a process of its own, so that its gigabyte and its threads are gone afterwards."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.peers.roofline"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def _read_rates(thread_counts: list[int]) -> tuple[dict[str, float], str]:
    """GB/s by number of threads."""
    memory = aligned_bytes(READ_BYTES).fill_(1)
    address = memory.data_ptr()
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return _torch_read_rates(memory, thread_counts), "torch.sum"
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "read.c", Path(folder) / "read.so"
        source.write_text(_SOURCE)
        subprocess.run(
            [compiler, "-O3", "-march=native", "-funroll-loops", "-shared", "-fPIC", source, "-o", library],
            check=True,
        )
        sum_words = ctypes.CDLL(str(library)).sum
    sum_words.argtypes, sum_words.restype = (ctypes.c_void_p, ctypes.c_size_t), ctypes.c_uint64
    rates = {}
    for count in thread_counts:
        size = READ_BYTES // count

        def read(slice_number: int, size: int = size) -> None:
            sum_words(address + slice_number * size, size // 8)

        rates[str(count)] = READ_BYTES / _best_seconds(count, read) / 1e9
    return rates, "C, huge pages"


def _best_seconds(num_threads: int, work: Callable[[int], None]) -> float:
    """Shortest time in which all threads, started together, have done `work` once."""
    best = float("inf")
    for _ in range(REPEATS):
        barrier = threading.Barrier(num_threads + 1)

        def run(number: int, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            work(number)

        threads = [threading.Thread(target=run, args=(number,)) for number in range(num_threads)]
        for thread in threads:
            thread.start()
        start = time.perf_counter()
        barrier.wait()
        for thread in threads:
            thread.join()
        best = min(best, time.perf_counter() - start)
    return best


def _torch_read_rates(memory: torch.Tensor, thread_counts: list[int]) -> dict[str, float]:
    tensor = memory.view(torch.float32)
    rates = {}
    for count in thread_counts:
        torch.set_num_threads(count)
        rates[str(count)] = READ_BYTES / min(_timed(tensor.sum) for _ in range(REPEATS)) / 1e9
    return rates


def _matrix_rate(num_threads: int) -> tuple[float, str]:
    """GFLOP/s of bf16 operands and what reached them.

    A processor without bf16 instructions widens them, and products of float32 are then its limit.
    """
    torch.set_num_threads(num_threads)
    best, name = 0.0, ""
    with torch.inference_mode():
        for num_out, num_in in WEIGHTS:
            weight = torch.randn(num_out, num_in).bfloat16()
            wide = weight.float()
            try:
                packed = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS[-1])
            except RuntimeError:  # no bf16 products in oneDNN on this processor
                packed = None
            for rows in ROWS:
                x = torch.randn(rows, num_in).bfloat16()
                ways: dict[str, Callable[[], Any]] = {
                    "float32 linear": lambda x=x.float(), w=wide: torch.nn.functional.linear(x, w),
                }
                if packed is not None:
                    ways["linear"] = lambda x=x, w=weight: torch.nn.functional.linear(x, w)
                    ways["packed"] = lambda x=x, w=packed: torch.ops.mkldnn._linear_pointwise(
                        x, w, None, "none", [], ""
                    )
                for way, product in ways.items():
                    seconds = min(_timed(product) for _ in range(REPEATS))
                    rate = 2 * rows * num_out * num_in / seconds / 1e9
                    if rate > best:
                        best, name = rate, f"torch {way} {rows} x {num_in} x {num_out}"
    return best, name


def _timed(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


if __name__ == "__main__":
    print(json.dumps(measure()))
