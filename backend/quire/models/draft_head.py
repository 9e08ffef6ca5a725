"""DecoderHead: what draft heads of decoder layers have in common."""

from __future__ import annotations

import torch

from quire.errors import ConfigError
from quire.layers.config import DecoderConfig
from quire.layers.linear import Linear
from quire.layers.scheme import SCHEMES, LinearScheme
from quire.models.decoder import DecoderModel
from quire.models.interface import ForwardInputs, HeadModel, Model
from quire_kernels.cpu.decoder import NativeDecoder


class PlainLinear(Linear):
    """Projection of a draft head's inputs. It is never quantised."""

    def allocate(self, scheme: LinearScheme, path: str) -> None:
        """See Linear."""
        super().allocate(SCHEMES[None], path)


class DecoderHead(DecoderModel, HeadModel):
    """Draft head of decoder layers, which guess the next token from a token and a hidden state. The embedding
    is the target's, and the output head too unless a family has its own."""

    def make_parts(self, config: DecoderConfig) -> None:
        """See DecoderModel. Drops the embedding and the output head, so that the target's can take their
        place (`share`)."""
        super().make_parts(config)
        del self.embed_tokens, self.lm_head

    def share(self, target: Model) -> None:
        """See HeadModel. Raises ConfigError if the target is no DecoderModel: if transformers' code computes
        it, for example."""
        if not isinstance(target, DecoderModel):
            raise ConfigError("draft_model: a draft head needs model_impl quire")
        self.embed_tokens, self.lm_head = target.embed_tokens, target.lm_head

    @property
    def fed_size(self) -> int:
        """See Model."""
        return self.config.hidden_size

    def join(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Computes the first layer's input from tokens' embeddings and hidden states, both [num_tokens,
        hidden_size]. The result has the same shape, or [num_tokens, 2 * hidden_size] for EAGLE-3."""
        raise NotImplementedError

    def guess(self, inputs: ForwardInputs, hidden: torch.Tensor) -> torch.Tensor:
        """See HeadModel. The result is the residual stream after the last layer, not normed."""
        x, residual = self.run_layers(self.join(self.embed_tokens(inputs.input_ids), hidden), inputs)
        total = x if residual is None else x + residual
        return total if inputs.rows is None else total[inputs.rows]

    def _fuse(self) -> NativeDecoder | None:
        """Returns None: the call that computes all layers gives hidden states after the final norm, and
        `guess` needs those before it."""
        return None
