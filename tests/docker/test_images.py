"""Both images built, run confined, asked from another host, stopped; that for GPUs on a stand-in base."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from quire_client import Client
from quire_client.errors import QuireClientError
from tests.docker.images import Builder, Container, Image, container, missing_tools

GIGABYTE = 1e9
NUM_STREAMS = 32
BUILD_TOOLS = ("gcc", "g++", "cc", "c++", "ld", "as", "make", "pip", "pip3", "uv", "git")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(bool(missing_tools()), reason=f"not on this machine: {', '.join(missing_tools())}"),
]


@pytest.fixture(params=["cpu", "gpu"])
def image(request: pytest.FixtureRequest) -> Image:
    chosen = request.getfixturevalue(request.param)
    assert isinstance(chosen, Image)
    return chosen


@pytest.mark.row("G15", clauses=("slim",))
def test_an_image_brings_what_it_runs_and_runs_as_nobody(image: Image) -> None:
    """No compiler and no pip, no cache of packages; that for the CPU takes less than two gigabytes."""
    assert int(image.user.partition(":")[0]) >= 1000
    folders = [image.root / folder.lstrip("/") for folder in image.environment["PATH"].split(":")]
    assert not [folder / name for folder in folders for name in BUILD_TOOLS if (folder / name).exists()]
    assert not list((image.root / "var/cache/apt/archives").glob("*.deb"))
    assert not (image.root / "root/.cache").exists()
    size = sum(path.lstat().st_size for path in image.root.rglob("*"))
    print(f"{image.name}: {size / GIGABYTE:.2f} GB")
    assert image.name != "cpu" or size < 2.0 * GIGABYTE


@pytest.mark.row("G15", clauses=("sbom",))
def test_the_bill_of_materials_lists_what_is_installed(image: Image) -> None:
    file = next(image.root.glob("opt/quire/**/sbom.cdx.json"))
    listed = {(one["name"].lower(), one["version"]) for one in json.loads(file.read_bytes())["components"]}
    code = (
        "import importlib.metadata\n"
        "for one in importlib.metadata.distributions(): print(one.name.lower(), one.version)\n"
    )
    installed = {tuple(line.split()) for line in image.python(code).splitlines()}
    assert listed >= installed and ("quire-triton", "0.1.0") in listed
    if image.name == "cpu":
        assert listed == installed


@pytest.mark.row("G15", clauses=("lazy",))
def test_layers_can_be_pulled_lazily_and_the_codes_is_small(cpu: Image, builder: Builder) -> None:
    """An upgrade of Quire changes one layer of some megabytes; each layer has a table of its files."""
    layers = builder.layers(cpu.name)
    assert all("io.containers.zstd-chunked.manifest-position" in one["annotations"] for one in layers)
    sizes = [one["size"] / 1e6 for one in layers]
    print(f"{cpu.name}: {sum(sizes):.0f} MB compressed, layers {[round(size, 1) for size in sizes]}")
    packages = max(range(len(sizes)), key=sizes.__getitem__)
    assert sizes[packages] > 100 and sum(sizes[packages + 1 :]) < 10


@pytest.mark.row("G15", clauses=("slim",))
def test_it_serves_as_nobody_on_a_read_only_root(image: Image, models: Path, tmp_path: Path) -> None:
    """A stream from another host, health, what can be written, a stop; again with what was cached."""
    cache = tmp_path / "cache"
    cache.mkdir()
    with container(image, models, cache, 1, tmp_path / "log") as first:
        print(f"{image.name}: ready {first.wait_ready():.1f} s, nothing cached")
        with (
            Client(f"{first.address}:8001") as client,
            client.stream("What is 12 + 7?", model="chat") as stream,
        ):
            texts = [chunk.text for chunk in stream]
        assert "".join(texts) == "12 + 7 = 19" and len(texts) > 1
        health = first.execute("quire", "healthcheck", "--timeout", "10")
        assert health.returncode == 0, health.stdout + health.stderr
        _check_confinement(first)
        assert first.stop() == 0, first.log.read_text("utf-8")[-4000:]
    with container(image, models, cache, 1, tmp_path / "log") as second:
        print(f"{image.name}: ready {second.wait_ready():.1f} s, with the cache of the first start")
        with Client(f"{second.address}:8001") as client, ThreadPoolExecutor(NUM_STREAMS) as pool:
            assert client.chat("What is 12 + 7?").text == "12 + 7 = 19"
            begun = threading.Barrier(NUM_STREAMS + 1)
            ends = [pool.submit(_end_of_a_long_stream, client, begun) for _ in range(NUM_STREAMS)]
            begun.wait(120.0)
            assert second.stop() == 0, second.log.read_text("utf-8")[-4000:]
            assert {end.result() for end in ends} == {"the engine is shutting down"}


def _end_of_a_long_stream(client: Client, begun: threading.Barrier) -> str:
    """Why a stream ended that has far to go."""
    with client.stream("x", model="chat", max_tokens=1900, ignore_eos=True, stream_interval_ms=500) as stream:
        try:
            next(stream)
            begun.wait(120.0)
            for _ in stream:
                pass
        except QuireClientError as error:
            return str(error)
    return "its length"


def _check_confinement(running: Container) -> None:
    uid = running.image.user.partition(":")[0]
    for process in (running.process, *running.process.children(recursive=True)):
        status = Path(f"/proc/{process.pid}/status").read_text("utf-8")
        fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        assert set(fields["Uid"].split()) == {uid} and fields["NoNewPrivs"] == "1"
        assert int(fields["CapEff"], 16) == int(fields["CapBnd"], 16) == 0
    code = (
        "import os\n"
        "for folder, folders, files in os.walk('/'):\n"
        "    if folder in ('/proc', '/tmp', '/dev/shm', '/var/cache/quire'): folders.clear(); continue\n"
        "    for path in (folder, *(os.path.join(folder, name) for name in files)):\n"
        "        if os.access(path, os.W_OK) and not os.path.islink(path): print(path)\n"
    )
    found = running.execute("python3", "-c", code)
    devices = {f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom")}
    assert found.returncode == 0 and set(found.stdout.split()) <= devices, found.stdout + found.stderr
