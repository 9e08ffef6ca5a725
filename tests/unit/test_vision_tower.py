"""The vision part alone equals `get_image_features` of transformers' full model, and says what is broken."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from quire_common.errors import InputError
from quire_ensemble.errors import VisionError
from quire_ensemble.vision_tower import MAX_IMAGES, VisionTower, choose_device, default_num_threads
from tests.fixtures.vision_checkpoints import VISION_KINDS, hf_image_inputs, make_vision_checkpoint

Images = tuple[np.ndarray, np.ndarray]
"""(pixel_values float32 [rows, row_size], grid [n, 3])."""

SIDES = {"llava": 4, "llava_siglip": 3}
"""Patches along each side of the LLaVA kinds' images."""
IMAGE_SIZES = {"llava": 56, "llava_siglip": 50, "llava_next": 56, "llava_onevision": 50}
TILED_GRIDS = {
    "llava_next": [(3, 40, 90), (5, 99, 101), (4, 300, 60)],
    # One of several images, and one whose rows are scaled down.
    "llava_onevision": [(3, 40, 90), (1, 99, 101), (5, 120, 97)],
}
QWEN_GRIDS = [(1, 4, 6), (1, 10, 8), (1, 2, 12)]

Edit = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One checkpoint of each kind, which no test changes."""
    return {kind: make_vision_checkpoint(kind, tmp_path_factory.mktemp(kind)) for kind in VISION_KINDS}


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """A tower sets the number of threads of its process; the tests' own stays."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def draw(kind: str, count: int, seed: int = 0) -> Images:
    """`count` different images, of different sizes where the kind takes any size."""
    generator = np.random.default_rng(seed)
    if kind in SIDES:
        grid = np.array([[1, SIDES[kind], SIDES[kind]]] * count, np.int32).reshape(count, 3)
        shape = (count, 3 * IMAGE_SIZES[kind] ** 2)
    elif kind in TILED_GRIDS:
        grid = np.array([TILED_GRIDS[kind][i % 3] for i in range(count)], np.int32).reshape(count, 3)
        shape = (int(grid[:, 0].sum()), 3 * IMAGE_SIZES[kind] ** 2)
    else:
        grid = np.array([QWEN_GRIDS[i % 3] for i in range(count)], np.int32).reshape(count, 3)
        shape = (int(grid.prod(axis=1).sum()), 3 * 2 * (16 if kind.startswith("qwen3") else 14) ** 2)
    return generator.standard_normal(shape, dtype=np.float32), grid


def load(path: Path, **options: Any) -> VisionTower:
    return VisionTower(path, **{"device": "cpu", "num_threads": 1, **options})


def hf_features(path: Path, kind: str, images: Images) -> list[np.ndarray]:
    """What the full model of transformers gives for each image."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    pixels, grid = (torch.from_numpy(array) for array in images)
    if kind == "llava_onevision":  # images of several prompts
        parts = zip(pixels.split(grid[:, 0].tolist()), grid[:, None], strict=True)
    else:
        parts = iter([(pixels, grid)])
    found: list[np.ndarray] = []
    with torch.no_grad():
        for part in parts:
            output = model.get_image_features(**hf_image_inputs(model, *part))
            levels = getattr(output, "deepstack_features", [])
            features = zip(output.pooler_output, *levels, strict=True)
            found += [torch.cat(rows, -1).numpy() for rows in features]
    return found


def assert_equal(ours: list[np.ndarray], theirs: list[np.ndarray], tolerance: float = 1e-5) -> None:
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == np.float32 and mine.shape == other.shape
        np.testing.assert_allclose(mine, other, rtol=0, atol=tolerance)


def rewrite_config(path: Path, edit: Edit) -> None:
    file = path / "config.json"
    config = json.loads(file.read_text("utf-8"))
    edit(config)
    file.write_text(json.dumps(config), "utf-8")


def rewrite_weights(path: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Gives `edit` the tensors by name; what it returns replaces them (None: it changed them in place)."""
    tensors = load_file(path / "model.safetensors")
    edited = edit(tensors)
    save_file(tensors if edited is None else edited, path / "model.safetensors", {"format": "pt"})


@pytest.fixture
def copy(checkpoints: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    return lambda kind: Path(shutil.copytree(checkpoints[kind], tmp_path / "copy"))


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("kind", VISION_KINDS)
def test_equals_the_full_model_of_transformers(kind: str, count: int, checkpoints: dict[str, Path]) -> None:
    images = draw(kind, count)
    tower = load(checkpoints[kind])
    ours = tower.encode(*images)
    assert_equal(ours, hf_features(checkpoints[kind], kind, images))
    assert [len(rows) for rows in ours] == tower.tokens(images[1])
    assert {rows.shape[1] for rows in ours} == {tower.hidden_size} == {192 if kind == "qwen3_vl" else 64}
    assert len({rows.tobytes() for rows in ours}) == count, "images must not look alike"


@pytest.mark.parametrize("max_patches", [1, 100, 104])
@pytest.mark.parametrize("kind", VISION_KINDS)
def test_batched_equals_alone_however_it_is_split(
    kind: str, max_patches: int, checkpoints: dict[str, Path]
) -> None:
    pixels, grid = draw(kind, 5)
    tower = load(checkpoints[kind])
    ends = np.cumsum([0, *tower.rows(grid)])
    alone = [tower.encode(pixels[ends[i] : ends[i + 1]], grid[i : i + 1])[0] for i in range(5)]
    parts = load(checkpoints[kind], max_patches=max_patches).split(grid)
    together = [tower.encode(pixels[ends[p.start] : ends[p.stop]], grid[p]) for p in parts]
    assert_equal([rows for part in together for rows in part], alone)


def test_forwards_are_cut_between_images_by_patches(checkpoints: dict[str, Path]) -> None:
    grid = np.array([(1, 4, 6), (1, 10, 8), (1, 2, 12), (1, 4, 6)], np.int32)  # 24, 80, 24, 24 patches
    parts = {
        limit: [(p.start, p.stop) for p in load(checkpoints["qwen2_vl"], max_patches=limit).split(grid)]
        for limit in (1, 48, 104, 127, 152)
    }
    assert parts == {
        1: [(0, 1), (1, 2), (2, 3), (3, 4)],
        48: [(0, 1), (1, 2), (2, 4)],
        104: [(0, 2), (2, 4)],
        127: [(0, 2), (2, 4)],
        152: [(0, 4)],
    }
    assert load(checkpoints["qwen2_vl"]).split(grid[:0]) == []


@pytest.mark.parametrize(
    ("layer", "strategy"),
    [
        (-2, "full"),
        (-1, "default"),
        (-3, "default"),
        (1, "full"),
        (2, "full"),
        ([0, -1], "default"),
        ([-2], "full"),
    ],
)
@pytest.mark.parametrize("kind", ["llava", "llava_siglip"])
def test_every_choice_of_llava_features(
    kind: str, layer: int | list[int], strategy: str, copy: Callable[[str], Path]
) -> None:
    path = copy(kind)

    def edit(config: dict[str, Any]) -> None:
        config["vision_feature_layer"] = layer
        config["vision_feature_select_strategy"] = strategy

    def widen(tensors: dict[str, torch.Tensor]) -> None:
        if isinstance(layer, list):
            name = "multi_modal_projector.linear_1.weight"
            tensors[name] = tensors[name].repeat(1, len(layer)).contiguous()

    rewrite_config(path, edit)
    rewrite_weights(path, widen)
    images = draw(kind, 2)
    tower = load(path)
    ours = tower.encode(*images)
    assert_equal(ours, hf_features(path, kind, images))
    assert [len(rows) for rows in ours] == tower.tokens(images[1])


def test_feature_layer_zero_is_the_embedding(copy: Callable[[str], Path]) -> None:
    """transformers takes a single 0 for "no hidden states" and fails; counted from the end it is -3 of 2."""
    path = copy("llava")
    images = draw("llava", 1)
    rewrite_config(path, lambda c: c.update(vision_feature_layer=-3))
    expected = hf_features(path, "llava", images)
    rewrite_config(path, lambda c: c.update(vision_feature_layer=0))
    assert_equal(load(path).encode(*images), expected)


def test_layers_above_the_features_are_not_built(checkpoints: dict[str, Path]) -> None:
    module = load(checkpoints["llava"])._family.module
    names = [name for name, _ in module.named_parameters()]
    assert any(".layers.0." in name for name in names)
    assert not any(".layers.1." in name for name in names), "vision_feature_layer -2 of 2 layers"
    assert not any("language_model" in name for name in names)


def spelled(kind: str, generation: str) -> Callable[[str], str]:
    """A stored name as another generation of transformers spells it."""

    def rename(name: str) -> str:
        vision = any(part in name for part in ("vision", "visual", "multi_modal"))
        bare = name.removeprefix("model.") if vision else name
        if generation == "wrapped tower" and bare.startswith("vision_tower."):
            bare = bare.replace("vision_tower.", "vision_tower.vision_model.")
        if generation == "under model" and bare.startswith(("vision_tower.", "multi_modal", "visual.")):
            bare = f"model.{bare}"
        return bare

    return rename


@pytest.mark.parametrize("generation", ["top level", "under model", "wrapped tower"])
@pytest.mark.parametrize("kind", VISION_KINDS)
def test_names_of_every_generation_of_transformers(
    kind: str, generation: str, copy: Callable[[str], Path]
) -> None:
    path = copy(kind)
    images = draw(kind, 1)
    expected = load(path).encode(*images)
    rename = spelled(kind, generation)
    stored = set()

    def edit(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        renamed = {rename(name): tensor for name, tensor in tensors.items()}
        if kind in SIDES and generation == "wrapped tower":  # saved by transformers before 4.31
            renamed["vision_tower.vision_model.embeddings.position_ids"] = torch.arange(17)[None]
        stored.update(renamed)
        return renamed

    rewrite_weights(path, edit)
    prefixes = {
        "top level": ("vision_tower.e", "visual."),
        "under model": ("model.vision_tower.", "model.visual."),
        "wrapped tower": ("vision_tower.vision_model.", "visual."),
    }[generation]
    assert any(name.startswith(prefixes) for name in stored), sorted(stored)
    assert_equal(load(path).encode(*images), expected, tolerance=0)


def test_shards_of_the_language_model_are_not_opened(copy: Callable[[str], Path]) -> None:
    path = copy("qwen2_5_vl")
    images = draw("qwen2_5_vl", 2)
    expected = load(path).encode(*images)
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    weight_map = {}
    vision = sorted(name for name in tensors if name.startswith("visual."))
    halves = {"a.safetensors": vision[::2], "b.safetensors": vision[1::2]}
    for file, names in halves.items():
        save_file({name: tensors[name] for name in names}, path / file)
        weight_map |= dict.fromkeys(names, file)
    weight_map |= dict.fromkeys(sorted(set(tensors) - set(vision)), "text.safetensors")
    (path / "text.safetensors").write_bytes(b"no weights at all")
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}), "utf-8")
    assert_equal(load(path).encode(*images), expected, tolerance=0)
    (path / "b.safetensors").unlink()
    assert complaint(path) == f"{path}/b.safetensors: shard not found; {index.name} names it"
    index.write_text(json.dumps({"weight_map": {"visual.x": "../b.safetensors"}}), "utf-8")
    assert "'../b.safetensors' is not the name of a .safetensors file beside the index" in complaint(path)
    index.write_text("{", "utf-8")
    assert complaint(path).startswith(f"{index}: cannot be read as JSON: ")


def test_pickles_only_when_they_are_allowed(copy: Callable[[str], Path]) -> None:
    path = copy("llava")
    images = draw("llava", 1)
    expected = load(path).encode(*images)
    torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()
    assert "allow_pickle=true reads them" in complaint(path)
    assert_equal(load(path, allow_pickle=True).encode(*images), expected, tolerance=0)
    torch.save({"vision_tower.x": print}, path / "pytorch_model.bin")
    assert "not a pickle of tensors only" in complaint(path, allow_pickle=True)
    (path / "pytorch_model.bin").write_bytes(b"PK no archive")
    assert "broken checkpoint file" in complaint(path, allow_pickle=True)


def test_half_precision_stays_near(checkpoints: dict[str, Path]) -> None:
    for kind in VISION_KINDS:
        images = draw(kind, 2)
        exact = load(checkpoints[kind]).encode(*images)
        for dtype, tolerance in (("bfloat16", 0.03), ("float16", 0.004)):
            rough = load(checkpoints[kind], dtype=dtype).encode(*images)
            scale = max(np.abs(rows).max() for rows in exact)
            assert_equal(rough, exact, tolerance=tolerance * scale)
            assert not np.array_equal(rough[0], exact[0])
    assert torch.get_default_dtype() == torch.float32
    assert_equal(
        load(checkpoints["llava"], dtype="auto").encode(*draw("llava", 1)),
        load(checkpoints["llava"]).encode(*draw("llava", 1)),
        tolerance=0,
    )


def complaint(path: Path, **options: Any) -> str:
    """The message of the VisionError that loading raises: one line."""
    with pytest.raises(VisionError) as raised:
        load(path, **options)
    message = str(raised.value)
    assert "\n" not in message
    return message


def test_one_line_for_each_way_weights_can_be_broken(copy: Callable[[str], Path]) -> None:
    path = copy("llava")
    file = path / "model.safetensors"
    original = file.read_bytes()
    projector = "multi_modal_projector.linear_2.weight"

    def after(edit: Callable[[dict[str, torch.Tensor]], Any]) -> str:
        file.write_bytes(original)
        rewrite_weights(path, edit)
        return complaint(path)

    assert (
        after(lambda t: {name: t[name] for name in t if name != projector})
        == f"{file}: 1 missing tensors: {projector}"
    )
    many = after(lambda t: {name: t[name] for name in t if "vision_tower" not in name})
    assert "missing tensors: vision_tower." in many and " more" in many
    assert after(lambda t: t.update({projector: torch.zeros(3, 4)})) == (
        f"{file}: {projector} has shape [3, 4], config.json means [64, 64]"
    )
    quantised = after(lambda t: t.update({projector: torch.zeros(64, 64, dtype=torch.int8)}))
    assert quantised == f"{file}: {projector} has type torch.int8, expected floating point"
    unknown = after(lambda t: t.update({"vision_tower.extra.weight": torch.zeros(1)}))
    assert unknown == f"{file}: 1 unexpected tensors: vision_tower.extra.weight"
    file.write_bytes(original[:-10])
    assert complaint(path).startswith(f"{file}: broken safetensors file: ")
    file.unlink()
    assert complaint(path) == f"{path}: holds no weights: neither model.safetensors nor its index"


def test_one_line_for_each_way_a_configuration_can_be_wrong(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    def copy_of(kind: str) -> tuple[Path, Path]:
        made = Path(shutil.copytree(checkpoints[kind], tmp_path / str(len(list(tmp_path.iterdir())))))
        return made, made / "config.json"

    path, file = copy_of("llava")
    original = file.read_text("utf-8")

    def after(edit: Edit) -> str:
        file.write_text(original, "utf-8")
        rewrite_config(path, edit)
        return complaint(path)

    far = after(lambda c: c.update(vision_feature_layer=-4))
    assert far == f"{file}: vision_feature_layer -4 is not within the 2 layers of the vision tower"
    other = after(lambda c: c.update(vision_config={"model_type": "siglip2_vision_model"}))
    assert other == (
        f"{file}: vision tower 'siglip2_vision_model' is not supported; supported: clip_vision_model, "
        "siglip_vision_model"
    )
    path, file = copy_of("qwen3_vl")
    original = file.read_text("utf-8")
    for indexes in ([2, 0], [0, 3], [0, 0], [-1]):
        twice = after(lambda c, i=indexes: c["vision_config"].update(deepstack_visual_indexes=i))
        assert twice == f"{file}: deepstack_visual_indexes {indexes} are not ascending layers of 3"
    path, file = copy_of("llava")
    original = file.read_text("utf-8")
    text_only = after(lambda c: (c.clear(), c.update(model_type="llama")))
    assert text_only.startswith(f"{file}: model_type 'llama' has no known vision part; known are llava")
    assert after(lambda c: c.update(model_type="nonsense")).startswith(f"{file}: cannot be read: ")
    file.write_text("{", "utf-8")
    assert complaint(path).startswith(f"{file}: cannot be read: ")
    file.unlink()
    assert complaint(path) == f"{file}: not found"


def test_wrong_options(checkpoints: dict[str, Path]) -> None:
    path = checkpoints["llava"]
    assert complaint(path, dtype="int8").startswith("dtype 'int8' is not supported; supported: auto, float32")
    assert complaint(path, device="gpu0") == (
        "device 'gpu0' is not a device; expected auto, cpu, cuda or cuda:N"
    )
    assert complaint(path, device="meta").startswith("device 'meta' is not supported")
    assert complaint(path, device="cuda:99").startswith("device 'cuda:99' is not there: ")
    wanted = "cuda" if torch.cuda.is_available() else "cpu"
    assert choose_device("auto").type == wanted


def test_num_threads(checkpoints: dict[str, Path]) -> None:
    load(checkpoints["llava"], num_threads=3)
    assert torch.get_num_threads() == 3
    load(checkpoints["llava"], num_threads=None)
    assert torch.get_num_threads() == default_num_threads() >= 1


def test_wrong_images_are_refused_by_name(checkpoints: dict[str, Path]) -> None:
    def refused(kind: str, pixels: np.ndarray, grid: Any) -> str:
        with pytest.raises(InputError) as raised:
            load(checkpoints[kind]).check(pixels, np.asarray(grid))
        return str(raised.value)

    qwen, grid = draw("qwen2_vl", 2)
    assert refused("qwen2_vl", qwen[1:], grid) == "pixel_values: has 103 rows, image_grid means 104"
    assert refused("qwen2_vl", qwen[:, 1:], grid) == (
        "pixel_values: must have shape [rows, 1176], got [104, 1175]"
    )
    assert refused("qwen2_vl", qwen, grid[:, :2]) == "image_grid: must have shape [images, 3], got [2, 2]"
    for image in ([1, 3, 8], [0, 4, 6], [1, -4, -6]):
        assert refused("qwen2_vl", qwen[:24], [[1, 2, 2], image]) == (
            f"image_grid[1]: must be positive, height and width multiples of 2, got {image}"
        )
    many = np.ones((MAX_IMAGES + 1, 3), np.int32)
    assert refused("qwen2_vl", qwen, many) == (
        f"image_grid: at most {MAX_IMAGES} images are allowed, got {MAX_IMAGES + 1}"
    )
    huge = 2**31 - 2
    assert refused("qwen2_vl", qwen, np.array([[huge, huge, huge]] * 2, np.int32)) == (
        f"pixel_values: has 104 rows, image_grid means {2 * huge**3}"
    )
    llava, grid = draw("llava", 2)
    assert refused("llava", llava[:1], grid) == "pixel_values: has 1 rows, image_grid means 2"
    tiled, _ = draw("llava_next", 1)
    assert refused("llava_next", tiled, [[2, 40, 90]]) == (
        "image_grid[0]: an image of 40 x 90 pixels has [3] tiles, got 2"
    )
    assert refused("llava_onevision", tiled, [[2, 40, 90]]) == (
        "pixel_values: must have shape [rows, 7500], got [3, 9408]"
    )
    for image in ([3, 0, 90], [3, 40, 2**24 + 1], [3, -40, -90]):
        assert refused("llava_next", tiled, [image]) == (
            f"image_grid[0]: height and width must be from 1 to 16777216, got {image}"
        )
    assert refused("llava", llava, [[1, 4, 4], [1, 4, 5]]) == (
        "image_grid[1]: must be [1, 4, 4] for this model, got [1, 4, 5]"
    )


def test_the_language_model_is_never_in_memory(copy: Callable[[str], Path]) -> None:
    """A language model of 400 MB in the same file as the tiny tower: the process must not grow by it."""
    path = copy("llava")
    add_ballast(path / "model.safetensors", "language_model.model.ballast", 100_000_000)
    program = f"""
import resource
from quire_ensemble.vision_tower import VisionTower
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
VisionTower({str(path)!r}, device="cpu", num_threads=1)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) < 200, f"grew by {ran.stdout.strip()} MB"


def add_ballast(file: Path, name: str, elements: int) -> None:
    """Adds a float32 tensor of zeros to a safetensors file, as a hole that takes no room on disk."""
    stored = file.read_bytes()
    length = int.from_bytes(stored[:8], "little")
    header, data = json.loads(stored[8 : 8 + length]), stored[8 + length :]
    header[name] = {
        "dtype": "F32",
        "shape": [elements],
        "data_offsets": [len(data), len(data) + 4 * elements],
    }
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    os.truncate(file, 8 + len(text) + len(data) + 4 * elements)
