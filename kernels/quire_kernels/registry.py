"""Registry of the operators' implementations, chosen by device, dtype and facts of the call such as shapes.

An implementation registers itself with `@implementation(...)`. `select` chooses the one of highest priority
that supports the call and does not leave it to others, and logs this, usually once per kind of call. The
caller may name an implementation. If the caller does not, the environment may name one for each operator
(`QUIRE_KERNELS="paged_attention=reference,rms_norm=reference"`). It is an error if a named implementation
does not support the call. Another one is used only if the named one `leaves` the call.
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
    """Choosing an operator's implementation failed: a name is unknown, QUIRE_KERNELS is malformed, or the
    named implementation does not support the call, or none does."""


@dataclass(frozen=True)
class Implementation:
    """One implementation of an operator."""

    operator: str
    name: str
    function: Callable[..., Any]
    devices: frozenset[str]
    """torch device types that it supports; empty: any."""
    dtypes: frozenset[torch.dtype]
    """Types of the operands that it supports; empty: any."""
    priority: int
    """Priority: if none is named, the implementation of highest priority is chosen among those that support
    the call and do not leave it."""
    predicate: Callable[..., str | None] | None
    """Called with the call's facts (head_dim, block_size, ...) by keyword. It returns why the call is not
    supported; None: it is. Without a predicate, any facts are supported."""
    leaves: frozenset[str] = frozenset()
    """Names of facts. If one of them is true, this implementation leaves the call to the best of the others,
    even if it supports the call and was named."""
    is_recordable: bool = True
    """Whether a CUDA graph that recorded it also computes other batches of the same shape. For that, it must
    read lengths on the device."""

    def can_do(self, device_type: str, dtype: torch.dtype, facts: Mapping[str, Any]) -> bool:
        """Whether it supports a call with this device, type and facts, and does not leave the call to other
        implementations."""
        return not self.leaves_call(facts) and self.why_not(device_type, dtype, facts) is None

    def leaves_call(self, facts: Mapping[str, Any]) -> bool:
        """Whether it leaves a call with these facts to other implementations."""
        return any(facts.get(name) for name in self.leaves)

    def why_not(self, device_type: str, dtype: torch.dtype, facts: Mapping[str, Any]) -> str | None:
        """Returns why it does not support a call with this device, type and facts; None: it does, though it
        may leave the call."""
        if self.devices and device_type not in self.devices:
            return f"only on {', '.join(sorted(self.devices))}"
        if self.dtypes and dtype not in self.dtypes:
            return f"only for {', '.join(sorted(str(one).removeprefix('torch.') for one in self.dtypes))}"
        return None if self.predicate is None else self.predicate(**facts)


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
    predicate: Callable[..., str | None] | None = None,
    leaves: tuple[str, ...] = (),
    is_recordable: bool = True,
) -> Callable[[F], F]:
    """Decorator that registers a function or class as implementation `name` of `operator`; see
    `Implementation`."""

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
            frozenset(leaves),
            is_recordable,
        )
        _picked.clear()
        return function

    return register


def operators() -> list[str]:
    """Names of all operators."""
    return sorted(_implementations)


def implementations(operator: str) -> list[Implementation]:
    """Returns all implementations of an operator, highest priority first.

    Raises:
        KernelError: there is no such operator.
    """
    if operator not in _implementations:
        raise KernelError(f"operator {operator!r} is unknown; known: {', '.join(operators())}")
    return sorted(_implementations[operator].values(), key=lambda i: (-i.priority, i.name))


@contextmanager
def forced(names: Mapping[str, str]) -> Iterator[None]:
    """Replaces the environment's choices, by operator name, inside the `with` block. For tests and
    benchmarks.

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
    **facts: Any,
) -> Callable[..., Any]:
    """Returns the function that computes `operator` for these operands.

    Args:
        operator: registered name.
        device_type: "cpu" or "cuda".
        dtype: type of the operands.
        wanted: name of the implementation to use; None: the environment's choice, or else the best one. If
            it leaves the call to others (see `Implementation.leaves`), the best of these is used.
        facts: hashable facts of the call on which implementations may depend.

    Raises:
        KernelError: no implementation supports the call, the named one does not, a name is unknown, or
            QUIRE_KERNELS is malformed.
    """
    key = (operator, device_type, dtype, wanted, *facts.values())
    picked = _picked.get(key)
    if picked is None:
        picked = _picked[key] = pick(operator, device_type, dtype, wanted=wanted, **facts)
        logger.info("%s: %s on %s %s %s", operator, picked.name, device_type, dtype, facts if facts else "")
    return picked.function


def pick(
    operator: str,
    device_type: str,
    dtype: torch.dtype,
    *,
    wanted: str | None = None,
    **facts: Any,
) -> Implementation:
    """Returns the implementation that `select` chooses, without logging it. Raises KernelError as `select`
    does."""
    chosen = wanted or choices().get(operator)
    if chosen is not None:
        _check_name(operator, chosen)
        one = _implementations[operator][chosen]
        if (reason := one.why_not(device_type, dtype, facts)) is not None:
            raise KernelError(
                f"{operator}={chosen} was asked for but cannot do {device_type} {dtype} {facts}: {reason}"
            )
        if not one.leaves_call(facts):
            return one
    for candidate in implementations(operator):
        if candidate.can_do(device_type, dtype, facts):
            return candidate
    raise KernelError(f"no implementation of {operator} for {device_type} {dtype} {facts}")


def capabilities(operator: str, device_type: str, dtype: torch.dtype, **facts: Any) -> dict[str, str | None]:
    """Returns the reason why each implementation does not support a call (None: it does), by name, highest
    priority first."""
    return {one.name: one.why_not(device_type, dtype, facts) for one in implementations(operator)}


def choices() -> dict[str, str]:
    """Returns the names of the implementations that the environment, or `forced`, chooses, by operator.

    A valid environment is read only once.

    Raises:
        KernelError: QUIRE_KERNELS is malformed, or names an unknown operator or implementation.
    """
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
