"""The tokenizer model under load: batches form, no request disturbs another, order is kept."""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc

from quire_ensemble.builder import _python_model
from quire_ensemble.pbtxt import tokenizer_config
from quire_ensemble.triton_tokenizer import LONG_BYTES
from tests.e2e.conftest import TinyServer, held, write_model
from tests.e2e.triton_calls import Reply, stream, tensor
from tests.fixtures.server import ServeRepository
from tests.fixtures.waiting import wait_until

pytestmark = pytest.mark.server

LONG = "a long text, of which a great many tokens are made; " * 800
SHORT = [f"short text number {number}, 数字 {'x' * (7 * number % 90)}" for number in range(96)]
assert len(LONG) > 8 * LONG_BYTES > max(map(len, SHORT))


def executions(tiny: TinyServer) -> tuple[int, int]:
    """Requests that the tokenizer has answered, and calls of `execute` that it took."""
    with grpc.InferenceServerClient(tiny.server.grpc_url) as client:
        (model,) = client.get_inference_statistics("tokenizer").model_stats
    return model.inference_count, model.execution_count


def prompt(name: str, text: str | bytes) -> list[Any]:
    return [tensor(name, np.array([[text if isinstance(text, bytes) else text.encode()]], dtype=np.object_))]


def at_once(
    url: str, model: str, inputs: list[list[Any]], sent: Callable[[], None] = lambda: None
) -> list[tuple[Any, Any]]:
    """Result and error of each request; all are sent without waiting for any, and then `sent` is called.

    By ModelInfer: the gRPC front of tritonserver 2.51 faults now and then where hundreds of requests to a
    batching model come on one stream.
    """
    answers: queue.Queue[tuple[int, Any, Any]] = queue.Queue()

    def send(client: Any, number: int, tensors: list[Any]) -> None:
        client.async_infer(
            model,
            tensors,
            callback=lambda result, error: answers.put((number, result, error)),
            request_id=str(number),
        )

    with grpc.InferenceServerClient(url) as client:
        for number, tensors in enumerate(inputs):
            send(client, number, tensors)
        sent()
        got = sorted((answers.get(timeout=120) for _ in inputs), key=lambda answer: answer[0])
    return [(result, error) for _, result, error in got]


@pytest.mark.row("B23")
def test_batches_form_and_every_answer_is_that_of_its_own_text(tiny: TinyServer) -> None:
    """Long texts, which others overtake, messages and wrong requests among the short texts."""
    assert tiny.llm.tokenizer is not None
    hf = tiny.llm.tokenizer.hf
    expected: list[list[int] | str] = []
    inputs = []
    for number, text in enumerate(SHORT):
        name, value, ids = "text_input", text, hf(text)["input_ids"]
        if number % 24 == 5:
            value, ids = LONG + text, hf(LONG + text)["input_ids"]
        elif number % 24 == 11:
            messages = [{"role": "user", "content": text}]
            name, value = "messages", str(messages).replace("'", '"')
            ids = hf.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        elif number % 24 == 17:
            name, value, ids = "messages", "[{}]", "messages: [0].role must be a non-empty string"
        inputs.append(prompt(name, value))
        expected.append(ids)
    requests, calls = executions(tiny)
    with ExitStack() as stack:
        num_waiting = stack.enter_context(held(tiny.server, "tokenizer"))

        def sent() -> None:
            # But for those that are worked on, at most a batch.
            wait_until(lambda: num_waiting() >= len(inputs) - 32)
            stack.close()

        got = at_once(tiny.server.grpc_url, "tokenizer", inputs, sent)
    for number, ((result, error), wanted) in enumerate(zip(got, expected, strict=True)):
        if isinstance(wanted, str):
            assert wanted in error.message(), number
            continue
        assert error is None, (number, error)
        assert result.get_response().id == str(number)
        ids = result.as_numpy("input_ids")
        assert ids.shape == (1, len(wanted)) and ids[0].tolist() == wanted, number
    answered, called = executions(tiny)
    assert answered - requests == len(inputs)
    assert called - calls < len(inputs) // 2, "what comes in while others are worked on goes together"


@pytest.mark.row("B23", clauses=("order",))
def test_streams_behind_the_batches_are_those_of_the_engine(tiny: TinyServer) -> None:
    """Streams of the ensemble, a long text's among them: each gets its own deltas, in their order.

    TensorRT-LLM's ensembles mixed up the tokens of a stream where requests went together beside the engine.
    """
    texts = [LONG[: 2 * LONG_BYTES], *SHORT[:31]]

    def ask(model: str, text: str) -> Reply:
        inputs = {"text_input": text, "stream": True, "max_tokens": 24, "ignore_eos": True}
        return stream(tiny.server.grpc_url, model, inputs)

    alone = [ask("generator", text) for text in texts]
    requests, _ = executions(tiny)
    with ThreadPoolExecutor(len(texts)) as pool:
        together = list(pool.map(lambda text: ask("chat", text), texts))
    for reply, expected in zip(together, alone, strict=True):
        assert (reply.error, reply.finals) == (None, 1)
        assert (reply.text, reply.token_ids) == (expected.text, expected.token_ids)
    assert executions(tiny)[0] - requests == len(texts)


@pytest.mark.slow
@pytest.mark.row("B23", clauses=("cost",))
def test_batches_cut_the_cost_of_a_request(
    serve_repository: ServeRepository, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """CPU time of server and stub for the same load, in turns with a tokenizer whose batches are of one: some
    half of it, as most of what a request takes is the round trip between the two processes."""
    models = {"together": 32, "alone": 1}
    for name, size in models.items():
        config = tokenizer_config(name, checkpoint=str(tiny_checkpoint))
        config = config.replace("max_batch_size: 1\n", f"max_batch_size: {size}\n")
        write_model(tmp_path / "repository", name, config, _python_model("tokenizer"))
    server = serve_repository(tmp_path / "repository")
    inputs = [prompt("text_input", text) for text in SHORT * 16]
    costs: dict[str, list[float]] = {name: [] for name in models}
    for name in [*models] * 4:
        processes = server.descendants()
        before = sum(sum(process.cpu_times()[:2]) for process in processes)
        assert all(error is None for _, error in at_once(server.grpc_url, name, inputs))
        costs[name].append(sum(sum(process.cpu_times()[:2]) for process in processes) - before)
    together, alone = (median(costs[name][1:]) for name in models)  # the first time warms up
    assert together < 0.8 * alone, costs
