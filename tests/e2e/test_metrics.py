"""What a scrape of the real server says, against what its clients saw."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from tritonclient.grpc import InferenceServerClient

from benchmarks.dashboard import ask, panels, targets
from benchmarks.fake_device import environment
from quire.triton.metrics_board import HISTOGRAMS
from quire_client._metrics import Scrape
from tests.e2e.conftest import write_generator, write_model
from tests.e2e.triton_calls import Reply, TritonStream, stream
from tests.fixtures.server import ServerProcess
from tests.fixtures.threads import OWN, engines_and_stubs, wakes_in
from tests.fixtures.waiting import wait_until
from tests.rows import ROOT

pytestmark = pytest.mark.server

STEP_MS, LONG_STEP_MS = 20.0, 120.0
"""What a step takes at least; the long one is long beside what a machine adds that has little else to do."""
NUM_TOKENS = 12
WAIT_S = 120.0
WINDOW_S = 1.5
"""In which wakes are counted."""
STRAY = 1
"""Times that a thread may wake in a window without a reason."""
CHART = ROOT / "docker" / "kubernetes" / "quire" / "files"
REPORT = 'parameters { key: "REPORT_CUSTOM_METRICS" value { string_value: "true" } }'


FRONT = """
platform: "ensemble"
input [
  { name: "text_input", data_type: TYPE_STRING, dims: [ 1 ] },
  { name: "max_tokens", data_type: TYPE_INT32, dims: [ 1 ] }
]
output [ { name: "text_output", data_type: TYPE_STRING, dims: [ 1 ] } ]
ensemble_scheduling {
  step {
    model_name: "other" model_version: -1
    input_map { key: "text_input", value: "text_input" }
    input_map { key: "max_tokens", value: "max_tokens" }
    output_map { key: "text_output", value: "text_output" }
  }
}
"""


@dataclass
class Seen:
    """What a client measured of one stream, in seconds; `began` on the monotonic clock."""

    reply: Reply
    began: float = field(default_factory=time.monotonic)
    first: float = 0.0
    whole: float = 0.0
    gaps: list[float] = field(default_factory=list)
    """Of each token behind the first response."""


def watch(url: str, model: str, inputs: dict[str, Any], **options: Any) -> Seen:
    seen = Seen(Reply())
    call = TritonStream(url, model, {"stream": True, "return_num_output_tokens": True, **inputs}, **options)
    seen.reply = call.reply
    last, is_over = 0.0, False
    while not is_over:
        is_over = call.next()
        now = time.monotonic()
        if not call.reply.results or call.reply.error is not None:
            continue
        count = int(call.reply.results[-1].as_numpy("num_output_tokens")[0])
        if last and count:
            seen.gaps += [(now - last) / count] * count
        seen.first = seen.first or now - seen.began
        last, seen.whole = now, now - seen.began
    call.close()
    return seen


def scrape(server: ServerProcess) -> Scrape:
    return Scrape.fetch(server.metrics_url, WAIT_S)


def scrape_until(server: ServerProcess, is_so: Callable[[Scrape], bool]) -> Scrape:
    """Figures come at most four seconds and a half after what they tell of."""
    found = []

    def found_so() -> Scrape | None:
        found[:] = [scrape(server)]
        return found[0] if is_so(found[0]) else None

    samples = wait_until(found_so, lambda: found[0].samples, poll_s=0.1)
    assert samples is not None
    return samples


def figures_of(samples: Scrape) -> set[tuple[str, str, float]]:
    """Our figures: name, labels and value."""
    return {
        (name, str(labels), number)
        for name, found in samples.samples.items()
        for labels, number in found
        if name.startswith(("quire_", "vllm:"))
    }


def buckets(samples: Scrape, name: str, **labels: str) -> list[int]:
    """Bucket of each value of a histogram, ascending."""
    bounds = [*(f"{bound:g}" for bound in HISTOGRAMS[name][1]), "+Inf"]
    totals = [samples.total(f"{name}_bucket", le=bound, **labels) for bound in bounds]
    assert totals[-1] == samples.total(f"{name}_count", **labels)
    found, before = [], 0.0
    for index, total in enumerate(totals):
        found += [index] * int(total - before)
        before = total
    return found


def server_of(folder: Path, checkpoint: Path, step_ms: float) -> ServerProcess:
    """Two models that share an engine, which has two places."""
    for name in ("generator", "other"):
        write_generator(
            folder / "repository",
            name,
            checkpoint,
            config=REPORT,
            max_num_seqs=2,
            max_num_batched_tokens=4096,
            max_model_len=16_384,
            num_blocks=256,
            watchdog_s=0,
        )
    write_model(folder / "repository", "front", FRONT)
    return ServerProcess(folder / "repository", folder, env=environment(step_ms))


@pytest.fixture(scope="module")
def server(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with server_of(tmp_path_factory.mktemp("metrics"), tiny_checkpoint, STEP_MS) as running:
        yield running


@pytest.fixture(scope="module")
def measured(server: ServerProcess) -> tuple[list[Seen], Scrape]:
    return measure(server)


def measure(server: ServerProcess) -> tuple[list[Seen], Scrape]:
    """Ten streams for two places: some of them wait."""
    tenants = ["", "acme", "globex"]

    def ask(number: int) -> Seen:
        inputs = {
            "text_input": f"prompt {number} " * 3,
            "max_tokens": NUM_TOKENS,
            "ignore_eos": True,
            "tenant": tenants[number % 3],
            "return_num_input_tokens": True,
            "return_timing": True,
        }
        return watch(server.grpc_url, "generator" if number % 2 else "other", inputs)

    # A connection that is there, which they share: to make one is no part of a request.
    with InferenceServerClient(server.grpc_url) as client, ThreadPoolExecutor(10) as pool:
        assert client.is_server_live()
        seen = list(pool.map(ask, range(10)))
    assert all(one.reply.error is None for one in seen)
    samples = scrape_until(server, is_whole)
    return seen, samples


def is_whole(found: Scrape) -> bool:
    """Whether a scrape has all of ten requests: figures come one by one, and some may be on their way."""
    whole = found.total("quire_request_seconds_sum")
    parts = [f"quire_{part}_seconds" for part in ("queue", "prefill", "decode")]
    counted = {found.total(f"{name}_count") for name in ("quire_request_seconds", *parts)}
    return counted == {10.0} and sum(found.total(f"{one}_sum") for one in parts) == pytest.approx(
        whole, rel=1e-3
    )


@pytest.mark.row("G1", clauses=("histograms",))
def test_histograms_lie_between_what_was_told_and_what_the_clock_says(
    measured: tuple[list[Seen], Scrape],
) -> None:
    """A client is told of times (output `timing`) that end before the response is sent; a histogram's end
    behind that, and before the scrape."""
    seen, samples = measured
    elapsed = samples.at - min(one.began for one in seen)
    told = [json.loads(one.reply.results[-1].as_numpy("timing")[0]) for one in seen]
    prefilled = [one["queue"] + one["prefill"] for one in told]
    whole = [begun + one["decode"] for begun, one in zip(prefilled, told, strict=True)]
    sent = [one["total"] - one["first_token"] for one in told]
    gaps = sum(len(one.gaps) for one in seen)
    for name, count, least_ms in (
        ("quire_time_to_first_token_seconds", 10, sum(prefilled)),
        ("quire_inter_token_seconds", gaps, 0.0),
        ("quire_time_per_output_token_seconds", 10, sum(sent) / (NUM_TOKENS - 1)),
        ("quire_request_seconds", 10, sum(whole)),
        ("quire_queue_seconds", 10, sum(one["queue"] for one in told)),
        ("quire_prefill_seconds", 10, sum(one["prefill"] for one in told)),
        ("quire_decode_seconds", 10, sum(one["decode"] for one in told)),
    ):
        found = buckets(samples, name)
        assert len(found) == count > 0, name
        assert max(found) <= bisect_left(HISTOGRAMS[name][1], elapsed), name
        assert 0.999 * least_ms / 1000 <= samples.total(f"{name}_sum") <= count * elapsed, name
    # Queue, prefill and decode are the parts of the whole.
    parts = sum(samples.total(f"quire_{part}_seconds_sum") for part in ("queue", "prefill", "decode"))
    assert parts == pytest.approx(samples.total("quire_request_seconds_sum"), rel=0.001)
    assert samples.total("quire_queue_seconds_sum") > NUM_TOKENS * STEP_MS / 1000, "eight of ten have waited"


@pytest.mark.slow
@pytest.mark.row("G1", clauses=("equal",))
def test_a_scrape_equals_what_clients_measured(tiny_checkpoint: Path, tmp_path: Path) -> None:
    with server_of(tmp_path, tiny_checkpoint, LONG_STEP_MS) as slow_server:
        seen, samples = measure(slow_server)
    per_token = [sum(one.gaps) / (NUM_TOKENS - 1) for one in seen]
    for name, values in {
        "quire_time_to_first_token_seconds": [one.first for one in seen],
        "quire_inter_token_seconds": [gap for one in seen for gap in one.gaps],
        "quire_time_per_output_token_seconds": per_token,
        "quire_request_seconds": [one.whole for one in seen],
    }.items():
        ours = sorted(bisect_left(HISTOGRAMS[name][1], seconds) for seconds in values)
        theirs = buckets(samples, name)
        assert len(ours) == len(theirs) >= 10
        away = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
        # What was sent may come late on a busy machine; that is not what is measured here.
        assert sorted(away)[int(len(away) * 0.7) - 1] <= 1, (name, ours, theirs)
        assert samples.total(f"{name}_sum") == pytest.approx(sum(values), rel=0.5)


@pytest.mark.row("G4", clauses=("sums",))
def test_counters_by_model_and_tenant_are_the_sums_of_usage(measured: tuple[list[Seen], Scrape]) -> None:
    seen, samples = measured
    expected: Counter[tuple[str, str, str]] = Counter()
    for number, one in enumerate(seen):
        model, tenant = "generator" if number % 2 else "other", ["", "acme", "globex"][number % 3]
        results = one.reply.results
        expected["input", model, tenant] += int(results[-1].as_numpy("num_input_tokens")[0])
        # Of each response, as vLLM's contract says.
        expected["output", model, tenant] += sum(int(r.as_numpy("num_output_tokens")[0]) for r in results)
    for kind in ("input", "output"):
        found = {
            (kind, labels["model"], labels["tenant"]): number
            for labels, number in samples.samples[f"quire_{kind}_tokens_total"]
            if labels["adapter"] == ""
        }
        assert found == {key: count for key, count in expected.items() if key[0] == kind}
    assert (
        sum(samples.total(f"quire_{kind}_tokens_total") for kind in ("input", "output")) == expected.total()
    )


def test_an_engine_of_two_models_is_shown_once(measured: tuple[list[Seen], Scrape]) -> None:
    """Both showed its figures: a sum over models was twice what had been computed."""
    _, samples = measured
    for name in ("quire_requests_running", "quire_scheduled_tokens_total", "quire_kv_use_ratio"):
        assert len(samples.samples[name]) == 1
    inputs = samples.total("quire_input_tokens_total")
    cached = samples.total("quire_prefix_cached_tokens_total")
    computed = inputs - cached + 10 * (NUM_TOKENS - 1)
    # Last rows of streams may have been launched in vain; the warm-up was two requests of a block at most.
    assert computed <= samples.total("quire_scheduled_tokens_total") <= computed + 10 + 2 * 16
    engines = {labels["engine"] for labels, _ in samples.samples["quire_engine_info"]}
    assert {labels["model"] for labels, _ in samples.samples["quire_engine_info"]} == {"generator", "other"}
    assert engines == {labels["engine"] for labels, _ in samples.samples["quire_requests_running"]}


@pytest.mark.row("G3", clauses=("names", "epp"))
def test_the_sample_of_an_endpoint_picker_finds_its_figures(
    server: ServerProcess, measured: tuple[list[Seen], Scrape]
) -> None:
    """By our names, and by vLLM's, which a picker knows without being told: while two run and two wait."""
    text = (ROOT / "docker" / "kubernetes" / "samples" / "inferencepool.yaml").read_text("utf-8")
    (config,) = (one["data"] for one in yaml.safe_load_all(text) if one["kind"] == "ConfigMap")
    plugins = {one["type"]: one for one in yaml.safe_load(config["picker.yaml"])["plugins"]}
    given = plugins["core-metrics-extractor"]["parameters"]["engineConfigs"]
    engines = {one["name"]: one for one in given}
    assert set(engines) == {"quire", "vllm"}
    inputs = {"text_input": "x", "max_tokens": 15_000, "ignore_eos": True, "stream": True}
    calls = [TritonStream(server.grpc_url, "generator", inputs, request_id=f"held-{i}") for i in range(4)]
    try:
        for engine in engines.values():
            queued, running = engine["queuedRequestsSpec"], engine["runningRequestsSpec"]
            samples = scrape_until(
                server, lambda found, q=queued, r=running: (found.total(r), found.total(q)) == (2, 2)
            )
            # A picker takes one sample of a name: there must be no other.
            names = [engine[key] for key in ("queuedRequestsSpec", "runningRequestsSpec", "kvUsageSpec")]
            assert [len(samples.samples[name]) for name in names] == [1, 1, 1]
            assert 0 < samples.total(engine["kvUsageSpec"]) < 1
            for key in ("cacheInfoSpec", "loraSpec"):
                assert key not in engine or samples.samples[engine[key]]
        assert samples.total("quire_requests_waiting_for", reason="seats") == 2
        (info, one) = samples.samples["vllm:cache_config_info"][0]
        assert (info["block_size"], info["num_gpu_blocks"], one) == ("16", "256", 1)
        (adapters, when) = samples.samples["vllm:lora_requests_info"][0]
        assert adapters["running_lora_adapters"] == adapters["waiting_lora_adapters"] == ""
        assert time.time() - 3600 < when <= time.time()
    finally:
        for call in calls:
            call.cancel()
    scrape_until(server, lambda found: found.total("quire_requests_running") == 0)


@pytest.mark.row("G5")
def test_ends_are_told_apart_which_tritons_own_counts_do_not(
    server: ServerProcess, measured: tuple[list[Seen], Scrape]
) -> None:
    """Successes, refusals, clients that left and requests cancelled by id, of a model that streams."""
    before = scrape(server)
    asked = {"text_input": "x", "max_tokens": 3, "ignore_eos": True}
    endless = {**asked, "max_tokens": 15_000, "stream": True}
    url = server.grpc_url
    for _ in range(3):
        assert watch(url, "other", asked).reply.error is None
    for wrong in ({"top_p": 7.0}, {"max_tokens": -1}):
        assert watch(url, "other", {**asked, **wrong}).reply.error is not None
    left = TritonStream(url, "other", endless)
    left.next()
    left.cancel()
    named = TritonStream(url, "other", endless, request_id="by-id")
    named.next()
    stream(url, "other", {"cancel": True}, request_id="by-id")
    assert named.read_all().finish_reasons[-1] == "cancelled"

    def changed(found: Scrape, name: str, **labels: str) -> float:
        return found.total(name, model="other", **labels) - before.total(name, model="other", **labels)

    after = scrape_until(
        server,
        lambda found: (
            changed(found, "quire_requests_total") == 7
            and changed(found, "quire_commands_total", code="") == 1
        ),
    )
    ends = {
        (labels["finish_reason"], labels["code"]): changed(
            after, "quire_requests_total", finish_reason=labels["finish_reason"], code=labels["code"]
        )
        for labels, _ in after.samples["quire_requests_total"]
        if labels["model"] == "other"
    }
    assert {end: count for end, count in ends.items() if count} == {
        ("length", ""): 3,
        ("error", "INVALID_ARG"): 2,
        ("cancelled", "CANCELLED"): 1,
        ("cancelled", ""): 1,
    }
    # To Triton a request of a decoupled model is a success once `execute` has returned, whatever follows.
    assert changed(after, "nv_inference_request_success") == 3 + 2 + 1 + 1 + 1
    assert changed(after, "nv_inference_request_failure") == 0

    # An ensemble counts a failure of its member twice: the error, and the FINAL that comes with it.
    assert stream(url, "front", {"text_input": "x", "max_tokens": 3}).error is None
    assert stream(url, "front", {"text_input": "x", "max_tokens": -1}).error is not None
    after = scrape_until(
        server, lambda found: found.total("nv_inference_request_failure", model="front") == 2
    )
    assert after.total("nv_inference_request_failure", model="front", reason="OTHER") == 2
    assert after.total("nv_inference_request_success", model="front") == 1


@pytest.mark.row("G33", clauses=("no-polling",))
@pytest.mark.parametrize("steps_go_on", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_no_thread_wakes_for_nothing_while_streams_wait(
    server: ServerProcess, measured: tuple[list[Seen], Scrape], steps_go_on: bool
) -> None:
    """Two streams run and four wait for a place. While the engine is held, as by a step that takes long,
    there is the responder's question to Triton about each client, for which there is no event, and about the
    model; no other thread wakes. While steps go on each one wakes as often as it has a reason (on a busy
    machine more often, as threads wait for the interpreter's lock).
    """
    asked = {"text_input": "x", "max_tokens": 15_000, "ignore_eos": True, "stream": True}
    (engine,), stubs = engines_and_stubs(server, "generator")
    others = engines_and_stubs(server, "other")[1]
    steps, figures = 1000 / STEP_MS, 2.0
    asks = 6 * 10.0 + 2.0
    """In a second: of each client, and for the answer about the model, which another thread asks."""

    def excess(reasons: dict[str, float], *, of_asking: float) -> list[Any]:
        """Threads that wake more often than there are reasons in a second; those for the stub that has the
        streams apart."""
        before = figures_of(scrape(server))
        woken = wakes_in([engine, *stubs, *others], WINDOW_S)
        num_changed = len(figures_of(scrape(server)) - before)
        reasons = {**reasons, "quire-metrics": figures * num_changed}
        found = []
        for pid, threads in woken.items():
            for name, count in threads:
                expected = reasons.get(name, 0.0)
                if pid in stubs:
                    expected += {"quire-responder": of_asking, "quire-drain": 3 * 2.0}.get(name, 0.0)
                # An answer of Triton's is waited for, too, and another thread may be in the way.
                is_ours = pid == engine or name.startswith(OWN)
                if is_ours and count > STRAY + 2 * WINDOW_S * expected:
                    found.append((name, count, expected, threads))
        return found

    held = [TritonStream(server.grpc_url, "generator", asked) for _ in range(6)]
    try:
        scrape_until(server, lambda found: found.total("quire_requests_waiting") == 4)
        reasons = {"python": steps + figures, "quire-runner_0": 2 * steps}
        reasons |= {"ZMQbg/IO/0": 2 * (steps + figures), "quire-responder": figures}
        of_asking = 3 * steps + asks
        if not steps_go_on:
            reasons, of_asking = {}, asks
            psutil.Process(engine).suspend()
        # What was before may have its sequel: there is a window in which nothing wakes in vain.
        wait_until(lambda: not excess(reasons, of_asking=of_asking))
    finally:
        psutil.Process(engine).resume()
        for call in held:
            call.cancel()
    scrape_until(server, lambda found: found.total("quire_requests_running") == 0)


# --- Prometheus ---


@dataclass
class Prometheus:
    """A real one that scrapes a server every second, with the chart's rules."""

    url: str

    @classmethod
    @contextmanager
    def of(cls, server: ServerProcess, folder: Path) -> Iterator[Prometheus]:
        shutil.copy(CHART / "rules.yaml", folder)
        targets = [{"targets": [server.metrics_url], "labels": {"service": "chat", "namespace": "models"}}]
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": ["rules.yaml"],
            "scrape_configs": [{"job_name": "quire", "static_configs": targets}],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config), "utf-8")
        with socket.socket() as holder:
            holder.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{holder.getsockname()[1]}"
        command = ["prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=data"]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [*command, f"--web.listen-address={address}"], cwd=folder, stdout=log, stderr=log
            )
        try:
            yield cls(f"http://{address}")
        finally:
            process.terminate()
            process.wait(WAIT_S)

    def until(self, query: str) -> list[Any]:
        """The answer to a query, once there is one with a number."""

        def answer() -> list[Any]:
            with suppress(urllib.error.URLError):
                found = ask(self.url, "query", query=query)["result"]
                if all(one["value"][1] != "NaN" for one in found):
                    return list(found)
            return []

        return wait_until(answer, query, poll_s=0.2)


def test_panels_of_what_newer_servers_count_say_so() -> None:
    """They are empty on 24.10."""
    for panel in panels():
        is_newer = any("nv_" in expr for _, expr in targets(panel, rate_interval="30s"))
        assert panel.get("description", "").startswith("from 24.11") == is_newer, panel["title"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="no Prometheus (Debian's package prometheus)")
def test_a_real_prometheus_answers_every_panel_and_loads_every_rule(
    server: ServerProcess, tmp_path: Path
) -> None:
    """Every query of the dashboard is parsed, and has an answer while there is load."""
    inputs = {
        "text_input": "x " * 30,
        "max_tokens": 4000,
        "ignore_eos": True,
        "stream": True,
        "tenant": "acme",
    }
    short = {**inputs, "max_tokens": 4}
    with Prometheus.of(server, tmp_path) as prometheus:
        prometheus.until("quire_engine_info")
        held = TritonStream(server.grpc_url, "generator", inputs)
        stop = threading.Event()

        def load() -> None:
            while not stop.is_set():
                stream(server.grpc_url, "other", short)

        with ThreadPoolExecutor(1) as pool:
            try:
                running = pool.submit(load)
                for panel in panels():
                    for _, expr in targets(panel, rate_interval="30s", service="chat"):
                        if "nv_" in expr:
                            ask(prometheus.url, "query", query=expr)  # parsed
                        else:
                            prometheus.until(expr)
                assert not running.done()
            finally:
                stop.set()
                held.cancel()
        names = set(ask(prometheus.url, "label/__name__/values"))
        groups = ask(prometheus.url, "rules")["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        assert len(rules) >= 12 and all(rule["health"] == "ok" for rule in rules), rules
        texts = [rule["query"] for rule in rules]
        texts += [expr for panel in panels() for _, expr in targets(panel, rate_interval="30s")]
        used = {name for text in texts for name in re.findall(r"\bquire_\w+", text)}
        assert len(used) > 20 and used <= names, used - names
        assert ask(prometheus.url, "query", query='up{job="quire"}')["result"][0]["value"][1] == "1"
