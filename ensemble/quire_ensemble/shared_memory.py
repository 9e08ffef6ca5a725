"""Shared memory between a Python model of Triton and the server: whether it has room for a response."""

from __future__ import annotations

import time
from typing import Any

SMALL_BYTES = 256 * 1024
"""Largest final response with data, in bytes, that a generator sends without asking for room, unless a send
failed recently. `ask_for_room` pauses after it has asked for more."""
_MARGIN_BYTES = 8 * 1024
"""Most bytes of shared memory that a response needs beside its content."""
_PAUSE_S, _PAUSE_S_PER_BYTE = 0.005, 1e-8
END_PAUSES_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 5.0, 5.0, 5.0)
"""Pauses, in seconds, between tries to send an error that ends a request, or to find room for one."""


def ask_for_room(pb_utils: Any, num_bytes: int) -> None:
    """Raises an exception if Triton has no shared memory for a response of `num_bytes` bytes.

    A `send` with FINAL that finds no room closes the sender and delivers nothing, so its client waits for
    ever. Triton has no call that asks for room. `is_model_ready` writes its arguments into the memory that
    responses go through, and has no other effect here: no model has this name. The version is a row of zeros,
    a little longer than the response. For more than SMALL_BYTES the function also pauses, so that the server
    can give the memory back.
    """
    try:
        pb_utils.is_model_ready(".", "0" * (num_bytes + _MARGIN_BYTES))
    except Exception as error:
        if "not found" not in str(error):  # from 26.07 on it says so of the model, with the name
            raise
    if num_bytes > SMALL_BYTES:
        # The server gives the memory back when it has already answered: a moment's work for each byte.
        time.sleep(_PAUSE_S + num_bytes * _PAUSE_S_PER_BYTE)


def wait_for_room(pb_utils: Any) -> None:
    """Returns when there is shared memory for an error response, or after about 24 seconds."""
    for pause_s in END_PAUSES_S:
        try:
            ask_for_room(pb_utils, 0)
            return
        except Exception:  # whatever Triton raises
            time.sleep(pause_s)
