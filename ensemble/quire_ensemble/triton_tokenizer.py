"""The `tokenizer` model of an ensemble: text or chat messages in, token ids out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from quire_ensemble.errors import InputError
from quire_ensemble.text_limits import TextLimits, text_limits
from quire_ensemble.triton_model import EnsembleModel, element, given_inputs

if TYPE_CHECKING:
    from quire_ensemble.tokenizer import Tokenizer


class TokenizerModel(EnsembleModel):
    """The tokenizer of an ensemble.

    Inputs, exactly one: `text_input` STRING [1], `messages` STRING [1]. Output: `input_ids` INT32 [n].
    Parameters named like the fields of `TextLimits` set these.
    """

    tokenizer: Tokenizer
    limits: TextLimits

    def _load(self, checkpoint: Path, parameters: Mapping[str, str], args: Mapping[str, str]) -> None:
        from quire_ensemble.tokenizer import Tokenizer

        self.limits = text_limits(parameters, checkpoint)
        self.tokenizer = Tokenizer(checkpoint)

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._respond(request) for request in requests]

    def _respond(self, request: Any) -> Any:
        pb = self.pb_utils
        given = given_inputs(request)
        try:
            text, messages = element(given, "text_input"), element(given, "messages")
            token_ids = self.limits.encode(self.tokenizer, text, messages)
        except InputError as error:
            return self._refusal(error)
        return pb.InferenceResponse([pb.Tensor("input_ids", np.asarray(token_ids, dtype=np.int32))])
