"""Two models of one server take turns: one sleeps while the other is awake."""

from __future__ import annotations

import pytest

from quire.server.healthcheck import probe
from quire_client import Client
from quire_client.errors import Unavailable
from tests.e2e.conftest import AssortedServer, engine_of

pytestmark = pytest.mark.server

PROMPT = "the quick brown fox jumps over the lazy dog"


@pytest.mark.row("G17", clauses=("wakes", "swap"))
def test_models_are_swapped(assorted: AssortedServer) -> None:
    server = assorted.server
    engines = {model: engine_of(server, assorted.root / model) for model in ("first", "second")}

    with Client(server.grpc_url) as client:

        def tokens(model: str) -> tuple[int, ...]:
            answers = [
                client.generate(PROMPT, model=model, max_tokens=12, ignore_eos=True, **sampling)
                for sampling in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 3})
            ]
            return tuple(token for answer in answers for token in answer.token_ids)

        before = {model: tokens(model) for model in ("first", "second")}
        assert before["first"] != before["second"]

        def memory() -> dict[str, int]:
            return {model: engine.memory_info().rss for model, engine in engines.items()}

        both = memory()
        client.sleep(model="second", drain=True)
        freed = both["second"] - memory()["second"]
        assert freed > 100 << 20, (both, memory())
        for asleep, awake in [("second", "first"), ("first", "second"), ("second", "first")]:
            if memory()[asleep] > both[asleep] - freed // 2:
                client.sleep(model=asleep)
                assert client.wake(model=awake)["seconds"] >= 0
            assert memory()[asleep] < memory()[awake] - freed // 2, (memory(), freed)
            with pytest.raises(Unavailable, match="asleep"):
                client.generate(PROMPT, model=asleep, max_tokens=1)
            assert tokens(awake) == before[awake]
            assert probe(server.grpc_url, asleep, 60.0) == "asleep, and it answers"
            assert probe(server.grpc_url, awake, 60.0) == "a token came"
        client.wake(model="second")
        assert {model: tokens(model) for model in before} == before
        assert all(engine_of(server, assorted.root / model) == one for model, one in engines.items())
