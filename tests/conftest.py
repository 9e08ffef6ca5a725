"""Settings for every test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fixtures.waiting import patience

# Tests run tiny shapes, where more threads only fight each other (and other test runs) for the cores. Set
# before torch is imported, and inherited by the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Nothing a test does may reach for the network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# A hub of a test's own answers when the machine lets it.
for _limit in ("HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT"):
    os.environ.setdefault(_limit, "120")
# What is compiled is kept for the next run; packed weights of tiny models are not for the user's own cache.
os.environ.setdefault("QUIRE_CACHE_DIR", str(Path.home() / ".cache" / "quire-tests"))


@pytest.fixture(autouse=True)
def _patience() -> Iterator[None]:
    with patience():
        yield
