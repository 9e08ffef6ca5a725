"""StatesModel: a decoder in which layers may keep a state in place of keys and values."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping

from torch import nn

from quire.layers.config import DecoderConfig
from quire.layers.states import StatesConfig
from quire.models.decoder import DecoderModel
from quire.roofline import ModelWork


class StatesModel(DecoderModel):
    """Decoder whose configuration is a StatesConfig. On a GPU there are no kernels for states: PyTorch
    computes Mamba-2 and gated DeltaNet one token of each sequence at a time, and convolutions one sequence at
    a time."""

    state_name: str
    """Name of the module with a layer's state in `StatesModel._named_modules`. A family may rename it
    there."""

    def state_bytes(self, config: DecoderConfig) -> Mapping[int, int]:
        """See DecoderModel."""
        assert isinstance(config, StatesConfig)
        return dict.fromkeys(config.state_layers, config.state.state_bytes(config.dtype))

    def work(self, kv_token_bytes: int) -> ModelWork:
        """See DecoderModel. The bytes of states are not counted."""
        work = super().work(kv_token_bytes)
        assert isinstance(self.config, StatesConfig)
        return dataclasses.replace(work, windows=work.windows[len(self.config.state_layers) :])

    def _named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        assert isinstance(self.config, StatesConfig)
        with_state = {f"model.layers.{layer}.self_attn": layer for layer in self.config.state_layers}
        for path, module in super()._named_modules():
            found = re.match(r"model\.layers\.\d+\.self_attn", path)
            if found and found[0] in with_state:
                path = f"model.layers.{with_state[found[0]]}.{self.state_name}{path[found.end() :]}"
            yield path, module
