"""llama.cpp's part, in its own interpreter: a JSON document through the standard input, another one out.

In: `file`; `texts`, to tokenize; `windows`, token ids whose perplexity is measured; `prompts` and `ours`,
token ids and what we made of each. Out: `token_ids` of the texts; `perplexity`; for each prompt the number of
tokens that agree with ours (`agreed`) and, where one differs, by how much llama.cpp finds its own token
likelier (`gap`, nats).
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import llama_cpp
import numpy as np


class Model:
    """One sequence at a time, at most `size` tokens."""

    def __init__(self, file: str, size: int) -> None:
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(
            file.encode(), llama_cpp.llama_model_default_params()
        )
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = params.n_batch = size
        params.n_threads = params.n_threads_batch = len(os.sched_getaffinity(0))
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        self._vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(self._vocab)
        self._batch = llama_cpp.llama_batch_init(size, 0, 1)
        self._length = 0

    def tokenize(self, text: str) -> list[int]:
        data = text.encode()
        found = (llama_cpp.llama_token * (len(data) + 8))()
        count = llama_cpp.llama_tokenize(self._vocab, data, len(data), found, len(found), True, True)
        return list(found[:count])

    def clear(self) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        self._length = 0

    def log_probabilities(self, token_ids: list[int], only_last: bool = False) -> np.ndarray[Any, Any]:
        """Log-probabilities of what follows each token, or the last one: float64 [tokens, vocabulary].

        The tokens go on behind those of earlier calls, since `clear`.
        """
        batch = self._batch
        for row, token_id in enumerate(token_ids):
            batch.token[row], batch.pos[row] = token_id, self._length + row
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, 0
            batch.logits[row] = not only_last or row == len(token_ids) - 1
        batch.n_tokens = len(token_ids)
        if (status := llama_cpp.llama_decode(self._context, batch)) != 0:
            raise RuntimeError(f"llama_decode returned {status}")
        self._length += len(token_ids)
        rows = [len(token_ids) - 1] if only_last else range(len(token_ids))
        logits = np.stack(
            [
                np.ctypeslib.as_array(
                    llama_cpp.llama_get_logits_ith(self._context, row), (self._vocab_size,)
                ).astype(np.float64)
                for row in rows
            ]
        )
        logits -= logits.max(1, keepdims=True)
        found: np.ndarray[Any, Any] = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        return found


def main() -> None:
    asked = json.load(sys.stdin)
    model = Model(asked["file"], 1024)
    total, count = 0.0, 0
    for window in asked["windows"]:
        model.clear()
        found = model.log_probabilities(window)
        total -= float(found[np.arange(len(window) - 1), window[1:]].sum())
        count += len(window) - 1
    compared = []
    for prompt, ours in zip(asked["prompts"], asked["ours"], strict=True):
        model.clear()
        following, agreed, gap = model.log_probabilities(prompt, only_last=True)[0], 0, 0.0
        for token_id in ours:
            best = int(following.argmax())
            if best != token_id:
                gap = float(following[best] - following[token_id])
                break
            agreed += 1
            following = model.log_probabilities([token_id], only_last=True)[0]
        compared.append({"agreed": agreed, "gap": gap})
    answer = {
        "token_ids": [model.tokenize(text) for text in asked["texts"]],
        "perplexity": float(np.exp(total / count)),
        "num_tokens": count,
        "compared": compared,
        "version": llama_cpp.__version__,
    }
    os.write(_OUT, json.dumps(answer).encode())


if __name__ == "__main__":
    _OUT = os.dup(1)
    os.dup2(2, 1)  # llama.cpp prints where it likes
    main()
