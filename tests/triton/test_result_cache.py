"""Results of deterministic requests are replayed: the same to the client, and the engine is not asked.

The real scheduler, engine loop, responder and parser of texts; model and Triton are stand-ins.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import json
import math
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.fixtures import fake_pb_utils

fake_pb_utils.install()

from quire.config import EngineConfig, ResultCacheConfig  # noqa: E402
from quire.engine.core import EngineCore  # noqa: E402
from quire.engine.executor import RunnerExecutor  # noqa: E402
from quire.engine.messages import AddRequest, EmbedsMessage, EngineInfo  # noqa: E402
from quire.engine.shared_array import SharedArray  # noqa: E402
from quire.frontend.output_processor import split_ranking  # noqa: E402
from quire.request.logits_processors import NamedProcessor  # noqa: E402
from quire.request.sampling_params import (  # noqa: E402
    PoolingParams,
    SamplingParams,
    StructuredOutput,
    Thinking,
)
from quire.request.scheduling_params import SchedulingParams  # noqa: E402
from quire.triton import result_cache  # noqa: E402
from quire.triton.metrics import RequestMetrics  # noqa: E402
from quire.triton.parsed_request import ParsedRequest  # noqa: E402
from quire.triton.request_handle import RequestHandle  # noqa: E402
from quire.triton.result_cache import ResultCache  # noqa: E402
from quire.triton.results import ChoiceResult, Results  # noqa: E402
from quire_ensemble.generator_schema import OUTPUTS  # noqa: E402
from quire_ensemble.tokenizer import Tokenizer  # noqa: E402
from tests.fixtures.checkpoints import write_tokenizer  # noqa: E402
from tests.fixtures.fake_runner import VOCAB_SIZE  # noqa: E402
from tests.fixtures.frontend import Ended, Frontend  # noqa: E402
from tests.fixtures.waiting import wait_until  # noqa: E402
from tests.triton.test_responder import SteppedRunner  # noqa: E402

WAIT_S = 60.0
ALL = frozenset(spec.name for spec in OUTPUTS) - {"timing"}
CONFIG = ResultCacheConfig(memory=10**6)
PROMPT = [7, 8, 9, 10, 11]
GREEDY = SamplingParams(max_tokens=30, ignore_eos=True)


class Figures:
    """Stands where a MetricsBoard does: values of counters by name and labels."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, ...], Any] = {}

    def counter(self, name: str, **labels: str) -> Any:
        return self.values.setdefault((name, *labels.values()), SimpleNamespace(value=0))

    def histogram(self, name: str, **labels: str) -> Any:
        return SimpleNamespace(observe=lambda *numbers: None)

    def touch(self) -> None: ...


class Harness(Frontend):
    core: EngineCore

    def __init__(self, directory: Path, tokenizer: Any, cache: ResultCache) -> None:
        values = {"model": "fake", "block_size": 4, "result_cache": {"memory": "1MB"}}
        config = EngineConfig.from_mapping(values)
        self.runner, self.cache, self.count = SteppedRunner(256, 4), cache, 0
        self.runner.info = dataclasses.replace(self.runner.info, kv_identity={"weights": "a"})
        self.ended, self.figures = Ended(), Figures()
        observers = [self.ended, RequestMetrics(self.figures, "m", "1")]  # type: ignore[arg-type]
        core = EngineCore(config, RunnerExecutor(self.runner))
        super().__init__(directory, core, tokenizer, observers, results=cache)

    def submit(self, params: SamplingParams, prompt: list[int] = PROMPT, **fields: Any) -> Any:
        sender = fake_pb_utils.ResponseSender()
        self.count += 1
        names = ALL if params.logprobs is not None else ALL - {"logprobs", "cumulative_logprob"}
        names -= set() if params.prompt_logprobs is not None else {"prompt_logprobs"}
        params, num_best = split_ranking(params)
        fields = {"stream": True, "arrived_at": time.monotonic(), "num_best": num_best, **fields}
        parsed = ParsedRequest(prompt, params, f"r{self.count}", names, names | {"timing"}, **fields)
        self.cache.look_up(parsed, self.responder.engine.info)
        self.responder.submit(RequestHandle(sender, f"t-{self.count}", f"r{self.count}"), parsed)
        return sender

    def ask(self, params: SamplingParams, **fields: Any) -> list[dict[str, Any]]:
        """The responses' tensors, once there was a FINAL and no error."""
        return responses(self.submit(params, **fields))

    def close(self) -> None:
        self.runner.gate.set()
        super().close()


def responses(sender: Any) -> list[dict[str, Any]]:
    assert sender.final.wait(WAIT_S), "no FINAL"
    assert all(response.error is None for response in sender.responses), sender.responses[-1].error.message()
    return [{name: array.tolist() for name, array in one.tensors.items()} for one in sender.responses]


def timing_of(answers: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(next(one["timing"][0] for one in answers if "timing" in one))
    return found


def whole(answers: list[dict[str, Any]], *, is_repeated: bool = False) -> dict[Any, Any]:
    """What a client has of each choice in the end, however it was cut."""
    joined: dict[Any, Any] = {}
    for one in answers[-1:] if is_repeated else answers:
        place = one["batch_index"][0], one["index"][0]
        choice = joined.setdefault(place, {"num_responses": 0})
        choice["num_responses"] += 1
        for name, value in one.items():
            if name in ("text_output", "reasoning_output"):
                choice[name] = choice.get(name, b"") + value[0]
            elif name in ("output_ids", "num_output_tokens"):
                choice[name] = choice.get(name, 0 if name != "output_ids" else [])
                choice[name] += sum(value) if name == "num_output_tokens" else value
            elif name in ("logprobs", "prompt_logprobs"):  # these come with the first response
                choice[name] = [*choice.get(name, []), *json.loads(value[0])]
            elif name == "num_cached_tokens":
                choice[name] = max(choice.get(name, [0]), value)
            elif name != "timing":
                choice[name] = value
    for choice in joined.values():
        del choice["num_responses"]
    return joined


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    return Tokenizer(path).hf


@pytest.fixture
def harness(tmp_path: Path, tokenizer: Any) -> Iterator[Harness]:
    harness = Harness(tmp_path, tokenizer, ResultCache(CONFIG))
    yield harness
    harness.close()


def other_prompt(params: SamplingParams) -> ParsedRequest:
    return ParsedRequest([3, 4, 5], params, "", ALL, ALL)


SEEDED = SamplingParams(max_tokens=20, temperature=1.0, seed=5)
CASES: dict[str, tuple[SamplingParams, dict[str, Any]]] = {
    "greedy": (GREEDY, {}),
    "seeded, ends where it ends": (SEEDED, {}),
    "one token": (msgspec.structs.replace(GREEDY, max_tokens=1), {}),
    "choices": (msgspec.structs.replace(SEEDED, n=3), {}),
    "best of": (msgspec.structs.replace(SEEDED, n=2, best_of=4, logprobs=0), {"stream": False}),
    "beams": (SamplingParams(max_tokens=9, n=2, beam_width=3, logprobs=0), {"stream": False}),
    "log-probabilities": (msgspec.structs.replace(GREEDY, logprobs=0, prompt_logprobs=0), {}),
    "one response": (GREEDY, {"stream": False}),
    "three tokens a response": (GREEDY, {"stream_interval": 3}),
    "repeated": (GREEDY, {"cumulative": True}),
    "prompts": (GREEDY, {"others": [other_prompt(GREEDY), other_prompt(SEEDED)]}),
    "an embedding": (SamplingParams(dimensions=1, max_tokens=1), {"stream": False}),
    "a stop token": (msgspec.structs.replace(GREEDY, stop_token_ids=tuple(range(20))), {}),
}


@pytest.mark.row("G22")
@pytest.mark.parametrize("case", CASES)
def test_the_client_sees_no_difference(harness: Harness, case: str) -> None:
    params, fields = CASES[case]
    first = harness.ask(params, **fields)
    steps = harness.core.num_finished_steps
    harness.runner.gate.clear()  # an engine that is asked would not answer
    again = harness.ask(params, **fields)
    is_repeated = fields.get("cumulative", False)
    assert whole(again, is_repeated=is_repeated) == whole(first, is_repeated=is_repeated)
    assert (timing_of(first)["result_cached"], timing_of(again)["result_cached"]) == (False, True)
    assert harness.core.num_finished_steps == steps and not harness.core.has_work
    if fields.get("stream", True):
        sizes = [one["num_output_tokens"][0] for one in again]
        assert sizes[0] == 1, "the first token goes out alone"
        if "stream_interval" in fields:
            assert sizes == [1, *[3] * 9, 2]
    assert not harness.responder._requests.generations and not harness.responder._requests.handles


@pytest.mark.row("G22")
def test_stop_strings_are_found_in_what_is_replayed(harness: Harness) -> None:
    """They are the frontend's: the engine knows no end, and what it says behind it is not kept."""
    text = b"".join(one["text_output"][0] for one in harness.ask(GREEDY)).decode("utf-8", "replace")
    found = next(text[at : at + 2] for at in range(4, 40) if text[at : at + 2].isprintable())
    params = msgspec.structs.replace(GREEDY, stop=(found,))
    first = harness.ask(params)
    harness.runner.gate.clear()
    again = harness.ask(params)
    assert whole(again) == whole(first)
    assert again[-1]["finish_reason"] == [b"stop"] and again[-1]["stop_reason"] == [found.encode()]


def text_by_length(answers: list[dict[str, Any]]) -> dict[int, bytes]:
    """Text so far after each response, by the number of tokens so far."""
    lengths = itertools.accumulate(len(one["output_ids"]) for one in answers)
    texts = itertools.accumulate(one["text_output"][0] for one in answers)
    return dict(zip(lengths, texts, strict=True))


def computed_with(harness: Harness, cuts: list[int], params: SamplingParams, **fields: Any) -> list[Any]:
    """Likewise `Harness.ask`: no step begins before the response that may end with the token before it has
    been sent. `cuts`: the numbers of tokens with which one may."""
    runner, execute, before = harness.runner, harness.runner.execute, harness.runner.num_steps
    runner.gate.clear()
    sender = harness.submit(params, stream_interval=1, **fields)

    def behind(output: Any) -> Any:
        num_due = bisect.bisect(cuts, runner.num_steps - before)
        wait_until(lambda: len(sender.responses) >= num_due)
        return execute(output)

    runner.execute = behind  # type: ignore[method-assign]
    runner.gate.set()
    found = responses(sender)
    runner.execute = execute  # type: ignore[method-assign]
    return found


@pytest.mark.row("G22")
def test_another_pace_is_the_request_s_own(harness: Harness) -> None:
    """What one client got in one response another may stream, and the other way round."""
    first = harness.ask(GREEDY, stream=False)
    each = harness.ask(GREEDY, stream_interval=1)
    of_each = text_by_length(each)
    own = SchedulingParams(cache_result=False)
    computed = computed_with(harness, list(of_each), GREEDY, scheduling=own)
    assert [timing_of(one)["result_cached"] for one in (first, each, computed)] == [False, True, False]
    assert len(each) > 20 and whole(each)[0, 0]["text_output"] == whole(first)[0, 0]["text_output"]
    assert text_by_length(computed) == of_each


def test_drafts_are_no_part_of_the_key(harness: Harness) -> None:
    """However many are tried, the result is the same."""
    each = [harness.ask(GREEDY, scheduling=SchedulingParams(num_draft=number)) for number in (None, 0, 8)]
    assert [timing_of(one)["result_cached"] for one in each] == [False, True, True]


@pytest.mark.row("G22")
@pytest.mark.parametrize(
    ("params", "scheduling"),
    [
        (SamplingParams(max_tokens=9, temperature=1.0), SchedulingParams()),
        (GREEDY, SchedulingParams(cache_result=False)),
        (GREEDY, SchedulingParams(session="talk")),
        (GREEDY, SchedulingParams(pin=True, cache_ttl_s=10.0)),
        (msgspec.structs.replace(GREEDY, logits_processors=(NamedProcessor("p"),)), SchedulingParams()),
    ],
)
def test_what_is_not_looked_up(params: SamplingParams, scheduling: SchedulingParams) -> None:
    """No seed; it asks for none; it is to keep blocks in the engine; code may do anything."""
    cache, info = ResultCache(CONFIG), make_info()
    for others in ([], [other_prompt(GREEDY)]):
        parsed = ParsedRequest(PROMPT, params, "", ALL, ALL, scheduling=scheduling, others=others)
        cache.look_up(parsed, info)
        assert parsed.recording is None and parsed.results is None
    sound = ParsedRequest(PROMPT, GREEDY, "", ALL, ALL)
    cache.look_up(sound, msgspec.structs.replace(info, fingerprint=""))
    assert sound.recording is None, "nobody knows what the engine computes with"
    cache.look_up(sound, info)
    assert sound.recording is not None


@pytest.mark.row("G22")
def test_what_ended_otherwise_is_not_kept(harness: Harness) -> None:
    """Cancelled, out of time, failed, or broken off by a client."""
    harness.runner.hold_after_token_of = "t-1"
    gone = harness.submit(GREEDY)
    assert gone.first.wait(WAIT_S)
    gone.cancelled = True
    assert gone.final.wait(WAIT_S)
    harness.runner.gate.set()
    harness.runner.hold_after_token_of = "t-2"
    late = harness.submit(GREEDY, scheduling=SchedulingParams(deadline=time.monotonic() + 3600))
    assert late.first.wait(WAIT_S)
    harness.core.scheduler.roster.clock = lambda: time.monotonic() + 3600
    harness.runner.gate.set()
    assert responses(late)[-1]["finish_reason"] == [b"timeout"]
    assert harness.cache._memory.num_bytes == 0
    assert not harness.responder._requests.generations
    assert not timing_of(harness.ask(GREEDY))["result_cached"]
    assert timing_of(harness.ask(GREEDY))["result_cached"]


@pytest.mark.row("G22")
def test_one_that_is_refused_leaves_the_others_recordings_whole(harness: Harness) -> None:
    """It was counted out and had never been counted in: a later one was recorded from its middle."""
    harness.responder.drain._ends_at = math.inf
    refused = harness.submit(GREEDY)
    assert refused.final.wait(WAIT_S) and refused.responses[-1].error is not None
    harness.responder.drain._ends_at = None  # the model was loaded again
    assert not harness.responder._requests.generations
    assert not timing_of(harness.ask(GREEDY))["result_cached"]
    assert timing_of(harness.ask(GREEDY))["result_cached"]


def test_observers_and_metrics_know_of_it(harness: Harness) -> None:
    for _ in range(3):
        harness.ask(GREEDY)
    harness.ask(GREEDY, scheduling=SchedulingParams(cache_result=False))
    records = harness.ended.wait(4)
    assert [record.result_cached for record in records] == [False, True, True, None]
    assert {record.num_output_tokens for record in records} == {30}
    name = "quire_result_cache_lookups_total"
    assert [harness.figures.counter(name, m="m", v="1", r=r).value for r in ("hit", "miss")] == [2, 1]


@pytest.mark.row("G22")
def test_a_client_that_leaves_a_replay_ends_it(harness: Harness) -> None:
    params = msgspec.structs.replace(GREEDY, max_tokens=350)
    harness.ask(params, stream=False)
    sender = fake_pb_utils.ResponseSender()
    gone = threading.Event()

    def leave() -> None:
        if len(sender.responses) == 3:
            sender.cancelled = True
            gone.wait(0.3)  # until the next poll is due

    sender.send_delay = leave
    parsed = ParsedRequest(PROMPT, params, "", ALL, ALL, stream=True, stream_interval=1)
    harness.cache.look_up(parsed, harness.responder.engine.info)
    assert parsed.results is not None
    harness.responder.submit(RequestHandle(sender, "left", ""), parsed)
    assert sender.final.wait(WAIT_S)
    assert sender.responses[-1].error is not None and len(sender.responses) < 100
    assert timing_of(harness.ask(params))["result_cached"], "others are served"


def make_info(**values: Any) -> EngineInfo:
    fields = {"max_model_len": 400, "vocab_size": VOCAB_SIZE, "hidden_size": 8, "fingerprint": "f", **values}
    return EngineInfo(
        pid=1, takes_position_ids=False, num_blocks=1, block_size=1, kv_cache_bytes=1,
        dtype="float32", device="cpu", **fields,
    )  # fmt: skip


OTHER_VALUES: dict[str, Any] = {
    "dimensions": 8, "pooling": PoolingParams(use_activation=False),
    "max_tokens": 3, "min_tokens": 1, "temperature": 0.5, "top_k": 1, "top_p": 0.5, "min_p": 0.5,
    "typical_p": 0.5, "repetition_penalty": 1.5, "presence_penalty": 1.0, "frequency_penalty": 1.0,
    "no_repeat_ngram_size": 3, "logit_bias": {1: 1.0}, "bad_words": ("a",), "bad_words_ids": ((1,),),
    "seed": 6, "stop": ("a",), "stop_token_ids": (3,), "include_stop_str_in_output": True,
    "ignore_eos": False, "skip_special_tokens": False, "logprobs": 1, "prompt_logprobs": 1, "n": 2,
    "best_of": 3, "beam_width": 2, "length_penalty": 0.5, "early_stopping": True, "thinking_budget": 4,
    "thinking": Thinking(True, (1,), (2,), (2,)), "structured_output": StructuredOutput(regex="a"),
}  # fmt: skip


@pytest.mark.row("G22")
def test_the_key_holds_all_that_decides_a_result(tmp_path: Path) -> None:
    """Every field of the messages is in it, unless it is one of those that are known to decide nothing: a new
    one counts, and this test asks for it."""
    assert OTHER_VALUES.keys() | {"logits_processors"} == {*SamplingParams.__struct_fields__}
    harmless = {"request_id", "external_id", "arrival_time", "scheduling", "num_deaths", "outputs"}
    assert {*AddRequest.__struct_fields__} == harmless | {
        "prompt_token_ids",
        "sampling_params",
        "embeds",
        "adapter",
        "adapter_digest",
    }

    def key(params: SamplingParams = SEEDED, fingerprint: str = "f", **fields: Any) -> bytes:
        values: dict[str, Any] = {"prompt_token_ids": PROMPT, "external_id": "", **fields}
        values |= {"outputs": ALL, "final_outputs": ALL}
        return ResultCache(CONFIG, tokenizer)._key(ParsedRequest(params=params, **values), fingerprint)

    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    keys = [key()]
    for name, value in OTHER_VALUES.items():
        assert getattr(SEEDED, name) != value or name == "ignore_eos", name
        base = msgspec.structs.replace(SEEDED, ignore_eos=True) if name == "ignore_eos" else SEEDED
        keys += [key(msgspec.structs.replace(base, **{name: value}))] if base is SEEDED else [key(base)]
    keys.append(key(fingerprint="g"))
    keys.append(key(prompt_token_ids=[*PROMPT, 1]))
    keys.append(key(others=[other_prompt(SEEDED)]))
    keys.append(key(scheduling=SchedulingParams(tenant="a")))
    keys.append(key(scheduling=SchedulingParams(cache_salt="a")))
    keys += [
        key(adapter=name, adapter_digest=digest) for name, digest in (("a", "1"), ("b", "1"), ("a", "2"))
    ]
    array = SharedArray(1, 2, (1, 8), 0, 0)
    contents = (("a", b""), ("b", b""), ("a", b"1"))
    images = [EmbedsMessage(array, [(0, 1)], [digest], positions) for digest, positions in contents]
    keys += [key(embeds=image) for image in images]
    keys.append(key(embeds=EmbedsMessage(array, [(1, 2)], ["a"], b"")))
    (tokenizer / "tokenizer.json").write_text("{}")
    keys.append(key())
    (tokenizer / "tokenizer.json").write_text("{ }")
    keys.append(key())
    assert len({*keys}) == len(keys)
    same = [
        key(stream=True, stream_interval=3, external_id="another", arrived_at=5.0),
        key(scheduling=SchedulingParams(priority=3, deadline=9.0, retention=1)),
    ]
    assert {*same} == {keys[-1]}


def test_an_engine_with_other_weights_is_another(harness: Harness) -> None:
    """Also where it went on with a request that the one before had begun."""
    harness.ask(GREEDY)
    info = harness.responder.engine.info
    parsed = ParsedRequest(PROMPT, GREEDY, "", ALL, ALL)
    harness.cache.look_up(parsed, msgspec.structs.replace(info, fingerprint="other weights"))
    assert parsed.results is None and parsed.recording is not None
    before = harness.cache._memory.num_bytes
    harness.cache.keep(parsed.recording, [], info)
    assert harness.cache._memory.num_bytes == before


@pytest.mark.row("G22")
def test_what_a_redis_had_is_in_memory_from_then_on() -> None:
    cache, info = ResultCache(CONFIG), make_info()
    entry = msgspec.msgpack.encode(Results(result_cache.VERSION, [ChoiceResult(0, 0, [1, 2, 3], "stop")]))
    for answers in ([entry], [None]):  # it is away the second time
        cache._redis = SimpleNamespace(get=lambda key, answers=answers: answers.pop())  # type: ignore[assignment]
        parsed = ParsedRequest(PROMPT, GREEDY, "", ALL, ALL)
        cache.look_up(parsed, info)
        assert parsed.results is not None and parsed.results.choices[0].token_ids == [1, 2, 3]


@pytest.mark.row("G22")
def test_a_large_result_of_redis_does_not_push_out_what_is_in_memory() -> None:
    cache, info = ResultCache(ResultCacheConfig(memory=200)), make_info()
    choice = ChoiceResult(0, 0, [1] * 30, "length")
    entry = msgspec.msgpack.encode(Results(result_cache.VERSION, [choice]))
    assert 200 > len(entry) > 200 // result_cache.MAX_SHARE
    cache._redis = SimpleNamespace(get=lambda key: entry)  # type: ignore[assignment]
    parsed = ParsedRequest(PROMPT, GREEDY, "", ALL, ALL)
    cache.look_up(parsed, info)
    assert parsed.results is not None and cache._memory.num_bytes == 0


@pytest.mark.row("G22")
def test_entries_that_no_engine_can_have_made_are_not_found() -> None:
    """What a Redis holds may be anybody's: of another version, for other choices, ids outside the vocabulary,
    other types, or noise. None is replayed, and none raises."""
    cache, info = ResultCache(CONFIG), make_info()
    good = ChoiceResult(0, 0, [1, 2, 3], "stop")

    def found(data: bytes, params: SamplingParams = GREEDY) -> bool:
        parsed = ParsedRequest(PROMPT, params, "", ALL, ALL)
        cache._memory.put(cache._key(parsed, "f"), data)
        cache.look_up(parsed, info)
        return parsed.results is not None

    def entry(version: int = result_cache.VERSION, **values: Any) -> bytes:
        choice = msgspec.structs.replace(good, **values)
        return msgspec.msgpack.encode(Results(version, [choice]))

    assert found(entry())
    assert not found(entry(version=result_cache.VERSION + 1))
    wrong: list[dict[str, Any]] = [
        {"token_ids": [VOCAB_SIZE]}, {"token_ids": [-1]}, {"token_ids": [1] * 401}, {"index": 1}, {"item": 1},
        {"finish_reason": "cancelled"}, {"finish_reason": ""}, {"token_ids": ["a"]}, {"token_ids": "abc"},
        {"logprobs": []}, {"logprobs": [[[1], [0.5], 1]] * 3}, {"num_cached_tokens": -1},
        {"stop_reason": [1]}, {"embedding": b"1234"}, {"token_ids": [1] * 31}, {"num_cached_tokens": 6},
        {"prompt_logprobs": [None] * 5},
    ]  # fmt: skip
    for values in wrong:
        assert not found(entry(**values)), values
    assert not found(entry(), msgspec.structs.replace(GREEDY, logprobs=0))
    assert not found(msgspec.msgpack.encode(Results(result_cache.VERSION, [good, good])))
    assert not found(b"\x91" * 5000)
    rng = random.Random(0)
    data = entry(logprobs=None)
    for _ in range(2000):
        broken = bytearray(data)
        for _ in range(rng.randrange(1, 4)):
            broken[rng.randrange(len(broken))] = rng.randrange(256)
        found(bytes(broken[: rng.randrange(1, len(broken) + 1)]))
