"""`quire-client top`: what it reads from /metrics, and its frames."""

from __future__ import annotations

import dataclasses
import http.server
import math
import threading
from collections.abc import Iterator

import pytest
from click.testing import CliRunner

from quire_client._metrics import Interval, Scrape
from quire_client._top import frame
from quire_client.cli import cli
from tests.unit.fake_kserve import nobody


def text(scale: float = 1.0, running: int = 3) -> str:
    buckets = {"0.1": 0, "0.25": 5, "0.5": 9, "1": 10, "+Inf": 10}
    histogram = "".join(
        f'quire_time_to_first_token_seconds_bucket{{le="{le}",model="generator"}} {count * scale}\n'
        for le, count in buckets.items()
    )
    return f"""# HELP quire_requests_running Sequences
# TYPE quire_requests_running gauge
quire_requests_running{{engine="e1"}} {running}
quire_requests_waiting{{engine="e1"}} 2
quire_requests_waiting_for{{engine="e1",reason="seats"}} 2
quire_requests_waiting_for{{engine="e1",reason="blocks"}} 0
quire_engine_info{{engine="e1",model="generator"}} 1
quire_engine_info{{engine="e1",model="generator_unary"}} 1
quire_batch_rows{{engine="e1"}} 3
quire_batch_tokens{{engine="e1"}} 40
quire_kv_blocks{{engine="e1",state="free"}} 50
quire_kv_blocks{{engine="e1",state="cached"}} 25
quire_kv_blocks{{engine="e1",state="in_use"}} 25
quire_kv_blocks{{engine="e1",state="pinned"}} 5
quire_prefix_queried_tokens_total{{engine="e1"}} {1000 * scale}
quire_prefix_cached_tokens_total{{engine="e1"}} {400 * scale}
quire_steps_total{{engine="e1"}} {100 * scale}
quire_preemptions_total{{engine="e1"}} 7
quire_engine_restarts_total{{engine="e1"}} 1
quire_requests_total{{code="",finish_reason="stop",model="generator"}} {8 * scale}
quire_requests_total{{code="INTERNAL",finish_reason="error",model="generator"}} {2 * scale}
quire_output_tokens_total{{model="generator",tenant="a\\"}}\\n\x1b[2J"}} {500 * scale}
quire_output_tokens_total{{model="generator",tenant=""}} {500 * scale}
{histogram}"""


def test_labels_are_unescaped_and_counts_are_of_the_interval() -> None:
    first, second = Scrape.parse(text()), Scrape.parse(text(3.0))
    assert second.values_of("quire_output_tokens_total", "tenant") == ["", 'a"}\n\x1b[2J']
    seen = Interval(dataclasses.replace(second, at=first.at + 4), first)
    assert seen.rate("quire_output_tokens_total", model="generator") == 2000 / 4
    assert seen.grown("quire_requests_total", finish_reason="error") == 4
    # A server that was started anew counts from zero.
    assert Interval(first, second).grown("quire_requests_total") == 10


@pytest.mark.parametrize(("share", "seconds"), [(0.5, 0.25), (0.25, 0.175), (0.9, 0.5), (0.95, 0.75)])
def test_quantiles_are_those_of_prometheus(share: float, seconds: float) -> None:
    name = "quire_time_to_first_token_seconds"
    assert Interval(Scrape.parse(text())).quantile(share, name) == pytest.approx(seconds)
    assert math.isnan(Interval(Scrape.parse("")).quantile(share, name))
    same = Scrape.parse(text())
    assert math.isnan(Interval(same, same).quantile(share, name)), "nothing since then"


def test_a_frame() -> None:
    first, second = Scrape.parse(text()), Scrape.parse(text(3.0, running=4))
    shown = frame(dataclasses.replace(second, at=first.at + 2), first, "host:8002")
    for words in (
        "engine e1  generator, generator_unary",
        "running 4   waiting 2 (seats 2)   last step 3 rows, 40 tokens   100 steps/s",
        "KV [#####               ]  25% of 100 blocks   25 cached, 5 pinned",
        "prefix hits 40%   preemptions 7   restarts 1",
    ):
        assert words in shown
    row = shown.splitlines()[-1].split()
    assert row == ["generator", "10", "2", "0", "1000", "250.0", "ms", "750.0", "ms", "-", "-", "-"]


@pytest.fixture
def served() -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text().encode())

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_once_prints_one_frame(served: str) -> None:
    done = CliRunner().invoke(cli, ["top", served, "--once"])
    assert done.exit_code == 0 and "running 3   waiting 2 (seats 2)" in done.output
    assert "\x1b" not in done.output


def test_a_server_that_is_not_there_is_one_line() -> None:
    with nobody() as url:
        done = CliRunner().invoke(cli, ["top", url, "--once"])
    assert done.exit_code != 0 and "Connection refused" in str(done.exception or done.output)


@pytest.mark.parametrize(
    "line",
    [
        'quire_requests_running{engine="e1"} NaN',
        'quire_kv_blocks{engine="e1",state="in_use"} +Inf',
        'quire_kv_blocks{engine="e1",state="in_use"} 1e300\nquire_kv_blocks{engine="e1",state="free"} -1e300',
        'quire_requests_waiting_for{engine="e1"} 1',
        'quire_engine_info{engine="e1"} 1',
        "quire_requests_running 1.2.3",
        'quire_time_to_first_token_seconds_bucket{model="generator",le="x"} 1',
        "x{" + "a" * 1_000_000 + "} 1",
    ],
    ids=lambda line: line[:50],
)
def test_whatever_answers_there_is_a_frame_of_it(line: str) -> None:
    """A line of a million letters took 40 minutes, far more than a test may take."""
    assert "engine e1" in frame(Scrape.parse(f"{text()}{line}\n"), None, "here")
