"""Two models of one server take turns: one sleeps while the other is awake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest

from quire.server.healthcheck import probe
from quire_client import Client
from quire_client.errors import Unavailable
from quire_ensemble.builder import build_repository
from tests.e2e.conftest import OPTIONS
from tests.fixtures.checkpoints import make_checkpoint

SHAPE = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4}
PROMPT = "the quick brown fox jumps over the lazy dog"


@pytest.mark.row("G17", clauses=("wakes", "swap"))
def test_models_are_swapped(tmp_path: Path, serve_repository: Any) -> None:
    options = {**OPTIONS, "max_model_len": 256, "num_blocks": 1024, "allow_sleep": True}
    repository = tmp_path / "repository"
    repository.mkdir()
    for seed, model in enumerate(("first", "second")):
        checkpoint = make_checkpoint("llama", tmp_path / model, seed=seed, **SHAPE)
        out = tmp_path / f"of-{model}"
        build_repository(checkpoint, out, placement="path", engine_options=options)
        (out / "generator").rename(repository / model)
        file = repository / model / "config.pbtxt"
        file.write_text(file.read_text("utf-8").replace('"generator"', f'"{model}"'), "utf-8")
    server = serve_repository(repository)
    engines: dict[str, psutil.Process] = {}

    with Client(server.grpc_url) as client:

        def tokens(model: str) -> tuple[int, ...]:
            answers = [
                client.generate(PROMPT, model=model, max_tokens=12, ignore_eos=True, **sampling)
                for sampling in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 3})
            ]
            return tuple(token for answer in answers for token in answer.token_ids)

        before = {model: tokens(model) for model in ("first", "second")}
        assert before["first"] != before["second"]
        found = server.running("quire.engine.loop")
        assert len(found) == 2

        def memory() -> list[int]:
            return sorted(one.memory_info().rss for one in found)

        both = memory()
        client.sleep(model="second", drain=True)
        freed = both[1] - memory()[0]
        assert freed > 100 << 20, (both, memory())
        by_memory = sorted(found, key=lambda one: one.memory_info().rss)
        engines.update(zip(("second", "first"), by_memory, strict=True))
        for asleep, awake in [("second", "first"), ("first", "second"), ("second", "first")]:
            if engines[asleep].memory_info().rss > both[1] - freed // 2:
                client.sleep(model=asleep)
                assert client.wake(model=awake)["seconds"] >= 0
            small, large = (engines[model].memory_info().rss for model in (asleep, awake))
            assert small < large - freed // 2, (small, large, freed)
            with pytest.raises(Unavailable, match="asleep"):
                client.generate(PROMPT, model=asleep, max_tokens=1)
            assert tokens(awake) == before[awake]
            assert probe(server.grpc_url, asleep, 60.0) == "asleep, and it answers"
            assert probe(server.grpc_url, awake, 60.0) == "a token came"
        client.wake(model="second")
        assert {model: tokens(model) for model in before} == before
        assert {one.pid for one in server.running("quire.engine.loop")} == {one.pid for one in found}
