"""Settings for every test."""

from __future__ import annotations

import os

# Tests run tiny shapes, where more threads only fight each other (and other test runs) for the cores. Set
# before torch is imported, and inherited by the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Nothing a test does may reach for the network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
