"""The model repository builder: what it writes is complete, consistent and what the repository serves."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from quire.config import EngineConfig, ModelConfig, load_config_file
from quire.request.sampling_params import SAMPLING_FIELDS
from quire.triton.scheduling_fields import SCHEDULING_FIELDS
from quire_common.errors import InputError
from quire_ensemble.builder import PLACEMENTS, Placement, build_repository, has_chat_template
from quire_ensemble.cli import repository
from quire_ensemble.errors import BuildError
from quire_ensemble.generator_schema import (
    IMAGE_INPUTS,
    INPUTS,
    JSON_SAMPLING_INPUT,
    OUTPUTS,
    SAMPLING_INPUTS,
    SCHEDULING_INPUTS,
    TensorSpec,
)
from quire_ensemble.messages import check_messages
from quire_ensemble.triton_model import checkpoint_path
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.vision_checkpoints import make_vision_checkpoint

MODEL_REPOSITORY = Path(__file__).resolve().parents[2] / "model_repository"
DEMO = MODEL_REPOSITORY / "generator" / "1" / "demo"
VISION_DEMO = MODEL_REPOSITORY / "vision_generator" / "1" / "demo"
MODELS = ("generator", "generator_unary", "tokenizer", "chat", "chat_unary")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Files a builder looks at; it reads neither weights nor vocabulary."""
    path = tmp_path / "checkpoints" / "tiny"
    path.mkdir(parents=True)
    (path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (path / "tokenizer.json").write_text("{}")
    (path / "chat_template.jinja").write_text("{{ messages }}")
    return path


def parse(path: Path) -> Any:
    return text_format.Parse(path.read_text("utf-8"), model_config_pb2.ModelConfig())


def configs(out: Path) -> Iterator[tuple[str, Any]]:
    for path in sorted(out.glob("*/config.pbtxt")):
        yield path.parent.name, parse(path)


def tensors(specs: Any) -> dict[str, tuple[int, tuple[int, ...], bool]]:
    return {spec.name: (spec.data_type, tuple(spec.dims), getattr(spec, "optional", False)) for spec in specs}


def declared(specs: tuple[TensorSpec, ...], *, inputs: bool) -> dict[str, tuple[int, tuple[int, ...], bool]]:
    value = model_config_pb2.DataType.Value
    return {s.name: (value(s.datatype), s.dims, s.optional if inputs else False) for s in specs}


@pytest.mark.parametrize("demo", [DEMO, VISION_DEMO], ids=["text", "vision"])
def test_the_committed_repository_is_what_the_builder_writes(demo: Path, tmp_path: Path) -> None:
    generator = demo.parents[1].name
    written = build_repository(demo, tmp_path / "out", generator_name=generator)
    assert written[-1] == tmp_path / "out" / generator / "1" / "demo"
    for path in written[:-1]:
        committed = MODEL_REPOSITORY / path.relative_to(tmp_path / "out")
        assert committed.read_text("utf-8") == path.read_text("utf-8"), (
            f"{committed}: edit the builder, then run what model_repository/README.md says"
        )
    built = {path.relative_to(tmp_path / "out") for path in written[:-1]}
    for model in {path.parts[0] for path in built}:
        for path in (MODEL_REPOSITORY / model).rglob("*"):
            if path.is_file() and demo not in path.parents and "__pycache__" not in path.parts:
                assert path.relative_to(MODEL_REPOSITORY) in built, f"{path} is not the builder's"


def test_building_over_the_committed_repository_leaves_the_checkpoint_alone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    demo = out / "generator" / "1" / "demo"
    shutil.copytree(DEMO, demo)
    written = build_repository(demo, out)
    assert demo not in written
    assert demo.is_dir() and not demo.is_symlink()
    assert json.loads((out / "generator/1/quire.json").read_text())["model"] == "demo"


def test_every_config_parses_and_is_complete(checkpoint: Path, tmp_path: Path) -> None:
    build_repository(checkpoint, tmp_path / "out", instance_count=3)
    found = dict(configs(tmp_path / "out"))
    assert set(found) == set(MODELS)
    for name, config in found.items():
        assert config.name == name
        assert config.HasField("dynamic_batching") == (config.max_batch_size > 0) == (name == "tokenizer")
        assert config.input and config.output, "must load with --disable-auto-complete-config"
        assert list((tmp_path / "out" / name / "1").iterdir()), (
            "Triton wants the version directory, git a file"
        )
    for name, decoupled, count in (("generator", True, 3), ("generator_unary", False, 1)):
        config = found[name]
        assert config.backend == "quire"
        assert config.model_transaction_policy.decoupled is decoupled
        assert [(g.count, g.kind) for g in config.instance_group] == [
            (count, model_config_pb2.ModelInstanceGroup.KIND_MODEL)
        ]
        assert tensors(config.input) == declared(INPUTS, inputs=True)
        assert tensors(config.output) == declared(OUTPUTS, inputs=False)
    tokenizer = found["tokenizer"]
    assert tokenizer.max_batch_size == 1, "a damaged text would fail the requests that came with it"
    assert tokenizer.backend == "python"
    assert [g.kind for g in tokenizer.instance_group] == [model_config_pb2.ModelInstanceGroup.KIND_CPU]
    assert not tokenizer.model_transaction_policy.decoupled
    assert not tokenizer.dynamic_batching.max_queue_delay_microseconds, "a lone request waits for no others"
    assert not tokenizer.dynamic_batching.preserve_ordering, "short texts would wait for the long one before"


def test_a_vision_checkpoint_gets_the_vision_models(tmp_path: Path) -> None:
    """Every tensor that a step of the ensembles needs is declared by who makes it, with its type and rank."""
    checkpoint = make_vision_checkpoint("qwen2_vl", tmp_path / "checkpoint")
    build_repository(checkpoint, tmp_path / "out", generator_name="writer", instance_count=2)
    found = dict(configs(tmp_path / "out"))
    members = {"vision_preprocessor", "vision_encoder", "writer", "writer_unary"}
    assert set(found) == {*members, "vision_chat", "vision_chat_unary"}
    for name in ("vision_preprocessor", "vision_encoder"):
        parameter = found[name].parameters["checkpoint"].string_value
        assert (tmp_path / "out" / name / parameter).resolve() == checkpoint.resolve()
        assert "checkpoint" not in (tmp_path / "out" / name / "1" / "model.py").read_text()
    encoder = found["vision_encoder"]
    assert encoder.max_batch_size > 1 and encoder.HasField("dynamic_batching")
    preprocessor = found["vision_preprocessor"]
    assert preprocessor.max_batch_size == 1 and preprocessor.HasField("dynamic_batching")
    assert all(item.allow_ragged_batch and not item.optional for item in encoder.input)
    for name, generator in (("vision_chat", "writer"), ("vision_chat_unary", "writer_unary")):
        steps = found[name].ensemble_scheduling.step
        assert [step.model_name for step in steps] == ["vision_preprocessor", "vision_encoder", generator]
        made: dict[str, tuple[int, int]] = {
            spec.name: (spec.data_type, len(spec.dims)) for spec in found[name].input
        }
        batching: set[str] = set()  # tensors that have a batch dimension beside these
        for step in steps:
            member = found[step.model_name]
            inputs = {spec.name: (spec.data_type, len(spec.dims)) for spec in member.input}
            outputs = {spec.name: (spec.data_type, len(spec.dims)) for spec in member.output}
            for theirs, ours in step.input_map.items():
                # Between models of which one batches Triton adds or takes away a batch dimension of one; rows
                # of embeddings are made without one, their number stands there.
                datatype, rank = made[ours]
                rank += ours == "image_embeds" and ours in batching
                assert inputs[theirs] == (datatype, rank), f"{name}: {step.model_name}.{theirs} from {ours}"
            made |= {ours: outputs[theirs] for theirs, ours in step.output_map.items()}
            batching |= set(step.output_map.values()) if member.max_batch_size else set()
            needed = {spec.name for spec in member.input if not spec.optional}
            assert needed <= set(step.input_map)


def test_a_checkpoint_whose_tower_is_unknown_is_served_as_text(tmp_path: Path) -> None:
    """Llama 4 has a vision part that nothing here computes; images are refused."""
    checkpoint = make_checkpoint("llama4", tmp_path / "checkpoint")
    config = json.loads((checkpoint / "config.json").read_text())
    config |= {"model_type": "llama4", "vision_config": {"model_type": "llama4_vision_model"}}
    (checkpoint / "config.json").write_text(json.dumps(config))
    build_repository(checkpoint, tmp_path / "out")
    names = {"tokenizer", "generator", "generator_unary", "chat", "chat_unary"}
    assert {name for name, _ in configs(tmp_path / "out")} == names
    message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
    with pytest.raises(InputError, match="type 'image_url' is not supported; known: 'text'"):
        check_messages([message])


@pytest.mark.parametrize(
    ("ensemble", "generator"), [("chat", "generator"), ("chat_unary", "generator_unary")]
)
def test_ensembles_fit_their_members(ensemble: str, generator: str, checkpoint: Path, tmp_path: Path) -> None:
    """Every map names a tensor that exists with the same type, and the one shared namespace has no clash.

    An ensemble whose input and output were both called `logprobs` made tritonserver refuse the repository.
    """
    build_repository(checkpoint, tmp_path / "out")
    found = dict(configs(tmp_path / "out"))
    config = found[ensemble]
    assert config.platform == "ensemble"
    assert [step.model_name for step in config.ensemble_scheduling.step] == ["tokenizer", generator]

    types: dict[str, tuple[int, tuple[int, ...]]] = {}
    for spec in (*config.input, *config.output):
        assert spec.name not in types, f"{spec.name} is both input and output of the ensemble"
        types[spec.name] = (spec.data_type, tuple(spec.dims))
    made = {spec.name for spec in config.input}
    for step in config.ensemble_scheduling.step:
        member = found[step.model_name]
        for specs, mapping in ((member.input, step.input_map), (member.output, step.output_map)):
            members = {spec.name: (spec.data_type, tuple(spec.dims)) for spec in specs}
            for name, own in mapping.items():
                assert types.setdefault(own, members[name]) == members[name], (name, own)
        assert set(step.input_map.values()) <= made
        made |= set(step.output_map.values())
    assert {spec.name for spec in config.output} <= made
    assert all(spec.optional for spec in config.input)

    # Whatever shapes generation can be said through the ensemble too.
    passed = config.ensemble_scheduling.step[1].input_map
    images = {s.name for s in IMAGE_INPUTS}
    own = {"text_input", "text_pair", "messages", "prompt_embeds", "cancel", "cache_control"}
    assert set(passed) == {s.name for s in INPUTS} - images - own


def test_the_tensor_table_knows_every_sampling_parameter() -> None:
    assert {spec.name for spec in SAMPLING_INPUTS} == set(SAMPLING_FIELDS)
    assert {spec.name for spec in SCHEDULING_INPUTS} == set(SCHEDULING_FIELDS)
    assert JSON_SAMPLING_INPUT in INPUTS
    for specs in (INPUTS, OUTPUTS):
        assert len({spec.name for spec in specs}) == len(specs)
        assert all(spec.doc for spec in specs)
    config = INPUTS[0].input_config()
    assert config == {"name": "text_input", "data_type": "TYPE_STRING", "dims": [-1], "optional": True}
    assert "optional" not in OUTPUTS[0].output_config()


def test_spelled_out_engine_keys_are_the_engines_defaults(checkpoint: Path, tmp_path: Path) -> None:
    build_repository(checkpoint, tmp_path / "out")
    values = load_config_file(tmp_path / "out/generator/1/quire.json")
    assert EngineConfig.from_mapping(values) == EngineConfig(model=ModelConfig(model="tiny"))


def test_engine_options_reach_both_generators(checkpoint: Path, tmp_path: Path) -> None:
    options = {"max_num_seqs": 7, "num_blocks": 99, "kv_cache_memory": "64MiB"}
    build_repository(checkpoint, tmp_path / "out", engine_options=options)
    both = [load_config_file(tmp_path / f"out/{name}/1/quire.json") for name in MODELS[:2]]
    for values in both:
        config = EngineConfig.from_mapping(values)
        assert (config.scheduler.max_num_seqs, config.cache.num_blocks) == (7, 99)
        assert config.cache.kv_cache_memory == 64 * 2**20
    # Equal but for the checkpoint's path: that is how two models come to share one engine.
    assert {**both[0], "model": ""} == {**both[1], "model": ""}


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("prefix", ["", "tiny-"])
def test_all_models_find_the_one_checkpoint(
    placement: Placement, prefix: str, checkpoint: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    build_repository(checkpoint, out, placement=placement, name_prefix=prefix)
    place = out / f"{prefix}generator" / "1" / "tiny"
    found = set()
    for name in MODELS[:2]:
        version = out / f"{prefix}{name}" / "1"
        found.add((version / load_config_file(version / "quire.json")["model"]).resolve())
    config = parse(out / f"{prefix}tokenizer" / "config.pbtxt")
    parameters = {k: v.string_value for k, v in config.parameters.items()}
    found.add(checkpoint_path(parameters, out / f"{prefix}tokenizer"))
    assert found == {place.resolve() if placement == "copy" else checkpoint.resolve()}
    assert place.is_symlink() == (placement == "link")
    assert place.exists() == (placement != "path")
    assert not list(place.parent.glob(".*")), "no half copies are left"


def test_two_checkpoints_share_a_repository_by_prefix(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    build_repository(checkpoint, out, name_prefix="a-")
    build_repository(checkpoint, out, name_prefix="b-")
    found = dict(configs(out))
    assert set(found) == {p + name for p in ("a-", "b-") for name in MODELS}
    assert [s.model_name for s in found["b-chat"].ensemble_scheduling.step] == ["b-tokenizer", "b-generator"]


def test_existing_models_are_overwritten_by_force_only(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    build_repository(checkpoint, out)
    other = out / "other" / "config.pbtxt"
    other.parent.mkdir()
    other.write_text("# mine")
    before = (out / "generator/1/quire.json").read_text()
    with pytest.raises(BuildError, match="exists already; use --force"):
        build_repository(checkpoint, out, engine_options={"max_num_seqs": 5})
    assert (out / "generator/1/quire.json").read_text() == before
    build_repository(checkpoint, out, engine_options={"max_num_seqs": 5}, force=True)
    assert json.loads((out / "generator/1/quire.json").read_text())["max_num_seqs"] == 5
    assert other.read_text() == "# mine"

    # A copied checkpoint is somebody's data: not even force replaces it.
    place = out / "generator" / "1" / "tiny"
    place.unlink()
    shutil.copytree(checkpoint, place)
    with pytest.raises(BuildError, match="exists already and is not this checkpoint; remove it first"):
        build_repository(checkpoint, out, force=True)
    assert (place / "config.json").is_file()


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda c: shutil.rmtree(c), "neither a Hugging Face checkpoint directory nor a .gguf file"),
        (lambda c: (c / "config.json").unlink(), "config.json: missing"),
        (lambda c: (c / "config.json").write_text("{"), "config.json: cannot be read as JSON"),
        (lambda c: (c / "config.json").write_text("{}"), "states no 'architectures'"),
        (lambda c: (c / "tokenizer.json").unlink(), "no tokenizer files; expected one of tokenizer.json"),
    ],
)
def test_incomplete_checkpoints_are_refused_before_anything_is_written(
    spoil: Any, reason: str, checkpoint: Path, tmp_path: Path
) -> None:
    spoil(checkpoint)
    with pytest.raises(BuildError, match=reason) as refused:
        build_repository(checkpoint, tmp_path / "out")
    assert str(checkpoint) in str(refused.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"name_prefix": "../x"}, "name prefix '../x' may hold letters"),
        ({"engine_options": {"model": "x"}}, "engine option 'model' is set by the checkpoint"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: dict[str, Any], reason: str, checkpoint: Path, tmp_path: Path
) -> None:
    with pytest.raises(BuildError, match=reason):
        build_repository(checkpoint, tmp_path / "out", **arguments)
    assert not (tmp_path / "out").exists()


def test_names_with_quotes_stay_inside_their_string(tmp_path: Path, checkpoint: Path) -> None:
    odd = checkpoint.rename(checkpoint.with_name('a "b" \\ ü'))
    build_repository(odd, tmp_path / "out")
    parameters = parse(tmp_path / "out/tokenizer/config.pbtxt").parameters
    assert parameters["checkpoint"].string_value == '../generator/1/a "b" \\ ü'


def test_has_chat_template(checkpoint: Path) -> None:
    assert has_chat_template(checkpoint)
    (checkpoint / "chat_template.jinja").unlink()
    assert not has_chat_template(checkpoint)
    (checkpoint / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    assert has_chat_template(checkpoint)


def test_commands_build_and_show(checkpoint: Path, tmp_path: Path) -> None:
    runner, out = CliRunner(), tmp_path / "out"
    command = ["build", f"--checkpoint={checkpoint}", f"--out={out}", "--instances=2"]
    built = runner.invoke(repository, [*command, "--option=max_num_seqs=9", "--option=dtype=float32"])
    assert built.exit_code == 0, built.output
    assert str(out / "chat" / "config.pbtxt") in built.output
    values = load_config_file(out / "generator/1/quire.json")
    assert (values["max_num_seqs"], values["dtype"]) == (9, "float32")

    again = runner.invoke(repository, command)
    assert again.exit_code == 1
    assert "exists already; use --force" in again.output
    wrong = runner.invoke(repository, [*command, "--force", "--option=max_num_seqs"])
    assert wrong.exit_code == 2
    assert "'max_num_seqs' must have the form KEY=VALUE" in wrong.output

    shown = runner.invoke(repository, ["show", str(out), "--tensors"])
    assert shown.exit_code == 0, shown.output
    assert "backend quire, streaming, 2 instances" in shown.output
    assert "ensemble: tokenizer -> generator_unary" in shown.output
    assert "text_output" in shown.output
    (out / "chat" / "config.pbtxt").write_text("nonsense {")
    broken = runner.invoke(repository, ["show", str(out)])
    assert broken.exit_code == 1
    assert "chat/config.pbtxt" in broken.output
    empty = runner.invoke(repository, ["show", str(checkpoint)])
    assert empty.exit_code == 1
    assert "not a model repository" in empty.output
