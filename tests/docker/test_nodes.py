"""Two nodes, a gateway and Prometheus: containers in network namespaces of their own."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml

from tests.docker.images import Container, Image, container, missing_tools
from tests.fixtures.waiting import wait_until
from tests.rows import ROOT

DOCKER = ROOT / "docker"
PROMPTS = [f"What is {number} + 7?" for number in range(8)]
TOKENS = 1500
"""Of a stream: some seconds of work."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(bool(missing_tools()), reason=f"not on this machine: {', '.join(missing_tools())}"),
]


@pytest.fixture
def start(cpu: Image, models: Path, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    def run(number: int, command: list[str] | None = None) -> Any:
        cache = tmp_path / f"cache-{number}"
        cache.mkdir(exist_ok=True)
        return container(cpu, models, cache, number, tmp_path / f"log-{number}", command)

    yield run


def read_json(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url, timeout=60) as reply:
        found: dict[str, Any] = json.loads(reply.read())
    return found


def computed_tokens(node: Container) -> float:
    """What the engine of a node has computed, by its metrics."""
    with urllib.request.urlopen(f"http://{node.address}:8002/metrics", timeout=60) as reply:
        lines = reply.read().decode().splitlines()
    (line,) = (line for line in lines if line.startswith("quire_scheduled_tokens_total{"))
    return float(line.split()[-1])


def gateway_command(*urls: str) -> list[str]:
    """That of compose.yaml, with its servers from the environment."""
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text("utf-8"))
    words: list[str] = compose["services"]["gateway"]["command"]
    at = words.index("--url")
    return ["env", f"QUIRE_URL={','.join(urls)}", *words[:at], *words[at + 2 :]]


def stream(client: openai.OpenAI, prompt: str, begun: Callable[[], object] | None = None) -> str | None:
    """The text; None where an error ended it."""
    texts = []
    try:
        for chunk in client.completions.create(
            model="generator",
            prompt=prompt,
            max_tokens=TOKENS,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        ):
            texts.append(chunk.choices[0].text)
            if begun is not None:
                begun()
                begun = None
    except openai.APIError:
        return None
    return "".join(texts)


@pytest.mark.row("F18", clauses=("nodes",))
def test_of_two_nodes_one_is_killed(start: Callable[..., Any]) -> None:
    """Its streams end with an error, the other's are whole; both serve again once it is back."""
    with start(2) as second, start(3, gateway_command("10.83.1.2:8001", "10.83.2.2:8001")) as gateway:
        with start(1) as first:
            first.wait_ready()
            second.wait_ready()
            gateway.wait_ready(":9000/health")
            base = f"http://{gateway.address}:9000"
            servers = [f"{node.address}:8001" for node in (first, second)]
            wait_until(lambda: read_json(f"{base}/health")["servers"] == dict.fromkeys(servers, True))
            client = openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0, timeout=120)
            alone = [stream(client, prompt) for prompt in PROMPTS]
            begun: list[None] = []
            with ThreadPoolExecutor(len(PROMPTS)) as pool:
                running = [pool.submit(stream, client, one, lambda: begun.append(None)) for one in PROMPTS]
                wait_until(lambda: len(begun) == len(PROMPTS))
                first.process.kill()
                killed = time.monotonic()
                texts = [one.result() for one in running]
            lost = [text is None for text in texts]
            assert sum(lost) == len(PROMPTS) // 2
            assert all(text is None or text == other for text, other in zip(texts, alone, strict=True))
            wait_until(
                lambda: (
                    read_json(f"{base}/health")["servers"] == dict(zip(servers, (False, True), strict=True))
                )
            )
            print(f"all streams ended and the gateway knows: {time.monotonic() - killed:.1f} s")
            assert stream(client, PROMPTS[0]) == alone[0]
        with start(1) as first:
            first.wait_ready()
            wait_until(lambda: read_json(f"{base}/health")["servers"] == dict.fromkeys(servers, True))
            with ThreadPoolExecutor(len(PROMPTS)) as pool:
                assert list(pool.map(lambda prompt: stream(client, prompt), PROMPTS)) == alone
            # Published twice a second.
            wait_until(lambda: all(computed_tokens(node) > TOKENS for node in (first, second)))


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus (Debian's package)")
def test_prometheus_reads_what_compose_gives_it(start: Callable[..., Any], tmp_path: Path) -> None:
    """Its configuration and rules as they are mounted, with the address that compose would resolve."""
    text = (DOCKER / "compose" / "prometheus.yaml").read_text("utf-8")
    for old, new in (("server:8002", "10.83.1.2:8002"), ("15s", "1s")):
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "prometheus.yml").write_text(text, "utf-8")
    shutil.copy(DOCKER / "kubernetes" / "quire" / "files" / "rules.yaml", tmp_path)
    words = [
        "--config.file=prometheus.yml",
        "--storage.tsdb.path=data",
        "--web.listen-address=127.0.0.1:19090",
    ]
    with start(1) as server:
        server.wait_ready()
        log = (tmp_path / "prometheus.log").open("w")
        with (
            log,
            subprocess.Popen(["prometheus", *words], cwd=tmp_path, stdout=log, stderr=log) as prometheus,
        ):
            try:

                def value(query: str) -> float | None:
                    url = f"http://127.0.0.1:19090/api/v1/query?query={urllib.parse.quote(query)}"
                    try:
                        result = read_json(url)["data"]["result"]
                    except OSError:
                        return None
                    return float(result[0]["value"][1]) if result else None

                wait_until(lambda: value('up{job="quire",service="chat"}') == 1)
                wait_until(lambda: value('quire:requests_waiting:sum{service="chat"}') == 0)
                wait_until(lambda: value('quire:kv_use:max{service="chat"}') is not None)
            finally:
                prometheus.terminate()


def test_a_node_that_is_drained_loses_nothing(start: Callable[..., Any]) -> None:
    """As in an upgrade: a new node is there, the old one ends by SIGTERM when its streams have ended."""
    running: Container
    with start(1) as running, start(3, gateway_command("10.83.1.2:8001", "10.83.2.2:8001")) as gateway:
        running.wait_ready()
        gateway.wait_ready(":9000/health")
        client = openai.OpenAI(
            base_url=f"http://{gateway.address}:9000/v1", api_key="none", max_retries=0, timeout=120
        )
        before = stream(client, PROMPTS[0])
        with start(2) as following:
            following.wait_ready()
            servers = {"10.83.1.2:8001": True, "10.83.2.2:8001": True}
            wait_until(lambda: read_json(f"http://{gateway.address}:9000/health")["servers"] == servers)
            assert running.stop() == 0
            servers["10.83.1.2:8001"] = False
            wait_until(lambda: read_json(f"http://{gateway.address}:9000/health")["servers"] == servers)
            assert stream(client, PROMPTS[0]) == before is not None
