"""A model that shares nothing with DecoderModel, through loader, engine, scheduler and runner."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import quire
from quire import LLM, SamplingParams
from quire.layers.config import DecoderConfig
from quire.layers.hf_config import HFConfig
from quire.layers.linear import Weight
from quire.loader import load
from quire.models.interface import ForwardInputs, Model
from quire.models.kv_groups import kv_groups
from quire.models.kv_spec import AttentionKV
from quire.worker.model_runner import ModelRunner
from quire_kernels import ops
from tests.fixtures.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.fixtures.drafters import eager
from tests.fixtures.graphs import recorded_steps
from tests.fixtures.runner_of import runner_of
from tests.unit.test_engine import random_prompts

HEADS, KV_HEADS, SIZE, HIDDEN = 4, 2, 16, 64
DECODER = "quire.models.decoder"


class PlainModel(nn.Module, Model):
    """Tables of tokens and positions, one attention, and a head."""

    def __init__(self, config: DecoderConfig, max_model_len: int, device: torch.device) -> None:
        super().__init__()
        self.config, self.kv_groups = config, kv_groups(config.kv_windows)
        shapes = {
            "tokens": (config.vocab_size, HIDDEN),
            "positions": (config.max_position_embeddings, HIDDEN),
            "projection": (HIDDEN, (HEADS + 2 * KV_HEADS) * SIZE),
            "head": (HIDDEN, config.vocab_size),
        }
        for name, shape in shapes.items():
            memory = torch.empty(shape, dtype=config.dtype, device=device)
            self.register_parameter(name, nn.Parameter(memory, requires_grad=False))

    @classmethod
    def parse_config(cls, hf: HFConfig, dtype: torch.dtype) -> DecoderConfig:
        return DecoderConfig.from_hf(hf, dtype)

    def kv_spec(self, kv_cache_dtype: str) -> AttentionKV:
        return AttentionKV(KV_HEADS, SIZE, self.config.dtype, kv_cache_dtype)

    def embed(self, inputs: ForwardInputs) -> torch.Tensor:
        return self.tokens[inputs.input_ids] + self.positions[inputs.positions]

    def compute(self, x: torch.Tensor, inputs: ForwardInputs) -> torch.Tensor:
        (meta,), kv_layer = inputs.metas, inputs.kv_cache.layer(0)
        heads = (x @ self.projection).view(len(x), -1, SIZE)
        query, key, value = (part.contiguous() for part in heads.split([HEADS, KV_HEADS, KV_HEADS], 1))
        ops.write_kv(key, value, kv_layer, meta.slot_mapping)
        hidden = x + ops.paged_attention(query, kv_layer, meta, scale=SIZE**-0.5).flatten(1)
        return hidden if inputs.rows is None else hidden[inputs.rows]

    def forward(self, inputs: ForwardInputs) -> torch.Tensor:
        return self.compute(self.embed(inputs), inputs)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return (hidden @ self.head).float()

    def weights(self) -> Iterator[Weight]:
        return (Weight(name, parameter) for name, parameter in self.named_parameters())

    def packed_bytes(self, device_type: str) -> int:
        return sum(parameter.nbytes for parameter in self.parameters())

    def finish(self) -> int:
        return self.packed_bytes("")


PROMPTS = [[*range(10, 34), *prompt] for prompt in random_prompts(6, longest=30, seed=5)]
"""They begin alike, for three blocks."""
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=24, ignore_eos=True, temperature=1.0, seed=3, logprobs=2)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_checkpoint("llama", tmp_path_factory.mktemp("plain"))
    config = {
        "architectures": ["PlainForCausalLM"],
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 128,
        "dtype": "float32",
    }
    (path / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    hf = HFConfig(path / "config.json", config)
    model = PlainModel(PlainModel.parse_config(hf, torch.float32), 128, torch.device("cpu"))
    weights = {name: torch.randn(memory.shape) for name, memory, _ in model.weights()}
    weights["projection"] *= 0.25
    save_file(weights, path / "model.safetensors")
    return path


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "model_class", lambda *_: PlainModel)


def engine(path: Path, **options: Any) -> LLM:
    values = {"max_model_len": 128, "num_blocks": 200, "block_size": 8, "num_threads": 1, **options}
    return LLM(path, **values)


def alone(path: Path, params: SamplingParams) -> list[list[int]]:
    """Tokens of each request by itself, its prompt computed at once and nothing found in the cache."""
    llm = engine(path, enable_prefix_caching=False)
    return [llm.generate([prompt], params)[0].token_ids for prompt in PROMPTS]


def test_the_model_is_what_its_formulas_say(checkpoint: Path) -> None:
    llm = engine(checkpoint)
    model = runner_of(llm.core).model
    assert isinstance(model, PlainModel) and not model.is_fused
    token_ids = list(PROMPTS[0])
    for _ in range(GREEDY.max_tokens):
        x = model.tokens[torch.tensor(token_ids)] + model.positions[: len(token_ids)]
        heads = (x @ model.projection).view(len(x), -1, SIZE).transpose(0, 1)
        query, key, value = heads.split([HEADS, KV_HEADS, KV_HEADS])
        attended = nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        )
        hidden = x + attended.transpose(0, 1).flatten(1)
        token_ids.append(int((hidden[-1] @ model.head).argmax()))
    assert llm.generate(PROMPTS[:1], GREEDY)[0].token_ids == token_ids[len(PROMPTS[0]) :]


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("way", ["in turns", "launched ahead", "recorded", "draft model"])
def test_cached_chunked_and_preempted_it_generates_what_it_does_alone(
    checkpoint: Path, way: str, params: SamplingParams
) -> None:
    expected = alone(checkpoint, params)
    options: dict[str, Any] = {"async_scheduling": way != "in turns"}
    if way == "draft model":
        options |= {"draft_model": str(checkpoint), "num_draft_tokens": 3}
    with recorded_steps() if way == "recorded" else nullcontext(), eager():
        llm = engine(checkpoint, max_num_batched_tokens=16, num_blocks=16, **options)
        for _ in range(2):
            assert [output.token_ids for output in llm.generate(PROMPTS, params)] == expected
        stats, runner = llm.core.stats(), runner_of(llm.core)
    assert stats.num_cached_tokens > 0 and stats.num_preemptions > 0
    assert stats.num_recomputed_tokens > 0 and stats.num_free_blocks == stats.num_blocks
    if way == "draft model":
        assert stats.num_accepted_drafts > 20
    if way == "recorded":
        assert isinstance(runner, ModelRunner) and runner.graphs and runner.prompt_graphs
        assert runner.graphs.num_replays > 10 and runner.prompt_graphs.num_replays > 10


def test_nobody_but_families_and_the_quantizer_knows_the_decoder() -> None:
    root = Path(quire.__file__).parent
    users = {path.relative_to(root).parts[0] for path in root.rglob("*.py") if DECODER in path.read_text()}
    assert users == {"models", "quantize"}


def test_hidden_states_of_all_tokens_are_there_on_request(checkpoint: Path) -> None:
    """As embeddings and heads that guess need them: log-probabilities of the prompt are made of them."""
    params = SamplingParams(max_tokens=2, ignore_eos=True, prompt_logprobs=0)
    output = engine(checkpoint, max_num_batched_tokens=16).generate(PROMPTS[:1], params)[0]
    whole = engine(checkpoint).generate(PROMPTS[:1], params)[0]
    assert output.prompt_logprobs is not None and whole.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(PROMPTS[0])
    found = [entry.logprobs[0] for entry in output.prompt_logprobs[1:] if entry]
    assert found == pytest.approx(
        [entry.logprobs[0] for entry in whole.prompt_logprobs[1:] if entry], abs=1e-4
    )
