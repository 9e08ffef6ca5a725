"""Checks that end processes of a server on this machine."""

from __future__ import annotations

import os
import select
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import psutil

from tests.compat.site import Failed, Known, NotShown, Site, end_of, wait_until

NUM_STREAMS = 32
TOKENS = 400
STUB_S = 10.0
"""By when a request to a dead stub has failed; a server looks for about a second."""


def _kill(site: Site, *words: str) -> float:
    """Kills the server's processes with all of these words in their command lines; the time at which."""
    below = psutil.Process(site.options.pid).children(recursive=True)
    lines = {process.pid: " ".join(process.as_dict(["cmdline"])["cmdline"] or ()) for process in below}
    found = [pid for pid, line in lines.items() if all(word in line for word in words)]
    if not found:
        raise NotShown(f"no process below {site.options.pid} has {' and '.join(words)} in its command line")
    for pid in found:
        os.kill(pid, signal.SIGKILL)
    return time.monotonic()


def engine_killed(site: Site) -> str:
    """Streams outlive their engine, with the tokens that they would have had."""
    (undisturbed,) = site.streams(1, max_tokens=TOKENS)
    expected = undisturbed.read_all().token_ids
    calls = site.streams(4, max_tokens=TOKENS)
    killed = _kill(site, "quire.engine.loop")
    with ThreadPoolExecutor(len(calls)) as pool:
        ends = list(pool.map(end_of, calls))
    ended_s = time.monotonic() - killed
    if any(call.reply.token_ids != expected for call in calls):
        raise Failed(f"a stream has not the tokens of one that was not disturbed; ends: {ends}")

    def is_answered() -> bool:
        try:
            return bool(site.answer_s())
        except Exception:
            return False

    wait_until(is_answered, "no engine has taken its place")
    answered_s = time.monotonic() - killed
    return (
        f"{len(calls)} streams ended whole {ended_s:.1f} s behind SIGKILL, answers after {answered_s:.1f} s"
    )


def stub_killed(site: Site) -> str:
    """No version brings a stub back: requests have to fail, and the model not to be ready."""
    began = _kill(site, "triton_python_backend_stub", f"/{site.generator}/")
    try:
        site.answer_s()
    except Exception:
        failed_s = time.monotonic() - began
    else:
        raise Failed("a request is answered without a stub")
    if failed_s > STUB_S:
        raise Failed(f"a request failed after {failed_s:.1f} s only")
    seen = f"a request fails in {failed_s:.1f} s"
    if site.http(f"/v2/models/{site.generator}/ready")[0] != 200:
        return f"{seen}; the model is not ready"
    if site.version < (2, 64):
        raise Known(f"{seen}; before 25.12 the model stays ready")
    raise Failed(f"{seen}; the model is ready")


def sigterm(site: Site) -> str:
    """The server's end under streams. Its exit status is its parent's to learn."""
    calls, ends = site.streams(NUM_STREAMS), os.pidfd_open(site.options.pid)
    began = time.monotonic()
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        reading = pool.map(end_of, calls)
        signal.pidfd_send_signal(ends, signal.SIGTERM)
        if not select.select([ends], [], [], site.options.exit_timeout)[0]:
            raise Failed(f"still there {site.options.exit_timeout:g} s behind SIGTERM")
        took_s = time.monotonic() - began
        reasons = sorted(reading)
    os.close(ends)
    broken = [end for end in reasons if "StatusCode" in end]  # of the connection; a server's error has none
    if broken:
        raise Failed(
            f"ended in {took_s:.1f} s, {len(broken)} of {NUM_STREAMS} streams cut off: {broken[0][:80]}"
        )
    seen = f"ended in {took_s:.1f} s; {NUM_STREAMS} streams had one final response each"
    return f"{seen} ({reasons[0]} ... {reasons[-1]})"
