"""The tables of docs/checkpoints.md say what loads, and as what."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file

from quire.config import ModelConfig, choices
from quire.errors import CheckpointError
from quire.layers.linear import AsStoredLinear, Linear
from quire.loader.load import empty_model, fill_weights
from quire.loader.quantized.scheme import ForeignTensors
from quire.models.decoder import DecoderModel
from quire.models.registry import ARCHITECTURES
from quire_kernels import registry
from quire_kernels.cpu.linear import NativeLinear
from quire_kernels.cpu.native import Format as NativeFormat
from quire_kernels.cuda.linear import why_not_pack
from quire_kernels.weights import JoinedLinear, PackedLinear, QuantizedRows, ReorderedLinear
from tests.fixtures import gguf_files
from tests.fixtures.checkpoints import (
    DELTA_FAMILIES,
    DENSE_FAMILIES,
    FAMILIES,
    GEMMA_FAMILIES,
    HYBRID_FAMILIES,
    MLA_FAMILIES,
    MLA_SIBLINGS,
    MOE_FAMILIES,
    OTHER_FAMILIES,
    build_model,
    make_checkpoint,
)
from tests.fixtures.drive import Driver, hf_logits, hf_model
from tests.fixtures.foreign_checkpoints import MAKERS, Tensors, make_foreign
from tests.fixtures.vision_checkpoints import OTHER_KINDS, VISION_KINDS, make_vision_checkpoint

TEXT_FAMILIES = (*FAMILIES, *GEMMA_FAMILIES)
OF_GGUF = ("llama", "llama3", "qwen2", "qwen3")
OF_FORMATS = ("mixtral", "qwen2_moe", "qwen3_moe", "dots1", "glm4_moe")
"""Families with experts of which files quantised by others are loaded."""
GATES = ("in_proj_ba", "in_proj_a", "in_proj_b")
"""Layers of gated DeltaNet that files of others leave as they are."""
IDS = torch.randint(5, 512, (24,), generator=torch.Generator().manual_seed(0)).tolist()
MOST_OFF = 0.2
"""Distance of logits that inputs in eight bits may make in a model of random weights."""
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64}
"""Multiples of GGUF's largest blocks."""
_FEW = {**SIZES, "intermediate_size": 256, "num_local_experts": 4, "num_hidden_layers": 1}
SIZES_OF_EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": _FEW,
    "qwen2_moe": {
        **_FEW,
        "num_experts": 4,
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 512,
        "mlp_only_layers": [],
    },
    "qwen3_moe": {**_FEW, "moe_intermediate_size": 256, "mlp_only_layers": []},
    "gpt_oss": _FEW,
}
OTHERS_OF_GGUF = (
    *(*GEMMA_FAMILIES, "phi3", "glm4", "granite", "olmo2", "olmo3", "smollm3", "seed_oss", "ernie4_5"),
    *("exaone4", "hunyuan", "dots1", "glm4_moe", "granitemoe", "ernie4_5_moe", "olmoe", "minimax_m2"),
    *(*MLA_FAMILIES, "lfm2", "lfm2_moe", "qwen3_5", "qwen3_5_moe"),
)
_EXPERTS = {"moe_intermediate_size": 256, "num_hidden_layers": 2}
_LATENT = {"qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64, "kv_lora_rank": 64}
SIZES_OF_OTHERS: dict[str, dict[str, Any]] = {
    **{family: {"query_pre_attn_scalar": 64} for family in ("gemma2", "gemma3")},
    "lfm2": {"intermediate_size": 384},
    "qwen3_5": {"linear_value_head_dim": 256},
    "qwen3_5_moe": {
        "linear_value_head_dim": 256,
        "num_experts": 4,
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256,
    },
    "lfm2_moe": {"moe_intermediate_size": 256, "num_experts": 4},
    **dict.fromkeys(("dots1", "glm4_moe", "ernie4_5_moe"), _EXPERTS),
    **{family: {**_EXPERTS, **_LATENT, "q_lora_rank": 256, "head_dim": 32} for family in MLA_FAMILIES},
}
SIZES_OF_OTHERS["deepseek_v2"]["q_lora_rank"] = None
SIZES_OF_OTHERS |= {family: {"num_local_experts": 4} for family in ("granitemoe", "minimax_m2")}
SIZES_OF_OTHERS["olmoe"] = {"num_experts": 4}
PLAIN_IN_GGUF = ("kv_b_proj", "moe_statics", "conv.conv", "conv1d", "linear_attn.out_proj")
"""Parts of names of tensors that the test's files hold in F32, besides routers."""
AS = {
    NativeFormat.GROUPED: "codes x int8",
    NativeFormat.W8A8: "int8 x int8",
    NativeFormat.INT8: "int8",
    NativeFormat.INT4: "int4",
}


def table(first: str) -> dict[str, list[str]]:
    """A table by the title of its first column, and its lines by what they begin with."""
    lines = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text().splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith(f"| {first} |"))
    found = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        name, *cells = (cell.strip().strip("`") for cell in line.strip("|").split("|"))
        assert name not in found
        found[name] = cells
    return found


BY_ARCHITECTURE = {name: cells for name, *cells in table("family").values()}
FOREIGN, GGUF, PLAIN = table("format"), table("type"), table("`quantization`")


def linears(packed: PackedLinear) -> Iterator[PackedLinear]:
    """The products that a layer is made of."""
    if isinstance(packed, ReorderedLinear):
        yield from linears(packed.layer)
    elif isinstance(packed, JoinedLinear):
        for part in packed.parts:
            yield from linears(part)
    else:
        yield packed


def kept(driver: Driver) -> str:
    """What the tables call the weights of a model that is loaded, all linear layers of the decoder."""
    assert isinstance(driver.model, DecoderModel)
    found = {
        AS.get(NativeFormat(one.struct.format), "numbers") if isinstance(one, NativeLinear) else "numbers"
        for layer in driver.model.layers
        for linear in layer.modules()
        if isinstance(linear, Linear) and not isinstance(linear, AsStoredLinear)
        for one in linears(linear.packed)
    }
    return ", ".join(sorted(found))


def planned(path: Path, quantization: str | None = None) -> float:
    """Bytes that the decoder's weights are to take on a GPU, as a share of what they would as numbers."""
    sizes = [
        empty_model(
            ModelConfig(model=str(path), dtype="bfloat16", quantization=one),  # type: ignore[arg-type]
            torch.device("meta"),
        ).model.packed_bytes("cuda")
        for one in (quantization, "dequantized")
    ]
    return sizes[0] / sizes[1]


@functools.cache
def plain_logits(family: str) -> torch.Tensor:
    """Those of transformers for IDS, of the family's plain weights."""
    return hf_logits(build_model(family), IDS)


def some_of(families: Sequence[str], name: str, names: Iterable[str]) -> tuple[str, ...]:
    """The first family and another one, whose turn it is at this one of the names."""
    first, *others = families
    return first, others[list(names).index(name) % len(others)]


def most_off(family: str) -> float:
    """MOST_OFF, or twice that with layers whose state carries differences on."""
    return 2 * MOST_OFF if family in HYBRID_FAMILIES else MOST_OFF


def error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Of half of the tokens at most: one that chooses another expert, by a hair, is far off alone."""
    return float(((ours - theirs).norm(dim=1) / theirs.norm(dim=1)).median())


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes the checkpoint of plain weights of a family, once."""
    made: dict[str, Path] = {}

    def make(family: str, **sizes: Any) -> Path:
        key = f"{family} {sizes}"
        if key not in made:
            path = tmp_path_factory.mktemp(family)
            made[key] = make_checkpoint(family, path, tokenizer=False, **sizes)
        return made[key]

    return make


def architecture(path: Path) -> str:
    (name,) = json.loads((path / "config.json").read_text())["architectures"]
    return str(name)


def cell(path: Path, column: int) -> str:
    """Of the line of a checkpoint's family."""
    return BY_ARCHITECTURE[architecture(path)][column]


def test_the_families_are_those_there_are() -> None:
    # Encoders and draft heads have lines elsewhere: they generate no text.
    others = {"bert", "modernbert", "eagle", "eagle3"}
    assert BY_ARCHITECTURE.keys() == {name for name, module in ARCHITECTURES.items() if module not in others}


def test_plain_weights_load_of_every_family_that_says_so(plain: Callable[..., Path], tmp_path: Path) -> None:
    families = (*TEXT_FAMILIES, *DENSE_FAMILIES, *MOE_FAMILIES, *OTHER_FAMILIES, *MLA_FAMILIES, *MLA_SIBLINGS)
    paths = [plain(family) for family in (*families, *HYBRID_FAMILIES)]
    paths += [make_vision_checkpoint(kind, tmp_path / kind) for kind in (*VISION_KINDS, *OTHER_KINDS)]
    for path in paths:
        driver = Driver.load(path, dtype="float32")
        assert kept(driver) == "numbers" and driver.logits(IDS).isfinite().all()
    said = {name for name, cells in BY_ARCHITECTURE.items() if cells[0] == "loads"}
    assert said == {architecture(path) for path in paths}
    of_others = {name for name, cells in BY_ARCHITECTURE.items() if cells[1] == "loads"}
    assert of_others == {architecture(plain(family)) for family in TEXT_FAMILIES}
    others = {architecture(plain(one)) for one in MOE_FAMILIES if one not in (*OF_FORMATS, "gpt_oss")}
    assert all(BY_ARCHITECTURE[name][1] == "not tested" for name in others)
    of_gguf = {name for name, cells in BY_ARCHITECTURE.items() if cells[2] == "loads"}
    assert of_gguf == {architecture(plain(family)) for family in OF_GGUF}


def test_the_values_of_quantization_are_those_there_are() -> None:
    assert PLAIN.keys() == {"unset", *choices("quantization"), "dequantized"}


@pytest.mark.parametrize("name", PLAIN)
def test_plain_weights_become_what_is_said(name: str, plain: Callable[..., Path]) -> None:
    quantization = None if name == "unset" else name
    on_cpu, on_gpu = PLAIN[name]
    for family in (*TEXT_FAMILIES, *MOE_FAMILIES, *MLA_FAMILIES, *HYBRID_FAMILIES):
        theirs = plain_logits(family)
        for dtype in ("float32", "bfloat16"):
            driver = Driver.load(plain(family), dtype=dtype, quantization=quantization)
            assert kept(driver) == on_cpu, (family, dtype)
            ours = driver.logits(IDS).float()
            assert ours.isfinite().all()
            if name not in ("int4", "w4a8", "fp8"):  # with whose few bits random models are others
                assert error(ours, theirs) < most_off(family), (family, dtype)
    halves = Driver.load(plain("llama"), dtype="float16", quantization=quantization)
    assert kept(halves) == "numbers" and halves.logits(IDS).isfinite().all()
    is_kept = quantization is not None and why_not_pack(64, 64, quantization=quantization) is None
    # There rows of w8a8 stay as they are.
    assert on_gpu == ({"w8a8": "int8"}.get(name, name) if is_kept else "numbers")


def test_the_formats_of_others_are_those_there_are() -> None:
    assert {name: cells[0] for name, cells in FOREIGN.items()} == {
        name: maker.config["quant_method"] for name, maker in MAKERS.items()
    }


@pytest.mark.parametrize("are_all", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["two", "all"])
@pytest.mark.parametrize("name", FOREIGN)
def test_formats_of_others_load_with_every_family(
    name: str, are_all: bool, plain: Callable[..., Path], tmp_path: Path
) -> None:
    _, on_cpu, on_gpu = FOREIGN[name]
    for family in TEXT_FAMILIES if are_all else some_of(TEXT_FAMILIES, name, FOREIGN):
        path, means = make_foreign(plain(family), tmp_path / family, MAKERS[name])
        driver = Driver.load(path, dtype="float32")
        assert kept(driver) == on_cpu, family
        assert error(driver.logits(IDS), meant(family, means)) < MOST_OFF, family
    assert on_device(tmp_path / "llama") == on_gpu
    assert (planned(tmp_path / "llama") < 0.9) == (on_gpu != "numbers")


@pytest.mark.parametrize("family", [*DENSE_FAMILIES, *OF_FORMATS, *MLA_FAMILIES, *DELTA_FAMILIES])
def test_other_families_load_of_the_formats_that_their_line_names(
    family: str, plain: Callable[..., Path], tmp_path: Path
) -> None:
    """Routers too, as the file has them: of GPTQ and FP8 always plain."""
    named = cell(plain(family), 1).split(", ")
    assert len(named) > 1
    for name in named:
        has_plain_routers = MAKERS[name].config["quant_method"] in ("gptq", "fp8")
        routers = ("gate", "shared_expert_gate") if has_plain_routers else ()
        config, gates = MAKERS[name].config, GATES if family in DELTA_FAMILIES else ()
        if gates:  # which files name, as in Qwen's own
            key = "ignore" if "ignore" in config else "modules_to_not_convert"
            names = [f"re:.*{gate}" for gate in gates] if key == "ignore" else gates
            config = {**config, key: [*config.get(key, ()), *names]}
        exempt = ("lm_head", *routers, *gates)
        path, means = make_foreign(plain(family), tmp_path / name, MAKERS[name], config=config, exempt=exempt)
        driver = Driver.load(path, dtype="float32")
        assert kept(driver) == ", ".join(sorted({FOREIGN[name][1], *(["numbers"] if gates else [])}))
        exact = shutil.copytree(plain(family), tmp_path / f"{name} means")
        save_file(means, exact / "model.safetensors", metadata={"format": "pt"})
        assert error(driver.logits(IDS), hf_logits(hf_model(exact), IDS)) < most_off(family), name


def test_fp8_blocks_with_an_indexer(plain: Callable[..., Path], tmp_path: Path) -> None:
    """As DeepSeek's files: the indexer's projections in fp8, the weights of its heads and routers plain."""
    exempt = ("lm_head", "gate", "weights_proj")
    path, means = make_foreign(plain("deepseek_v32"), tmp_path / "fp8", MAKERS["FP8 blocks"], exempt=exempt)
    assert cell(path, 1) == "FP8 blocks"
    driver = Driver.load(path, dtype="float32")
    assert kept(driver) == FOREIGN["FP8 blocks"][1]
    exact = shutil.copytree(plain("deepseek_v32"), tmp_path / "means")
    save_file(means, exact / "model.safetensors", metadata={"format": "pt"})
    assert error(driver.logits(IDS), hf_logits(hf_model(exact), IDS)) < most_off("deepseek_v32")


def meant(family: str, means: Tensors) -> torch.Tensor:
    model = build_model(family)
    model.load_state_dict(means, strict=False)
    model.tie_weights()
    return hf_logits(model, IDS)


def on_device(path: Path) -> str:
    """What a layer's weights are made to be on a device that is no CPU; torch's "meta" is one."""
    model, files, _ = empty_model(ModelConfig(model=str(path), dtype="bfloat16"), torch.device("cpu"))
    assert files is not None
    fill_weights(model, files.tensors(), files.source)
    layer = model.layers[0].mlp.down.tensors  # type: ignore[union-attr]
    assert isinstance(layer, ForeignTensors)
    layer.device = torch.device("meta")
    matrix = layer._computable(layer.parts[0].decode()).matrix
    if isinstance(matrix, QuantizedRows):
        return matrix.quantization
    assert isinstance(matrix, torch.Tensor) and matrix.dtype == torch.bfloat16
    return "numbers"


def test_the_types_of_gguf_are_those_there_are() -> None:
    """But for those of whole numbers and of eight bytes, in which no weights are."""
    others = {"I8", "I16", "I32", "I64", "F64"}
    assert GGUF.keys() == {kind.name for kind in GGMLQuantizationType} - others


@pytest.mark.parametrize("are_all", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["two", "all"])
@pytest.mark.parametrize("kind", GGUF)
def test_types_of_gguf_load_with_every_family(
    kind: str, are_all: bool, plain: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Types that nothing here can write hold zeros, so that of these only the way is tested."""
    of_file = GGMLQuantizationType[kind]
    to_blocks = gguf_files.to_blocks

    def blocks(data: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
        try:
            return to_blocks(data, kind)
        except KeyError:
            block, size = gguf.GGML_QUANT_SIZES[of_file]
            return np.zeros((data.shape[0], data.shape[1] // block * size), np.uint8)

    monkeypatch.setattr(gguf_files, "to_blocks", blocks)
    on_cpu, on_gpu = GGUF[kind]
    # Of experts, which are many, some types: those that the family's line names.
    of_experts = [family for family in SIZES_OF_EXPERTS if kind in cell(plain(family), 2).split(", ")]
    of_text = OF_GGUF if are_all else some_of(OF_GGUF, kind, GGUF)
    for family in (*of_text, *of_experts):
        sizes = SIZES if family in OF_GGUF else SIZES_OF_EXPERTS[family]
        file = gguf_files.write_gguf(plain(family, **sizes), tmp_path / f"{family}.gguf", kind)
        if on_cpu == on_gpu == "refused":
            with pytest.raises(CheckpointError, match=rf"^{file}: \S+ has unsupported type {kind}$"):
                Driver.load(file, dtype="float32")
            continue
        driver = Driver.load(file, dtype="float32")
        assert kept(driver) == on_cpu, family
        exact = Driver.load(file, dtype="float32", quantization="dequantized").logits(IDS)
        ours = driver.logits(IDS)
        assert ours.isfinite().all() and (ours - exact).norm() <= MOST_OFF * exact.norm(), family
        assert on_gpu == "numbers" and planned(file) == 1.0


class Rows:
    """Matrices as blocks mean them, and the blocks, row by row. Thus blocks that nothing can write but at
    random have a meaning that transformers can compute."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, np.ndarray] = {}

    def mean(self, weight: torch.Tensor, kind: GGMLQuantizationType) -> torch.Tensor:
        blocks = gguf_files.to_blocks(weight.numpy(), kind)
        means = gguf.quants.dequantize(blocks, kind)
        rows = zip(means.reshape(-1, means.shape[-1]), blocks.reshape(-1, blocks.shape[-1]), strict=True)
        self._blocks |= {row.tobytes(): block for row, block in rows}
        return torch.from_numpy(means).reshape(weight.shape)

    def to_blocks(self, data: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
        """In the place of `gguf_files.to_blocks`."""
        if kind == GGMLQuantizationType.F32:
            return data
        rows = [self._blocks[row.tobytes()] for row in np.ascontiguousarray(data).reshape(-1, data.shape[-1])]
        return np.stack(rows).reshape(*data.shape[:-1], -1)


@pytest.mark.parametrize("are_all", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["one", "all"])
@pytest.mark.parametrize("family", OTHERS_OF_GGUF)
def test_other_families_load_of_the_types_of_gguf_that_their_line_names(
    family: str, are_all: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As transformers computes what their blocks mean. Matrices of heads' latents, and the outputs of
    gated DeltaNet, are of the type F32: their rows are others in the file."""
    sizes = {**SIZES, "intermediate_size": 256, **gguf_files.OF_FILES.get(family, {})}
    model = build_model(family, **{**sizes, **SIZES_OF_OTHERS.get(family, {})})
    model.save_pretrained(tmp_path / "plain")
    named = cell(tmp_path / "plain", 2).split(", ")
    assert len(named) == 3
    of_turn = named[OTHERS_OF_GGUF.index(family) % len(named)]
    for name in named if are_all else [of_turn]:
        rows, exact = Rows(), shutil.copytree(tmp_path / "plain", tmp_path / name)
        weights = load_file(exact / "model.safetensors")
        for key, weight in weights.items():
            is_plain = any(part in key for part in PLAIN_IN_GGUF)
            if weight.ndim > 1 and not key.endswith(("gate.weight", "router.layer.weight")) and not is_plain:
                weights[key] = rows.mean(weight, GGMLQuantizationType[name])
        save_file(weights, exact / "model.safetensors", metadata={"format": "pt"})
        plain_kinds = dict.fromkeys(("attn_k_b", "attn_v_b", "exp_probs_b.bias", "ssm_out"), "F32")
        with monkeypatch.context() as patch:
            patch.setattr(gguf_files, "to_blocks", rows.to_blocks)
            file = gguf_files.write_gguf(exact, tmp_path / f"{name}.gguf", name, kinds=plain_kinds)
        theirs = hf_logits(hf_model(exact), IDS)
        with registry.forced({"grouped_linear": "reference"}):
            ours = Driver.load(file, dtype="float32").logits(IDS)
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=0.0)
        driver = Driver.load(file, dtype="float32")
        others = ["numbers"] if family in DELTA_FAMILIES else []
        assert kept(driver) == ", ".join(sorted({GGUF[name][0], *others})), name
        assert error(driver.logits(IDS), theirs) < most_off(family), name


def test_the_types_that_lines_name_are_tested() -> None:
    named = {name for name, cells in BY_ARCHITECTURE.items() if "," in cells[2]}
    of_others = {type(build_model(family)).__name__ for family in OTHERS_OF_GGUF}
    assert named == of_others | {type(build_model(family)).__name__ for family in SIZES_OF_EXPERTS}
