"""parse_scheduling_params: every field, in every spelling a request may use."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from quire.errors import InvalidArgumentError
from quire.request.scheduling_params import MAX_NAME_LENGTH, SchedulingParams
from quire.triton.scheduling_fields import SCHEDULING_FIELDS, parse_scheduling_params

NOW = 1000.0
NOT_INTEGERS = ["", "soon", "1.5", 1.5, True, [1], {}, b"1", float("nan"), 10**400]
NOT_NAMES = [1.5, True, ["a"], {}, b"a", "x" * (MAX_NAME_LENGTH + 1), "\ud800"]

# Accepted: raw value, field of SchedulingParams, what it becomes.
ACCEPTED = [
    ("request_priority", -100, "priority", -100),
    ("request_priority", "100", "priority", 100),
    ("priority", 3, "priority", 3),
    ("tenant", "blue", "tenant", "blue"),
    ("tenant", 17, "tenant", "17"),
    ("cache_salt", "s" * MAX_NAME_LENGTH, "cache_salt", "s" * MAX_NAME_LENGTH),
    ("ttft_deadline_ms", 250, "ttft_deadline", NOW + 0.25),
    ("deadline_ms", "1500", "deadline", NOW + 1.5),
    ("cache_retention", 0, "retention", 0),
    ("cache_retention", 100, "retention", 100),
    ("cache_ttl_ms", 2500, "cache_ttl_s", 2.5),
    ("cache_pin", True, "pin", True),
    ("cache_pin", "true", "pin", True),
    ("cache_result", "false", "cache_result", False),
    ("session", "talk-1", "session", "talk-1"),
    ("num_draft", 0, "num_draft", 0),
    ("num_draft", "64", "num_draft", 64),
]
REFUSED: dict[str, list[Any]] = {
    "request_priority": [*NOT_INTEGERS, -101, 101],
    "priority": [*NOT_INTEGERS, -101, 101],
    "tenant": NOT_NAMES,
    "cache_salt": NOT_NAMES,
    "ttft_deadline_ms": [*NOT_INTEGERS, 0, -1, 2**31],
    "deadline_ms": [*NOT_INTEGERS, 0, -1, 2**31],
    "cache_retention": [*NOT_INTEGERS, -1, 101],
    "cache_ttl_ms": [*NOT_INTEGERS, 0, 2**31],
    "cache_pin": ["yes", 2, [True]],
    "cache_result": ["yes", 2, [True]],
    "session": NOT_NAMES,
    "num_draft": [*NOT_INTEGERS, -1, 65],
    "session_end": ["yes", 2, [True]],
}


def parse(*sources: dict[str, Any], **options: Any) -> SchedulingParams:
    return parse_scheduling_params(*sources, arrived_at=NOW, **options)


@pytest.mark.parametrize(("name", "raw", "field", "expected"), ACCEPTED)
def test_accepted(name: str, raw: Any, field: str, expected: Any) -> None:
    needed = {"cache_ttl_ms": 3_600_000} if name == "cache_pin" else {}
    assert parse({name: raw, **needed}) == msgspec.structs.replace(parse(needed), **{field: expected})


@pytest.mark.parametrize("ttl", [{}, {"cache_ttl_ms": 3_600_001}])
def test_a_pin_has_an_end(ttl: dict[str, int]) -> None:
    """Without one a client held half of the pool until the operator noticed."""
    with pytest.raises(InvalidArgumentError, match="cache_pin: needs a cache_ttl_ms of at most 3600000"):
        parse({"cache_pin": True}, ttl)
    assert not parse({"cache_pin": False}, ttl).pin


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        pytest.param(name, raw, id=f"{name}-{index}")
        for name, entries in REFUSED.items()
        for index, raw in enumerate(entries)
    ],
)
def test_refused_naming_the_field(name: str, raw: Any) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        parse({name: raw})
    assert caught.value.field == name
    assert len(str(caught.value)) < 400, "a message must not echo a large input"


def test_tables_cover_every_field() -> None:
    assert set(REFUSED) == {*SCHEDULING_FIELDS, "priority"}
    assert {name for name, *_ in ACCEPTED} | {"session_end"} == set(REFUSED)


def test_a_limit_is_named() -> None:
    with pytest.raises(InvalidArgumentError, match=r"cache_retention: must be in \[0, 100\], got 101"):
        parse({"cache_retention": 101})
    with pytest.raises(InvalidArgumentError, match=r"num_draft: must be in \[0, 64\], got 65"):
        parse({"num_draft": 65})
    with pytest.raises(InvalidArgumentError, match="tenant: at most 256 characters are allowed, got 257"):
        parse({"tenant": "x" * 257})


def test_first_source_wins_and_all_are_checked() -> None:
    tensors, text, parameters, headers = (
        {},
        {"tenant": "b"},
        {"tenant": "c", "cache_salt": "s"},
        {"tenant": "d"},
    )
    assert parse(tensors, text, parameters, headers) == SchedulingParams(tenant="b", cache_salt="s")
    assert parse({"tenant": None}, {"tenant": "d"}).tenant == "d"
    with pytest.raises(InvalidArgumentError, match="request_priority"):
        parse({"request_priority": 1}, {"request_priority": "high"})


def test_nothing_said_is_the_default() -> None:
    assert parse() == SchedulingParams()
    assert parse(dict.fromkeys(SCHEDULING_FIELDS)) == SchedulingParams()


def test_the_smaller_deadline_wins() -> None:
    assert parse(timeout_us=2_000_000).deadline == NOW + 2.0
    assert parse({"deadline_ms": 500}, timeout_us=2_000_000).deadline == NOW + 0.5
    assert parse({"deadline_ms": 500}, timeout_us=100_000).deadline == NOW + 0.1
    assert parse({"ttft_deadline_ms": 700}, timeout_us=100_000).ttft_deadline == NOW + 0.7


@pytest.mark.row("A36")
def test_a_correlation_id_names_the_session() -> None:
    assert parse(correlation_id="7") == SchedulingParams(session="7")
    assert parse(correlation_id="7", sequence_end=True) == SchedulingParams(session="7", session_end=True)
    named = parse({"session": "mine"}, correlation_id="7", sequence_end=True)
    assert named == SchedulingParams(session="mine"), "the flag is that of the sequence"
    assert parse({"session_end": False}, correlation_id="7", sequence_end=True).session_end is False
    with pytest.raises(InvalidArgumentError, match="session_end: needs the session's name"):
        parse({"session_end": True})
    with pytest.raises(InvalidArgumentError, match="sequence_id: at most 256"):
        parse(correlation_id="x" * 257)
