"""Registry of the operators' implementations: picked by device, dtype and shape, logged once, overridable.

An implementation registers itself with `@implementation(...)`. `select` returns the one of highest priority
that can do what is asked. The caller may want a certain one, and the environment
(`QUIRE_KERNELS="paged_attention=reference,rms_norm=reference"`) chooses for all callers that do not; one that
is chosen and cannot do the job is an error, never a silent fallback.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

logger = logging.getLogger("quire_kernels")

ENVIRONMENT = "QUIRE_KERNELS"
F = TypeVar("F", bound=Callable[..., Any])


class KernelError(ValueError):
    """No implementation, or not the one that was asked for, can do what a model needs."""


class Declined(str):
    """Why an implementation leaves a call of a shape that it knows to the next one, even if it is chosen."""


@dataclass(frozen=True)
class Implementation:
    """One way to compute an operator."""

    operator: str
    name: str
    function: Callable[..., Any]
    devices: frozenset[str]
    """torch device types; empty: any."""
    dtypes: frozenset[torch.dtype]
    """Types of the operands; empty: any floating type."""
    priority: int
    """The highest one that `can_do` the job is picked."""
    predicate: Callable[..., bool | str] | None
    """Gets the call's shape facts (head_dim, block_size, ...) by keyword; a text says why not. None: any."""
    is_recordable: bool = True
    """Whether a CUDA graph of it computes another batch of the same shape: lengths are read on the device."""

    def can_do(self, device_type: str, dtype: torch.dtype, facts: Mapping[str, Any]) -> bool:
        """Whether it computes the operator for operands of this device, type and shape."""
        return self.why_not(device_type, dtype, facts) is None

    def why_not(self, device_type: str, dtype: torch.dtype, facts: Mapping[str, Any]) -> str | None:
        """The reason why it cannot compute the operator for these operands; None: it can."""
        if self.devices and device_type not in self.devices:
            return f"only on {', '.join(sorted(self.devices))}"
        if self.dtypes and dtype not in self.dtypes:
            return f"only for {', '.join(sorted(str(one).removeprefix('torch.') for one in self.dtypes))}"
        answer = True if self.predicate is None else self.predicate(**facts)
        if isinstance(answer, str):
            return answer
        return None if answer else "not for this shape, or it cannot be built here"


_implementations: dict[str, dict[str, Implementation]] = {}
_forced: dict[str, str] | None = None
_picked: dict[tuple[Any, ...], Implementation] = {}


def implementation(
    operator: str,
    name: str,
    *,
    devices: tuple[str, ...] = (),
    dtypes: tuple[torch.dtype, ...] = (),
    priority: int = 0,
    predicate: Callable[..., bool | str] | None = None,
    is_recordable: bool = True,
) -> Callable[[F], F]:
    """Decorator that registers a function as implementation `name` of `operator`."""

    def register(function: F) -> F:
        names = _implementations.setdefault(operator, {})
        assert name not in names, f"{operator} has two implementations named {name}"
        names[name] = Implementation(
            operator,
            name,
            function,
            frozenset(devices),
            frozenset(dtypes),
            priority,
            predicate,
            is_recordable,
        )
        _picked.clear()
        return function

    return register


def operators() -> list[str]:
    """Names of all operators."""
    return sorted(_implementations)


def implementations(operator: str) -> list[Implementation]:
    """All implementations of an operator, the preferred ones first.

    Raises:
        KernelError: there is no such operator.
    """
    if operator not in _implementations:
        raise KernelError(f"operator {operator!r} is unknown; known: {', '.join(operators())}")
    return sorted(_implementations[operator].values(), key=lambda i: (-i.priority, i.name))


@contextmanager
def forced(names: Mapping[str, str]) -> Iterator[None]:
    """Inside the block these choices, by operator name, are the environment's: for tests and benchmarks.

    Raises:
        KernelError: an operator or an implementation is unknown.
    """
    global _forced
    for operator, name in names.items():
        _check_name(operator, name)
    before, _forced = _forced, dict(names)
    _picked.clear()
    try:
        yield
    finally:
        _forced = before
        _picked.clear()


def select(
    operator: str,
    device_type: str,
    dtype: torch.dtype,
    *,
    wanted: str | None = None,
    without: tuple[Callable[..., Any], ...] = (),
    **facts: Any,
) -> Callable[..., Any]:
    """The function that computes `operator` for these operands.

    Args:
        operator: registered name.
        device_type: "cpu" or "cuda".
        dtype: of the operands.
        wanted: name of the one to take; None: the environment's choice, or else the best one.
        without: functions not to take, whoever wants them.
        facts: hashable facts of the call that implementations may depend on.

    Raises:
        KernelError: none can, or the chosen one cannot.
    """
    key = (operator, device_type, dtype, wanted, without, *facts.values())
    picked = _picked.get(key)
    if picked is None:
        picked = _picked[key] = pick(operator, device_type, dtype, wanted=wanted, without=without, **facts)
        logger.info("%s: %s on %s %s %s", operator, picked.name, device_type, dtype, facts if facts else "")
    return picked.function


def pick(
    operator: str,
    device_type: str,
    dtype: torch.dtype,
    *,
    wanted: str | None = None,
    without: tuple[Callable[..., Any], ...] = (),
    **facts: Any,
) -> Implementation:
    """The implementation that `select` chooses, without a line in the log; KernelError as of `select`."""
    chosen = wanted or choices().get(operator)
    if chosen is not None:
        _check_name(operator, chosen)
        one = _implementations[operator][chosen]
        reason = one.why_not(device_type, dtype, facts)
        if reason is None and one.function not in without:
            return one
        if reason is not None and not isinstance(reason, Declined):
            raise KernelError(
                f"{operator}={chosen} was asked for but cannot do {device_type} {dtype} {facts}: {reason}"
            )
    for candidate in implementations(operator):
        if candidate.function not in without and candidate.can_do(device_type, dtype, facts):
            return candidate
    raise KernelError(f"no implementation of {operator} for {device_type} {dtype} {facts}")


def capabilities(operator: str, device_type: str, dtype: torch.dtype, **facts: Any) -> dict[str, str | None]:
    """Why each implementation cannot compute this (None: it can), by name, the preferred ones first."""
    return {one.name: one.why_not(device_type, dtype, facts) for one in implementations(operator)}


def choices() -> dict[str, str]:
    """Names of the implementations that the environment chooses, by operator; raises KernelError."""
    global _forced
    if _forced is None:
        _forced = _from_environment(os.environ.get(ENVIRONMENT, ""))
    return _forced


def _from_environment(text: str) -> dict[str, str]:
    choices = {}
    for part in filter(None, (item.strip() for item in text.split(","))):
        operator, separator, name = part.partition("=")
        if not separator:
            raise KernelError(f"{ENVIRONMENT}: {part!r} is not of the form operator=implementation")
        _check_name(operator, name)
        choices[operator] = name
    return choices


def _check_name(operator: str, name: str) -> None:
    known = [i.name for i in implementations(operator)]
    if name not in known:
        raise KernelError(f"{operator} has no implementation {name!r}; known: {', '.join(known)}")
