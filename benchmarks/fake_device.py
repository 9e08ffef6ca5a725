"""FakeDevice: a runner without weights, for measurements of everything around it. No torch in here.

It answers as a GPU of a set speed would: a step takes a set time, whatever its rows, and begins when the one
before has ended, or when it is launched where that is later. The host waits by sleeping, so the device takes
no CPU time. The tokens mean nothing, but have text. Of the checkpoint config.json and tokenizer are read.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.kv_tiers import BlockAccess, KVTiers
from quire.loader.info import end_token_ids, read_configs
from quire.models.kv_groups import KVGroup
from quire.outputs import NOTHING, ModelRunnerOutput, RowOutput, RunnerInfo, ScheduledRequest, SchedulerOutput

REFUSAL = "a fake device draws one token per row; it knows no log-probabilities and no grammars"
_ROOT = Path(__file__).resolve().parent.parent


def environment(step_ms: float) -> dict[str, str]:
    """Variables with which an engine, or the server that starts it, computes by a fake device."""
    folders = filter(None, (str(_ROOT), os.environ.get("PYTHONPATH")))
    return {
        "QUIRE_TEST_RUNNER": f"{__name__}:FakeDevice",
        "QUIRE_FAKE_STEP_MS": str(step_ms),
        "PYTHONPATH": os.pathsep.join(folders),
    }


class FakeDevice:
    """A Runner of the shape that a checkpoint's config.json states; KV blocks are numbers alone.

    Args:
        step_ms: how long a step takes; None: as `environment` says.
        clock: seconds; it and `sleep` stand for real time.
        sleep: waits for so many seconds.

    Raises:
        CheckpointError: there is no config.json to be read.
    """

    def __init__(
        self,
        config: EngineConfig,
        step_ms: float | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        hf, generation = read_configs(config.model.model)
        vocab_size = int(hf.get("vocab_size"))
        eos = end_token_ids(hf, generation)
        max_model_len = config.model.max_model_len or int(hf.get("max_position_embeddings"))
        blocks_per_sequence = -(-max_model_len // config.cache.tokens_per_block)
        self.kv_cache: BlockAccess = _NoBlocks()
        self.info = RunnerInfo(
            num_blocks=config.cache.num_blocks or config.scheduler.max_num_seqs * blocks_per_sequence,
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            eos_token_ids=eos,
            kv_groups=(KVGroup(None, (0,)),),
            device="fake",
        )
        # Special tokens lie at the ends of vocabularies. Of one that has bytes alone these are letters.
        self._words = [one for one in range(vocab_size // 4, vocab_size * 3 // 8) if one not in eos]
        self._step_s = float(os.environ["QUIRE_FAKE_STEP_MS"] if step_ms is None else step_ms) / 1000
        self._clock, self._sleep = clock, sleep
        self._free_at = 0.0
        """When the last step that was launched ends."""
        self._launched: deque[tuple[float, ModelRunnerOutput]] = deque()
        """When each step ends, and what it brings."""

    def sleep(self) -> None:
        """There is nothing to give back."""

    def wake(self) -> None:
        """There is nothing to take."""

    def attach(self, tiers: KVTiers | None) -> None:
        if tiers is not None:
            raise ConfigError("a fake device has no KV blocks that a tier could keep")

    def launch(self, output: SchedulerOutput) -> None:
        rows = [self._row(number, item) for number, item in enumerate(output.scheduled)]
        if rows:
            self._free_at = max(self._free_at, self._clock()) + self._step_s
        self._launched.append((self._free_at, ModelRunnerOutput(rows)))

    def collect(self) -> ModelRunnerOutput:
        ends_at, output = self._launched.popleft()
        if (left := ends_at - self._clock()) > 0:
            self._sleep(left)
        return output

    def reset(self) -> None:
        self._launched.clear()

    def warm_up(self) -> None:
        pass

    def check(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _row(self, number: int, item: ScheduledRequest) -> RowOutput:
        new = item.new
        if new is not None:
            params = new.sampling_params
            asked = params.logprobs, params.prompt_logprobs, params.structured_output
            if params.num_sequences > 1 or params.dimensions or asked != (None, None, None):
                return RowOutput(error=REFUSAL)
        if not item.samples:
            return NOTHING
        position = item.num_computed_tokens + item.num_scheduled_tokens - item.num_drafts
        return RowOutput([self._words[(31 * number + position) % len(self._words)]])


class _NoBlocks:
    """Blocks of nothing."""

    block_bytes = 1

    def read(self, block_ids: object, out: object) -> None: ...

    def write(self, block_ids: object, data: object) -> None: ...

    def copy_blocks(self, pairs: object) -> None: ...
