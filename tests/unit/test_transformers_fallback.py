"""Models on transformers' code: what transformers generates, whatever the batch, and what is refused."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from quire import LLM, SamplingParams
from quire.config import EngineConfig, ModelConfig
from quire.errors import CheckpointError, ConfigError
from quire.loader.load import load_model
from quire.models import transformers_fallback
from quire.models.kv_groups import blocks_per_sequence
from quire.models.transformers_fallback import TransformersModel
from quire.models.transformers_layers import GatedLayer, Norm, PackedLayer, pack_layers
from quire.plan.capacity import predict
from quire.worker.kv_identity import kv_identity
from tests.fixtures.checkpoints import FALLBACK_FAMILIES, Checkpoints, make_checkpoint
from tests.fixtures.drive import Driver, hf_greedy, hf_logits, hf_model
from tests.fixtures.runner_of import runner_of

NATIVE_FAMILIES = ("llama", "qwen3", "gemma2", "gemma3", "mixtral", "gpt_oss", "minicpm3")
"""Which run on either code: caps, windows, sinks, experts, values smaller than keys among them."""
CPU = torch.device("cpu")
PROMPTS = [
    [
        *range(10, 34),
        *torch.randint(5, 512, (length,), generator=torch.Generator().manual_seed(length)).tolist(),
    ]
    for length in (1, 4, 9, 17, 26, 33)
]
"""They begin alike, for three blocks."""
MAX_TOKENS = 24


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("families"))


@pytest.fixture(scope="module")
def greedy(checkpoints: Checkpoints) -> Callable[[str], list[list[int]]]:
    """What transformers generates behind each of PROMPTS, alone."""

    @functools.cache
    def expected(family: str) -> list[list[int]]:
        model = hf_model(checkpoints[family])
        return [hf_greedy(model, prompt, MAX_TOKENS) for prompt in PROMPTS]

    return expected


@pytest.mark.row("E12", clauses=("generic",))
@pytest.mark.parametrize("family", FALLBACK_FAMILIES)
@pytest.mark.parametrize("chunk", [None, 7], ids=["whole", "chunks"])
def test_logits_equal_transformers(family: str, chunk: int | None, checkpoints: Checkpoints) -> None:
    driver = Driver.load(checkpoints[family])
    assert isinstance(driver.model, TransformersModel)
    expected = hf_logits(hf_model(checkpoints[family]), PROMPTS[-1])
    torch.testing.assert_close(driver.logits(PROMPTS[-1], chunk), expected, atol=1e-4, rtol=0.0)


@pytest.mark.row("E12", clauses=("generic",))
@pytest.mark.parametrize("family", FALLBACK_FAMILIES)
def test_batched_chunked_preempted_and_cached_it_generates_what_transformers_does_alone(
    family: str, checkpoints: Checkpoints, greedy: Callable[[str], list[list[int]]]
) -> None:
    expected = greedy(family)
    assert len({token for tokens in expected for token in tokens}) > 12, "tokens that say something"
    groups = Driver.load(checkpoints[family]).model.kv_groups
    llm = LLM(
        checkpoints[family],
        max_model_len=88,
        block_size=8,
        num_blocks=blocks_per_sequence(groups, 88, 8, 16) + 2,
        max_num_batched_tokens=16,
        num_threads=1,
    )
    params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    for _ in range(2):
        assert [output.token_ids for output in llm.generate(PROMPTS, params)] == expected
    stats = llm.core.stats()
    assert stats.num_cached_tokens > 0
    if any(group.window is None for group in groups):  # else a request does not grow
        assert stats.num_preemptions > 0 and stats.num_recomputed_tokens > 0
    assert stats.num_free_blocks == stats.num_blocks
    assert isinstance(runner_of(llm.core).model, TransformersModel)


@pytest.mark.parametrize("family", NATIVE_FAMILIES)
def test_both_codes_generate_the_same(family: str, checkpoints: Checkpoints) -> None:
    found = {}
    for code in ("quire", "transformers"):
        driver = Driver.load(checkpoints[family], model_impl=code)
        assert isinstance(driver.model, TransformersModel) == (code == "transformers")
        found[code] = driver.greedy(PROMPTS, MAX_TOKENS, 7)
    assert found["quire"] == found["transformers"]


@pytest.mark.parametrize("family", ["cohere2", "stablelm"])
def test_a_plan_knows_the_bytes_of_the_weights(family: str, checkpoints: Checkpoints) -> None:
    """Of a tied table once."""
    config = EngineConfig.from_mapping({"model": str(checkpoints[family]), "num_blocks": 2000})
    loaded = load_model(config.model, CPU)
    assert predict(config, "cpu", 2**33).weight_bytes == pytest.approx(loaded.weight_bytes, rel=0.1)


def test_pickles_and_made_up_weights_are_loaded_as_asked(tmp_path: Path) -> None:
    path = make_checkpoint("stablelm", tmp_path, weight_format="bin", tokenizer=False)
    model = ModelConfig(model=str(path), load_format="bin")
    expected = hf_logits(hf_model(path), PROMPTS[0])
    found = Driver(load_model(model, CPU).model).logits(PROMPTS[0])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0.0)
    (path / "pytorch_model.bin").unlink()
    logits = Driver.load(path, load_format="dummy").logits(PROMPTS[0])
    assert torch.isfinite(logits).all() and logits.std() > 0.1


def test_blocks_are_told_from_those_of_other_weights_and_other_code(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    other = make_checkpoint("llama", tmp_path, seed=1, tokenizer=False)

    def identity(path: Path, code: str) -> str:
        loaded = load_model(ModelConfig(model=str(path), model_impl=code), CPU, with_digest=True)  # type: ignore[arg-type]
        return json.dumps(kv_identity(loaded, CPU))

    ways = ((checkpoints["llama"], "transformers"), (checkpoints["llama"], "quire"), (other, "transformers"))
    found = [identity(*way) for way in ways]
    assert len(set(found)) == 3 and identity(*ways[0]) == found[0]


def test_half_precision_computes_in_the_checkpoints_type(checkpoints: Checkpoints) -> None:
    whole = Driver.load(checkpoints["cohere2"]).logits(PROMPTS[-1])
    half = Driver.load(checkpoints["cohere2"], dtype="bfloat16").logits(PROMPTS[-1])
    assert 0 < (half - whole).norm() < 0.1 * whole.norm()


def test_damaged_weights_are_refused_with_their_file(checkpoints: Checkpoints, tmp_path: Path) -> None:
    path = make_checkpoint("stablelm", tmp_path, tokenizer=False)
    file = path / "model.safetensors"
    whole = load_file(file)

    def refusal(weights: dict[str, torch.Tensor]) -> str:
        save_file(weights, file)
        with pytest.raises(CheckpointError) as caught:
            load_model(ModelConfig(model=str(path)), CPU)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    without = {name: tensor for name, tensor in whole.items() if name != "model.norm.weight"}
    assert refusal(without) == f"{file}: 1 missing tensors: model.norm.weight"
    assert refusal(whole | {"other": torch.zeros(2)}) == f"{file}: 1 unexpected tensors: other"
    wrong = {"model.norm.weight": torch.zeros(2)}
    assert refusal(whole | wrong) == (
        f"{file}: tensor 'model.norm.weight' has shape [2], the model means [64]"
    )
    projection = "model.layers.0.self_attn.q_proj.weight"
    for dtype in (torch.int8, torch.bool, torch.float8_e4m3fn):
        text = refusal(whole | {projection: whole[projection].to(dtype)})
        assert text == f"{file}: tensor {projection!r} is of {dtype}"


def refused(path: Path, **keys: Any) -> str:
    """Why a checkpoint is refused, its config.json changed before."""
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **keys}))
    with pytest.raises(CheckpointError) as caught:
        load_model(ModelConfig(model=str(path), load_format="dummy", model_impl="transformers"), CPU)
    text = str(caught.value)
    assert text.startswith(f"{file}: ") and "\n" not in text
    return text.removeprefix(f"{file}: ")


def configured(path: Path, model_type: str, **keys: Any) -> Path:
    """A directory with the config.json of a small model of a type."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    small = {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = CONFIG_MAPPING[model_type](**{**small, "intermediate_size": 128, **keys})
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]]
    config.save_pretrained(path)
    return path


@pytest.mark.row("E12", clauses=("generic",))
@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("rwkv", "it keeps a state beside keys and values"),
        ("bloom", "its attention does not go by the attention interface"),
        ("falcon", "its attention does not go by the attention interface"),
        ("git", "its attention does not go by the attention interface"),
        (
            "jetmoe",
            "what its layers compute depends on the values of tensors, which a check without data lacks",
        ),
        ("mixtral", "4 query heads are no multiple of 8 KV heads"),
        ("bert", "its tokens see others than those right before them (it is not causal, for one)"),
        ("doge", "it makes a mask of its own"),
        ("diffllama", "of num_hidden_layers=2 layers 2 call its attention interface, 4 times in all"),
    ],
)
def test_models_that_need_more_are_refused_with_the_reason(
    model_type: str, reason: str, tmp_path: Path
) -> None:
    name, _, found = refused(configured(tmp_path, model_type)).partition(
        " cannot run on transformers' code: "
    )
    assert name.endswith(("ForCausalLM", "LMHeadModel")) and found == reason


@pytest.mark.row("E12", clauses=("generic",))
def test_keys_that_nobody_obeys_are_refused(tmp_path: Path) -> None:
    """By their names."""
    text = refused(configured(tmp_path, "mamba"))
    assert text.startswith("layer_types: MambaForCausalLM cannot run on transformers' code")
    assert text.endswith(": full_attention and sliding_attention are served, and not 'linear_attention'")
    assert refused(configured(tmp_path, "roberta"), is_decoder=True).startswith(
        "is_decoder: RobertaForCausalLM"
    )
    path = configured(tmp_path, "stablelm")
    name = "StableLmForCausalLM cannot run on transformers' code"
    assert refused(path, pad_token_id=512) == f"{name}: pad_token_id must be below vocab_size"
    text = refused(path, pad_token_id=None, is_encoder_decoder=True)
    assert text == f"is_encoder_decoder: {name}: decoders alone are served"
    assert refused(path, is_encoder_decoder=False, quantization_config={"quant_method": "fp8"}).startswith(
        "quantization_config"
    )
    assert refused(path, quantization_config=None, architectures=["StableLmModel"]).startswith(
        "architecture 'StableLmModel' is not supported, and the causal model of model_type 'stablelm'"
    )
    unknown = refused(path, model_type="new", auto_map={"AutoModelForCausalLM": "code.New"})
    assert "model_type 'new' is unknown to transformers" in unknown
    assert "code that auto_map names is not run" in unknown


@pytest.mark.parametrize("value", [10**9, 10**12, 0, -1, "2", None, 1.5])
def test_sizes_that_take_for_ever_are_refused(value: Any, tmp_path: Path) -> None:
    configured(tmp_path, "stablelm")
    if value != 10**9:
        text = refused(tmp_path, max_position_embeddings=value)
        assert "max_position_embeddings" in text
    text = refused(tmp_path, max_position_embeddings=64, num_hidden_layers=value)
    assert "num_hidden_layers" in text


def test_a_model_of_too_many_layers_is_refused_before_any_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers_fallback, "_made", lambda *_: pytest.fail("made"))
    text = refused(configured(tmp_path, "stablelm"), num_hidden_layers=257)
    assert text == "num_hidden_layers must be at most 256, got 257"


def test_a_model_is_made_once_to_be_checked_and_not_again_before_its_weights_are_there(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, make = [], transformers_fallback._made

    def counted(*args: Any) -> Any:
        made.append(args[2].type)
        return make(*args)

    monkeypatch.setattr(transformers_fallback, "_made", counted)
    load_model(ModelConfig(model=str(checkpoints["stablelm"])), CPU)
    assert made == ["meta"]
    load_model(ModelConfig(model=str(checkpoints["stablelm"]), load_format="dummy"), CPU)
    assert made == ["meta", "meta", "cpu"]


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "num_key_value_heads"])
def test_sizes_of_no_model_are_refused(key: str, tmp_path: Path) -> None:
    configured(tmp_path, "stablelm")
    assert refused(tmp_path, **{key: 10**10}) == f"{key} must be at most {2**24}, got {10**10}"


def test_labels_of_a_classifier_are_not_read(tmp_path: Path) -> None:
    """transformers would make a table of them."""
    path = configured(tmp_path, "stablelm", num_key_value_heads=4)
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "num_labels": 10**12}))
    assert load_model(ModelConfig(model=str(path), load_format="dummy"), CPU).model.config.num_layers == 2


def test_layers_with_other_heads_keep_their_keys_as_they_are(checkpoints: Checkpoints) -> None:
    """The scales of a quantised cache, one for each head, would not have the room."""
    model = load_model(ModelConfig(model=str(checkpoints["mimo_v2_flash"])), CPU).model
    assert isinstance(model, transformers_fallback.TransformersModel)
    shapes = {(shape.num_kv_heads, shape.head_dim) for shape in model.config.attention}
    assert len(shapes) > 1
    for kind in ("int8", "fp8"):
        with pytest.raises(ConfigError, match=f"kv_cache_dtype={kind}: .* has layers with different heads"):
            model.kv_spec(kind)


def test_tokens_that_change_by_others_of_the_batch_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frequencies of longrope follow the longest position of a batch: its name says so, and what it does."""
    scaling = {
        "rope_type": "longrope",
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
        "rope_theta": 1e4,
    }
    path = make_checkpoint(
        "phi3", tmp_path, partial_rotary_factor=1.0, num_attention_heads=4, tokenizer=False
    )
    file = path / "config.json"
    keys = {"rope_parameters": scaling, "original_max_position_embeddings": 128, "tie_word_embeddings": False}
    file.write_text(json.dumps({**json.loads(file.read_text()), **keys}))
    config = ModelConfig(model=str(path), model_impl="transformers")
    with pytest.raises(CheckpointError, match=r"rope_parameters: .* with rope_type longrope: .* the longest"):
        load_model(config, CPU)
    monkeypatch.setattr(transformers_fallback, "_ROPE_OF_BATCHES", ())
    with pytest.raises(CheckpointError, match="hidden state changes with other tokens of a batch"):
        load_model(config, CPU)
    # A hidden state of zeros shows nothing.
    monkeypatch.setattr(transformers_fallback.TransformersModel, "_change_by_others", lambda _: float("nan"))
    with pytest.raises(CheckpointError, match="hidden state changes with other tokens of a batch"):
        load_model(config, CPU)


def test_what_fails_in_the_code_is_refused_in_one_line(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> int:
        raise AttributeError("'PackedLayer' object has no\nattribute 'in_features'")

    monkeypatch.setattr(transformers_fallback, "pack_layers", fail)
    with pytest.raises(CheckpointError) as caught:
        load_model(ModelConfig(model=str(checkpoints["stablelm"])), CPU)
    text = str(caught.value)
    assert text.startswith("StableLmForCausalLM cannot run on transformers' code: ") and "\n" not in text


def test_what_the_code_has_not_is_refused_by_its_key(checkpoints: Checkpoints) -> None:
    path = checkpoints["stablelm"]
    with pytest.raises(ConfigError, match="quantization=int8: models on transformers' code have none"):
        load_model(ModelConfig(model=str(path), quantization="int8"), CPU)
    with pytest.raises(ConfigError, match="enable_lora: this model has no layers that adapters may change"):
        LLM(path, enable_lora=True, num_blocks=100, num_threads=1)
    with pytest.raises(
        ConfigError, match="tensor_parallel_size=2: ranks do not divide a model on transformers' code"
    ):
        predict(EngineConfig.from_mapping({"model": str(path), "tensor_parallel_size": 2}), "cpu", 2**33)
    with pytest.raises(CheckpointError, match="'StableLmForCausalLM' is not supported; supported"):
        load_model(ModelConfig(model=str(path), model_impl="quire"), CPU)


def test_the_log_says_what_it_costs(checkpoints: Checkpoints, caplog: pytest.LogCaptureFixture) -> None:
    load_model(ModelConfig(model=str(checkpoints["llama"])), CPU)
    assert "transformers" not in caplog.text
    load_model(ModelConfig(model=str(checkpoints["stablelm"])), CPU)
    (line,) = (record.getMessage() for record in caplog.records if "model_impl" in record.getMessage())
    assert "StableLmForCausalLM" in line and "a step takes longer" in line and "no LoRA adapters" in line


class _Gated(nn.Module):
    """A gated layer, or one that looks like it."""

    def __init__(
        self, function: Callable[[torch.Tensor], torch.Tensor], swapped: bool = False, limit: float = math.inf
    ) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(64, 96), nn.Linear(64, 96), nn.Linear(96, 64)
        self.act_fn, self.swapped, self.limit = function, swapped, limit

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        if self.swapped:
            gate, up = up, gate
        return self.down_proj(self.act_fn(gate) * up.clamp(max=self.limit))


class _ScaledRMSNorm(nn.Module):
    """An RMSNorm whose scale is `offset` more than its weight."""

    def __init__(self, offset: float) -> None:
        super().__init__()
        self.weight, self.eps, self.offset = nn.Parameter(torch.randn(64)), 1e-5, offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + self.eps).rsqrt() * (self.weight + self.offset)


@pytest.mark.parametrize(
    ("module", "kind"),
    [
        (_Gated(nn.functional.silu), GatedLayer),
        (_Gated(nn.functional.gelu), GatedLayer),
        (_Gated(nn.functional.relu), _Gated),
        (_Gated(nn.functional.silu, swapped=True), _Gated),
        (_Gated(nn.functional.silu, limit=10.0), _Gated),
        (_ScaledRMSNorm(0.0), Norm),
        (_ScaledRMSNorm(1.0), _ScaledRMSNorm),
        (nn.Linear(64, 64), PackedLayer),
    ],
    ids=["silu", "gelu", "relu", "swapped", "limited", "norm", "other norm", "linear"],
)
def test_layers_become_one_call_where_that_computes_the_same(
    module: nn.Module, kind: type[nn.Module]
) -> None:
    class Base(nn.Module):
        def get_input_embeddings(self) -> None:
            return None

    base, x = Base(), torch.randn((1, 5, 64), generator=torch.Generator().manual_seed(1))
    base.add_module("part", module)
    with torch.no_grad():
        expected = module(x)
        pack_layers(base, nn.Module())
        assert type(base.part) is kind
        torch.testing.assert_close(base.part(x), expected, atol=1e-5, rtol=1e-5)
