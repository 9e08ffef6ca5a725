"""Reads a request's fields from Triton's request parameters, headers, `sampling_parameters` and tensors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Set
from typing import Any

from quire.converters import boolean, integer
from quire.errors import InvalidArgumentError
from quire.triton.raw_request import SPECS, RawRequest, decoded
from quire.triton.scheduling_fields import HEADERS, TRACE_HEADERS
from quire_common import client_json
from quire_common.errors import InputError

# Triton's own request parameters. Of HTTP generate they reach a model as they are, from elsewhere by the
# request's methods. `id` is what HTTP generate calls the request id.
_RESERVED = frozenset(
    {
        "id",
        "priority",
        "timeout",
        "sequence_id",
        "sequence_start",
        "sequence_end",
        "headers",
        "binary_data_output",
    }
)


def request_parameters(raw: RawRequest) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns the request parameters that may be fields of ours, and the values of forwarded headers that are
    in HEADERS, in the order of precedence.

    Triton forwards a header as a parameter of that name, over HTTP as the client wrote it and over gRPC in
    lower case. The parameters are returned without TRACE_HEADERS and what `_is_header` takes for a header,
    and without Triton's own. HTTP generate passes `timeout` and the sequence's id and end as parameters; they
    are copied to the fields of `raw` that are still empty.

    Raises:
        InvalidArgumentError: the parameters cannot be read, or one that is copied has a wrong value.
    """
    try:
        pairs: list[tuple[str, Any]] = json.loads(raw.parameters or "{}", object_pairs_hook=list)
    except ValueError as error:
        raise InvalidArgumentError("parameters", f"cannot be read: {error}") from None
    values = dict(pairs)
    if not raw.timeout_us and "timeout" in values:
        raw.timeout_us = integer(0, 2**63 - 1)("timeout", values["timeout"])
    if not raw.correlation_id and values.get("sequence_id"):
        raw.correlation_id = str(values["sequence_id"])
        raw.sequence_end = boolean("sequence_end", values.get("sequence_end", False))
    headers = [
        {name: value} for header, name in HEADERS.items() for key, value in pairs if key.lower() == header
    ]
    parameters = {
        key: value
        for key, value in values.items()
        if not (_is_header(key) or key in _RESERVED or key.startswith("triton_"))
        and key.lower() not in TRACE_HEADERS
    }
    return parameters, headers


def check_tenant(stated: Iterable[Mapping[str, Any]], headers: Iterable[Mapping[str, Any]]) -> None:
    """Refuses a tenant that does not come from a header.

    A client may send a request parameter that has the header's name, which looks like a header. Beside the
    header that the gateway sets, it is noticed if its value is another.

    Raises:
        InvalidArgumentError: a tenant is in `stated`, or the headers have different ones.
    """
    if any(source.get("tenant") is not None for source in stated):
        raise InvalidArgumentError("tenant", "must be given as a header here (tenant_from_header_only)")
    found = {header["tenant"] for header in headers if "tenant" in header}
    if len(found) > 1:
        raise InvalidArgumentError("tenant", f"must be given once, got {len(found)} values")


def _is_header(key: str) -> bool:
    """Whether a parameter's name looks like a header's: it has a hyphen. Names of our inputs that are written
    with hyphens are mistakes, not headers."""
    return "-" in key and key.replace("-", "_") not in SPECS


def json_parameters(raw: RawRequest) -> dict[str, Any]:
    """Parses the JSON object in `sampling_parameters`; empty if the request has none or only blanks.

    Raises:
        InvalidArgumentError: it is no valid JSON, no object, or exceeds a limit of `client_json`.
    """
    field = "sampling_parameters"
    value: bytes = raw.tensors.get(field, [b""])[0]
    if not value.strip():
        return {}
    try:
        found = client_json.parse_json(field, value)
    except InputError as error:
        raise InvalidArgumentError(error.field, error.reason) from None
    if not isinstance(found, dict):
        raise InvalidArgumentError(field, "must be a JSON object")
    return found


def typed_tensors(raw: RawRequest, names: Set[str]) -> dict[str, Any]:
    """Returns the values of the tensors in `names` that the request has, by name: a list for an input that
    holds a list, else a scalar.

    Raises:
        InvalidArgumentError: a text is not UTF-8.
    """
    typed: dict[str, Any] = {}
    for name in names & raw.tensors.keys():
        values = [decoded(name, value) for value in raw.tensors[name]]
        typed[name] = values if SPECS[name].dims == (-1,) else values[0]
    return typed


def wants_no_token(*sources: dict[str, Any]) -> bool:
    """Whether `max_tokens` (or `max_new_tokens`) is 0 in the first of `sources` that states it.

    In all sources a 0 of these keys is changed to 1 in place. The engine cannot generate less than a token,
    which costs little beside the prompt.
    """
    stated = [
        (source, name)
        for source in sources
        for name in ("max_tokens", "max_new_tokens")
        if source.get(name) is not None
    ]
    zeros = [str(source[name]).strip() == "0" for source, name in stated]
    for (source, name), is_zero in zip(stated, zeros, strict=True):
        if is_zero:
            source[name] = 1
    return bool(zeros) and zeros[0]


def with_lists_of_strings(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the request parameters, in which JSON lists of strings for `stop` or `bad_words` are parsed.

    Request parameters carry only scalars, so a list has to be written as JSON text. In other sources a list
    can be given as such, so a text there is one string. "[INST]" and "[1]" are no JSON lists of strings, and
    stay texts.
    """
    return {name: _spelled_list(name, value) for name, value in parameters.items()}


def _spelled_list(name: str, value: Any) -> Any:
    if name not in ("stop", "bad_words") or not isinstance(value, str):
        return value
    try:
        found = client_json.parse_json(name, value)
    except InputError:
        return value
    strings = isinstance(found, list) and all(isinstance(entry, str) for entry in found)
    return found if strings else value


def pop_named(values: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Removes the keys `names` from `values`; returns those that were there with their values."""
    return {name: values.pop(name) for name in names if name in values}
