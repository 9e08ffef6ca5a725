"""Multi-head latent attention: one vector per token, absorbed and expanded, whatever an engine does."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.config import EngineConfig, ModelConfig
from quire.errors import CheckpointError, ConfigError
from quire.layers import latent_attention
from quire.layers.latent_attention import LatentAttention
from quire.loader.load import load_model
from quire.models.decoder import DecoderModel
from quire.plan.capacity import predict
from quire_kernels import ops, registry
from quire_kernels.metadata import AttentionMetadata
from quire_quantize.source import SourceCheckpoint as Source
from tests.fixtures.adapters import make_adapter, merge
from tests.fixtures.checkpoints import MLA_FAMILIES, VOCAB_SIZE, make_checkpoint
from tests.fixtures.drafters import told
from tests.fixtures.drive import Driver, hf_greedy, hf_logits, hf_model
from tests.fixtures.foreign_checkpoints import MAKERS, make_foreign
from tests.fixtures.runner_of import runner_of
from tests.unit.test_oracle_matrix import engine, ids

TOKENS = random.Random(1).choices(range(5, VOCAB_SIZE), k=120)
SIZE = 64 + 16
"""kv_lora_rank + qk_rope_head_dim of the checkpoints."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {family: make_checkpoint(family, root / family) for family in MLA_FAMILIES}


def expand_from(model: DecoderModel, least: int | None) -> None:
    """Has contexts expanded for sequences with so many new tokens."""
    for module in model.modules():
        if isinstance(module, LatentAttention):
            module.least_expanded = least


@pytest.fixture
def forms(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Forms in which attention was computed since they were cleared."""
    found: set[str] = set()
    attend = ops.paged_attention

    def recorded(
        query: torch.Tensor, layer: torch.Tensor, meta: AttentionMetadata, **options: Any
    ) -> torch.Tensor:
        found.add("absorbed" if layer.stride(1) == 0 else "expanded")
        return attend(query, layer, meta, **options)

    monkeypatch.setattr(ops, "paged_attention", recorded)
    yield found


@pytest.mark.row("E6", clauses=("absorbed",))
@pytest.mark.parametrize("family", MLA_FAMILIES)
def test_both_forms_equal_transformers(family: str, checkpoints: dict[str, Path], forms: set[str]) -> None:
    """Whole prompts, chunks and single tokens; memory that no token has written is NaN."""
    driver = Driver.load(checkpoints[family], num_blocks=256)
    expected = hf_logits(hf_model(checkpoints[family]), TOKENS)
    for least, form in ((None, "absorbed"), (1, "expanded")):
        expand_from(driver.model, least)
        for chunk in (None, 50, 1):
            forms.clear()
            logits = driver.logits(TOKENS if chunk != 1 else TOKENS[:40], chunk)
            torch.testing.assert_close(logits, expected[: len(logits)], atol=1e-4, rtol=0.0)
            assert forms == {form}


@pytest.mark.row("E6")
def test_a_step_has_both_forms(
    checkpoints: dict[str, Path], forms: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long chunks are expanded beside single tokens and short ones that are not, where there is memory."""
    driver = Driver.load(checkpoints["deepseek_v3"])
    begins, before, now = (0, 20, 40, 60), (8, 30, 0, 40), (1, 12, 16, 3)
    whole = [driver.logits(TOKENS[begin:]) for begin in begins]
    for memory, expected in ((2**30, {"expanded", "absorbed"}), (2**10, {"absorbed"})):
        monkeypatch.setattr(latent_attention, "EXPANDED_BYTES", memory)
        expand_from(driver.model, 12)
        sequences = [driver.add(TOKENS[begin:]) for begin in begins]
        driver.step([(one, count) for one, count in zip(sequences, before, strict=True) if count])
        forms.clear()
        mixed = driver.step(list(zip(sequences, now, strict=True)))
        assert forms == expected
        for logits, of_all, first in zip(mixed, whole, before, strict=True):
            torch.testing.assert_close(logits, of_all[first : first + len(logits)], atol=1e-4, rtol=0.0)


def test_where_expanding_pays(checkpoints: dict[str, Path]) -> None:
    """Never on a CPU: what a token gets must not depend on its chunk. On a GPU from a number of new tokens on
    for which its products are fewer."""
    model = Driver.load(checkpoints["deepseek_v3"]).model
    layer = model.layers[0].self_attn
    assert isinstance(layer, LatentAttention) and layer.least_expanded is None
    layer.finish("cuda")
    least, context = layer.least_expanded, 10_000
    # Of a pair, rank 64: 64 + 16 and 64 numbers, or 32 + 16 and 48; of a token of the context 64 * (32 + 48).
    assert least is not None
    absorbed, expanded = (64 + 16 + 64) * context, (32 + 16 + 48) * context
    assert absorbed * least > expanded * least + 64 * (32 + 48) * context
    assert absorbed * (least // 3) < expanded * (least // 3) + 64 * (32 + 48) * context


@pytest.mark.row("C16", clauses=("bytes",))
def test_a_token_takes_one_latent_and_one_rotated_part(checkpoints: dict[str, Path]) -> None:
    """In the pool as it is allocated, in what is planned, and in what a step is said to read."""
    path, block_size = checkpoints["deepseek_v3"], 16
    for dtype, itemsize in (("float32", 4), ("bfloat16", 2)):
        llm = engine(path, num_blocks=20, block_size=block_size, dtype=dtype)
        runner = runner_of(llm.core)
        of_token = len(runner.model.layers) * SIZE * itemsize
        assert runner.kv_cache.nbytes == 20 * block_size * of_token
        assert runner.info.work is not None and runner.info.work.kv_token_bytes == SIZE * itemsize
        config = EngineConfig.from_mapping({"model": str(path), "dtype": dtype, "max_model_len": 128})
        assert predict(config, "cpu", 2**30).bytes_per_token == of_token
        llm.core.close()


@pytest.fixture(scope="module")
def greedy(checkpoints: dict[str, Path]) -> list[list[int]]:
    """Of PROMPTS, by transformers."""
    hf = hf_model(checkpoints["deepseek_v3"])
    return [hf_greedy(hf, prompt, 12) for prompt in PROMPTS]


PROMPTS = [TOKENS[:length] for length in (3, 40, 70)] + [TOKENS[10:30]]
GREEDY: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}


@pytest.mark.row("C16", clauses=("equal",))
@pytest.mark.parametrize(
    "options",
    [
        {"num_draft_tokens": 4},
        {"num_draft_tokens": 4, "async_scheduling": True},
        {"preemption_mode": "swap", "host_cache_memory": "16MiB", "num_blocks": 18},
    ],
    ids=["drafts", "drafts ahead", "swapped"],
)
def test_engines_of_every_kind_equal_transformers(
    checkpoints: dict[str, Path], greedy: list[list[int]], options: dict[str, Any]
) -> None:
    """What the oracle matrix has not; with three choices each, whose last block is copied."""
    with told([prompt + one for prompt, one in zip(PROMPTS, greedy, strict=True)], VOCAB_SIZE):
        llm = engine(checkpoints["deepseek_v3"], **options)
        outputs = llm.generate(PROMPTS, SamplingParams(n=3, **GREEDY))
    assert ids(outputs) == greedy
    assert all(other.token_ids == one.token_ids for one in outputs for other in one.others)
    scheduler, is_swapped = llm.core.scheduler, "preemption_mode" in options
    assert (llm.core.stats().num_swaps > 0) == is_swapped == (scheduler.num_accepted_drafts == 0)
    llm.core.close()


def test_adapters_change_all_projections_but_the_absorbed_one(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    path, prompt = checkpoints["deepseek_v3"], PROMPTS[1]
    targets = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")
    adapter = make_adapter(tmp_path / "a", hf_model(path), targets=targets)
    absorbed = make_adapter(tmp_path / "b", hf_model(path), targets=("kv_b_proj",))
    expected = hf_greedy(merge(hf_model(path), adapter), prompt, 12)
    options = {
        "enable_lora": True,
        "max_num_seqs": 4,
        "num_blocks": 64,
        "max_model_len": 128,
        "dtype": "float32",
    }
    llm = LLM(path, lora_modules={"a": str(adapter)}, **options)
    params = SamplingParams(**GREEDY)
    assert llm.generate([prompt], params, adapters="a")[0].token_ids == expected
    assert llm.generate([prompt], params)[0].token_ids == hf_greedy(hf_model(path), prompt, 12) != expected
    llm.core.close()
    with pytest.raises(CheckpointError, match="kv_b_proj"):
        LLM(path, lora_modules={"b": str(absorbed)}, **options)


@pytest.mark.parametrize("name", ["FP8 blocks", "GPTQ act-order"])
def test_what_is_absorbed_may_be_quantised(
    checkpoints: dict[str, Path], name: str, tmp_path: Path, forms: set[str]
) -> None:
    """It is what the quantised weights mean, in either form."""
    plain, exempt = checkpoints["deepseek_v3"], ("lm_head", "gate")
    path, means = make_foreign(plain, tmp_path / "foreign", MAKERS[name], exempt=exempt)
    assert any("kv_b_proj" in name for name in load_file(path / "model.safetensors") if "scale" in name)
    meant = rewritten(plain, tmp_path / "meant")
    save_file(means, meant / "model.safetensors", metadata={"format": "pt"})
    expected = hf_logits(hf_model(meant), TOKENS)
    with registry.forced({"grouped_linear": "reference"}):
        driver = Driver.load(path, dtype="float32")
    for least in (None, 1):
        expand_from(driver.model, least)
        torch.testing.assert_close(driver.logits(TOKENS), expected, atol=2e-3, rtol=0.0)
    assert forms == {"absorbed", "expanded"}


@pytest.mark.parametrize("quantization", ["int8", "w8a8"])
def test_weights_that_are_quantised_here_leave_the_absorbed_one(
    checkpoints: dict[str, Path], quantization: str
) -> None:
    driver = Driver.load(checkpoints["youtu"], quantization=quantization)
    layer = driver.model.layers[0].self_attn
    assert isinstance(layer, LatentAttention)
    assert layer.kv_up.nbytes == 4 * (32 + 48) * 64 * 4 > layer.out.nbytes
    exact = Driver.load(checkpoints["youtu"]).logits(TOKENS)
    error = (driver.logits(TOKENS) - exact).square().mean().sqrt() / exact.std()
    assert 0 < error < 0.15


def rewritten(path: Path, to: Path, **values: Any) -> Path:
    """A copy of a checkpoint with other keys in its config.json; None: without the key."""
    shutil.copytree(path, to)
    config = {**json.loads((path / "config.json").read_text()), **values}
    (to / "config.json").write_text(json.dumps(config))
    return to


@pytest.mark.row("E6")
def test_layers_that_predict_further_tokens_are_left_out(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """As in DeepSeek-V3's files, which have layer 61 of 61; another tensor is still an error."""
    path, last = checkpoints["deepseek_v3"], 2
    copy = rewritten(path, tmp_path / "copy", num_nextn_predict_layers=1)
    tensors = load_file(path / "model.safetensors")
    more = {
        name: tensors["model.norm.weight"].clone() for name in ("enorm.weight", "self_attn.o_proj.weight")
    }
    whole = tensors | {f"model.layers.{last + 1}.{name}": tensor for name, tensor in more.items()}
    save_file(whole, copy / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(Driver.load(copy).logits(TOKENS), Driver.load(path).logits(TOKENS))
    save_file(
        tensors | {f"model.layers.{last}.enorm.weight": more["enorm.weight"]}, copy / "model.safetensors"
    )
    with pytest.raises(CheckpointError, match=r"unexpected tensors: model\.layers\.2\.enorm"):
        Driver.load(copy)


@pytest.mark.row("E6", clauses=("equal",))
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("deepseek_v3", {"rope_interleave": False}),
        ("deepseek_v3", {"attention_bias": True, "rms_norm_eps": 1e-3}),
        ("deepseek_v3", {"q_lora_rank": None, "legacy_config": True}),
        ("deepseek_v2", {"q_lora_rank": 32, "attention_bias": True, "topk_method": "greedy"}),
        ("deepseek_v2", {"v_head_dim": 80, "rope_parameters": {"rope_type": "linear", "factor": 4.0}}),
    ],
)
def test_switches_of_the_configuration(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Also files without what transformers 5 derives, as those of the hub are."""
    path = make_checkpoint(family, tmp_path / "model", tokenizer=False, **options)
    config = json.loads((path / "config.json").read_text())
    for key in ("head_dim", "qk_head_dim"):
        config.pop(key, None)
    (path / "config.json").write_text(json.dumps(config))
    expected = hf_logits(hf_model(path), TOKENS)
    driver = Driver.load(path)
    for least in (None, 1):
        expand_from(driver.model, least)
        torch.testing.assert_close(driver.logits(TOKENS), expected, atol=2e-4, rtol=0.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_lora_rank": "64"}, "kv_lora_rank must be a positive whole number up to 65536, got '64'"),
        ({"kv_lora_rank": 10**9}, "kv_lora_rank must be a positive whole number up to 65536"),
        ({"q_lora_rank": 0}, "q_lora_rank must be a positive whole number up to 16777216, got 0"),
        ({"qk_rope_head_dim": 15}, "an even number of dimensions rotates"),
        ({"v_head_dim": True}, "v_head_dim must be a positive whole number"),
        ({"rope_interleave": 1}, "rope_interleave must be true or false, got 1"),
        (
            {"q_lora_rank": None, "attention_bias": True},
            "attention_bias true is not supported without q_lora",
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 8.0, "mscale_all_dim": "x"}},
            "mscale_all_dim 'x' must be a positive number",
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "mscale_all_dim": 1.0}},
            "mscale_all_dim needs the key factor",
        ),
    ],
)
def test_what_is_not_supported_is_refused(
    change: dict[str, Any], message: str, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    copy = rewritten(checkpoints["deepseek_v3"], tmp_path / "copy", **change)
    with pytest.raises(CheckpointError) as raised:
        load_model(ModelConfig(model=str(copy)), torch.device("cpu"))
    assert str(raised.value).startswith(f"{copy / 'config.json'}: ") and message in str(raised.value)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_quantised_cache_is_refused(checkpoints: dict[str, Path], kind: str) -> None:
    with pytest.raises(ConfigError, match=f"kv_cache_dtype={kind} .*latent attention"):
        engine(checkpoints["deepseek_v2"], kv_cache_dtype=kind)


def test_weights_are_not_quantised_for_others(checkpoints: dict[str, Path]) -> None:
    with pytest.raises(CheckpointError, match="DeepseekV3ForCausalLM has latent attention"):
        Source(checkpoints["deepseek_v3"])
