"""Images built by buildah and run as an orchestrator would, on machines without a container engine.

A container here is a mount, a process and a network namespace of its own, the image's file system read-only,
the image's user without any capability, and a link of its own to the machine. Needs root.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from quire.server import tritonserver
from tests.fixtures.waiting import wait_until
from tests.rows import ROOT

TOOLS = ("buildah", "debootstrap", "ip", "unshare", "nsenter", "setpriv")
CERTIFICATES = Path("/etc/ssl/certs")
STAND_IN = """
FROM localhost/quire-test/debian:12
RUN apt-get update && apt-get install --yes --no-install-recommends python3 libpython3.11 \\
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* && useradd --uid 1000 --create-home triton-server
COPY opt /opt
ENV PATH=/opt/tritonserver/bin:/usr/local/bin:/usr/bin:/bin LD_LIBRARY_PATH=/opt/tritonserver/lib
"""
"""The layout of the official image: the server in /opt/tritonserver, one stub for the system's Python
(Debian's 3.11 where Ubuntu has 3.12), the user triton-server. The server is that of the wheel."""


def missing_tools() -> list[str]:
    return [name for name in TOOLS if shutil.which(name) is None] + (["root"] if os.getuid() else [])


def run(*command: str | Path, timeout: float = 1800) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, (
        f"{shlex.join(map(str, command))}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    )
    return done.stdout


@dataclass(frozen=True)
class Image:
    """An image, mounted; `config` is what its Dockerfile says of how to run it."""

    name: str
    root: Path
    config: dict[str, Any]

    @property
    def environment(self) -> dict[str, str]:
        return dict(line.split("=", 1) for line in self.config["Env"])

    def python(self, code: str) -> str:
        """Output of a program in the image, as its user; of the image alone, not of a container."""
        env = [f"{name}={value}" for name, value in self.environment.items()]
        user = ("--userspec", self.user, self.root)
        return run("chroot", *user, "/usr/bin/env", "-i", *env, "python3", "-c", code)

    @property
    def user(self) -> str:
        """Its numbers, "uid:gid"; Kubernetes' runAsNonRoot takes no names."""
        return str(self.config["User"])


class Builder:
    """Images in a store of their own, below `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._places = (
            "--root",
            folder / "storage",
            "--runroot",
            folder / "run",
            "--storage-driver",
            "overlay",
        )
        self._containers: list[str] = []

    def buildah(self, *arguments: str | Path) -> str:
        return run("buildah", *self._places, *arguments).strip()

    def debian(self) -> None:
        """A base as slim as the official one, from Debian's own packages."""
        if "quire-test/debian" in self.buildah("images"):
            return
        system = self.folder / "debian"
        run("debootstrap", "--variant=minbase", "--include=ca-certificates", "bookworm", system)
        container = self.buildah("from", "scratch")
        self.buildah("add", "--quiet", container, system, "/")
        self.buildah("commit", "--quiet", "--rm", container, "localhost/quire-test/debian:12")
        shutil.rmtree(system)

    def stand_in(self) -> None:
        if "quire-test/tritonserver" in self.buildah("images"):
            return
        self.debian()
        wheel = tritonserver.find()
        context = self.folder / "stand-in"
        shutil.rmtree(context, ignore_errors=True)
        opt = context / "opt" / "tritonserver"
        (opt / "bin").mkdir(parents=True)
        shutil.copy(wheel.binary, opt / "bin")
        stub = wheel.stub.parents[1] / "3.11" / tritonserver.STUB
        backend = opt / "backends" / "python"
        shutil.copytree(wheel.backends / "python", backend, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(stub, backend)
        shutil.copytree(wheel.libraries, opt / "lib")
        (context / "Dockerfile").write_text(STAND_IN, "utf-8")
        self.build("tritonserver", context / "Dockerfile", context)
        shutil.rmtree(context)

    def build(self, name: str, file: Path, context: Path, **arguments: str) -> None:
        given = [f"--build-arg={key}={value}" for key, value in arguments.items()]
        wheels = os.environ.get("PIP_FIND_LINKS")
        for shared in filter(None, (str(CERTIFICATES), wheels)):
            given.append(f"--volume={shared}:{shared}:ro")
        layout = (
            "--isolation",
            "chroot",
            "--layers",
            "--format",
            "docker",
            "--tag",
            f"localhost/quire-test/{name}",
        )
        self.buildah("build", "--quiet", *layout, "--file", file, *given, context)

    def quire(self, name: str, file: str, **arguments: str) -> Image:
        """The image of a Dockerfile, from what is committed."""
        context = self.folder / "context"
        shutil.rmtree(context, ignore_errors=True)
        run("git", "clone", "--quiet", ROOT, context)
        if wheels := os.environ.get("PIP_FIND_LINKS"):
            arguments["PIP_ARGS"] = f"{arguments.get('PIP_ARGS', '')} --find-links {wheels}".strip()
        self.build(name, context / "docker" / file, context, **arguments)
        container = self.buildah("from", f"localhost/quire-test/{name}")
        self._containers.append(container)
        described = json.loads(self.buildah("inspect", container))
        return Image(name, Path(self.buildah("mount", container)), described["Docker"]["config"])

    def layers(self, name: str) -> list[dict[str, Any]]:
        """Layers of an image as a registry would get them in zstd:chunked, a format that is pulled lazily."""
        folder = self.folder / "registry"
        image = f"localhost/quire-test/{name}"
        self.buildah("push", "--quiet", "--compression-format", "zstd:chunked", image, f"oci:{folder}:{name}")
        (entry,) = json.loads((folder / "index.json").read_bytes())["manifests"]
        manifest = json.loads((folder / "blobs" / entry["digest"].replace(":", "/")).read_bytes())
        shutil.rmtree(folder)
        found: list[dict[str, Any]] = manifest["layers"]
        return found

    def close(self) -> None:
        for container in self._containers:
            self.buildah("rm", container)


class Container:
    """A running image. `address` is where its ports are reached from the machine.

    Args:
        models: model repository, at /models, read-only.
        cache: folder at /var/cache/quire; its owner becomes the image's user.
        number: 1 to 250, of the link to it: 10.83.<number>.2.
        command: instead of the image's own.
    """

    def __init__(
        self,
        image: Image,
        models: Path,
        cache: Path,
        number: int,
        log: Path,
        command: Sequence[str] | None = None,
    ) -> None:
        self.image, self.address = image, f"10.83.{number}.2"
        self._namespace, self._link = f"quire-test-{number}", f"quire{number}"
        uid, gid = map(int, image.user.split(":"))
        os.chown(cache, uid, gid)
        root = shlex.quote(str(image.root))
        words = [
            *(f"{key}={value}" for key, value in image.environment.items()),
            *(command or image.config["Cmd"]),
        ]
        devices = " ".join(("null", "zero", "full", "random", "urandom"))
        script = f"""set -e
            mount --make-rprivate /
            mount --bind {root} {root}
            mount -o remount,bind,ro {root}
            mount -t tmpfs -o mode=1777 tmpfs {root}/tmp
            mount -t tmpfs -o mode=755 tmpfs {root}/dev
            for name in {devices}; do touch {root}/dev/$name; mount --bind /dev/$name {root}/dev/$name; done
            ln -s /proc/self/fd {root}/dev/fd
            mkdir {root}/dev/shm; mount -t tmpfs -o mode=1777,size=1g tmpfs {root}/dev/shm
            mount -o remount,ro {root}/dev
            mount -t proc proc {root}/proc
            mount -t tmpfs tmpfs {root}/sys
            mount -o remount,ro {root}/sys
            mount --bind {shlex.quote(str(models))} {root}/models
            mount -o remount,bind,ro {root}/models
            mount --bind {shlex.quote(str(cache))} {root}/var/cache/quire
            cd {root}
            exec chroot {root} {self._confined} env -i {shlex.join(words)}"""
        self._open_link(number)
        self.log = log
        # Process 1 takes its namespace along and ends with `unshare`, and that with the tests.
        isolated = ("unshare", "--mount", "--pid", "--fork", "--kill-child")
        tied = ("setpriv", "--pdeathsig", "KILL")
        with log.open("w") as output:
            self._outer = subprocess.Popen(
                [*tied, "ip", "netns", "exec", self._namespace, *isolated, "sh", "-c", script],
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def _confined(self) -> str:
        uid, gid = self.image.user.split(":")
        # Who changes the user loses what `unshare --kill-child` arranged, unless it is to be kept.
        bare = "--clear-groups --no-new-privs --bounding-set=-all --inh-caps=-all"
        return f"setpriv --pdeathsig keep --reuid {uid} --regid {gid} {bare}"

    def _open_link(self, number: int) -> None:
        self._close_link()
        namespace, link, inner = self._namespace, self._link, f"{self._link}-in"
        run("ip", "netns", "add", namespace)
        run("ip", "link", "add", link, "type", "veth", "peer", "name", inner)
        run("ip", "link", "set", inner, "netns", namespace)
        run("ip", "addr", "add", f"10.83.{number}.1/24", "dev", link)
        run("ip", "link", "set", link, "up")
        inside = ("ip", "-n", namespace)
        run(*inside, "addr", "add", f"{self.address}/24", "dev", inner)
        run(*inside, "link", "set", inner, "up")
        run(*inside, "link", "set", "lo", "up")
        # To the other containers, through the machine.
        run(*inside, "route", "add", "default", "via", f"10.83.{number}.1")
        Path(f"/proc/sys/net/ipv4/conf/{link}/forwarding").write_text("1", "ascii")

    def _close_link(self) -> None:
        for command in (("link", "del", self._link), ("netns", "del", self._namespace)):
            subprocess.run(("ip", *command), capture_output=True)

    @property
    def process(self) -> psutil.Process:
        """Process 1 of the container."""
        (inner,) = psutil.Process(self._outer.pid).children()
        return inner

    def wait_ready(self, where: str = ":8000/v2/health/ready", timeout: float = 600) -> float:
        """Seconds until it called itself ready; `where`: port and path that say so."""
        begin = time.monotonic()

        def is_ready() -> bool:
            assert self._outer.poll() is None, self.log.read_text("utf-8")[-4000:]
            with contextlib.suppress(OSError, urllib.error.URLError):
                urllib.request.urlopen(f"http://{self.address}{where}", timeout=30).close()
                return True
            return False

        wait_until(is_ready, lambda: self.log.read_text("utf-8")[-4000:], timeout_s=timeout, poll_s=0.05)
        return time.monotonic() - begin

    def execute(self, *command: str) -> subprocess.CompletedProcess[str]:
        """A command in the running container, as its user."""
        env = [f"{key}={value}" for key, value in self.image.environment.items()]
        spaces = ("nsenter", "--target", str(self.process.pid), "--mount", "--pid", "--net", "--root", "--wd")
        words = [*spaces, *self._confined.split(), "env", "-i", *env, *command]
        return subprocess.run(words, capture_output=True, text=True, timeout=120)

    def stop(self, signum: int = signal.SIGTERM, timeout: float = 120) -> int:
        """Exit status after the signal, once nothing of the container is left."""
        if self._outer.poll() is None:
            self.process.send_signal(signum)
        return self._outer.wait(timeout)

    def close(self) -> None:
        """Kills what runs of it, and waits until it is gone."""
        self._outer.kill()
        self._outer.wait()
        try:
            wait_until(lambda: not self.processes(), lambda: f"{self.processes()} outlived their container")
        finally:
            self._close_link()

    def processes(self) -> list[int]:
        """Ids of all that run in its network, whoever their parent is."""
        return [int(pid) for pid in run("ip", "netns", "pids", self._namespace).split()]


@contextlib.contextmanager
def container(*arguments: Any, **options: Any) -> Iterator[Container]:
    running = Container(*arguments, **options)
    try:
        yield running
    finally:
        running.close()
