"""Plain tritonclient, nothing of ours: what any user of the server can do."""

from __future__ import annotations

import queue
import threading
import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

DTYPES = {
    "max_tokens": np.int32,
    "min_tokens": np.int32,
    "top_k": np.int32,
    "logprobs": np.int32,
    "seed": np.uint64,
    "temperature": np.float32,
    "top_p": np.float32,
    "input_ids": np.int32,
    "stop_token_ids": np.int32,
    "take": np.int32,
    "length_penalty": np.float32,
}


def tensor(name: str, value: Any) -> Any:
    """An InferInput; text and bytes become BYTES, lists one-dimensional tensors."""
    values = value if isinstance(value, list | np.ndarray) else [value]
    if isinstance(value, np.ndarray):
        array = value
    elif values and isinstance(values[0], str | bytes):
        array = np.array([v.encode() if isinstance(v, str) else v for v in values], dtype=np.object_)
    elif values and isinstance(values[0], bool):
        array = np.array(values, dtype=np.bool_)
    else:
        array = np.array(values, dtype=DTYPES.get(name, np.int32))
    item = grpcclient.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
    item.set_data_from_numpy(array)
    return item


FORGOTTEN_AFTER_S = 20.0
"""How long the server may take to close a stream behind its last response. 24.10 forgets some, more of them
while other clients break theirs off (the fuzzer counts them); tritonclient would wait for ever."""


@dataclass
class Reply:
    """Everything that came back for one streamed request."""

    results: list[Any] = field(default_factory=list)
    error: InferenceServerException | None = None
    finals: int = 0

    @property
    def texts(self) -> list[str]:
        return [r.as_numpy("text_output")[0].decode() for r in self.results]

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def token_ids(self) -> list[int]:
        return [int(i) for r in self.results for i in r.as_numpy("output_ids")]

    @property
    def finish_reasons(self) -> list[str]:
        arrays = [r.as_numpy("finish_reason") for r in self.results]
        return ["" if array is None else array[0].decode() for array in arrays]


class TritonStream:
    """One ModelStreamInfer call with one request; `options` are further ones of `async_stream_infer`."""

    def __init__(
        self,
        url: str,
        model: str,
        inputs: dict[str, Any],
        *,
        request_id: str = "",
        parameters: dict[str, Any] | None = None,
        empty_final: bool = False,
        outputs: list[str] | None = None,
        headers: dict[str, str] | None = None,
        **options: Any,
    ) -> None:
        self.client = grpcclient.InferenceServerClient(url)
        self._queue: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self.client.start_stream(lambda result, error: self._queue.put((result, error)), headers=headers)
        self.client.async_stream_infer(
            model,
            [tensor(name, value) for name, value in inputs.items()],
            request_id=request_id,
            parameters=parameters,
            enable_empty_final_response=empty_final,
            outputs=[grpcclient.InferRequestedOutput(name) for name in outputs] if outputs else None,
            **options,
        )
        self.reply = Reply()
        self._was_forgotten = False

    def next(self, timeout_s: float = 120.0) -> bool:
        """Waits for one response; True when it was the final one or an error."""
        result, error = self._queue.get(timeout=timeout_s)
        if error is not None:
            self.reply.error = error
            return True
        response = result.get_response()
        final = response.parameters["triton_final_response"].bool_param
        self.reply.finals += final
        if response.outputs:
            self.reply.results.append(result)
        return final

    def read_all(self) -> Reply:
        while not self.next():
            pass
        self.close()
        return self.reply

    def extra_responses(self) -> int:
        """Responses behind the final one; there must be none."""
        return self._queue.qsize() - self._was_forgotten

    def cancel(self) -> None:
        self.client.stop_stream(cancel_requests=True)

    def close(self) -> None:
        timer = threading.Timer(FORGOTTEN_AFTER_S, self._forget)
        timer.start()
        self.client.stop_stream()
        timer.cancel()
        self.client.close()

    def _forget(self) -> None:
        warnings.warn("tritonserver did not close a stream whose requests had all ended", stacklevel=1)
        self._was_forgotten = True  # its cancellation comes as one more error
        self.client.stop_stream(cancel_requests=True)


def stream(url: str, model: str, inputs: dict[str, Any], **options: Any) -> Reply:
    """Sends one request and reads it to its end."""
    return TritonStream(url, model, inputs, **options).read_all()


def infer(url: str, model: str, inputs: dict[str, Any], **options: Any) -> Any:
    """Plain ModelInfer."""
    with grpcclient.InferenceServerClient(url) as client:
        return client.infer(model, [tensor(name, value) for name, value in inputs.items()], **options)
