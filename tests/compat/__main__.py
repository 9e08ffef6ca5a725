"""Prints a line for each check; exit status 1 where one fails."""

from __future__ import annotations

import argparse
import os
import sys

from tests.compat.checks import CHECKS
from tests.compat.site import Failed, Known, NotShown, Site


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.compat", description="Does Quire work on a server?"
    )
    parser.add_argument("grpc", help="grpc://HOST:8001")
    parser.add_argument("http", help="http://HOST:8000")
    parser.add_argument("--model", default="", help="that streams by the backend quire")
    parser.add_argument("--ensemble", default="", help="of text or messages, over that model")
    parser.add_argument("--key", default="", help="NAME=VALUE, the header of a restricted model-repository")
    parser.add_argument("--seconds", type=float, default=10.0, help="of the long stream")
    parser.add_argument("--dangerous", action="store_true", help="also what is known to end this version")
    parser.add_argument("--pid", type=int, help="of a server here: kills its engine, and ends it by SIGTERM")
    parser.add_argument("--kill-stub", action="store_true", help="with --pid: kills a stub instead")
    parser.add_argument("--exit-timeout", type=float, default=12.0, help="seconds from SIGTERM to the end")
    options = parser.parse_args()
    if options.kill_stub and options.pid is None:
        parser.error("--kill-stub: it needs --pid")
    if options.key and "=" not in options.key:
        parser.error(f"--key: {options.key!r} is not NAME=VALUE")
    checks = [*CHECKS]
    if options.pid is not None:
        from tests.compat.processes import engine_killed, sigterm, stub_killed

        checks += [stub_killed] if options.kill_stub else [engine_killed, sigterm]
    try:
        site = Site(options)
    except Failed as failed:
        print(f"FAIL       server: {failed}")
        return 1
    print(f"Triton {'.'.join(map(str, site.version))}: {site.generator}, {site.ensemble or 'no ensemble'}")
    num_failed = 0
    for check in checks:
        try:
            state, text = "pass", check(site)
            if check.__name__ != "sigterm":
                site.check_alive()
        except Known as known:
            state, text = "known", str(known)
        except NotShown as missing:
            state, text = "not shown", str(missing)
        except Exception as error:  # whatever it is, the next check is of use
            state, text = (
                "FAIL",
                str(error) if isinstance(error, Failed) else f"{type(error).__name__}: {error}",
            )
        num_failed += state == "FAIL"
        print(f"{state:9}  {check.__name__}: {' '.join(text.split())}", flush=True)
    return 1 if num_failed else 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # a stream that a failed check has left open has a thread that would be waited for
