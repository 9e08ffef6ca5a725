"""Token sequences of words that must not appear."""

from __future__ import annotations

from typing import Any

import msgspec

from quire.request.sampling_params import SamplingParams


def with_bad_words_ids(params: SamplingParams, tokenizer: Any) -> SamplingParams:
    """Returns `params` with the token sequences of `bad_words` added to `bad_words_ids`.

    A word is banned as it is tokenized at the start of a text and after a space, since most vocabularies
    hold different tokens for the two.
    """
    sequences = dict.fromkeys(params.bad_words_ids)
    for word in params.bad_words:
        for text in (word, " " + word):
            token_ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            if token_ids:
                sequences.setdefault(token_ids)
    return msgspec.structs.replace(params, bad_words_ids=tuple(sequences))
