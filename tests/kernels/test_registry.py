"""The choice of an implementation: priority, capability, override, one log line."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from quire_kernels import ops, registry


@pytest.fixture(autouse=True)
def operator(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An operator `twice` with three implementations; forgotten after the test."""
    monkeypatch.setattr(registry, "_implementations", dict(registry._implementations))
    monkeypatch.setattr(registry, "_forced", None)
    registry.implementation("twice", "plain")(lambda x: ("plain", x))
    registry.implementation("twice", "fast", devices=("cpu",), dtypes=(torch.float32,), priority=10)(
        lambda x: ("fast", x)
    )

    def why_not(size: int) -> str | None:
        return "size is no multiple of 64" if size % 64 else None

    registry.implementation("twice", "wide", priority=20, predicate=why_not)(lambda x: ("wide", x))
    yield
    registry._picked.clear()


def pick(size: int = 1, device: str = "cpu", dtype: torch.dtype = torch.float32) -> str:
    name: str = registry.select("twice", device, dtype, size=size)(0)[0]
    return name


def test_the_highest_priority_that_can_do_the_job_is_picked() -> None:
    assert pick(size=128) == "wide"
    assert pick(size=100) == "fast"
    assert pick(size=100, dtype=torch.bfloat16) == "plain"
    assert pick(size=100, device="cuda") == "plain"


def test_a_choice_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="quire_kernels"):
        for _ in range(3):
            pick(size=100)
    assert [record.getMessage() for record in caplog.records] == [
        "twice: fast on cpu torch.float32 {'size': 100}"
    ]


def test_configuration_overrides_priority() -> None:
    with registry.forced({"twice": "plain"}):
        assert pick(size=128) == "plain"
    assert pick(size=128) == "wide"


def test_the_environment_overrides_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_KERNELS", " twice=plain , rms_norm=reference,")
    assert pick(size=128) == "plain"


def test_a_forced_implementation_that_cannot_do_the_job_is_an_error() -> None:
    message = r"twice=wide was asked for but cannot do cpu .*: size is no multiple of 64"
    with registry.forced({"twice": "wide"}), pytest.raises(registry.KernelError, match=message):
        pick(size=100)
    with pytest.raises(registry.KernelError, match=message):
        registry.pick("twice", "cpu", torch.float32, wanted="wide", size=100)


def test_a_caller_that_wants_one_gets_it_whatever_others_choose() -> None:
    with registry.forced({"twice": "fast"}):
        for wanted, expected in (("plain", "plain"), ("wide", "wide"), (None, "fast"), ("plain", "plain")):
            function = registry.select("twice", "cpu", torch.float32, wanted=wanted, size=128)
            assert function(0) == (expected, 0)


def test_what_a_chosen_implementation_leaves_to_others_is_the_nexts() -> None:
    """What it does not support is an error all the same."""

    def predicate(size: int, **_: object) -> str | None:
        return "size is odd" if size % 2 else None

    @registry.implementation("thrice", "even", priority=10, predicate=predicate, leaves=("late",))
    def even() -> None: ...

    registry.implementation("thrice", "plain")(even)

    def picked(wanted: str | None = None, size: int = 2, late: bool = False) -> str:
        return registry.pick("thrice", "cpu", torch.float32, wanted=wanted, size=size, late=late).name

    assert picked() == picked("even") == "even"
    assert picked(late=True) == picked("even", late=True) == "plain"
    with registry.forced({"thrice": "even"}):
        assert picked() == "even" and picked(late=True) == "plain"
    assert picked(size=3) == "plain"
    for late in (False, True):
        with pytest.raises(registry.KernelError, match=r"thrice=even was asked for but cannot .*size is odd"):
            picked("even", size=3, late=late)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("twice=best", "twice has no implementation 'best'; known: wide, fast, plain"),
        ("thrice=plain", "operator 'thrice' is unknown"),
        ("twice", "'twice' is not of the form operator=implementation"),
    ],
)
def test_a_wrong_environment_is_refused(monkeypatch: pytest.MonkeyPatch, value: str, message: str) -> None:
    monkeypatch.setenv("QUIRE_KERNELS", value)
    with pytest.raises(registry.KernelError, match=message):
        pick()


def test_no_implementation_is_an_error() -> None:
    registry.implementation("narrow", "only", devices=("cuda",))(lambda: None)
    with pytest.raises(registry.KernelError, match="no implementation of narrow for cpu"):
        registry.select("narrow", "cpu", torch.float32)


def test_every_operator_has_a_reference_for_any_device_and_type() -> None:
    names = {"paged_attention", "write_kv", "copy_blocks", "rms_norm", "rope", "gate_mul"}
    assert names <= set(registry.operators())
    for name in names:
        found = {i.name: i for i in registry.implementations(name)}["reference"]
        assert not found.devices and not found.dtypes and found.predicate is None
        assert hasattr(ops, name)


def test_importing_kernels_and_models_leaves_cuda_alone() -> None:
    # torch itself imports the bindings where they are installed, so only what comes after it counts.
    code = (
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "import quire_kernels.ops, quire.loader.load, quire.models.llama\n"
        "added = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "assert not added & {'cuda', 'cupy', 'triton', 'transformers'}, added\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ, timeout=280)
