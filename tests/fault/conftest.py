"""A server whose processes tests kill; the next one finds another where it has ended."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire_ensemble.builder import build_repository
from tests.e2e.conftest import OPTIONS
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.pace import PACED, PACED_ENV
from tests.fixtures.server import ServerProcess, SharedServer

WATCHDOG_S = 8.0
GENERATORS = ("--load-model=generator", "--load-model=generator_unary")


def served_generators(root: Path, **options: Any) -> SharedServer:
    """A server of a tiny llama's generators, two frontends to the one that streams, to be entered; for paced
    streams, too."""
    stated: dict[str, Any] = {**OPTIONS, **PACED, **options}
    checkpoint = make_checkpoint("llama", root / "llama", max_position_embeddings=stated["max_model_len"])
    build_repository(
        checkpoint, root / "repository", instance_count=2, placement="path", engine_options=stated
    )
    return SharedServer(root / "repository", root, GENERATORS, PACED_ENV)


@pytest.fixture(scope="session")
def mortal_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedServer]:
    processors = {**PACED["logits_processors"], "deadly": "tests.fixtures.deadly:Deadly"}
    options = {"num_blocks": 4096, "watchdog_s": WATCHDOG_S, "logits_processors": processors}
    with served_generators(tmp_path_factory.mktemp("mortal"), **options) as server:
        yield server


@pytest.fixture
def mortal(mortal_session: SharedServer) -> ServerProcess:
    """Its engine's streams outlive it. With the processor `deadly`, and a watchdog of WATCHDOG_S."""
    return mortal_session.current()
