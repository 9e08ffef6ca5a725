"""Choices, tenants, priorities, deadlines, sessions and the cache's commands through the real server."""

from __future__ import annotations

import itertools
import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from quire import LLM, SamplingParams
from quire.outputs import RequestOutput
from quire_client import Client
from quire_ensemble.builder import build_repository
from tests.e2e.conftest import OPTIONS, AssortedServer, TinyServer
from tests.e2e.triton_calls import Reply, TritonStream, stream
from tests.fixtures.pace import PACED, PACED_ENV, paced, paced_input
from tests.fixtures.server import ServerProcess
from tests.fixtures.waiting import GROWING_S, wait_until

pytestmark = pytest.mark.server

PROMPT = "The quick brown fox"
NUM_BLOCKS = 640
BLOCK_SIZE = 16
LONG: dict[str, Any] = {"max_tokens": 2400, "ignore_eos": True}
"""What each of four may take at once."""
LONGEST: dict[str, Any] = {"max_tokens": 10_000, "ignore_eos": True}
"""What one request alone may take."""
QUOTA, SPENT = {"tokens_per_minute": 40}, 400
"""Tokens that a tenant may use in a minute, and that it uses: it is in debt for nine of them."""
ONE = {"max_running": 1}
WAIT_S = 120.0


@pytest.fixture(scope="module")
def served(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyServer]:
    """A small engine: four sequences run at a time, and three prompts of 3600 tokens overflow its cache."""
    root = tmp_path_factory.mktemp("scheduling")
    trace = root / "trace.jsonl"
    options = {
        **OPTIONS,
        **PACED,
        "num_blocks": NUM_BLOCKS,
        "max_model_len": NUM_BLOCKS * BLOCK_SIZE,
        "max_num_seqs": 4,
        "queue_policy": "priority",
        "tenant_from_header_only": True,
        "tenants": {"grpc": QUOTA, "http": QUOTA, "one": ONE},
        "session_ttl_s": 3600.0,
        "kv_events": {
            "endpoint": f"ipc://{root}/events.ipc",
            "replay_endpoint": f"ipc://{root}/replay.ipc",
        },
        "trace_file": str(trace),
    }
    build_repository(tiny_checkpoint, root / "repository", placement="path", engine_options=options)
    llm = LLM(tiny_checkpoint, **{**OPTIONS, "max_model_len": NUM_BLOCKS * BLOCK_SIZE})
    with ServerProcess(root / "repository", root, env=PACED_ENV) as server:
        yield TinyServer(server, tiny_checkpoint, trace, llm)


def by_choice(reply: Reply) -> dict[int, tuple[list[int], list[str]]]:
    """Per choice: its token ids and its finish reasons."""
    found: dict[int, tuple[list[int], list[str]]] = {}
    for result, reason in zip(reply.results, reply.finish_reasons, strict=True):
        ids, reasons = found.setdefault(int(result.as_numpy("index")[0]), ([], []))
        ids.extend(int(i) for i in result.as_numpy("output_ids"))
        reasons.extend([reason] if reason else [])
    return found


def expected(outputs: list[RequestOutput]) -> dict[int, tuple[list[int], list[str]]]:
    (first,) = outputs
    return {o.index: (o.token_ids, [str(o.finish_reason)]) for o in (first, *first.others)}


def number(reply: Reply, name: str) -> Any:
    """The one value of an output in the last response."""
    return reply.results[-1].as_numpy(name)[0]


def post(url: str, body: dict[str, Any], headers: dict[str, str]) -> tuple[int, str]:
    everything = {"Content-Type": "application/json", **headers}
    request = urllib.request.Request(f"http://{url}", json.dumps(body).encode(), everything)
    try:
        with urllib.request.urlopen(request, timeout=WAIT_S) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def blocks_shown(served: TinyServer) -> dict[str, float]:
    """`quire_kv_blocks` of the generator by state."""
    with urllib.request.urlopen(f"http://{served.server.metrics_url}/metrics", timeout=WAIT_S) as answer:
        text = answer.read().decode()
    infos = re.findall(r'^quire_engine_info\{(.*model="generator".*)\}', text, re.MULTILINE)
    if not infos:
        return dict.fromkeys(("free", "cached", "in_use", "pinned"), 0.0)  # nothing is told yet
    engine = re.search(r'engine="\w+"', infos[0])[0]  # type: ignore[index]
    found = re.findall(rf"^quire_kv_blocks\{{(.*{engine}.*)\}} ([\d.e+]+)$", text, re.MULTILINE)
    states = {re.search(r'state="(\w+)"', labels)[1]: float(value) for labels, value in found}  # type: ignore[index]
    assert len(found) == len(states) == 4, found
    return states


def arrivals(served: TinyServer) -> list[dict[str, Any]]:
    return [arrival for record in served.trace() for arrival in record.get("arrivals", [])]


def scheduled_after_end(served: TinyServer, request_id: str) -> tuple[int, int]:
    """Steps with the request at all, and steps with it that were planned after its end."""
    in_all = after = 0
    ended = False
    for record in served.trace():
        rows = [row[0] for row in record.get("scheduled", [])]
        ended = ended or any(entry[0] == request_id for entry in record.get("ended", []))
        in_all += request_id in rows
        after += ended and request_id in rows
        ended = ended or any(entry["id"] == request_id for entry in record.get("finished", []))
    assert ended, f"{request_id} has no end in the trace"
    return in_all, after


@pytest.mark.row("A16", clauses=("streams", "index"))
@pytest.mark.parametrize("model", ["generator", "chat"])
def test_choices_are_seeded_streams_of_their_own(served: TinyServer, model: str) -> None:
    params: dict[str, Any] = {"n": 4, "seed": 11, "temperature": 1.0, "max_tokens": 24}
    reply = stream(served.server.grpc_url, model, {"text_input": PROMPT, "stream": True, **params})
    assert (reply.error, reply.finals) == (None, 1)
    found = by_choice(reply)
    assert found == expected(served.llm.generate([PROMPT], SamplingParams(**params)))
    assert sorted(found) == [0, 1, 2, 3]
    assert len({tuple(ids) for ids, _ in found.values()}) == 4, "four streams, not one four times"
    alone = SamplingParams(**{**params, "n": 1})
    assert found[0][0] == served.llm.generate([PROMPT], alone)[0].token_ids
    whole = stream(served.server.grpc_url, model, {"text_input": PROMPT, **params})
    assert by_choice(whole) == found
    assert len(whole.results) == 4, "one response per choice"


@pytest.mark.row("A16", clauses=("finish",))
def test_a_stop_string_ends_its_choice_and_no_other(served: TinyServer) -> None:
    params: dict[str, Any] = {"n": 4, "seed": 11, "temperature": 1.0, "max_tokens": 24, "ignore_eos": True}
    (first,) = served.llm.generate([PROMPT], SamplingParams(**params))
    text, rest = first.others[0].text, [first.text, *(o.text for o in first.others[1:])]
    pieces = (text[i : i + 2] for i in range(len(text) - 1))
    stop = next(p for p in pieces if p.isascii() and not any(p in other for other in rest))
    inputs = {"text_input": PROMPT, "stream": True, "stop": [stop], **params}
    found = by_choice(stream(served.server.grpc_url, "generator", inputs))
    assert {index: reasons for index, (_, reasons) in found.items()} == {
        0: ["length"],
        1: ["stop"],
        2: ["length"],
        3: ["length"],
    }
    assert [found[i][0] for i in (0, 2, 3)] == [o.token_ids for o in (first, *first.others[1:])]
    assert found[1][0] == first.others[0].token_ids[: len(found[1][0])]


@pytest.mark.row("A17")
def test_beams_come_best_first(served: TinyServer) -> None:
    params: dict[str, Any] = {"beam_width": 4, "n": 3, "max_tokens": 16, "length_penalty": 0.5}
    reply = stream(served.server.grpc_url, "generator", {"text_input": PROMPT, **params})
    outputs = served.llm.generate([PROMPT], SamplingParams(**params))
    assert by_choice(reply) == expected(outputs)
    sums = [float(result.as_numpy("cumulative_logprob")[0]) for result in reply.results]
    (best,) = outputs
    assert sums == pytest.approx([o.cumulative_logprob for o in (best, *best.others)], abs=1e-4)
    refused = stream(served.server.grpc_url, "generator", {"text_input": PROMPT, "stream": True, **params})
    assert "stream: must be false" in str(refused.error)


@pytest.mark.row("G21", clauses=("quotas",))
@pytest.mark.row("B13", clauses=("header", "quota"))
@pytest.mark.row("G21", clauses=("quotas",))
def test_a_tenants_quota_by_header_through_the_ensembles(served: TinyServer) -> None:
    """gRPC lower-cases headers; HTTP keeps their case, and forwards them with `infer` only."""

    def by_grpc(tenant: str) -> Reply:
        inputs = {"text_input": PROMPT, "stream": True, "max_tokens": SPENT, "ignore_eos": True}
        return stream(served.server.grpc_url, "chat", inputs, headers={"x-quire-tenant": tenant})

    def by_http(tenant: str) -> tuple[int, str]:
        body = {
            "inputs": [
                {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": [PROMPT]},
                {"name": "max_tokens", "shape": [1], "datatype": "INT32", "data": [SPENT]},
                {"name": "ignore_eos", "shape": [1], "datatype": "BOOL", "data": [True]},
            ]
        }
        url = f"{served.server.http_url}/v2/models/chat_unary/infer"
        return post(url, body, {"X-Tenant-Id": tenant})

    assert by_grpc("grpc").error is None
    refused = str(by_grpc("grpc").error)
    assert "quota of tenant 'grpc'" in refused and "; retry after " in refused
    assert by_http("http")[0] == 200
    status, text = by_http("http")
    assert (status, "; retry after " in text) == (503, True)
    assert by_grpc("other").error is None, "one tenant's quota is not another's"
    assert by_http("other")[0] == 200


@pytest.mark.parametrize("model", ["generator", "chat"])
def test_behind_a_gateway_no_client_speaks_for_another_tenant(served: TinyServer, model: str) -> None:
    """A request parameter may have a header's name: tritonserver passes on both."""
    inputs, header = {"text_input": PROMPT, "max_tokens": 2}, {"x-quire-tenant": "theirs"}
    url = served.server.grpc_url
    assert stream(url, model, inputs, headers=header).error is None
    for name in ("tenant", "x-quire-tenant", "X-Quire-Tenant", "x-tenant-id"):
        reply = stream(url, model, inputs, headers=header, parameters={name: "mine"})
        assert "tenant: must be given" in str(reply.error), name


@pytest.mark.row("B11", clauses=("ensemble",))
def test_priorities_reach_the_engine(served: TinyServer) -> None:
    prompt = {"text_input": PROMPT, "max_tokens": 2}
    ways: dict[int, dict[str, Any]] = {
        -71: {"inputs": {**prompt, "request_priority": -71}},
        -72: {"inputs": prompt, "parameters": {"request_priority": -72}},
        -73: {"inputs": prompt, "headers": {"x-quire-priority": "-73"}},
        -74: {"inputs": {**prompt, "sampling_parameters": '{"priority": -74}'}},
    }
    for options in ways.values():
        assert stream(served.server.grpc_url, "chat", **options).error is None
    with Client(served.server.grpc_url) as client:
        client.generate(PROMPT, max_tokens=2, priority=-75)
    seen = {arrival.get("priority", 0) for arrival in arrivals(served)}
    assert {*ways, -75} <= seen


@pytest.mark.row("B11", clauses=("preempts",))
def test_an_urgent_request_does_not_wait_for_those_that_run(served: TinyServer) -> None:
    url = served.server.grpc_url
    before = len(served.trace())
    running = {"stream": True, "request_priority": 61, **LONG, **paced_input()}
    blockers = [TritonStream(url, "generator", {"text_input": f"{PROMPT} {i}", **running}) for i in range(4)]
    for blocker in blockers:
        blocker.next()
    waiting = TritonStream(url, "generator", {"text_input": PROMPT, "request_priority": 62, **LONG})
    urgent = {"text_input": PROMPT, "stream": True, "max_tokens": 8, "ignore_eos": True}
    reply = stream(url, "chat", urgent, headers={"x-quire-priority": "-60"})
    assert (reply.error, reply.finish_reasons[-1]) == (None, "length")
    for call in (*blockers, waiting):
        call.cancel()
    records = served.trace()[before:]
    ended, classes = {}, {}
    for index, record in enumerate(records):
        for arrival in record.get("arrivals", []):
            classes[arrival["id"]] = arrival.get("priority", 0)
        for entry in record.get("finished", []):
            ended[entry["id"]] = index
    (urgent_id,) = (name for name, priority in classes.items() if priority == -60)
    others = [name for name, priority in classes.items() if priority in (61, 62)]
    first = next(
        index
        for index, record in enumerate(records)
        if any(row[0] == urgent_id for row in record.get("scheduled", []))
    )
    assert all(ended.get(name, len(records)) > first for name in others), "it waited for one of them"
    preempted = [name for record in records[: first + 1] for name in record.get("preempted", [])]
    assert 61 in {classes.get(name) for name in preempted}


@pytest.mark.row("A22", whole=True)
def test_expired_requests_end_by_timeout_and_never_run_again(served: TinyServer) -> None:
    """Of a tenant that may run one request: a second one waits while there is room, so that it is not
    refused as one that could not make it."""
    url = served.server.grpc_url
    marks = {"ttft": 81, "triton": 82, "total": 83}
    running = {"text_input": PROMPT, "stream": True, **LONGEST}
    running["sampling_parameters"] = json.dumps({"logits_processors": paced()})
    tenant = {"x-quire-tenant": "one"}
    blocker = TritonStream(url, "generator", running, headers=tenant)
    blocker.next()
    for limit_s in GROWING_S:
        limit_ms = int(1000 * limit_s)
        limits = {"request_priority": marks["ttft"], "ttft_deadline_ms": limit_ms}
        by_triton = {**running, "request_priority": marks["triton"]}
        by_total = {**running, "request_priority": marks["total"], "deadline_ms": limit_ms}
        with ThreadPoolExecutor(3) as pool:
            too_late = pool.submit(stream, url, "generator", {**running, **limits}, headers=tenant)
            asked = {
                "triton": pool.submit(stream, url, "chat", by_triton, timeout=1000 * limit_ms),
                "total": pool.submit(stream, url, "chat", by_total),
            }
        late, replies = too_late.result(), {name: one.result() for name, one in asked.items()}
        if all(reply.text for reply in replies.values()):  # both had begun when their time was over
            break
    assert (late.error, late.finish_reasons, late.text) == (None, ["timeout"], "")
    blocker.cancel()
    for reply in replies.values():
        assert (reply.error, reply.finals) == (None, 1)
        assert reply.finish_reasons[-1] == "timeout"
    # A step with something to do closes the records of what ended before it.
    stream(url, "generator", {"text_input": PROMPT, "max_tokens": 2})
    ids = {arrival.get("priority", 0): arrival["id"] for arrival in arrivals(served)}
    assert scheduled_after_end(served, ids[marks["ttft"]]) == (0, 0)
    for name in replies:
        steps, after = scheduled_after_end(served, ids[marks[name]])
        assert after == 0
        assert steps < LONGEST["max_tokens"], "it was to be ended before its last token"


@pytest.mark.row("C8", whole=True)
def test_the_cache_is_emptied_beside_a_running_request(served: TinyServer) -> None:
    url = served.server.grpc_url
    (want,) = served.llm.generate([PROMPT], SamplingParams(max_tokens=1000, ignore_eos=True))
    asked = {"input_ids": list(range(100, 200)), "max_tokens": 2, "return_num_cached_tokens": True}
    with Client(url) as client:
        stream(url, "generator", asked)
        warm = stream(url, "generator", asked)
        assert number(warm, "num_cached_tokens") == 96
        assert client.cache_inspect()["num_cached_blocks"] > 0
        wait_until(lambda: blocks_shown(served)["cached"] > 0)
        inputs = {"text_input": PROMPT, "stream": True, **LONGEST, **paced_input()}
        running = TritonStream(url, "generator", inputs, request_id="running")
        running.next()
        client.cache_reset()
        emptied = client.cache_inspect()
        assert emptied["num_cached_blocks"] == 0
        assert emptied["num_blocks_in_use"] > 0, "the running request was to be there"
        cold = stream(url, "generator", asked)
        assert number(cold, "num_cached_tokens") == 0
        assert cold.token_ids == warm.token_ids
        client.cancel("running", model="generator")
        reply = running.read_all()
        assert reply.finish_reasons[-1] == "cancelled", "the running request was to be there"
        assert reply.token_ids[:1000] == want.token_ids[: len(reply.token_ids)]
        client.cache_reset()
        empty = {"free": NUM_BLOCKS, "cached": 0.0, "in_use": 0.0, "pinned": 0.0}
        wait_until(lambda: blocks_shown(served) == empty, lambda: blocks_shown(served))
        refused = stream(url, "generator", {"cache_control": '{"command": "burn"}'})
        assert "cache_control: must be" in str(refused.error)


@pytest.mark.row("C17", clauses=("replay",))
def test_a_subscriber_hears_of_the_served_engines_blocks(served: TinyServer) -> None:
    root = served.trace_file.parent
    prompts = ([(i * 17 + turn) % 400 + 3 for i in range(5 * BLOCK_SIZE)] for turn in itertools.count())
    heard: dict[int, bytes] = {}
    tokens: dict[int, list[int]] = {}
    with ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        live, replay = (stack.enter_context(context.socket(kind)) for kind in (zmq.SUB, zmq.DEALER))
        client = stack.enter_context(Client(served.server.grpc_url))
        live.subscribe(b"")
        live.connect(f"ipc://{root}/events.ipc")
        replay.connect(f"ipc://{root}/replay.ipc")

        def request_is_heard() -> bool:
            """A subscription takes a moment to take effect."""
            asked = {"input_ids": next(prompts), "max_tokens": 2}
            assert stream(served.server.grpc_url, "generator", asked).error is None
            return bool(live.poll(100))

        def catch_up() -> None:
            replay.send_multipart([b"", (0).to_bytes(8, "big")])
            while True:
                assert replay.poll(WAIT_S * 1000), "no answer to a replay request"
                _, number, payload = replay.recv_multipart()
                if int.from_bytes(number, "big", signed=True) == -1:
                    return
                assert heard.setdefault(int.from_bytes(number, "big"), payload) == payload

        def blocks() -> set[int]:
            """What can be found in the cache, by what was heard alone."""
            catch_up()
            found: set[int] = set()
            assert sorted(heard) == list(range(len(heard))), "no gap"
            for number in sorted(heard):
                _, events, _ = msgspec.msgpack.decode(heard[number])
                for tag, *fields in events:
                    if tag == "BlockStored":
                        names, _, token_ids, size, *_ = fields
                        found |= set(names)
                        pieces = (token_ids[i : i + size] for i in range(0, len(token_ids), size))
                        tokens.update(zip(names, pieces, strict=True))
                    elif tag == "BlockRemoved":
                        found -= set(fields[0])
                    else:
                        found.clear()
            return found

        wait_until(request_is_heard)
        _, number, payload = live.recv_multipart()
        heard[int.from_bytes(number, "big")] = payload
        wait_until(lambda: len(blocks()) == client.cache_inspect()["num_findable_blocks"])
        first = [(i * 17) % 400 + 3 for i in range(BLOCK_SIZE)]
        assert first in [tokens[name] for name in blocks()]
        client.cache_reset()
        wait_until(lambda: not blocks())


@pytest.mark.row("A36", clauses=("reuse", "end", "ids"))
def test_a_correlation_id_keeps_a_conversation(served: TinyServer) -> None:
    url = served.server.grpc_url

    starts = itertools.count()

    def flood() -> None:
        for start in itertools.islice(starts, 3):
            prompt = [(start * 31 + i * 7) % 400 + 3 for i in range(3600)]
            assert stream(url, "generator", {"input_ids": prompt, "max_tokens": 2}).error is None

    def turn(prompt: list[int], **options: Any) -> Reply:
        inputs = {"input_ids": prompt, "max_tokens": 20, "ignore_eos": True, "return_num_cached_tokens": True}
        reply = stream(url, "generator", inputs, **options)
        assert reply.error is None
        return reply

    first = [(i * 13) % 400 + 3 for i in range(200)]
    answer = turn(first, sequence_id=77, sequence_start=True).token_ids
    # The last token of an answer is never computed.
    known = (len(first) + len(answer) - 1) // BLOCK_SIZE * BLOCK_SIZE
    flood()
    second = [*first, *answer, 5, 6, 7]
    reply = turn(second, sequence_id=77)
    assert number(reply, "num_cached_tokens") == known
    flood()
    third = [*second, *reply.token_ids, 8]
    kept = (len(second) + len(reply.token_ids) - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert number(turn(third, sequence_id=77, sequence_end=True), "num_cached_tokens") == kept
    flood()
    assert number(turn(third), "num_cached_tokens") == 0, "the end flag lets the blocks go"


@pytest.mark.row("A36", clauses=("ttl",))
def test_a_conversation_is_forgotten_with_its_time_to_live(assorted: AssortedServer) -> None:
    """Of half a second; while another one lives, its blocks are there (above)."""
    url = assorted.server.grpc_url
    first, others = ([(i * step) % 400 + 3 for i in range(1020)] for step in (13, 7))  # all its blocks, each
    asked = {"max_tokens": 2, "return_num_cached_tokens": True}
    with Client(url) as client:
        for session, prompt in ((78, first), (79, others)):
            inputs = {"input_ids": prompt, **asked}
            assert stream(url, "bare", inputs, sequence_id=session, sequence_start=True).error is None
            wait_until(lambda: not client.cache_inspect(model="bare")["pins"])
    reply = stream(url, "bare", {"input_ids": first, **asked}, sequence_id=78)
    assert number(reply, "num_cached_tokens") == 0
