"""Streams outlive their engine: whenever it dies, each goes on with the tokens that it would have had.

The oracle is the same request with an engine that lives.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from quire.config import EngineConfig
from quire.core.probation import InFlightSuspects
from quire.engine.core import EngineCore
from quire.engine.executor import RunnerExecutor
from quire.request.sampling_params import SamplingParams, parse_sampling_params
from quire.request.scheduling_params import SchedulingParams
from quire_ensemble.tokenizer import Tokenizer
from tests.fixtures import fake_pb_utils
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.fake_runner import FakeRunner, generate_choices_alone
from tests.fixtures.mortal_engine import (
    MAX_MODEL_LEN,
    TENSORS,
    EngineDeathError,
    Frontend,
    RandomRequests,
    Sender,
    answers,
    fake_core,
)
from tests.fixtures.waiting import wait_until


@pytest.fixture
def frontend() -> Iterator[Frontend]:
    made = Frontend(fake_core())
    yield made
    made.close()


@pytest.mark.row("F17")
@pytest.mark.parametrize("seed", range(24))
def test_whenever_engines_die_all_requests_end_as_if_none_had(seed: int) -> None:
    """At every boundary between messages: before an engine has a request, in its prompt, before a fork,
    between choices' ends, with the last message lost; while requests wait."""
    rng = random.Random(seed)
    frontend = Frontend(fake_core(num_blocks=256))
    requests = RandomRequests(frontend, rng, most_prompts=2)
    try:
        while not requests.are_over:
            requests.ask()
            for _ in range(rng.randrange(4)):
                frontend.engine.step()
            if rng.random() < 0.2:
                frontend.kill(undelivered=rng.randrange(5))
                frontend.replace()
            elif rng.random() < 0.7:
                frontend.turn()
        assert frontend.engine.num_deaths > 2
        requests.check()
        frontend.engine.core.scheduler.check_integrity()
        stats = frontend.engine.core.stats()
        assert stats.num_free_blocks == 256 and stats.num_running == stats.num_waiting == 0
    finally:
        frontend.close()


@pytest.mark.parametrize("policy", ["longest_prefix", "shortest_first"])
def test_choices_that_go_on_share_no_block_of_their_outputs(policy: str) -> None:
    """Where a queue hashes what it is given, one choice's output was taken for that of the others."""
    frontend = Frontend(fake_core(queue_policy=policy))
    try:
        params = SamplingParams(n=3, seed=5, max_tokens=30, ignore_eos=True)
        sender = frontend.submit([[39]], params)
        for _ in range(8):
            frontend.step()
        frontend.kill()
        frontend.replace()
        frontend.run([sender])
        found = answers(sender)
        got = [(found[0, index]["ids"], found[0, index]["reason"]) for index in range(3)]
        assert got == generate_choices_alone([39], params, MAX_MODEL_LEN)
    finally:
        frontend.close()


def test_a_request_without_a_seed_goes_on_with_its_own(frontend: Frontend) -> None:
    """The engine chose it; another engine would choose another, and the stream go on as a second one."""
    params = SamplingParams(temperature=1.0, max_tokens=30, ignore_eos=True, n=2)
    sender = frontend.submit([[4, 5, 6]], params)
    for _ in range(4):
        frontend.step()
    (generation,) = frontend.responder._requests.generations.values()
    seed = generation.processor.choices[0].seed
    assert seed is not None
    frontend.kill()
    frontend.replace()
    frontend.run([sender])
    found = answers(sender)
    seeded = msgspec.structs.replace(params, seed=seed)
    expected = generate_choices_alone([4, 5, 6], seeded, MAX_MODEL_LEN)
    assert [(found[0, index]["ids"], found[0, index]["reason"]) for index in range(2)] == expected


def test_places_in_the_queue_survive_and_no_limit_refuses_what_was_admitted() -> None:
    """Requests come back before those that come after the death, in the order in which they came at first."""
    frontend = Frontend(fake_core(max_num_seqs=1, max_waiting_requests=3))
    try:
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        first = frontend.submit([[9, 9]], params, arrived_at=time.monotonic())
        frontend.step()
        senders = [frontend.submit([[7, n]], params, arrived_at=time.monotonic()) for n in range(1, 4)]
        frontend.kill()
        requests = frontend.responder._requests
        requests.generations = dict(reversed(requests.generations.items()))  # another frontend was faster
        frontend.replace()
        refused = frontend.submit([[7, 8]], params, arrived_at=time.monotonic())
        assert refused.responses[-1].error.code() == fake_pb_utils.TritonError.UNAVAILABLE
        order: list[Sender] = []
        for _ in range(100):
            frontend.step()
            order += [s for s in (first, *senders) if s.final.is_set() and s not in order]
        assert order == [first, *senders]
        assert all(len(answers(sender)[0, 0]["ids"]) == 4 for sender in order)
    finally:
        frontend.close()


def test_requests_end_as_usual_while_there_is_no_engine(frontend: Frontend) -> None:
    """By their clients, by name, by their deadlines; the others go on."""
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    now = time.monotonic()

    def submit(**options: Any) -> Sender:
        return frontend.submit([[4, 5]], params, **options)

    late, patient = submit(scheduling=SchedulingParams(deadline=now)), submit()
    frontend.engine.core.scheduler.roster._deadlines._heap.clear()  # the engine dies before it looks
    named, gone = submit(external_id="mine"), submit()
    for _ in range(3):
        frontend.step()
    unstarted = submit()
    frontend.kill()
    served = frontend.responder
    *_, last = served._requests.handles.values()
    paused = served._requests.generations[last.request_id]
    paused.message = msgspec.structs.replace(paused.message, scheduling=SchedulingParams(ttft_deadline=now))
    new = submit()
    assert new.responses[0].error.code() == fake_pb_utils.TritonError.UNAVAILABLE
    cancel = submit(external_id="mine", cancel=True)
    assert cancel.final.is_set() and cancel.responses[0].error is None
    unknown = submit(external_id="other", cancel=True)
    assert unknown.responses[0].error.code() == fake_pb_utils.TritonError.UNAVAILABLE
    gone.cancelled = True
    served._polls._queue = [(0.0, request_id, handle) for _, request_id, handle in served._polls._queue]
    frontend.turn()
    frontend.turn()
    assert named.final.is_set() and late.final.is_set() and gone.final.is_set() and unstarted.final.is_set()
    assert answers(named)[0, 0]["reason"] == "cancelled" and answers(named)[0, 0]["ids"]
    assert answers(late)[0, 0]["reason"] == answers(unstarted)[0, 0]["reason"] == "timeout"
    assert gone.responses[-1].error.code() == fake_pb_utils.TritonError.CANCELLED
    frontend.replace()
    assert len(frontend.engine.core.scheduler.roster.requests) == 1, "only one is to go on"
    frontend.run([patient])
    assert len(answers(patient)[0, 0]["ids"]) == 60


def test_each_prompt_has_its_own_deadline_while_there_is_no_engine(frontend: Frontend) -> None:
    """Those of a batch were all ended by the deadline of its first row, or not at all."""
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    sender = frontend.submit([[4, 5], [6, 7]], params, outputs=TENSORS, final_outputs=TENSORS)
    for _ in range(3):
        frontend.step()
    served = frontend.responder
    _, second = served._requests.generations.values()
    scheduling = SchedulingParams(deadline=time.monotonic())
    second.message = msgspec.structs.replace(second.message, scheduling=scheduling)
    frontend.kill()
    served._polls._queue = [(0.0, request_id, handle) for _, request_id, handle in served._polls._queue]
    frontend.turn()
    frontend.turn()
    ended = [one.tensors["batch_index"][0] for one in sender.responses if one.tensors["finish_reason"][0]]
    assert ended == [1], "while there is no engine"
    frontend.replace()
    frontend.run([sender])
    found = answers(sender)
    assert (found[0, 0]["reason"], len(found[0, 0]["ids"])) == ("length", 30)
    assert found[1, 0]["reason"] == "timeout" and 0 < len(found[1, 0]["ids"]) < 30


def test_a_death_is_learned_of_behind_an_answer_that_cannot_be_handled(frontend: Frontend) -> None:
    """All that had come with such an answer was lost: requests waited for an engine that was dead."""
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    sender = frontend.submit([[4, 5]], params)
    (generation,) = frontend.responder._requests.generations.values()
    frontend.step()
    frontend.engine.step()
    generation.recording = object()  # type: ignore[assignment]  # what fails when it is told of an output
    frontend.kill()
    assert frontend.responder._continuation._paused_until
    generation.recording = None
    frontend.replace()
    frontend.run([sender])
    assert len(answers(sender)[0, 0]["ids"]) == 9


@pytest.mark.parametrize("max_pause_s", [60.0, 0.0])
def test_a_cancellation_that_a_dying_engine_did_not_read_is_not_lost(max_pause_s: float) -> None:
    """A stream whose client had gone went on to its last token: nobody sends it again."""
    frontend = Frontend(fake_core(), max_pause_s=max_pause_s)
    try:
        params = SamplingParams(max_tokens=60, ignore_eos=True)
        mine, other = (frontend.submit([[4, 5]], params, external_id=name) for name in ("mine", "other"))
        for _ in range(3):
            frontend.step()
        frontend.engine.die()
        cancel, unknown = (
            frontend.submit([[4]], params, external_id=name, cancel=True) for name in ("mine", "nobody")
        )
        frontend.turn()
        assert answers(mine)[0, 0]["reason"] == "cancelled" and answers(mine)[0, 0]["ids"]
        assert cancel.final.is_set() and cancel.responses[0].error is None
        assert unknown.responses[0].error.code() == fake_pb_utils.TritonError.UNAVAILABLE
        assert other.final.is_set() == (not max_pause_s)
        frontend.replace()
        assert len(frontend.engine.core.scheduler.roster.requests) == bool(max_pause_s)
    finally:
        frontend.close()


def test_an_answer_that_came_whole_is_not_taken_back_by_a_death(frontend: Frontend) -> None:
    """Its engines had died of it, says the last one, which delivered its end."""
    sender = frontend.submit([[4, 5]], SamplingParams(max_tokens=3, ignore_eos=True))
    (generation,) = frontend.responder._requests.generations.values()
    generation.num_crashes_alone = 1
    for _ in range(3):
        frontend.engine.step()
    frontend.engine.die(InFlightSuspects(("t-0",), is_alone=True))
    frontend.turn()
    assert len(answers(sender)[0, 0]["ids"]) == 3


def test_requests_end_where_no_engine_can_be_started(frontend: Frontend) -> None:
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    streams = [frontend.submit([[4, 5]], params, stream=stream) for stream in (True, False)]
    for _ in range(3):
        frontend.step()
    frontend.kill()
    frontend.engine.give_up()
    frontend.turn()
    for sender in streams:
        assert sender.final.is_set()
        assert sender.responses[-1].error.code() == fake_pb_utils.TritonError.UNAVAILABLE
        assert "it cannot be started" in sender.responses[-1].error.message()
    frontend.replace()
    assert not frontend.engine.core.has_work


@pytest.mark.parametrize("max_pause_s", [0, 0.001])
def test_requests_do_not_wait_longer_than_they_may(max_pause_s: float) -> None:
    frontend = Frontend(fake_core(), max_pause_s=max_pause_s)
    try:
        sender = frontend.submit([[4, 5]], SamplingParams(max_tokens=60, ignore_eos=True))
        frontend.step()
        frontend.kill()
        assert sender.final.is_set() or max_pause_s
        wait_until(lambda: frontend.turn() or sender.final.is_set())
        assert sender.responses[-1].error.code() == fake_pb_utils.TritonError.UNAVAILABLE
        assert "max_pause_s" in sender.responses[-1].error.message()
        frontend.replace()
        assert not frontend.engine.core.has_work
    finally:
        frontend.close()


def test_a_stop_string_found_here_ends_its_choice_for_the_next_engine_too(tmp_path: Path) -> None:
    """The engine was told, and died before it read that."""
    frontend = Frontend(fake_core(), None)
    try:
        params = SamplingParams(max_tokens=30, ignore_eos=True, n=2, seed=3)
        sender = frontend.submit([[4, 5]], params)
        for _ in range(3):
            frontend.step()
        (generation,) = frontend.responder._requests.generations.values()
        ended, other = generation.processor.choices
        ended.finish_reason = "stop"
        frontend.responder._queue.mark(generation.handle, ended)
        frontend.kill()
        frontend.replace()
        assert list(frontend.engine.core.scheduler.roster.requests) == ["t-0#1"]
        frontend.run([sender])
        assert len(answers(sender)[0, 1]["ids"]) == 30 and other.finished
        assert not frontend.engine.loop._owners
    finally:
        frontend.close()


PROMPT = list(range(4, 40))
REAL: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.2, "seed": 3, "top_k": 50, "top_p": 0.95},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.7},
    "bans": {"no_repeat_ngram_size": 2, "bad_words": ["a", "the"], "logit_bias": {"5": 3.0}},
    "min_tokens": {"min_tokens": 30, "temperature": 1.0, "seed": 1},
    "choices": {"n": 3, "temperature": 1.0, "seed": 9, "logprobs": 2},
    "grammar": {"guided_regex": "(ab|[0-9]){40}", "temperature": 1.5, "seed": 4},
    "stop": {"stop": ["e", "1"], "min_tokens": 12, "temperature": 1.5, "seed": 8},
    "beams": {"beam_width": 2, "max_tokens": 4},
    "prompt": {"prompt_logprobs": 1},
}


@pytest.mark.row("F17")
def test_a_model_goes_on_with_the_same_tokens_texts_and_logprobs(tmp_path: Path) -> None:
    """Penalties, bans, grammars and stop strings all depend on what came before the death."""
    checkpoint = make_checkpoint("llama", tmp_path / "llama")
    tokenizer = Tokenizer.find("", checkpoint)
    assert tokenizer is not None
    options = {
        "model": str(checkpoint), "max_model_len": 256, "num_blocks": 300, "num_threads": 1,
        "dtype": "float32", "max_num_batched_tokens": 48,
    }  # fmt: skip
    config = EngineConfig.from_mapping(options)

    def outcome(kill_every: int) -> list[dict[tuple[int, int], dict[str, Any]]]:
        from quire.frontend.bad_words import with_bad_words_ids

        frontend = Frontend(lambda: EngineCore(config), tokenizer.hf)
        try:
            senders = []
            names = TENSORS | {"cumulative_logprob"}
            for given in REAL.values():
                params = parse_sampling_params(
                    {"max_tokens": 50, "ignore_eos": "guided_regex" not in given, **given}
                )
                params = with_bad_words_ids(params, tokenizer.hf)
                senders.append(frontend.submit([PROMPT], params, outputs=names, final_outputs=names))
            for number in range(1, 1000):
                frontend.step()
                if all(sender.final.is_set() for sender in senders):
                    break
                if kill_every and number % kill_every == 0:
                    frontend.kill(undelivered=number % 3)
                    frontend.replace()
            return [answers(sender) for sender in senders]
        finally:
            frontend.close()

    undisturbed = outcome(0)
    assert len({str(one) for one in undisturbed}) == len(REAL), "kinds that differ"
    for found, expected, name in zip(outcome(9), undisturbed, REAL, strict=True):
        assert found.keys() == expected.keys()
        for key, one in expected.items():
            got = found[key]
            assert (got["ids"], got["text"], got["reason"]) == (one["ids"], one["text"], one["reason"]), name
            assert got["sum"] == pytest.approx(one["sum"], rel=1e-4)
            for field in ("logprobs", "prompt_logprobs"):
                entries = [
                    e and (e["token_id"], e["logprob"], *e["top"].values()) for e in got.get(field, [])
                ]
                wanted = [e and (e["token_id"], e["logprob"], *e["top"].values()) for e in one.get(field, [])]
                assert len(entries) == len(wanted)
                for entry, other in zip(entries, wanted, strict=True):
                    assert (entry is None) == (other is None)
                    if entry is not None:
                        np.testing.assert_allclose(entry, other, atol=1e-4)


class PoisonedRunner(FakeRunner):
    """A step that samples a token of a poisonous request, behind so many that it has, ends the process."""

    POISON = 49

    def execute(self, output: Any) -> Any:
        result = super().execute(output)
        for row in output.scheduled:
            known = self.rows[row.request_id]
            num_output = len(known.token_ids) - known.num_prompt_tokens
            if known.token_ids[0] == self.POISON and row.samples and num_output > known.token_ids[1]:
                raise EngineDeathError
        return result


def poisoned_core(depth: int, **options: Any) -> Callable[[], EngineCore]:
    config = EngineConfig.from_mapping(
        {"model": "fake", "block_size": 4, "max_num_seqs": 40, "max_num_batched_tokens": 64, **options}
    )

    def make() -> EngineCore:
        runner = PoisonedRunner(1000, 4, max_model_len=MAX_MODEL_LEN)
        return EngineCore(config, RunnerExecutor(runner, depth=depth))

    return make


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("after", [0, 1, 9, 25])
@pytest.mark.parametrize("kind", [{}, {"n": 3, "seed": 4}, {"best_of": 2}])
def test_a_request_that_kills_engines_ends_and_no_other(after: int, kind: dict[str, Any], depth: int) -> None:
    """It would have killed every engine, and with each all others' time."""
    frontend = Frontend(poisoned_core(depth, queue_policy="priority" if after == 9 else "fcfs"))
    try:
        params = SamplingParams(max_tokens=60, ignore_eos=True, **kind)
        prompts = [[n, 5, 6, *range(n, 20)] for n in range(1, 32)]
        senders = [frontend.submit([prompt], params) for prompt in prompts[:16]]
        poison = frontend.submit([[PoisonedRunner.POISON, after, 3]], params)
        senders += [frontend.submit([prompt], params) for prompt in prompts[16:]]
        for _ in range(3000):
            frontend.step()
            if frontend.engine.is_dead:
                frontend.replace()
            if all(sender.final.is_set() for sender in [*senders, poison]):
                break
        assert frontend.engine.num_deaths == 4, "two in company, two alone"
        assert poison.responses[-1].error.code() == fake_pb_utils.TritonError.INTERNAL
        for sender, prompt in zip(senders, prompts, strict=True):
            found = answers(sender)
            expected = generate_choices_alone(prompt, params, MAX_MODEL_LEN)
            assert [(one["ids"], one["reason"]) for _, one in sorted(found.items())] == expected
        assert frontend.engine.core.scheduler.probation.review() is None
        assert not frontend.engine.core.scheduler.probation._suspects
        frontend.engine.core.scheduler.check_integrity()
    finally:
        frontend.close()


def test_several_killers_are_found_one_after_the_other() -> None:
    frontend = Frontend(poisoned_core(1))
    try:
        params = SamplingParams(max_tokens=60, ignore_eos=True)
        killers = [frontend.submit([[PoisonedRunner.POISON, after, 3]], params) for after in (3, 12, 40)]
        other = frontend.submit([[4, 5]], params)
        for _ in range(3000):
            frontend.step()
            if frontend.engine.is_dead:
                frontend.replace()
        assert [one.responses[-1].error.code() for one in killers] == [fake_pb_utils.TritonError.INTERNAL] * 3
        assert len(answers(other)[0, 0]["ids"]) == 60
    finally:
        frontend.close()


def test_engines_that_die_while_requests_get_on_blame_none(frontend: Frontend) -> None:
    """Killed from outside, again and again."""
    sender = frontend.submit([[4, 5]], SamplingParams(max_tokens=150, ignore_eos=True))
    while not sender.final.is_set():
        for _ in range(26):  # some of them compute again what was known
            frontend.step()
        frontend.engine.die(frontend.engine._stated_suspects[-1])
        frontend.turn()
        frontend.replace()
    assert len(answers(sender)[0, 0]["ids"]) == 150 and frontend.engine.num_deaths > 4


def test_a_pause_is_told_once_it_is_over(frontend: Frontend) -> None:
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    names = frozenset({"output_ids", "text_output", "finish_reason", "timing"})
    sender = frontend.submit([[4, 5]], params, outputs=names, final_outputs=names)
    for _ in range(3):
        frontend.step()
    for _ in range(2):
        frontend.kill()
        time.sleep(0.02)
        frontend.replace()
        frontend.step()
    frontend.run([sender])
    timings = [msgspec.json.decode(r.tensors["timing"][0]) for r in sender.responses]
    assert timings[0]["paused"] == timings[0]["num_continuations"] == 0
    assert timings[-1]["num_continuations"] == 2 and 40 <= timings[-1]["paused"] < timings[-1]["total"]


def test_image_memory_stays_open_until_its_request_ends(frontend: Frontend) -> None:
    from quire.engine.messages import EmbedsMessage
    from quire.engine.shared_array import SharedBuffer

    width = frontend.engine.info.hidden_size
    rows = np.ones((2, width), dtype=np.float32)
    buffer = SharedBuffer(rows)
    embeds = EmbedsMessage(buffer.descriptor(), [(1, 2)], ["x"])
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    alone = frontend.submit([[4, 5, 5, 6]], params, embeds=embeds)
    frontend.run([alone])
    sender = frontend.submit([[4, 5, 5, 6]], params, embeds=embeds, buffer=buffer)
    for _ in range(3):
        frontend.step()
    frontend.kill()
    assert buffer._fd >= 0
    frontend.replace()
    frontend.run([sender])
    assert answers(sender)[0, 0]["ids"] == answers(alone)[0, 0]["ids"]
    assert buffer._fd < 0
