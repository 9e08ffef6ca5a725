"""Checkpoints that others quantised compute what `transformers` does with the weights they mean."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.config import ModelConfig
from quire.errors import CheckpointError
from quire.layers.hf_config import HFConfig
from quire.layers.scheme import SCHEMES
from quire.loader.load import empty_model, fill_weights, load_model
from quire.loader.quantized import scheme
from quire.loader.quantized.decoded import Decoded
from quire.loader.quantized.rules import read_rules
from quire.loader.quantized.scheme import ForeignScheme, ForeignTensors
from quire.models.decoder import DecoderModel
from quire_kernels import registry
from quire_kernels.cpu.linear import NativeLinear
from quire_kernels.cpu.native import Format as NativeFormat
from quire_kernels.weights import QuantizedRows, ReorderedLinear
from tests.fixtures.checkpoints import build_model, make_checkpoint
from tests.fixtures.drive import Driver, hf_logits
from tests.fixtures.foreign_checkpoints import (
    GROUP,
    MAKERS,
    Maker,
    Tensors,
    make_foreign,
    store_gptq,
    store_int8,
    store_packed,
)

CPU = torch.device("cpu")
IDS = torch.randint(5, 512, (40,), generator=torch.Generator().manual_seed(0)).tolist()
WITH_QUANTISED_INPUTS = ("W8A8 per channel", "W8A8 per tensor", "LLM.int8")
"""Formats whose product has inputs of eight bits, whichever implementation it is."""
OTHER_FAMILIES = ("llama3", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3")
"""Names of layers and their fusing are the same for all formats, so that one of each kind of them will do."""
Make = Callable[..., tuple[Path, Tensors]]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes the checkpoint of plain weights of a family, once."""
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            made[family] = make_checkpoint(family, tmp_path_factory.mktemp(family), tokenizer=False)
        return made[family]

    return make


@pytest.fixture
def make(plain: Callable[[str], Path], tmp_path: Path) -> Make:
    """Makes a quantised checkpoint of the plain llama; see make_foreign."""
    return lambda *args, **options: make_foreign(plain("llama"), tmp_path / "foreign", *args, **options)


def expected(means: Tensors, family: str = "llama") -> torch.Tensor:
    """What `transformers` says about IDS, with these weights."""
    model = build_model(family)
    model.load_state_dict(means, strict=False)
    model.tie_weights()
    return hf_logits(model, IDS)


def logits(path: Path) -> torch.Tensor:
    """Ours, with the numbers that weights in groups mean."""
    with registry.forced({"grouped_linear": "reference"}):
        return Driver.load(path, dtype="float32").logits(IDS)


def error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


def check(path: Path, means: Tensors) -> None:
    torch.testing.assert_close(logits(path), expected(means), atol=1e-3, rtol=0.0)


def complaint(path: Path, **options: Any) -> str:
    """The message of the CheckpointError that loading raises: one line."""
    with pytest.raises(CheckpointError) as raised:
        load_model(ModelConfig(model=str(path), **options), CPU)
    message = str(raised.value)
    assert "\n" not in message
    return message


@pytest.mark.row("D12", clauses=("channel", "block"))
@pytest.mark.parametrize("name", MAKERS)
def test_logits_are_those_of_the_weights_that_are_meant(name: str, make: Make) -> None:
    path, means = make(MAKERS[name])
    theirs = expected(means)
    if name in WITH_QUANTISED_INPUTS:
        assert error(logits(path), theirs) < 0.08
    else:
        torch.testing.assert_close(logits(path), theirs, atol=1e-3, rtol=0.0)


@pytest.mark.parametrize("name", ["GPTQ act-order", "W8A8 per channel", "FP8 blocks"])
@pytest.mark.parametrize("family", OTHER_FAMILIES)
def test_every_family_loads(family: str, name: str, plain: Callable[[str], Path], tmp_path: Path) -> None:
    path, means = make_foreign(plain(family), tmp_path / "foreign", MAKERS[name])
    theirs = expected(means, family)
    if name in WITH_QUANTISED_INPUTS:
        assert error(logits(path), theirs) < 0.15
    else:
        torch.testing.assert_close(logits(path), theirs, atol=2e-3, rtol=0.0)


@pytest.mark.row("D11", clauses=("bound", "gemm"))
@pytest.mark.parametrize("name", ["W8A8 per channel", "W8A8 per tensor"])
def test_eight_bits_are_near_plain_weights_and_use_the_integer_product(
    name: str, make: Make, plain: Callable[[str], Path]
) -> None:
    """Inputs are quantised as they come (per token, in groups), weights as the file has them."""
    path, _ = make(MAKERS[name])
    driver = Driver.load(path, dtype="float32")
    assert error(driver.logits(IDS), Driver.load(plain("llama")).logits(IDS)) < 0.1
    assert isinstance(driver.model, DecoderModel) and driver.model.is_fused
    for layer in driver.model.layers:
        packed = layer.self_attn.qkv.packed  # type: ignore[union-attr]
        assert isinstance(packed, NativeLinear) and packed.struct.format == NativeFormat.W8A8


@pytest.mark.row("D13", clauses=("gemv",))
@pytest.mark.parametrize("name", ["AWQ gemm", "GPTQ", "GPTQ act-order", "W4A16 with zeros"])
def test_codes_are_what_products_read(name: str, make: Make) -> None:
    """They are restored inside the product, of one row too: no matrix of numbers is kept anywhere."""
    path, means = make(MAKERS[name])
    model = load_model(ModelConfig(model=str(path), dtype="float32"), CPU).model
    x = torch.randn(1, 128, generator=torch.Generator().manual_seed(2))
    for index, layer in enumerate(model.layers):
        packed = layer.mlp.down.packed  # type: ignore[union-attr]
        native = packed.layer if isinstance(packed, ReorderedLinear) else packed
        assert isinstance(native, NativeLinear) and native.struct.format == NativeFormat.GROUPED
        # Half a byte a weight, and for 32 of them a scale and a minimum of float32 at most.
        assert native.nbytes <= 64 * 128 * (0.5 + 8 / 32)
        assert error(packed(x), x @ means[f"model.layers.{index}.mlp.down_proj.weight"].T) < 0.02


# Orders of inputs, and parts of a fused layer that differ.


def test_parts_of_a_layer_may_have_orders_of_their_own(make: Make) -> None:
    """q, k and v of one input, as well as gate and up, sorted by activations of different calibrations."""
    path, means = make(Maker(MAKERS["GPTQ act-order"].config, store_gptq(4, GROUP, offset=1, order="own")))
    check(path, means)


def test_orders_that_are_none_are_refused(make: Make) -> None:
    def store(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        tensors, means = MAKERS["GPTQ"].store(weight)
        return {**tensors, "g_idx": tensors["g_idx"].clamp(max=0)}, means

    path, _ = make(Maker(MAKERS["GPTQ"].config, store))
    assert complaint(path) == (
        f"{path / 'config.json'}: model.layers.0.mlp.down_proj: g_idx does not divide the inputs among "
        "4 groups of one size"
    )


def test_a_bias_that_the_model_has_not_must_be_zero(make: Make) -> None:
    def store(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        tensors, means = MAKERS["GPTQ"].store(weight)
        return {**tensors, "bias": tensors["bias"] + 1}, means

    path, _ = make(Maker(MAKERS["GPTQ"].config, store))
    assert "14 unexpected tensors: model.layers.0.mlp.down_proj.bias" in complaint(path)


# What config.json says of layers.


def _group(targets: list[str], layout: str, weights: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {"targets": targets, "format": layout, "weights": weights, **others}


FOUR = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
EIGHT = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
DYNAMIC = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
FOUR_BITS, WHOLE_BYTES = Maker({}, store_packed(4, GROUP, zeros=False)), Maker({}, store_int8)
FLOATS = MAKERS["FP8 per channel"]
CONFIGURATIONS: dict[str, tuple[dict[str, Any], dict[str, Maker], tuple[str, ...]]] = {
    "an ignore list of names and patterns": (
        {
            "format": "pack-quantized",
            "config_groups": {"group_0": _group(["Linear"], "pack-quantized", FOUR)},
            "ignore": ["lm_head", "model.layers.0.self_attn.v_proj", "re:.*layers\\.1\\.mlp.*"],
        },
        {"": FOUR_BITS},
        ("lm_head", "layers.0.self_attn.v_proj", "layers.1.mlp"),
    ),
    "a quantised head": (
        {
            "format": "pack-quantized",
            "config_groups": {"group_0": _group(["Linear"], "pack-quantized", FOUR)},
            "ignore": [],
        },
        {"": FOUR_BITS},
        (),
    ),
    "a head of other bits": (
        {
            "format": "mixed-precision",
            "config_groups": {
                "group_0": _group(["Linear"], "pack-quantized", FOUR),
                "group_1": _group(["lm_head"], "float-quantized", FP8),
            },
            "ignore": None,
        },
        {"lm_head": FLOATS, "": FOUR_BITS},
        (),
    ),
    "patterns before classes, whatever their order": (
        {
            "format": "mixed-precision",
            "config_groups": {
                "group_0": _group(["Linear"], "float-quantized", FP8),
                "group_1": _group(["re:.*(q|k|v|o)_proj$"], "pack-quantized", FOUR),
            },
            "ignore": ["lm_head"],
        },
        {"self_attn": FOUR_BITS, "mlp": FLOATS},
        ("lm_head",),
    ),
    "names before patterns": (
        {
            "format": "mixed-precision",
            "config_groups": {
                "group_0": _group(["re:.*_proj"], "pack-quantized", FOUR),
                "group_1": _group(["model.layers.1.mlp.down_proj"], "float-quantized", FP8),
            },
            "ignore": ["lm_head"],
        },
        {"layers.1.mlp.down_proj": FLOATS, "": FOUR_BITS},
        ("lm_head",),
    ),
    "parts of one layer that differ": (
        {
            "format": "mixed-precision",
            "config_groups": {
                "group_0": _group(["re:.*(q|up|o)_proj$"], "pack-quantized", FOUR),
                "group_1": _group(["re:.*(k|gate|down)_proj$"], "float-quantized", FP8),
            },
            "ignore": ["lm_head"],
        },
        {
            **dict.fromkeys(("q_proj", "up_proj", "o_proj"), FOUR_BITS),
            **dict.fromkeys(("k_proj", "gate_proj", "down_proj"), FLOATS),
        },
        ("lm_head", "v_proj"),
    ),
    "a scheme that quantises nothing": (
        {
            "format": "pack-quantized",
            "config_groups": {
                "group_0": _group(["Linear"], "pack-quantized", FOUR),
                "group_1": {"targets": ["re:.*o_proj"], "weights": None, "input_activations": None},
            },
            "ignore": ["lm_head"],
            "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"},
        },
        {"": FOUR_BITS},
        ("lm_head", "o_proj"),
    ),
}


@pytest.mark.row("D20", clauses=("matrix",))
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_layers_are_quantised_as_the_configuration_says(name: str, make: Make) -> None:
    config, makers, exempt = CONFIGURATIONS[name]
    config = {"quant_method": "compressed-tensors", **config}
    check(*make(makers, config=config, exempt=exempt))


def test_a_quantised_head_answers_greedily(make: Make) -> None:
    """`argmax` of the head, which no logits are kept for, too."""
    config, makers, exempt = CONFIGURATIONS["a quantised head"]
    path, means = make(makers, config={"quant_method": "compressed-tensors", **config}, exempt=exempt)
    with registry.forced({"grouped_linear": "reference"}):
        model = load_model(ModelConfig(model=str(path), dtype="float32"), CPU).model
    hidden = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    assert torch.equal(model.best_tokens(hidden), (hidden @ means["lm_head.weight"].T).argmax(1))


def test_inputs_of_a_head_in_fp8_are_not_quantised(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where those of other layers are, which are fp8; torch's "meta" is a device that is no CPU."""
    config, makers, exempt = CONFIGURATIONS["a head of other bits"]
    path, _ = make(makers, config={"quant_method": "compressed-tensors", **config}, exempt=exempt)
    model, files, _ = empty_model(ModelConfig(model=str(path), dtype="bfloat16"), CPU)
    assert files is not None
    fill_weights(model, files.tensors(), files.source)
    tensors = model.lm_head.tensors
    assert isinstance(tensors, ForeignTensors) and tensors.is_head
    tensors.device, decoded = torch.device("meta"), tensors.parts[0].decode()
    for tensors.is_head, expected in ((True, "fp8_weights"), (False, "fp8")):
        matrix = tensors._computable(decoded).matrix
        assert isinstance(matrix, QuantizedRows) and matrix.quantization == expected
    # What is dequantised first, to be quantised anew, is a head too.
    wide = Decoded(torch.ones(64, 64))
    for quantization, of_heads in (("fp8", "fp8_weights"), ("int4", "int8")):
        found: list[str | None] = []
        monkeypatch.setattr(
            scheme.ops, "pack_linear", lambda *_, found=found, **named: found.append(named["quantization"])
        )
        tensors.scheme = ForeignScheme(tensors.scheme.rules, path, SCHEMES[quantization], keeps_codes=False)
        for tensors.is_head in (True, False):
            tensors._packed(wide, None, None)
        assert found == [of_heads, quantization]
    for is_head, quantization in ((True, "fp8_weights"), (False, None)):
        table = SCHEMES["fp8"].table("lm_head", 64, 64, is_head=is_head, dtype=torch.bfloat16)
        assert table.quantization == quantization


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("AWQ gemm", "modules_to_not_convert"),
        ("GPTQ", "modules_to_not_convert"),
        ("FP8 blocks", "modules_to_not_convert"),
        ("FP8 per tensor", "ignored_layers"),
        ("FP8 of FBGEMM", "modules_to_not_convert"),
        ("NVFP4 of ModelOpt", "ignore"),
        ("NF4", "llm_int8_skip_modules"),
        ("LLM.int8", "llm_int8_skip_modules"),
    ],
)
def test_lists_of_exempt_layers(name: str, key: str, make: Make) -> None:
    """Whole parts of names count: "layers.1" is not "layers.11", and "v_proj" every v."""
    config = {**MAKERS[name].config, key: ["v_proj", "layers.1.mlp", "lm_head"]}
    path, means = make(MAKERS[name], config=config, exempt=("v_proj", "layers.1.mlp", "lm_head"))
    if name in WITH_QUANTISED_INPUTS:
        assert error(logits(path), expected(means)) < 0.08
    else:
        check(path, means)


def test_gptq_names_the_layers_it_has_quantised(make: Make) -> None:
    config = {
        **MAKERS["GPTQ"].config,
        "modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.up_proj"]],
    }
    exempt = ("k_proj", "v_proj", "o_proj", "gate_proj", "down_proj", "lm_head")
    check(*make(MAKERS["GPTQ"], config=config, exempt=exempt))


def test_gptq_may_have_quantised_the_head(make: Make) -> None:
    check(*make(MAKERS["GPTQ"], config={**MAKERS["GPTQ"].config, "lm_head": True}, exempt=()))


# What is not supported, in one line.


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            {"quant_method": "hqq"},
            "quantization_config: weights quantised by 'hqq' are not supported; supported: awq, gptq, "
            "compressed-tensors, fp8, fbgemm_fp8, modelopt, bitsandbytes",
        ),
        ({"bits": 4}, "weights quantised by 'unknown' are not supported"),
        ({"quant_method": "hqq"}, "weights quantised by 'hqq' are not supported"),
        (
            {"quant_method": "awq", "version": "marlin"},
            "version 'marlin' is not supported; supported: gemm, gemv",
        ),
        ({"quant_method": "awq", "bits": 8}, "of awq: bits 8 is not supported; supported: 4"),
        ({"quant_method": "gptq", "bits": 5}, "of gptq: bits 5 is not supported; supported: 2, 3, 4, 8"),
        (
            {"quant_method": "gptq", "bits": 4, "dynamic": {"-:x": {}}},
            "of gptq: dynamic, which gives",
        ),
        (
            {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
            "checkpoint_format 'marlin'",
        ),
        ({"quant_method": "gptq", "bits": 4, "group_size": "x"}, "group_size 'x' is no number of features"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ' is not supported"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {},
                "sparsity_config": {"format": "sparse-24"},
            },
            "of compressed-tensors: sparsity_config is not supported",
        ),
        (
            {"config_groups": {"group_0": _group(["Linear"], "marlin-24", FOUR)}},
            "of compressed-tensors: weights of the format marlin-24 of int4 per group are not supported",
        ),
        (
            {"config_groups": {"group_0": _group(["Embedding"], "pack-quantized", FOUR)}},
            "quantised embeddings (targets: Embedding) are not supported",
        ),
        (
            {"config_groups": {"group_0": _group(["re:("], "pack-quantized", FOUR)}},
            "a target is no regular expression",
        ),
        ({"quant_method": "compressed-tensors"}, "holds a value that cannot be right"),
        ("awq", "holds a value that cannot be right"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    config: Any, says: str, plain: Callable[[str], Path], tmp_path: Path
) -> None:
    values = json.loads((plain("llama") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, "quantization_config": config}))
    message = complaint(tmp_path)
    assert message.startswith(str(tmp_path / "config.json")) and says in message


def test_a_file_that_is_not_as_its_configuration_says(make: Make, plain: Callable[[str], Path]) -> None:
    path, _ = make(MAKERS["AWQ gemm"], config={**MAKERS["AWQ gemm"].config, "group_size": 64})
    assert f"{path}/model.safetensors: model.layers.0.mlp.down_proj.qzeros has shape [4, 8]" in complaint(
        path
    )


def test_plain_weights_are_no_fp8(make: Make) -> None:
    """They would be rounded to eight bits."""
    path, _ = make(MAKERS["FP8 blocks"], exempt=("lm_head", "v_proj"))
    assert "v_proj.weight has type torch.float32, expected torch.float8_e4m3fn" in complaint(path)


def test_weights_may_be_computed_with_as_numbers(make: Make) -> None:
    """With `dequantized`; other values of `quantization` quantise these numbers anew."""
    path, means = make(MAKERS["W8A8 per channel"])
    theirs = expected(means)
    ours = Driver.load(path, dtype="float32", quantization="dequantized").logits(IDS)
    torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=0.0)
    assert 1e-3 < error(Driver.load(path, dtype="float32", quantization="int8").logits(IDS), theirs) < 0.08


@pytest.mark.parametrize(("asked", "dtype"), [("auto", torch.bfloat16), ("float16", torch.float16)])
def test_activations_of_files_in_float16_have_a_type_with_products(
    asked: str, dtype: torch.dtype, make: Make
) -> None:
    """On a CPU; that is what most files of AWQ and GPTQ say."""
    path, _ = make(MAKERS["AWQ gemm"])
    values = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**values, "dtype": "float16"}))
    assert load_model(ModelConfig(model=str(path), dtype=asked), CPU).config.dtype == dtype


# What is said.


def test_what_is_kept_and_what_it_costs_is_logged(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    path, _ = make(MAKERS["FP8 blocks"])
    with caplog.at_level(logging.INFO, "quire"):
        load_model(ModelConfig(model=str(path), dtype="bfloat16"), CPU)
    assert (
        f"{path}/config.json: fp8 weights: 0.1 MiB in the files are kept in 0.1 MiB; 0.1 MiB of these are "
        "numbers in the type of the activations, as there is no product for what is stored here"
    ) in caplog.messages


@pytest.mark.parametrize("name", ["W8A8 per channel", "FP8 blocks", "NF4"])
def test_what_a_plan_says_of_weights_is_what_they_take(name: str, make: Make) -> None:
    path, _ = make(MAKERS[name])
    config = ModelConfig(model=str(path), dtype="bfloat16")
    planned = empty_model(config, torch.device("meta")).model.packed_bytes("cpu")
    assert planned == pytest.approx(load_model(config, CPU).weight_bytes, rel=0.05)


@pytest.mark.parametrize("name", ["NF4", "NF4 nested"])
def test_blocks_of_bitsandbytes_go_on_in_the_next_row(name: str, tmp_path: Path) -> None:
    """They are of 64 weights wherever rows end: checkpoints whose rows are no multiple of it were refused."""
    # Heads of 24; the last block of each matrix is shorter, or starts in the middle of a row.
    sizes = {"hidden_size": 72, "intermediate_size": 90, "num_attention_heads": 3, "num_key_value_heads": 1}
    plain = make_checkpoint("llama", tmp_path / "plain", tokenizer=False, **sizes)
    path, means = make_foreign(plain, tmp_path / "foreign", MAKERS[name])
    model = build_model("llama", **sizes)
    model.load_state_dict(means, strict=False)
    torch.testing.assert_close(logits(path), hf_logits(model, IDS), atol=1e-3, rtol=0.0)


def test_rules_of_nemotron_h_name_the_modules_of_its_files() -> None:
    """Layers under "backbone" were not exempt, nor routers, which modelopt does not list."""
    quantized = {"quant_method": "modelopt", "quant_algo": "FP8"}
    exempt = {"ignore": ["backbone.layers.4.mixer.in_proj", "lm_head"]}
    rules = read_rules(HFConfig(Path("config.json"), {"quantization_config": {**quantized, **exempt}}))
    assert rules is not None
    names = ("layers.4.mixer.in_proj", "layers.5.mixer.in_proj", "layers.5.mixer.gate")
    found = [rules.format_of(f"model.{name}") is not None for name in names]
    assert found == [False, True, False]
