"""The list of requests says of each in what state it is and what it waits for; a cancelled one leaves it."""

from __future__ import annotations

from typing import Any

import pytest

from quire.core.request_list import MAX_LISTED, list_requests
from quire.request.scheduling_params import SchedulingParams
from tests.fixtures.fake_engine import FakeEngine
from tests.fixtures.fake_runner import VOCAB_SIZE


def listed(engine: FakeEngine, tenant: str | None = None) -> dict[str, Any]:
    return list_requests(engine.scheduler.roster, tenant)


def states(engine: FakeEngine) -> dict[str, tuple[str, str]]:
    return {one["id"]: (one["state"], one["waits_for"]) for one in listed(engine)["requests"]}


def add(
    engine: FakeEngine, name: str, num_prompt: int, num_output: int, tenant: str = "", **how: Any
) -> None:
    engine.add(
        name, num_prompt, num_output, external_id=name, scheduling=SchedulingParams(tenant=tenant), **how
    )


def test_states_and_what_each_waits_for() -> None:
    engine = FakeEngine(num_blocks=10, max_num_seqs=2, max_num_batched_tokens=6)
    add(engine, "decodes", 4, 9)
    engine.step()
    add(engine, "prefills", 16, 3)
    assert states(engine) == {"decodes": ("decoding", ""), "prefills": ("waiting", "step")}
    engine.step()
    add(engine, "next", 4, 3)
    add(engine, "last", 4, 3)
    assert states(engine) == {
        "decodes": ("decoding", ""),
        "prefills": ("prefilling", ""),
        "next": ("waiting", "seats"),
        "last": ("waiting", "queue"),
    }
    assert [one["position"] for one in listed(engine)["requests"]] == [0, 0, 0, 1]
    engine.clock.now += 1.5
    one = listed(engine)["requests"][1]
    assert (one["num_prompt_tokens"], one["num_computed_tokens"], one["num_output_tokens"]) == (16, 5, 0)
    assert one["age_ms"] == 1500


def test_one_that_waits_for_blocks() -> None:
    engine = FakeEngine(num_blocks=4)
    add(engine, "runs", 12, 3)
    engine.step()
    add(engine, "large", 8, 3)
    assert states(engine)["large"] == ("waiting", "blocks")
    engine.run()
    assert listed(engine) == {"num_running": 0, "num_waiting": 0, "requests": [], "num_more": 0}


def test_one_that_waits_for_its_tenants_cap() -> None:
    engine = FakeEngine(tenants='{"a": {"max_running": 1}}')
    add(engine, "runs", 4, 9, tenant="a")
    engine.step()
    add(engine, "capped", 4, 9, tenant="a")
    engine.step()
    assert states(engine)["capped"] == ("waiting", "tenant")
    assert [one["id"] for one in listed(engine, "a")["requests"]] == ["runs", "capped"]
    assert listed(engine, "")["requests"] == listed(engine, "b")["requests"] == []


def test_choices_are_one_request() -> None:
    engine = FakeEngine(max_num_seqs=4)
    add(engine, "several", 4, 5, n=3, temperature=1.0, seed=1)
    before = listed(engine)["requests"]
    assert [(one["id"], one["num_choices"], one["state"]) for one in before] == [("several", 3, "waiting")]
    engine.step()
    engine.step()
    (one,) = listed(engine)["requests"]
    assert (one["num_choices"], one["num_output_tokens"], one["state"]) == (3, 6, "decoding")
    assert listed(engine)["num_running"] == 1


def test_the_list_is_bounded_and_says_how_many_are_not_in_it() -> None:
    engine = FakeEngine(max_num_seqs=2, max_waiting_requests=2 * MAX_LISTED)
    for index in range(MAX_LISTED + 7):
        add(engine, f"{index}-" + "x" * 1000, 2, 2)
    engine.step()
    answer = listed(engine)
    assert (len(answer["requests"]), answer["num_more"]) == (MAX_LISTED, 7)
    assert (answer["num_running"], answer["num_waiting"]) == (2, MAX_LISTED + 5)
    assert max(len(one["id"]) for one in answer["requests"]) == 256


@pytest.mark.parametrize("is_planned", [False, True])
def test_a_request_cancelled_while_its_blocks_are_loaded_gives_them_back(is_planned: bool) -> None:
    """Those that a load under way writes are free when it has ended, which the next step tells."""
    engine = FakeEngine(num_blocks=16, host_blocks=64, cache={"enable_prefix_caching": True})
    prompt = [(position * 5) % VOCAB_SIZE for position in range(33)]
    engine.add("first", 0, 3, prompt=prompt)
    engine.run()
    engine.kv.reset()
    engine.add("loads", 0, 3, prompt=prompt, external_id="loads")
    plan = engine.scheduler.schedule()
    assert plan.kv_loads and states(engine) == {"loads": ("loading", "load")}
    if is_planned:
        engine.runner.execute(plan)
    engine.abort("loads")
    assert listed(engine)["requests"] == []
    if not is_planned:
        engine.runner.execute(plan)
    done = engine.runner.tiers.poll() if engine.runner.tiers is not None else []
    engine.scheduler.finish_loads(done)
    engine.scheduler.check_integrity()
    assert engine.kv.num_free_blocks == 16
    assert not engine.scheduler.has_unfinished()
