"""Rounds over all engines, interleaved; result file and tables.

For each shape and precision the engines are loaded together as far as memory allows; ours is in every such
group. All but the one that is measured are stopped. Each round goes through the workloads, and within a
workload through the engines, forward in even rounds and backward in odd ones, so that slow changes of the
machine meet all of them alike. The roofline is measured before the first round and after each.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from benchmarks import history, machine
from benchmarks.peers import checkpoints, roofline, venvs
from benchmarks.peers.adapter_process import AdapterError, AdapterProcess
from benchmarks.peers.checkpoints import BITS_PER_WEIGHT, SHAPES, Shape
from benchmarks.peers.registry import LLAMA_CPP, PEERS, Peer
from benchmarks.peers.table import figures, markdown
from benchmarks.peers.venvs import PeerUnavailable
from benchmarks.peers.workloads import KV_TOKENS, WARM_UP, WORKLOADS, Workload
from benchmarks.report import output_directory
from benchmarks.served import package_path

ADAPTERS = Path(__file__).resolve().parent / "adapters"
MEMORY_SHARE = 0.85
"""Share of the available memory that the engines of one group may need together."""


def say(line: str) -> None:
    click.echo(f"bench-peers: {line}", err=True)


class Session:
    """One invocation: its folder, its result document, and the engines that have not failed."""

    def __init__(
        self,
        folder: Path,
        settings: dict[str, Any],
        overrides: dict[str, dict[str, Any]],
        before: Path | None = None,
    ) -> None:
        self.folder = folder
        self.overrides = overrides
        self.before = before
        self.document: dict[str, Any] = {
            "environment": machine.environment(),
            "settings": settings,
            "shapes": {},
            "engines": {},
            "skipped": {},
            "roofline": [],
            "runs": [],
        }

    def skip(self, peer: Peer, reason: str, shape: Shape | None = None) -> None:
        """Notes why a peer has no (more) runs, of one shape or at all."""
        name = peer.name if shape is None else f"{peer.name} on {shape.name}"
        say(f"{name}: {reason}")
        self.document["skipped"][name] = reason

    def save(self) -> str:
        """Writes result.json and table.md; returns the table."""
        (self.folder / "result.json").write_text(json.dumps(self.document, indent=1) + "\n", "utf-8")
        text = markdown(self.document)
        (self.folder / "table.md").write_text(text, "utf-8")
        return text

    def measure_roofline(self) -> None:
        measured = roofline.measure_apart()
        self.document["roofline"].append(measured)
        say(f"roofline: {measured['read_gb_s']} GB/s, {measured['matrix_gflop_s']:.0f} GFLOP/s")

    def start(self, peer: Peer, shape: Shape, install: bool) -> AdapterProcess | None:
        """Installs, converts and loads; None (and noted) where any of it fails."""
        log = self.folder / f"{shape.name}-{peer.name}.log"
        try:
            python = venvs.ensure(peer.venv, install=install)
            weights = _weights(peer, shape, python, log)
            options = peer.options | self.overrides.get(peer.before or peer.name, {})
            if peer.server_venv is not None:
                options = {"python": str(venvs.ensure(peer.server_venv, install=install)), **options}
            cores = ",".join(map(str, machine.usable_cores()))
            env = {key: value.format(venv=python.parents[1], cores=cores) for key, value in peer.env.items()}
            adapter = ADAPTERS / peer.adapter
            if peer.before and self.before is not None:
                adapter = self.before / ADAPTERS.relative_to(machine.ROOT) / peer.adapter
                env |= package_path(self.before)
            command = [str(python), str(adapter), "--weights", str(weights), "--options", json.dumps(options)]
            process = AdapterProcess(command, log, env=env)
        except (PeerUnavailable, AdapterError) as error:
            self.skip(peer, str(error), shape)
            return None
        except subprocess.CalledProcessError as error:
            self.skip(peer, f"{Path(error.cmd[0]).name} failed, see {log}", shape)
            return None
        say(f"{peer.name}: loaded {shape.name} in {process.ready['load_s']:.1f} s")
        self.document["engines"][peer.name] = process.ready
        return process

    def run_once(
        self, peer: Peer, process: AdapterProcess, shape: Shape, workload: Workload, number: int
    ) -> None:
        """One measured run into the document; AdapterError where it fails."""
        requests = workload.requests(number, shape.vocab_size)
        result, conditions = process.run(requests, workload.running)
        record = {
            "shape": shape.name,
            "workload": workload.name,
            "peer": peer.name,
            "round": number,
            "num_prompt_tokens": workload.num_prompt_tokens,
            "num_outputs": [request.num_output for request in requests],
            **asdict(result),
            **conditions,
        }
        self.document["runs"].append(record)
        say(
            f"{shape.name} {workload.name} round {number} {peer.name}: "
            f"{result.num_output_tokens / result.wall_s:.1f} out tok/s in {result.wall_s:.1f} s, "
            f"others {conditions['others_cpu'] * 100:.0f} % of the CPU"
        )


def _weights(peer: Peer, shape: Shape, python: Path, log: Path) -> Path:
    form, _, kind = peer.weights.partition(":")
    if form == "gguf":
        return checkpoints.gguf(shape, kind, venvs.ensure(LLAMA_CPP))
    if form == "openvino":
        return checkpoints.openvino(shape, python, log)
    return checkpoints.huggingface(shape)


def memory_gib(peer: Peer, shape: Shape) -> float:
    """What an engine is taken to need at most, for grouping."""
    bits = BITS_PER_WEIGHT[peer.precision]
    weights = peer.weight_copies * shape.stored_params * bits / 8
    return (weights + KV_TOKENS * shape.kv_bytes_per_token) / 2**30 + 1.0


def groups(peers: Sequence[Peer], shape: Shape, budget_gib: float) -> list[list[Peer]]:
    """Peers to be loaded together: of one precision, within the budget, with ours in each group."""
    result: list[list[Peer]] = []
    for precision in dict.fromkeys(peer.precision for peer in peers):
        ours = [peer for peer in peers if peer.precision == precision and peer.is_ours]
        others = [peer for peer in peers if peer.precision == precision and not peer.is_ours]
        fixed = sum(memory_gib(peer, shape) for peer in ours)
        group, used = list(ours), fixed
        for peer in others:
            need = memory_gib(peer, shape)
            if used + need > budget_gib and len(group) > len(ours):
                result.append(group)
                group, used = list(ours), fixed
            group.append(peer)
            used += need
        result.append(group)
    return result


def round_order(names: Sequence[str], number: int) -> list[str]:
    """Forward, backward, forward ..."""
    return list(names) if number % 2 == 0 else list(reversed(names))


@contextlib.contextmanager
def _loaded(
    session: Session, group: Sequence[Peer], shape: Shape, install: bool
) -> Iterator[dict[str, AdapterProcess]]:
    """The group's engines that could be started; whatever is still open at the end is closed."""
    processes: dict[str, AdapterProcess] = {}
    try:
        for peer in group:
            process = session.start(peer, shape, install)
            if process is not None:
                processes[peer.name] = process
        yield processes
    finally:
        for process in processes.values():
            process.close()


def measure_group(
    session: Session,
    group: Sequence[Peer],
    shape: Shape,
    workloads: Sequence[Workload],
    rounds: Sequence[int],
    install: bool,
) -> None:
    """All rounds of one group of engines."""
    with _loaded(session, group, shape, install) as processes:

        def attempt(peer: Peer, workload: Workload, number: int, measured: bool = True) -> None:
            try:
                if measured:
                    session.run_once(peer, processes[peer.name], shape, workload, number)
                else:
                    processes[peer.name].run(workload.requests(number, shape.vocab_size), workload.running)
            except AdapterError as error:
                processes.pop(peer.name).close()
                session.skip(peer, f"{workload.name}: {error}", shape)

        for peer in group:
            if peer.name in processes:
                attempt(peer, WARM_UP, 0, measured=False)
        for number in rounds:
            for workload in workloads:
                for name in round_order([peer.name for peer in group], number):
                    if name in processes:
                        attempt(PEERS[name], workload, number)
            session.measure_roofline()
            session.save()


def _names(known: Sequence[str]) -> Any:
    def convert(_: click.Context, __: click.Parameter, value: str) -> list[str]:
        names = value.split(",")
        unknown = [name for name in names if name not in known]
        if unknown:
            raise click.BadParameter(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
        return names

    return convert


def _overrides(_: click.Context, __: click.Parameter, values: Sequence[str]) -> dict[str, dict[str, Any]]:
    overrides: dict[str, dict[str, Any]] = {}
    for value in values:
        peer, _colon, text = value.partition(":")
        try:
            options = json.loads(text)
        except ValueError:
            options = None
        if peer not in PEERS or not isinstance(options, dict):
            raise click.BadParameter(f'must be PEER:{{"key": value}}, got {value!r}')
        overrides.setdefault(peer, {}).update(options)
    return overrides


@click.command()
@click.option("--shapes", default="llama-1b,qwen3-0.6b", show_default=True, callback=_names(list(SHAPES)))
@click.option("--workloads", default=",".join(WORKLOADS), show_default=True, callback=_names(list(WORKLOADS)))
@click.option(
    "--peers",
    default=",".join(name for name, peer in PEERS.items() if not peer.before),
    show_default=True,
    callback=_names([name for name, peer in PEERS.items() if not peer.before]),
)
@click.option(
    "--before",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A checkout of another commit: ours as they stand there take part too.",
)
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(min=1))
@click.option(
    "--scale",
    default=1.0,
    show_default=True,
    type=click.FloatRange(0.0, 1.0, min_open=True),
    help="Of all lengths, for a trial.",
)
@click.option("--quick", is_flag=True, help="One round at a tenth of the lengths: does everything run?")
@click.option(
    "--option", "overrides", multiple=True, callback=_overrides, help='For an engine: PEER:{"key": value}.'
)
@click.option(
    "--install/--no-install", default=True, show_default=True, help="Of peers' venvs that are missing."
)
@click.option(
    "--from",
    "source",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Print the tables of an earlier result.json.",
)
def main(
    shapes: list[str],
    workloads: list[str],
    peers: list[str],
    before: Path | None,
    rounds: int,
    scale: float,
    quick: bool,
    overrides: dict[str, dict[str, Any]],
    install: bool,
    source: Path | None,
) -> None:
    """The same work for Quire and every other engine that installs, and the machine's limit."""
    if source is not None:
        click.echo(markdown(json.loads(source.read_text("utf-8"))))
        return
    if quick:
        rounds, scale = 1, 0.1
    # So that engines are ended, which may be stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if before is not None:
        peers += [name for name, peer in PEERS.items() if peer.before in peers]
    settings = {
        "shapes": shapes,
        "workloads": workloads,
        "peers": peers,
        "rounds": rounds,
        "scale": scale,
        "overrides": overrides,
    }
    session = Session(output_directory(), settings, overrides, before and before.resolve())
    chosen = [PEERS[name] for name in peers]
    for peer in chosen:
        try:
            for venv in (peer.venv, peer.server_venv):
                venvs.ensure(venv, install=install, progress=say)
        except PeerUnavailable as error:
            session.skip(peer, str(error))
    session.measure_roofline()
    for shape in (SHAPES[name] for name in shapes):
        session.document["shapes"][shape.name] = checkpoints.describe(shape)
        work = [WORKLOADS[name].scaled(scale) for name in workloads]
        runnable = [peer for peer in chosen if peer.name not in session.document["skipped"]]
        for group in groups(runnable, shape, MEMORY_SHARE * machine.available_gib()):
            say(f"{shape.name}: {', '.join(peer.name for peer in group)}")
            measure_group(session, group, shape, work, range(rounds), install)
    click.echo(session.save())
    own = figures(session.document)
    if scale == 1.0 and own:
        history.append(history.line(own, session.document["environment"]))
    click.echo(f"raw data: {session.folder}")
