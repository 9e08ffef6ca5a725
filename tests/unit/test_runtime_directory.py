"""Where frontends meet and who starts the engine; a script that needs no model stands for the engine."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import zmq

from quire.config import EngineConfig
from quire.core.probation import NO_SUSPECTS, InFlightSuspects
from quire.engine import connection as connection_module
from quire.engine import supervisor as supervisor_module
from quire.engine.connection import CONNECT_ATTEMPTS, EngineConnection, EngineEndedError, connect
from quire.engine.messages import EngineInfo
from quire.engine.processes import open_verified_pidfd, start_time_of, wait_readable
from quire.engine.runtime_directory import EngineState, RuntimeDirectory
from quire.engine.supervisor import (
    RUN_MODULE,
    EngineAddress,
    EngineSupervisor,
    engine_environment,
    runtime_base,
)
from quire.errors import CheckpointError, ConfigError, EngineStoppedError, UnavailableError
from tests.fixtures.waiting import wait_until

WAIT_S = 60.0
INFO = EngineInfo(1, 2048, 100, 8, False, 16, 16, 4096, "float32", "cpu")

FAKE_ENGINE = """#!{python}
import os, signal, sys, time
from pathlib import Path
from quire.engine.runtime_directory import EngineState, RuntimeDirectory
from quire.engine.processes import start_time_of
arguments = dict(zip(sys.argv[3::2], sys.argv[4::2]))
if not sys.stdin.buffer.read(1):
    raise SystemExit(1)
root, pid = Path({root!r}), os.getpid()
with (root / "started").open("a") as started:
    started.write(f"{{pid}}\\n")
directory = RuntimeDirectory(Path(arguments["--directory"]))
values = pid, start_time_of(pid), int(arguments["--generation"])
if (root / "ending").exists():
    (root / "ending").unlink()
    directory.write_state(EngineState("ready", *values, address=f"ipc://{{root}}/left.ipc"))
    while not (root / "left").exists():
        time.sleep(0.01)
    raise SystemExit(0)
if (root / "broken").exists():
    directory.write_state(EngineState("failed", *values, error="the checkpoint is not there"))
    raise SystemExit(1)
while not (root / "go").exists():
    time.sleep(0.01)
directory.write_state(EngineState("ready", *values, address="ipc://somewhere"))
signal.pause()
"""

FRONTEND = """
import os, sys
from quire.config import EngineConfig
from quire.engine.supervisor import EngineSupervisor
EngineSupervisor(EngineConfig.from_mapping({"model": "fake"}), int(sys.argv[1])).ensure()
"""


class Site:
    """A runtime directory's base and the engines that were started there."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.base = root / "runtime"
        self.base.mkdir(mode=0o700)
        (root / "go").touch()

    def supervisor(self, **options: Any) -> EngineSupervisor:
        config = EngineConfig.from_mapping({"model": "fake", **options})
        return EngineSupervisor(config, os.getpid())

    @property
    def started(self) -> list[int]:
        path = self.root / "started"
        return [int(line) for line in path.read_text().split()] if path.exists() else []


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    script = tmp_path / "python"
    script.write_text(FAKE_ENGINE.format(python=sys.executable, root=str(tmp_path)))
    script.chmod(0o755)
    site = Site(tmp_path)
    monkeypatch.setenv("QUIRE_PYTHON", str(script))
    monkeypatch.setenv("QUIRE_RUNTIME_DIR", str(site.base))
    monkeypatch.setattr(supervisor_module, "KILL_WAIT_S", WAIT_S)  # a busy machine takes its time to end one
    yield site
    for process in psutil.process_iter(["pid", "cmdline"]):
        if str(script) in (process.info["cmdline"] or ()):
            process.kill()


def is_locked(directory: Path) -> bool:
    try:
        with RuntimeDirectory.locked(directory, 0.0):
            return False
    except TimeoutError:
        return True


def test_frontends_that_send_differently_share_an_engine(site: Site) -> None:
    """A model that differed in stream_interval alone loaded the weights a second time."""
    first = site.supervisor()
    for key, value in {"stream_interval": 4, "max_prompt_bytes": 9, "startup_timeout_s": 20.0}.items():
        assert site.supervisor(**{key: value}).ensure() == first.ensure(), key
    assert len(site.started) == 1
    for key, value in {"num_blocks": 100, "tokenizer": "/elsewhere", "trace_file": "/dev/null"}.items():
        assert site.supervisor(**{key: value}).directory != first.directory, key


def test_frontends_share_an_engine_and_the_last_one_ends_it(site: Site) -> None:
    first, second = site.supervisor(), site.supervisor()
    address = first.ensure()
    assert second.ensure() == address
    assert site.started == [address.pid]
    assert start_time_of(address.pid) == address.start_time
    first.close(0.0)
    assert not first.directory.exists() and start_time_of(address.pid) is None


def start_frontend() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", FRONTEND, str(os.getpid())])


def test_an_engine_whose_starter_was_killed_is_waited_for(site: Site) -> None:
    """The lock was free again and nothing told of the engine that was loading: a second one was started on
    the first one's socket."""
    (site.root / "go").unlink()
    starter = start_frontend()
    wait_until(lambda: site.started)
    starter.kill()
    starter.wait()
    site_supervisor = site.supervisor()
    with RuntimeDirectory.locked(site_supervisor.directory) as directory:
        state = directory.read_state()
    assert state is not None and (state.state, state.pid) == ("starting", site.started[0])
    (site.root / "go").touch()
    address = site_supervisor.ensure()
    assert site.started == [address.pid]


def test_an_engine_that_nobody_knows_of_ends(tmp_path: Path) -> None:
    """Its starter was killed before it could say so: the real engine reads the end of its input."""
    command = [sys.executable, str(RUN_MODULE), "quire.engine.loop", "--directory", str(tmp_path)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=280)
    assert done.returncode == 1 and "died before it could announce it" in done.stderr
    assert not (tmp_path / "state.json").exists()


def own(**values: Any) -> bytes:
    """A state that names this living process, with the start time of another."""
    state = {"state": "ready", "pid": os.getpid(), "start_time": 1, "generation": 3, "address": "ipc://old"}
    return json.dumps({**state, **values}).encode()


STALE = {
    "foreign pid": own(),
    "foreign pid, starting": own(state="starting"),
    "stopped": own(state="stopped"),
    "failed": own(state="failed", error="long ago"),
    "dead": own(pid=2**22 + 1),
    "before start times": own()[:-1].replace(b'"start_time": 1, ', b"") + b"}",
    "half": own()[:40],
    "wrong types": own(pid="1"),
    "a list": b"[]",
    "negative": own(pid=-1),
    "large": own(pid=10**30),
    "nested": b"[" * 60_000,
    "empty": b"",
}


@pytest.mark.parametrize("content", STALE.values(), ids=STALE)
def test_what_an_earlier_engine_left_does_not_block_the_next(site: Site, content: bytes) -> None:
    supervisor = site.supervisor()
    supervisor.directory.mkdir(mode=0o700)
    (supervisor.directory / "state.json").write_bytes(content)
    (supervisor.directory / "frontend-1").touch()
    (supervisor.directory / f"frontend-{os.getppid()}-1").touch()
    (supervisor.directory / "frontend-x-y").touch()
    address = supervisor.ensure()
    assert address.address == "ipc://somewhere" and site.started == [address.pid]
    supervisor.close(0.0)
    assert not supervisor.directory.exists(), "markers of others' pids are no frontends"


def test_closing_ends_no_process_that_only_has_the_pid(site: Site) -> None:
    """The recorded pid had gone to another process, which was killed."""
    supervisor = site.supervisor()
    with subprocess.Popen(["sleep", "600"]) as bystander:
        supervisor.directory.mkdir(mode=0o700)
        (supervisor.directory / "state.json").write_bytes(own(pid=bystander.pid))
        supervisor.close(0.0)
        alive = bystander.poll() is None
        bystander.kill()
    assert alive
    assert open_verified_pidfd(os.getpid(), 1) is None


def test_a_failed_start_can_be_tried_again(site: Site) -> None:
    (site.root / "broken").touch()
    supervisor = site.supervisor()
    for _ in range(2):
        with pytest.raises(CheckpointError, match="the checkpoint is not there"):
            supervisor.ensure()
    (site.root / "broken").unlink()
    address = supervisor.ensure()
    os.kill(address.pid, signal.SIGKILL)
    wait_until(lambda: start_time_of(address.pid) is None)
    later = supervisor.ensure()
    assert later.generation == address.generation + 1 and later.pid != address.pid


def test_an_engine_begins_while_its_frontend_does_something_else(site: Site) -> None:
    """It is not waited for. What it says of a start that failed is told by who waits for it then, and no
    second engine is started for that. A frontend that cannot be served takes back what it has begun."""
    (site.root / "go").unlink()
    first, second = site.supervisor(), site.supervisor()
    first.begin()
    second.begin()
    wait_until(lambda: len(site.started) == 1)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(first.ensure)
        wait_until(lambda: is_locked(first.directory))
        site.supervisor().begin()  # while the directory is locked
        (site.root / "go").touch()
        address = waiting.result(WAIT_S)
    assert second.ensure() == address and [address.pid] == site.started
    first.close(0.0)

    (site.root / "broken").touch()
    third = site.supervisor()
    third.begin()
    wait_until(lambda: len(site.started) == 2 and psutil.Process(site.started[1]).status() == "zombie")
    with pytest.raises(CheckpointError, match="the checkpoint is not there"):
        third.ensure()
    assert len(site.started) == 2

    (site.root / "broken").unlink()
    (site.root / "go").unlink()
    fourth = site.supervisor()
    fourth.begin()
    wait_until(lambda: len(site.started) == 3)
    fourth.close(0.0)
    assert start_time_of(site.started[2]) is None and not fourth.directory.exists()


def test_who_started_an_engine_collects_it_though_another_frontend_starts_the_next(site: Site) -> None:
    """It stayed a zombie until the frontend that had started it ended."""
    first, second = site.supervisor(), site.supervisor()
    old = first.ensure()
    os.kill(old.pid, signal.SIGKILL)
    wait_until(lambda: psutil.Process(old.pid).status() == "zombie")
    new = second.ensure()
    assert psutil.pid_exists(old.pid) and first.ensure() == new
    assert not psutil.pid_exists(old.pid)


@pytest.mark.parametrize("then", ["another is ready", "it was stopped", "it hangs"])
def test_what_has_begun_may_be_another_by_the_time_it_is_waited_for(site: Site, then: str) -> None:
    """It was taken for the one that had begun, and for dead."""
    limits = {"startup_timeout_s": 0.5} if then == "it hangs" else {}
    first, second = site.supervisor(**limits), site.supervisor()
    if then == "it hangs":
        (site.root / "go").unlink()
    first.begin()
    second.begin()
    wait_until(lambda: len(site.started) == 1)
    if then == "it hangs":
        with pytest.raises(UnavailableError, match=r"startup_timeout_s=0\.5"):
            first.ensure()
        (site.root / "go").touch()
    elif then == "it was stopped":
        with RuntimeDirectory.locked(first.directory) as directory:
            state = directory.read_state()
            assert state is not None
            directory.write_state(msgspec.structs.replace(state, state="stopped"))
    else:
        os.kill(second.ensure().pid, signal.SIGKILL)
        first.reap()
        wait_until(lambda: start_time_of(site.started[0]) is None or first.reap())
        assert second.ensure().generation == 1
    address = second.ensure()
    assert address.generation == 1 and site.started[1:] == [address.pid]
    assert first.ensure() == address


def test_a_slow_start_is_given_up_and_can_be_tried_again(site: Site) -> None:
    (site.root / "go").unlink()
    supervisor = site.supervisor(startup_timeout_s=0.5)
    with pytest.raises(UnavailableError, match=r"startup_timeout_s=0\.5"):
        supervisor.ensure()
    wait_until(lambda: all(start_time_of(pid) is None for pid in site.started))
    (site.root / "go").touch()
    assert site.supervisor().ensure().pid not in site.started[:-1]


def test_a_frontend_that_leaves_does_not_wait_for_an_engine_that_starts(site: Site) -> None:
    """It waited for the directory, which a thread of its own had locked for as long as an engine may take."""
    (site.root / "go").unlink()
    supervisor = site.supervisor(startup_timeout_s=600.0)
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(supervisor.ensure)
        wait_until(lambda: bool(site.started))
        supervisor.close(0.0)
        with pytest.raises(UnavailableError, match="being unloaded"):
            starting.result(WAIT_S)
    wait_until(lambda: all(start_time_of(pid) is None for pid in site.started))


def test_a_frontend_that_has_left_starts_no_engine(site: Site) -> None:
    """Its thread that replaces a dead engine may wait for the lock while it leaves: it made the directory
    anew then, with an engine that nobody ended."""
    supervisor = site.supervisor()
    supervisor.close(0.0)
    with pytest.raises(UnavailableError, match="being unloaded"):
        supervisor.ensure()
    assert supervisor._process is None and not supervisor.directory.joinpath("config.json").exists()


def test_an_engine_that_was_told_to_stop_is_not_replaced_until_the_model_is_loaded_anew(site: Site) -> None:
    supervisor = site.supervisor()
    address = supervisor.ensure()
    os.kill(address.pid, signal.SIGKILL)
    with RuntimeDirectory.locked(supervisor.directory) as directory:
        directory.write_state(EngineState("stopped", address.pid, address.start_time, 0))
    with pytest.raises(EngineStoppedError):
        supervisor.ensure()
    assert isinstance(site.supervisor().ensure(), EngineAddress)


def test_an_engine_that_is_told_to_stop_at_its_start_is_not_replaced(site: Site) -> None:
    """It had no time to say so: another was started at the end of the server, and streams waited for it."""
    first, second = site.supervisor(), site.supervisor()
    second._address = address = first.ensure()
    os.kill(address.pid, signal.SIGKILL)
    wait_until(lambda: start_time_of(address.pid) is None)
    (site.root / "go").unlink()
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(first.ensure)
        wait_until(lambda: len(site.started) == 2)
        os.kill(site.started[1], signal.SIGTERM)
        with pytest.raises(EngineStoppedError):
            starting.result(WAIT_S)
    for supervisor in (first, second):
        with pytest.raises(EngineStoppedError):
            supervisor.ensure()
    assert len(site.started) == 2


@pytest.mark.parametrize("kind", ["open to others", "link", "dangling link", "file", "another user's"])
def test_a_directory_that_others_may_have_made_is_refused(
    site: Site, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name can be foretold: who made it first handed the frontend an engine of his own."""
    supervisor = site.supervisor()
    path, elsewhere = supervisor.directory, site.root / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    if kind == "open to others":
        path.mkdir()
        path.chmod(0o770)
    elif kind == "link":
        path.symlink_to(elsewhere)
    elif kind == "dangling link":
        path.symlink_to(site.root / "nowhere")
    elif kind == "file":
        path.touch()
    else:
        path.mkdir(mode=0o700)
        monkeypatch.setattr(os, "getuid", lambda uid=os.getuid(): uid + 1)
    with pytest.raises(ConfigError, match=f"{path.name}.*QUIRE_RUNTIME_DIR"):
        supervisor.ensure()
    assert not site.started and not list(elsewhere.iterdir())


@pytest.mark.parametrize("name", ["lock", "config.json", "state.json", "frontend-{pid}-{start}"])
def test_no_file_is_opened_through_a_link(site: Site, name: str) -> None:
    """A link named `lock` had the file it led to truncated."""
    supervisor = site.supervisor()
    supervisor.directory.mkdir(mode=0o700)
    victim = site.root / "victim"
    victim.write_text("precious")
    link = name.format(pid=os.getpid(), start=start_time_of(os.getpid()))
    (supervisor.directory / link).symlink_to(victim)
    if name.endswith(".json"):  # it is replaced, or read as if there were none
        supervisor.ensure()
    else:
        with pytest.raises(UnavailableError, match=supervisor.directory.name):
            supervisor.ensure()
    assert victim.read_text() == "precious"


def test_a_path_that_is_too_long_for_a_socket_is_told_so(tmp_path: Path) -> None:
    path = tmp_path / ("a" * 100)
    path.mkdir(mode=0o700)
    directory = RuntimeDirectory(path)
    with pytest.raises(ConfigError, match=r"107 bytes: set QUIRE_RUNTIME_DIR"):
        directory.socket_path()
    directory.close()


def test_a_server_with_the_pid_of_an_earlier_one_meets_elsewhere(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container it is always 1."""
    before = site.supervisor().directory
    assert before == site.supervisor().directory
    monkeypatch.setattr(supervisor_module, "start_time_of", lambda pid: 4711)
    after = site.supervisor().directory
    assert before != after
    boot = site.root / "boot"
    boot.write_text("another")
    monkeypatch.setattr(supervisor_module, "BOOT_ID", boot)
    assert site.supervisor().directory not in (before, after)


def test_the_users_own_folder_goes_before_everybodys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUIRE_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(supervisor_module.tempfile, "tempdir", None)
    own_folder = tmp_path / "own"
    own_folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(own_folder))
    assert runtime_base() == own_folder
    own_folder.chmod(0o755)
    assert runtime_base() == tmp_path
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "missing"))
    assert runtime_base() == tmp_path


def test_the_engine_imports_nothing_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`python -m` puts it first, as an empty element of PYTHONPATH does: a click.py that lay where the server
    was started ran in every engine."""
    for name in ("click", "runpy", "json", "zmq"):
        (tmp_path / f"{name}.py").write_text("open('imported', 'w').close()\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep + "/nowhere")
    command = [sys.executable, str(RUN_MODULE), "quire.engine.loop", "--help"]
    done = subprocess.run(
        command, env=engine_environment(), cwd=tmp_path, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0 and "--directory" in done.stdout, done.stderr
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "show.py").write_text("import sys\nprint(sys.path, sys.argv[1:])\n")
    for path in ("", os.pathsep + "/nowhere"):
        monkeypatch.setenv("PYTHONPATH", path)
        shown = subprocess.run(
            [sys.executable, str(RUN_MODULE), "show", "an argument"],
            env={**engine_environment(), "PYTHONPATH": str(elsewhere)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert "['an argument']" in shown and repr(str(Path(RUN_MODULE).parent)) not in shown
        assert repr(str(tmp_path)) not in shown
    assert not (tmp_path / "imported").exists()


def test_a_link_to_nowhere_above_the_directory_is_refused(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was not there counted as there, and was made again and again by a whole core."""
    dangling = site.root / "dangling"
    dangling.symlink_to(site.root / "nowhere")
    monkeypatch.setenv("QUIRE_RUNTIME_DIR", str(dangling / "below"))
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(site.supervisor().ensure)
        wait_until(lambda: starting.done())
        assert isinstance(starting.exception(), UnavailableError)


def test_a_frontend_that_leaves_does_not_wait_for_another_ones_engine(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits for an engine has the directory locked: an unload took as long as the start of a model."""
    leaving, staying = site.supervisor(), site.supervisor()
    before = leaving.ensure()
    os.kill(before.pid, signal.SIGKILL)
    wait_until(lambda: start_time_of(before.pid) is None)
    (site.root / "go").unlink()
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(staying.ensure)
        wait_until(lambda: len(site.started) == 2)
        with monkeypatch.context() as patch:
            patch.setattr(supervisor_module, "KILL_WAIT_S", 0.1)
            leaving.close(0.1)
        assert not starting.done()
        (site.root / "go").touch()
        address = starting.result(WAIT_S)
    assert start_time_of(address.pid) == address.start_time, "it ended the other one's engine"
    staying.close(0.0)
    assert not staying.directory.exists()


def test_who_meets_an_engine_that_is_just_ending_gets_the_next(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last frontend left between another one's look at the engine and its hello: a model that was
    unloaded and loaded again failed to load."""
    (site.root / "ending").touch()
    supervisor = site.supervisor()
    context: zmq.Context[Any] = zmq.Context()
    addresses = []
    greeted = EngineConnection.hello

    def hello(connection: EngineConnection, timeout_s: float) -> EngineInfo:
        addresses.append(connection.address)
        if len(addresses) > 1:
            return INFO
        (site.root / "left").touch()
        return greeted(connection, timeout_s)

    monkeypatch.setattr(EngineConnection, "hello", hello)
    connection, info = connect(context, supervisor)
    assert info is INFO and connection.pidfd >= 0
    assert [address.generation for address in addresses] == [0, 1]
    assert connection.address == addresses[1] and start_time_of(addresses[0].pid) is None
    connection.close(goodbye=False)
    supervisor.close(0.0)
    context.term()


def test_an_engine_that_always_ends_is_given_up(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = []

    def hello(connection: EngineConnection, timeout_s: float) -> EngineInfo:
        ended.append(connection.address.pid)
        connection.close(goodbye=False)
        os.kill(ended[-1], signal.SIGKILL)
        wait_until(lambda: start_time_of(ended[-1]) is None)
        raise EngineEndedError("the engine ended before it answered")

    monkeypatch.setattr(EngineConnection, "hello", hello)
    context: zmq.Context[Any] = zmq.Context()
    with pytest.raises(UnavailableError, match="ended before it answered"):
        connect(context, site.supervisor())
    assert site.started == ended and len(set(ended)) == 3
    context.term()


def left_behind(site: Site, *, server_pid: int = 2**22 + 1, life: str = "0" * 8) -> Path:
    """A directory as a server leaves it that was killed, with its engine."""
    path = site.base / f"quire-{os.getuid()}-{server_pid}-{life}-{'a' * 12}"
    path.mkdir(mode=0o700)
    for name in ("lock", "config.json", "engine-0.ipc", f"frontend-{2**22 + 1}-1"):
        (path / name).touch()
    (path / "state.json").write_bytes(own(pid=2**22 + 1))
    return path


def test_what_killed_servers_left_is_removed_at_the_next_start(site: Site) -> None:
    """Only `quire serve` removed anything: each plain tritonserver that was killed left a directory."""
    gone = [left_behind(site), left_behind(site, server_pid=os.getpid())]
    mine = site.supervisor().directory
    other = left_behind(site, life=mine.name.split("-")[3], server_pid=os.getpid())
    foreign = site.base / gone[0].name.replace(f"-{os.getuid()}-", f"-{os.getuid() + 1}-")
    foreign.mkdir(mode=0o700)
    open_to_others = left_behind(site, life="1" * 8)
    open_to_others.chmod(0o755)
    not_ours = site.base / f"quire-{os.getuid()}-notes"
    not_ours.mkdir(mode=0o700)
    elsewhere = site.root / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (elsewhere / "precious").touch()
    link = site.base / gone[0].name.replace("0" * 8, "2" * 8)
    link.symlink_to(elsewhere)
    supervisor = site.supervisor()
    supervisor.ensure()
    assert not any(path.exists() for path in gone)
    assert all(path.exists() for path in (mine, other, foreign, open_to_others, not_ours, link))
    assert (elsewhere / "precious").exists()
    supervisor.close(0.0)


@pytest.mark.parametrize("how", ["locked", "held by an engine", "marked by a frontend"])
def test_a_directory_in_use_stays_though_its_server_is_not_to_be_seen(site: Site, how: str) -> None:
    """Two containers may share the folder: neither sees the processes of the other."""
    path = left_behind(site)
    with contextlib.ExitStack() as stack:
        if how == "locked":
            stack.enter_context(RuntimeDirectory.locked(path))
        else:
            directory = RuntimeDirectory(path)
            stack.callback(directory.close)
            directory.hold() if how == "held by an engine" else directory.mark()
        files = sorted(path.iterdir())
        supervisor_module.sweep(site.base)
        assert sorted(path.iterdir()) == files
        if how == "marked by a frontend":
            directory.unmark()
    supervisor_module.sweep(site.base)
    assert not path.exists()


def test_the_engine_holds_its_directory_to_its_end(tmp_path: Path) -> None:
    """It is not to be swept while the model loads, whoever started it."""
    folder = tmp_path / "engine"
    folder.mkdir(mode=0o700)
    os.mkfifo(folder / "config.json", 0o600)
    command = [sys.executable, str(RUN_MODULE), "quire.engine.loop", "--directory", str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as engine:
        assert engine.stdin is not None
        engine.stdin.write(b"\n")
        engine.stdin.close()
        with (folder / "config.json").open("w") as config:  # it reads its configuration
            directory = RuntimeDirectory(folder)
            assert directory.is_in_use()
            config.write("no configuration")
        assert engine.wait(WAIT_S) == 1
    assert not directory.is_in_use()
    directory.close()


@pytest.mark.parametrize("comes_after", ["lock", "state.json"])
def test_who_comes_while_a_directory_is_removed_keeps_what_he_makes(
    site: Site, comes_after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock's file went before others: who came then locked a new one, and what he wrote was removed with
    what was left."""
    path = left_behind(site)
    unlink = os.unlink
    files = ("config.json", "state.json", "engine-0.ipc")

    def come() -> None:
        with RuntimeDirectory.locked(path) as directory:
            for name in files:
                directory.write(name, b"new")

    with ThreadPoolExecutor(1) as pool:
        coming: list[Future[None]] = []

        def interrupted(name: str, *, dir_fd: int | None = None) -> None:
            unlink(name, dir_fd=dir_fd)
            if name == comes_after:
                coming.append(pool.submit(come))
                with contextlib.suppress(FutureTimeoutError):
                    coming[0].result(0.5)  # in vain where he has to wait for us

        monkeypatch.setattr(os, "unlink", interrupted)
        supervisor_module.sweep(site.base)
        coming[0].result(WAIT_S)
    assert all((path / name).read_bytes() == b"new" for name in files)


def test_a_system_that_does_not_say_when_it_was_started(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some sandboxes have no boot_id: no model could be loaded there."""
    monkeypatch.setattr(supervisor_module, "BOOT_ID", site.root / "missing")
    supervisor = site.supervisor()
    assert supervisor.ensure() == site.supervisor().ensure()
    supervisor.close(0.0)


def test_a_connection_that_failed_may_be_closed_again() -> None:
    """The number of its descriptor had gone to somebody else, or the reason to `Bad file descriptor`."""
    pid = os.getpid()
    address = EngineAddress(pid, "ipc://@quire-nobody-listens", 0, start_time_of(pid) or 0)
    context: zmq.Context[Any] = zmq.Context()
    connection = EngineConnection(context, address)
    with pytest.raises(UnavailableError, match="did not answer"):
        connection.hello(0.05)
    with open(os.devnull, "rb") as other:
        connection.close(goodbye=False)
        assert other.read() == b""
    context.term()


@pytest.mark.parametrize("watchdog_s", [0.1, 0])
def test_an_engine_that_never_answers_is_replaced(
    site: Site, monkeypatch: pytest.MonkeyPatch, watchdog_s: float
) -> None:
    """Its frontends watch it once they have joined it. Stopped before that it was asked for ever, and no
    request was served until somebody killed it by hand."""
    for name, value in {"HELLO_TIMEOUT_S": 0.1, "THAWED_S": 0.001}.items():
        monkeypatch.setattr(connection_module, name, value)
    context: zmq.Context[Any] = zmq.Context()
    supervisor = site.supervisor(watchdog_s=watchdog_s)
    for _ in range(2):
        with pytest.raises(UnavailableError, match="the engine did not answer"):
            connect(context, supervisor)
    assert len(site.started) == (2 * CONNECT_ATTEMPTS if watchdog_s else 1)
    alive = [pid for pid in site.started if start_time_of(pid) is not None]
    assert len(alive) == (0 if watchdog_s else 1)
    supervisor.close(0.0)
    context.term()


def test_an_engine_in_a_long_step_is_not_taken_for_stuck(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is loaded beside it is refused, and those whose step it is lose nothing."""
    monkeypatch.setattr(connection_module, "HELLO_TIMEOUT_S", 0.1)
    monkeypatch.setattr(connection_module, "THAWED_S", 0.001)
    context: zmq.Context[Any] = zmq.Context()
    supervisor = site.supervisor(watchdog_s=0.1)
    address = supervisor.ensure()
    with RuntimeDirectory.locked(supervisor.directory) as directory:
        heartbeat = directory.heartbeat(address.pid, 3600.0)
    assert heartbeat is not None
    heartbeat.beat()
    with pytest.raises(UnavailableError, match="the engine did not answer"):
        connect(context, supervisor)
    assert start_time_of(address.pid) is not None and len(site.started) == 1
    supervisor.close(0.0)
    context.term()


def test_what_is_at_risk_is_told_however_many_they_are_and_a_full_disk_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of more than 64 KiB the first half was read, which is no JSON: then none was suspected."""
    tmp_path.chmod(0o700)
    directory = RuntimeDirectory(tmp_path)
    suspects = InFlightSuspects(tuple(f"01234567-{number}" for number in range(10**6, 10**6 + 2**16)))
    directory.write_suspects(7, suspects)
    assert directory.read_suspects(7) == suspects

    def replace(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "replace", replace)
    directory.write_suspects(7, NO_SUSPECTS)
    directory.close()
    assert [path.name for path in tmp_path.iterdir()] == ["at-risk-7"]


def test_what_engines_leave_does_not_pile_up(site: Site) -> None:
    """Each that was killed left files behind for as long as the server lived; of the latest another frontend
    may still have to read what was at risk."""
    supervisor = site.supervisor()
    pids = []
    for _ in range(3):
        pids.append(pid := supervisor.ensure().pid)
        directory = RuntimeDirectory(supervisor.directory)
        assert directory.heartbeat(pid, 1.0) is not None
        directory.write_suspects(pid, NO_SUSPECTS)
        (directory.path / f"engine-{pid}.ipc").touch()
        directory.write(".interrupted", b"")
        directory.close()
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda pid=pid: start_time_of(pid) is None)
    supervisor.ensure()
    of_engines = {f"{kind}-{pids[-1]}" for kind in ("heartbeat", "at-risk")}
    kept = {path.name for path in supervisor.directory.iterdir() if not path.name.startswith("frontend-")}
    assert kept == {"lock", "state.json", "config.json", *of_engines}


def test_the_end_of_a_process_is_seen_at_descriptors_beyond_those_of_select() -> None:
    """A frontend with many clients has more than 1024, and could not end an engine then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with contextlib.ExitStack() as stack:
        stack.callback(child.wait)
        stack.callback(child.kill)
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
        pidfd = os.pidfd_open(child.pid)
        stack.callback(os.close, pidfd)
        high = fcntl.fcntl(pidfd, fcntl.F_DUPFD_CLOEXEC, 1500)
        stack.callback(os.close, high)
        assert not wait_readable(high, 0.0)
        child.kill()
        assert wait_readable(high, WAIT_S)
