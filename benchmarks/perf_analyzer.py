"""perf_analyzer against a running server: finds the binary, runs it, computes from its raw export.

`python -m benchmarks.perf_analyzer` is perf_analyzer itself, with its arguments, and finds its libraries.

What it prints for streams is not used: its latency is that of the whole request under the name of the first
response. The export holds the send time and every response time of every request, which is all we need.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks import report
from benchmarks.load import prompts
from benchmarks.report import RequestRecord, Row
from quire_common.cache import cache_directory

NEEDED_LIBRARIES = ("libb64.so.0d", "libcudart.so.12")
ATTEMPTS = 3
"""perf_analyzer 2.50 now and then ends well and leaves a cut export: for a number that a response lacks it
shows what lay in memory, and at a float that is NaN its JSON writer stops without flushing its buffer of
64 KiB. So a short export is empty, and a longer one ends at a multiple of that. What lies there depends on
the process's random addresses: another run is another chance."""


class PerfAnalyzerError(click.ClickException):
    """perf_analyzer is missing or failed; the message says what to do."""


def find_binary() -> Path:
    """The binary that the manylinux wheel of tritonclient 2.50.0 puts beside python."""
    for folder in (Path(sys.executable).parent, Path(sysconfig.get_path("scripts"))):
        if (folder / "perf_analyzer").is_file():
            return folder / "perf_analyzer"
    raise PerfAnalyzerError("perf_analyzer: not found beside python; pip install 'tritonclient[all]==2.50.0'")


def library_path(cache: Path | None = None, site_packages: Path | None = None) -> str:
    """A LD_LIBRARY_PATH under which the binary finds its two unusual libraries.

    nvidia-pytriton carries both under hashed names; links with the right names are made in `cache`. A
    library that is missing there is left to the system's own path.
    """
    folder = cache or cache_directory("perf_analyzer")
    packages = site_packages or Path(sysconfig.get_path("purelib"))
    folder.mkdir(parents=True, exist_ok=True)
    for name in NEEDED_LIBRARIES:
        stem, _, suffix = name.partition(".so")
        found = sorted((packages / "nvidia_pytriton.libs").glob(f"{stem}-*.so{suffix}*"))
        link = folder / name
        if found and (not link.is_symlink() or link.readlink() != found[0]):
            temporary = folder / f".{name}.{os.getpid()}"
            temporary.symlink_to(found[0])
            temporary.replace(link)
    existing = os.environ.get("LD_LIBRARY_PATH", "")
    return f"{folder}:{existing}" if existing else str(folder)


def check_binary(binary: Path, libraries: str) -> str:
    """The binary's version line.

    Raises:
        PerfAnalyzerError: it does not start, with the loader's reason.
    """
    done = subprocess.run(
        [str(binary), "--version"],
        env={**os.environ, "LD_LIBRARY_PATH": libraries},
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise PerfAnalyzerError(f"perf_analyzer does not start: {(done.stderr or done.stdout).strip()}")
    return (done.stdout + done.stderr).strip()


@dataclass(frozen=True)
class Workload:
    """What every request asks for."""

    max_tokens: int = 32
    """Exactly this many tokens come: `ignore_eos` is set."""
    num_prompts: int = 64
    seed: int = 0

    def input_data(self) -> dict[str, Any]:
        """perf_analyzer's `--input-data`; it goes round these prompts.

        A model takes several in a request, so the shape of `text_input` must be said."""
        fixed = {"max_tokens": [self.max_tokens], "ignore_eos": [True], "stream": [True]}
        texts = prompts(self.num_prompts, seed=self.seed)
        return {"data": [{"text_input": {"content": [text], "shape": [1]}, **fixed} for text in texts]}


def parse_export(document: Mapping[str, Any], *, max_tokens: int | None = None) -> list[RequestRecord]:
    """Records of all experiments of a `--profile-export-file`.

    Tokens of a response are its `output_ids`. Where these are not in the export, they are `max_tokens` spread
    over the responses (the last gets the rest), which is right for requests with `ignore_eos`.
    """
    records = []
    # Nanoseconds since 1970 do not fit a float exactly; those of one run do.
    base = min((r["timestamp"] for e in document["experiments"] for r in e["requests"]), default=0)
    for experiment in document["experiments"]:
        for request in experiment["requests"]:
            start = (request["timestamp"] - base) / 1e9
            times = [(t - base) / 1e9 for t in request["response_timestamps"]]
            outputs = request.get("response_outputs") or [{}] * len(times)
            counts = [_num_tokens(o) for o in outputs]
            if all(count is None for count in counts):
                counts = list(_spread_tokens(max_tokens or len(times), len(times)))
            kept = [(t, n) for t, n in zip(times, counts, strict=True) if n]
            records.append(RequestRecord(start, tuple(t for t, _ in kept), tuple(n for _, n in kept)))
    return records


def _num_tokens(output: Mapping[str, Any]) -> int | None:
    """Tokens of a response; None: the export does not tell. 0: a response without tokens (a bare final flag).

    Only `output_ids` can be trusted: it is in every response, and the export fills numbers that a response
    does not hold with whatever lay in memory.
    """
    if "output_ids" not in output:
        return None
    ids = output["output_ids"]
    return len(ids) if isinstance(ids, list) else int(isinstance(ids, int))


def _spread_tokens(tokens: int, responses: int) -> Sequence[int]:
    if responses == 0:
        return []
    each = max(1, tokens // responses)
    return [each] * (responses - 1) + [max(1, tokens - each * (responses - 1))]


def run(
    url: str,
    model: str,
    concurrency: int,
    request_count: int,
    workload: Workload,
    *,
    export: Path,
    timeout: float = 600.0,
) -> list[RequestRecord]:
    """One measurement; writes the raw export (and perf_analyzer's own words beside it).

    Raises:
        PerfAnalyzerError: the run failed or lost requests.
    """
    binary, libraries = find_binary(), library_path()
    data = export.with_name(f"{model}.input.json")
    data.write_text(json.dumps(workload.input_data()), "utf-8")
    command = [
        *(str(binary), "-m", model, "-u", url, "-i", "grpc", "--async", "--streaming"),
        *("--input-data", str(data), "--request-count", str(request_count)),
        *("--concurrency-range", f"{concurrency}:{concurrency}", "--profile-export-file", str(export)),
    ]
    environment = {**os.environ, "LD_LIBRARY_PATH": libraries}
    for _ in range(ATTEMPTS):
        export.unlink(missing_ok=True)  # it refuses a file that exists
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
        except subprocess.TimeoutExpired:
            raise PerfAnalyzerError(
                f"perf_analyzer: {model} x{concurrency} took over {timeout:g} s"
            ) from None
        export.with_suffix(".log").write_text(done.stdout + done.stderr, "utf-8")
        if done.returncode != 0 or not export.is_file():
            words = (done.stderr.strip() or done.stdout.strip()).splitlines()[-3:]
            raise PerfAnalyzerError(f"perf_analyzer: {model} x{concurrency} failed: {' / '.join(words)}")
        try:
            document = json.loads(export.read_bytes())
        except ValueError:  # cut, perhaps within a character
            continue
        records = parse_export(document, max_tokens=workload.max_tokens)
        if len(records) < request_count:
            raise PerfAnalyzerError(
                f"perf_analyzer: {model} x{concurrency} lost requests: its export has {len(records)} of "
                f"{request_count}"
            )
        return records
    raise PerfAnalyzerError(
        f"perf_analyzer: {model} x{concurrency} wrote no whole export in {ATTEMPTS} attempts; the last has "
        f"{export.stat().st_size} bytes"
    )


def matrix(
    url: str,
    models: Sequence[str],
    concurrencies: Sequence[int],
    folder: Path,
    *,
    workload: Workload,
    requests_per_stream: int = 8,
    repeats: int = 3,
    progress: Callable[[str], None],
) -> list[Row]:
    """Every model at every concurrency, each warmed up and repeated.

    The warm-up is a run of the same concurrency; its export is kept as `*-warmup.json`, but not counted.
    """
    rows = []
    for model in models:
        for concurrency in concurrencies:
            row = Row(f"perf_analyzer x{concurrency}", model)
            count = max(32, requests_per_stream * concurrency)
            warmup = folder / f"{model}-c{concurrency}-warmup.json"
            run(url, model, concurrency, 4 * max(concurrency, 4), workload, export=warmup)
            for repeat in range(repeats):
                export = folder / f"{model}-c{concurrency}-{repeat + 1}.json"
                records = run(url, model, concurrency, count, workload, export=export)
                row.summaries.append(report.summarize(records))
            run_now = report.median_run(row.summaries)
            progress(f"{row.load} {model}: {run_now.get('tokens_per_s', 0):.0f} tokens/s")
            rows.append(row)
    return rows


def main(arguments: Sequence[str]) -> None:
    """Becomes perf_analyzer.

    Raises:
        PerfAnalyzerError: it is not installed.
    """
    binary = str(find_binary())
    os.execve(binary, [binary, *arguments], {**os.environ, "LD_LIBRARY_PATH": library_path()})


if __name__ == "__main__":
    main(sys.argv[1:])
