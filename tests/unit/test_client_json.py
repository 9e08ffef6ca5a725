"""JSON of clients: bounded in size and depth, and never repeated at its own length."""

from __future__ import annotations

import sys
import tracemalloc

import pytest

from quire.errors import InvalidArgumentError
from quire.request.sampling_params import parse_sampling_params
from quire_common.client_json import MAX_BYTES, MAX_DEPTH, MAX_VALUES, parse_json
from quire_common.errors import InputError, kind, shown
from quire_ensemble.messages import parse_conversation

NESTED = "[" * 984 + "]" * 984
"""Deep enough to end an interpreter's patience in repr, and not in json.loads."""


def deep(levels: int) -> str:
    return '{"a":[' * (levels // 2) + "1" + "]}" * (levels // 2)


def test_depth_and_size_have_limits_that_errors_name() -> None:
    assert parse_json("x", deep(MAX_DEPTH)) is not None
    for text in ("[" * 65 + "]" * 65, NESTED, "[" * 100_000, "[" * 500_000 + "]" * 500_000):
        with pytest.raises(InputError, match=f"^x: JSON nested too deeply, at most {MAX_DEPTH} levels"):
            parse_json("x", text.encode())
    assert len(parse_json("x", b'"' + b"a" * (MAX_BYTES - 2) + b'"')) == MAX_BYTES - 2
    with pytest.raises(InputError, match=f"^x: at most {MAX_BYTES} bytes, got {MAX_BYTES + 1}$"):
        parse_json("x", b" " * (MAX_BYTES + 1))
    with pytest.raises(InputError, match=r"^x: at most 10 bytes"):
        parse_json("x", b"[1, 2, 3, 4]", max_bytes=10)


def test_many_small_values_are_refused_before_they_are_made() -> None:
    """16 MiB of empty lists took 550 MB and stopped every thread for a second."""
    many = "[" + "[]," * MAX_VALUES + "1]"
    tracemalloc.start()
    with pytest.raises(InputError, match=f"at most {MAX_VALUES} lists, objects and keys"):
        parse_json("messages", many, max_bytes=2**24)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10**5


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("NaN", "NaN is not JSON"),
        ("[-Infinity]", "-Infinity is not JSON"),
        ("1" + "0" * sys.get_int_max_str_digits(), "invalid JSON: Exceeds the limit"),
        ("{]", "invalid JSON at line 1 column 2"),
        ("", "invalid JSON at line 1 column 1"),
    ],
)
def test_what_is_no_json_is_refused(text: str, reason: str) -> None:
    with pytest.raises(InputError) as error:
        parse_json("x", text)
    assert error.value.reason.startswith(("invalid JSON", "NaN", "-Inf")) and reason in error.value.reason


def test_a_value_is_shown_at_a_cost_that_does_not_depend_on_its_size() -> None:
    """`{value!r:.80}` made the text of the whole value first, and RecursionError of a deep one."""
    value: object = None
    for _ in range(100_000):
        value = [value]
    large = ["x" * 100] * 10**6
    for one in (value, large, {"a": value}, "x" * 10**7, b"x" * 10**7, 10**5000, -(10**5000), object()):
        tracemalloc.start()
        assert len(kind(one)) < 120 and len(shown(one)) < 120
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 10**4, "made as long as it is"
    assert kind(None) == "null" and kind("ab") == "str 'ab'" and kind(3) == "int 3"
    assert kind([1, 2]) == "list of 2 entries" and kind(2**300) == "int of 301 bits"
    # It stands alone in messages, too: "must be in [1, 64], got of 301 bits".
    assert shown([1, 2]) == "list of 2 entries" and shown(2**300) == "int of 301 bits" and shown({1}) == "set"
    while isinstance(value, list):  # else its own end recurses
        value = value.pop()


@pytest.mark.parametrize("field", ["temperature", "max_tokens", "seed", "ignore_eos", "stop", "logit_bias"])
@pytest.mark.parametrize("value", ["x" * 10**6, [[[]]] * 10**5, {"a": {"b": 1}}, 10**4000, float("inf")])
def test_errors_about_parameters_are_short(field: str, value: object) -> None:
    with pytest.raises(InvalidArgumentError) as error:
        parse_sampling_params({field: value})
    assert error.value.field == field and len(str(error.value)) < 300


def test_an_unknown_parameter_is_named_in_short() -> None:
    with pytest.raises(InvalidArgumentError) as error:
        parse_sampling_params({"x" * 10**6: 1})
    assert len(str(error.value)) < 1000


def test_messages_have_the_same_limits() -> None:
    tool = '{"messages": [{"role": "user", "content": "x"}], "tools": [%s]}'
    with pytest.raises(InputError, match="messages: JSON nested too deeply"):
        parse_conversation(tool % ('{"a":' * 100 + "1" + "}" * 100))
    with pytest.raises(InputError, match="messages: at most 20 bytes"):
        parse_conversation(tool % "", max_bytes=20)


@pytest.mark.parametrize("field", ["stop", "bad_words"])
def test_strings_are_limited_together(field: str) -> None:
    """64 stop strings of 1,024 characters and 64 choices: an automaton each held up every stream for 12.6 s,
    and took 1.1 GiB."""
    assert parse_sampling_params({field: ["x" * 1024] * 4})
    with pytest.raises(
        InvalidArgumentError, match=f"{field}: entries are limited to 4096 characters together"
    ):
        parse_sampling_params({field: ["x" * 1024] * 4 + ["y"]})
