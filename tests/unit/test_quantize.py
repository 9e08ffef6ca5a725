"""`quire quantize`: trained weights become small numbers, and what is written is what was meant."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from quire.cli import main
from quire.errors import CheckpointError, ConfigError
from quire.loader.quantized.formats import Format, PackedIntegers, ScaledRows, WholeIntegers
from quire_ensemble.tokenizer import Tokenizer
from quire_quantize import directory
from quire_quantize.calibration import Calibration
from quire_quantize.gptq import gptq_codes
from quire_quantize.perplexity import perplexity, windows
from quire_quantize.quantize import quantize
from quire_quantize.rounding import FP8, Grid, QuantizedMatrix, group_grid, on_grid, round_rows
from quire_quantize.scaling import awq_factors, input_groups, scale, sharing
from quire_quantize.schemes import SCHEMES
from quire_quantize.source import SourceCheckpoint
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.drive import Driver, hf_logits, hf_model
from tests.fixtures.gguf_files import write_gguf
from tests.fixtures.perplexity import DEMO, demo_answers, logits_of, perplexity_of

LIMITS = {"awq": 0.0005, "gptq": 0.0005, "w8a8": 0.0002, "w4a8": 0.0005, "fp8": 0.0005}
"""Change of the demo's perplexity on its held-out answers."""
FORMATS: dict[str, Callable[[int], Format]] = {
    "awq": lambda group: PackedIntegers(4, group, False, False),
    "gptq": lambda group: PackedIntegers(4, group, True, False),
    "w8a8": lambda _: ScaledRows(torch.int8, True),
    "w4a8": lambda group: WholeIntegers(4, (True, group), True),
    "fp8": lambda _: ScaledRows(FP8, True),
}
"""Readers that were compared with compressed-tensors' own (tests/unit/test_foreign_weights.py)."""
IDS = torch.randint(5, 512, (40,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.fixture(scope="module")
def demo_text() -> str:
    """Conversations of the demo, which it was trained for."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    return "".join(tokenizer.decode(token_ids) for token_ids, _ in demo_answers(60)[24:])


@pytest.fixture(scope="module")
def source() -> SourceCheckpoint:
    return SourceCheckpoint(DEMO)


@pytest.fixture(scope="module")
def calibration(source: SourceCheckpoint) -> Calibration:
    """Of the demo with texts that it knows."""
    texts = [token_ids for token_ids, _ in demo_answers(40)]
    return Calibration(source.model, source.read("model.embed_tokens.weight"), texts)


def run(path: Path, scheme: str, out: Path, text: str = "") -> Path:
    quantize(path, scheme, out, text, lambda done, count: None)
    return out


@pytest.mark.row("D19", clauses=("tool",))
@pytest.mark.parametrize("scheme", SCHEMES)
def test_one_command_makes_a_checkpoint_that_answers_as_before(
    scheme: str, demo_text: str, tmp_path: Path
) -> None:
    out, text = tmp_path / "out", tmp_path / "text"
    text.write_text(demo_text)
    arguments = ["quantize", "--checkpoint", str(DEMO), "--scheme", scheme, "--out", str(out)]
    result = CliRunner().invoke(main, [*arguments, "--calibration", str(text)])
    assert result.exit_code == 0, result.output
    *_, last = result.output.splitlines()
    print("\n", scheme, last)
    assert last.startswith("perplexity of ") and "before" in last and "after" in last
    linears = [name for name in load_file(DEMO / "model.safetensors") if "_proj" in name]
    stored = load_file(out / "model.safetensors")
    assert sum(name.endswith("weight_scale") for name in stored) == len(linears)
    assert not any(tensor.dtype == torch.float32 for name, tensor in stored.items() if name in linears)
    texts = demo_answers(24)
    exact, found = (perplexity_of(logits_of(path, texts), texts) for path in (DEMO, out))
    print(scheme, f"{found / exact - 1:+.4%}")
    assert abs(found / exact - 1) < LIMITS[scheme]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_stored_is_read_as_it_was_meant(scheme: str, dtype: torch.dtype) -> None:
    """Also of a row of zeros, and of rows with numbers of one sign."""
    weight = torch.randn(24, 192, generator=torch.Generator().manual_seed(0)) * 0.02
    weight[1], weight[2], weight[3] = 0.0, weight[2].abs() + 1.0, -weight[3].abs() - 1.0
    if scheme in ("w8a8", "fp8"):
        matrix = round_rows(weight, FP8 if scheme == "fp8" else torch.int8, dtype)
    else:
        importance = torch.linspace(1.0, 5.0, 192)
        grid = group_grid(weight, 64, dtype, is_symmetric=scheme != "awq", importance=importance)
        matrix = nearest(weight, grid, dtype)
    stored = dict(matrix.stored(SCHEMES[scheme].format))
    assert stored["weight_scale"].dtype == dtype
    form = FORMATS[scheme](64)
    slots = {slot.suffix: slot for slot in form.slots(24, 192)}
    assert {name: tuple(tensor.shape) for name, tensor in stored.items()} == {
        name: slot.shape for name, slot in slots.items()
    }
    wide = {name: tensor.to(slots[name].dtype) for name, tensor in stored.items()}
    # Zeros times float32 scales are rounded by the reader; all else is exact.
    most = 1e-6 if scheme == "awq" and dtype == torch.float32 else 0.0
    torch.testing.assert_close(form.decode(wide).dequantize(), matrix.dequantize(), rtol=0.0, atol=most)
    step = (weight.amax(1) - weight.amin(1)).clamp(min=weight.abs().amax(1)) / (
        1.9 if "8" in scheme[:2] else 7
    )
    assert ((matrix.dequantize() - weight).abs().amax(1) <= step).all()


def nearest(weight: torch.Tensor, grid: Grid, dtype: torch.dtype = torch.float32) -> QuantizedMatrix:
    """Each weight's nearest number, whatever the others become."""
    return on_grid(grid.per_column(weight.shape[1]).codes(weight), grid, dtype)


def error(change: torch.Tensor, gram: torch.Tensor) -> float:
    """What a change of the weights changes in the products."""
    return float((change @ gram * change).sum())


@pytest.mark.parametrize("index", [0, 3])
def test_gptq_and_awq_keep_products_better_than_the_nearest_numbers(
    index: int, source: SourceCheckpoint, calibration: Calibration
) -> None:
    """On each matrix of a trained layer, with inputs that it gets."""
    tensors = source.layer(index)
    own = {f"model.layers.{index}.{name}": tensor for name, tensor in tensors.items()}
    statistics = calibration.statistics(index, calibration.layer(index, own))
    config = source.model.config
    for group in input_groups(tensors):
        inputs = statistics[group.path]
        weights = [tensors[name] for name in group.weights]

        def grid_of(weight: torch.Tensor, is_symmetric: bool = False) -> Grid:
            return group_grid(weight, 64, torch.float32, is_symmetric=is_symmetric)

        factors = awq_factors(weights, inputs, grid_of, sharing(group, config))
        unscaled = scaled = 0.0
        for weight in weights:
            unscaled += error(nearest(weight, grid_of(weight)).dequantize() - weight, inputs.gram)
            changed = nearest(weight * factors, grid_of(weight * factors))
            scaled += error(changed.dequantize() / factors - weight, inputs.gram)
            grid = group_grid(weight, 64, torch.float32, is_symmetric=True, importance=inputs.gram.diagonal())
            rounded = nearest(weight, grid).dequantize()
            codes = gptq_codes(weight, inputs.gram, grid)
            chosen = on_grid(codes, grid, torch.float32).dequantize()
            found, simple = (error(one - weight, inputs.gram) for one in (chosen, rounded))
            print(f"{index} {group.path}: GPTQ {found / simple:.3f} of the nearest numbers' error")
            assert found < 0.8 * simple
            plain = nearest(weight, grid_of(weight, True)).dequantize()
            assert simple < error(plain - weight, inputs.gram)
        print(f"{index} {group.path}: AWQ {scaled / unscaled:.3f}")
        assert scaled < unscaled


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2", "gemma3"])
def test_layers_compute_as_the_model_does_and_scaling_changes_nothing(family: str, tmp_path: Path) -> None:
    """Hidden states go through all layers one by one, in windows of several lengths. In the second run
    every input is divided by a factor where it comes from, and multiplied again by the columns: norms that
    are stored less 1, biases, and value heads that several query heads share among them."""
    source = SourceCheckpoint(make_checkpoint(family, tmp_path, tokenizer=False))
    model, embeddings = source.model, source.read("model.embed_tokens.weight")
    texts = [IDS[:3], IDS, *[IDS[5:20]] * 9]
    expected = hf_hidden(tmp_path, IDS)
    generator = torch.Generator().manual_seed(1)
    for is_scaled in (False, True):
        calibration = Calibration(model, embeddings, texts)
        for index in range(model.config.num_layers):
            tensors = source.layer(index)
            for group in input_groups(tensors) if is_scaled else ():
                size = tensors[group.weights[0]].shape[1]
                factors = torch.exp(torch.randn(size, generator=generator))
                scale(tensors, group, sharing(group, model.config)(factors), model.config)
            own = {f"model.layers.{index}.{name}": tensor for name, tensor in tensors.items()}
            calibration.advance(index, calibration.layer(index, own))
        found = calibration.hidden[3 : 3 + len(IDS)]
        torch.testing.assert_close(found, expected, atol=2e-3 * float(expected.abs().max()), rtol=0.0)


@torch.inference_mode()
def hf_hidden(path: Path, token_ids: list[int]) -> torch.Tensor:
    """What `transformers` gives its last norm."""
    model = hf_model(path)
    given = []
    model.model.norm.register_forward_pre_hook(lambda _, args: given.append(args[0][0]))
    model(torch.tensor([token_ids]))
    return given[0]


def test_statistics_are_those_of_the_inputs(source: SourceCheckpoint, calibration: Calibration) -> None:
    own = {f"model.layers.0.{name}": tensor for name, tensor in source.layer(0).items()}
    found = calibration.statistics(0, calibration.layer(0, own))["self_attn.qkv"]
    x = calibration.hidden
    normed = x * (x.square().mean(1, keepdim=True) + source.model.config.rms_norm_eps).rsqrt()
    normed = normed * own["model.layers.0.input_layernorm.weight"]
    torch.testing.assert_close(found.gram, normed.T @ normed / len(x), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found.sizes, normed.abs().mean(0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.largest, normed.abs().amax(0), rtol=1e-4, atol=1e-5)


def test_many_tensors_are_in_several_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plain = make_checkpoint("qwen2", tmp_path / "plain", dtype="bfloat16")
    one = run(plain, "fp8", tmp_path / "one")
    monkeypatch.setattr(directory, "_SHARD_BYTES", 50_000)
    several = run(plain, "fp8", tmp_path / "several")
    index = json.loads((several / "model.safetensors.index.json").read_text())
    files = sorted(file.name for file in several.glob("*.safetensors"))
    assert len(files) > 2 and files == sorted(set(index["weight_map"].values()))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert index["weight_map"].keys() == load_file(one / "model.safetensors").keys()
    options = {"quantization": "dequantized", "dtype": "float32"}
    assert torch.equal(
        *(Driver.load(path, **options).logits(IDS) for path in (one, several))  # type: ignore[arg-type]
    )
    assert (several / "tokenizer.json").read_bytes() == (plain / "tokenizer.json").read_bytes()


def test_a_gguf_file_becomes_a_directory_that_others_read(tmp_path: Path) -> None:
    """Its tokenizer and shape with it; transformers reads what it knows without the weights."""
    from transformers import AutoConfig, AutoTokenizer

    plain = make_checkpoint("llama", tmp_path / "plain")
    file = write_gguf(plain, tmp_path / "model.gguf", "Q8_0", chat_template="{{ messages }}")
    out = run(file, "w8a8", tmp_path / "out", "Some words to calibrate with. " * 40)
    options = {"dtype": "float32", "quantization": "dequantized"}
    exact, found = (Driver.load(path, **options).logits(IDS) for path in (file, out))
    assert float((found - exact).norm() / exact.norm()) < 0.15
    values = json.loads((out / "config.json").read_text())
    assert values["model_type"] == "llama" and values["quantization_config"]["format"] == "int-quantized"
    del values["quantization_config"]
    (out / "config.json").write_text(json.dumps(values))
    theirs = AutoConfig.from_pretrained(out)
    assert (theirs.hidden_size, theirs.num_key_value_heads, theirs.vocab_size) == (64, 2, 512)
    text = "Grüße, 世界"
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.encode(text) == Tokenizer(file).encode(text)
    assert tokenizer.chat_template == "{{ messages }}"


def test_what_exists_is_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(CheckpointError, match=f"{out}: exists already"):
        run(DEMO, "fp8", out)
    assert list(out.iterdir()) == []
    with pytest.raises(CheckpointError, match=r"cannot be written: .*name too long"):
        run(DEMO, "fp8", tmp_path / ("x" * 300))


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    """Files may not grow beyond 64 KiB: the weights fail half-way."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))

    out = tmp_path / "out"
    command = [sys.executable, "-m", "quire.cli", "quantize", "--checkpoint", str(DEMO)]
    command += ["--scheme", "fp8", "--out", str(out)]
    done = subprocess.run(command, preexec_fn=limit, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and f"Error: {out}: cannot be written: " in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "scheme", "says"),
    [
        ({"tokenizer": False}, "gptq", "has no tokenizer, so no text can calibrate it: use fp8"),
        ({"intermediate_size": 144}, "awq", "groups of 32 inputs or more, .* 64, 144: use w8a8 or fp8"),
    ],
)
def test_checkpoints_that_cannot_be_quantised(options: dict, scheme: str, says: str, tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path / "plain", **options)
    with pytest.raises(CheckpointError, match=says):
        run(path, scheme, tmp_path / "out", "text")
    with pytest.raises(CheckpointError, match="already"):
        run(run(path, "fp8", tmp_path / "once"), "fp8", tmp_path / "twice")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["once", "plain"]


def test_checkpoints_that_contradict_themselves_are_not_quantised(tmp_path: Path) -> None:
    """Of two tensors for one place the last was taken; a head that is not the table was found at the load of
    what had been made of it."""
    path = make_checkpoint("llama", tmp_path, tokenizer=False)
    file, config = path / "model.safetensors", json.loads((path / "config.json").read_text())
    weights = load_file(file)
    save_file({**weights, "norm.weight": torch.zeros(64)}, file)
    with pytest.raises(CheckpointError, match=r" stands for model\.norm\.weight, as a tensor before it does"):
        SourceCheckpoint(path)
    save_file(weights, file)
    (path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is not model\.embed_tokens\.weight, but"):
        SourceCheckpoint(path)
    (path / "config.json").write_text(
        json.dumps({**config, "architectures": ["MistralForCausalLM"], "layer_types": 3})
    )
    with pytest.raises(CheckpointError, match=r"config\.json: holds a value that cannot be right: "):
        SourceCheckpoint(path)


@pytest.mark.row("D19", clauses=("qat",))
def test_a_checkpoint_of_quantisation_aware_training_is_what_was_trained(tmp_path: Path) -> None:
    """Training has moved all weights onto a grid of four bits, so their small numbers lose nothing: in
    compressed-tensors' form and in a GGUF file they are, bit for bit, the model that was trained."""
    plain = make_checkpoint("llama", tmp_path / "plain")
    weights, stored = load_file(plain / "model.safetensors"), {}
    for name, tensor in list(weights.items()):
        if "_proj" not in name:
            stored[name] = tensor
            continue
        groups = tensor.unflatten(1, (-1, 32))
        # A group's number of largest size is -8 times the scale in Q4_0, which both forms can hold.
        largest = groups.gather(2, groups.abs().argmax(2, keepdim=True))
        scales = (largest / -8).half().float()
        codes = (groups / scales).round().clamp(-8, 7)
        weights[name] = (codes * scales).flatten(1)
        matrix = QuantizedMatrix(codes.flatten(1).to(torch.int8), scales.squeeze(2))
        stored |= {
            f"{name.removesuffix('weight')}{suffix}": one for suffix, one in matrix.stored("pack-quantized")
        }
    save_file(weights, plain / "model.safetensors", metadata={"format": "pt"})
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    save_file(stored, foreign / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((plain / "config.json").read_text())
    arguments = SCHEMES["gptq"].config(SourceCheckpoint(plain).model.config, ["lm_head"])
    arguments["config_groups"]["group_0"]["weights"]["group_size"] = 32
    (foreign / "config.json").write_text(json.dumps({**values, "quantization_config": arguments}))
    file = write_gguf(plain, tmp_path / "trained.gguf", "Q4_0")
    options = {"dtype": "float32", "quantization": "dequantized"}
    exact = Driver.load(plain, dtype="float32").logits(IDS)
    assert torch.equal(Driver.load(foreign, **options).logits(IDS), exact)
    linears = {name: tensor for name, tensor in weights.items() if "_proj" in name}
    read = SourceCheckpoint(file).read
    assert all(torch.equal(read(name), tensor) for name, tensor in linears.items())


def test_perplexity_is_that_of_transformers(demo_text: str) -> None:
    """And the same each time."""
    text = demo_text[:1200]
    found, count = perplexity(DEMO, text, dtype="float32")
    assert (found, count) == perplexity(DEMO, text, dtype="float32")
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(DEMO).encode(text, add_special_tokens=False)
    assert len(ids) > 600  # a whole window behind the token that begins texts; the rest does not count
    model, total, counted = hf_model(DEMO), 0.0, 0
    for window in ([256, *ids[:511]],):
        logprobs = hf_logits(model, window).double().log_softmax(-1)[:-1]
        total -= float(logprobs.gather(1, torch.tensor(window[1:])[:, None]).sum())
        counted += len(window) - 1
    assert counted == count and found == pytest.approx(float(torch.tensor(total / count).exp()), rel=1e-4)


@pytest.mark.parametrize("max_model_len", [1, 2, 3])
def test_a_model_too_short_for_perplexity_is_refused(max_model_len: int) -> None:
    with pytest.raises(ConfigError, match=f"max_model_len={max_model_len} is too short"):
        perplexity(DEMO, "a text", max_model_len=max_model_len)


class Numbers:
    """A tokenizer of texts such as "3 1 2", which may put 9 before them."""

    def __init__(self, has_bos: bool) -> None:
        self.has_bos = has_bos
        self.hf = SimpleNamespace(bos_token_id=9)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [9] * (self.has_bos and add_special_tokens) + [int(word) for word in text.split()]


def test_windows_cover_a_text_and_begin_as_the_tokenizer_begins() -> None:
    def cut(count: int, size: int, most: int, has_bos: bool = False) -> list[list[int]]:
        return windows(Numbers(has_bos), " ".join(map(str, range(count))), size, most)  # type: ignore[arg-type]

    assert cut(10, 4, 100) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert cut(5, 3, 100, has_bos=True) == [[9, 0, 1], [9, 2, 3]]
    assert cut(2, 4, 100) == [[0, 1]] and cut(0, 4, 100) == []
    assert cut(80, 10, 30) == [list(range(at, at + 10)) for at in (0, 20, 50)]


def test_a_server_of_another_user_can_read_what_is_written(tmp_path: Path) -> None:
    """The directory that temporary files get is its maker's alone."""
    with directory.new_directory(tmp_path / "new") as made:
        (made / "config.json").write_text("{}")
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o755
