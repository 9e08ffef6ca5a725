"""quantize: quantises a checkpoint of plain matrices, layer by layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from quire.errors import CheckpointError
from quire_ensemble.tokenizer import Tokenizer
from quire_quantize.calibration import Calibration
from quire_quantize.directory import WeightsWriter, new_directory, write_json
from quire_quantize.perplexity import CALIBRATION_TOKENS, WINDOW, windows
from quire_quantize.rounding import QuantizedMatrix
from quire_quantize.schemes import SCHEMES, LayerInputs, group_size
from quire_quantize.source import SourceCheckpoint


def quantize(path: Path, scheme_name: str, out: Path, text: str, progress: Callable[[int, int], None]) -> int:
    """Writes a quantised checkpoint and returns the number of bytes of its tensors.

    Memory need not hold the whole checkpoint. It holds mainly the hidden states of the calibration text, some
    copies of one decoder layer in float32, the statistics of this layer's inputs, and some GiB of tensors
    that are not yet written.

    Args:
        path: a directory, or a .gguf file.
        scheme_name: name in SCHEMES.
        out: directory to make. It appears when the whole checkpoint is written.
        text: calibration text, of which at most CALIBRATION_TOKENS tokens are used.
        progress: called with the number of finished layers and the number of all layers.

    Raises:
        CheckpointError: the checkpoint is broken or not supported, it lacks a tokenizer for calibration, or
            `out` exists or cannot be written.
        TokenizerError: the checkpoint's tokenizer cannot be loaded.
    """
    scheme = SCHEMES[scheme_name]
    with new_directory(out) as directory, torch.inference_mode():
        source = SourceCheckpoint(path)
        model, dtype = source.model, source.dtype
        if scheme.weights["strategy"] == "group":
            group_size(model.config)  # said before the work
        writer, count = WeightsWriter(directory), model.config.num_layers
        in_layers = {f"model.layers.{index}." for index in range(count)}
        others = [name for name in source.tensors if ".".join((*name.split(".")[:3], "")) not in in_layers]
        for name in others:
            tensor = source.read(name)
            writer.add(source.tensors[name].name, tensor.to(dtype) if source.is_gguf else tensor)
        calibration = _calibration(source, text) if scheme.is_calibrated else None
        for index in range(count):
            prefix, tensors = f"model.layers.{index}", source.layer(index)
            statistics = {}
            if calibration is not None:
                layer = calibration.layer(index, _named(prefix, tensors))
                statistics = calibration.statistics(index, layer)
            matrices = scheme.quantize(tensors, LayerInputs(model.config, dtype, statistics))
            for name, matrix in matrices.items():
                tensors[f"{name}.weight"] = matrix.dequantize()
            if calibration is not None and index + 1 < count:
                calibration.advance(index, calibration.layer(index, _named(prefix, tensors)))
            _write(writer, source, prefix, tensors, matrices, scheme.format)
            progress(index + 1, count)
        writer.finish()
        write_json(
            directory / "config.json",
            source.config_json(scheme.config(model.config, _ignored(source, others))),
        )
        source.copy_files(directory)
    return writer.num_bytes


def _calibration(source: SourceCheckpoint, text: str) -> Calibration:
    tokenizer = Tokenizer.find("", source.path)
    if tokenizer is None:
        raise CheckpointError(f"{source.path}: has no tokenizer, so no text can calibrate it: use fp8")
    size = min(WINDOW, source.model.config.max_position_embeddings)
    cut = windows(tokenizer, text, size, CALIBRATION_TOKENS)
    vocab_size = source.model.config.vocab_size
    if not cut or max(map(max, cut)) >= vocab_size:
        raise CheckpointError(f"{source.path}: the tokenizer gives no ids below vocab_size={vocab_size}")
    return Calibration(source.model, source.read("model.embed_tokens.weight"), cut)


def _named(prefix: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def _write(
    writer: WeightsWriter,
    source: SourceCheckpoint,
    prefix: str,
    tensors: dict[str, torch.Tensor],
    matrices: dict[str, QuantizedMatrix],
    layout: str,
) -> None:
    """Gives a decoder layer's tensors to the writer, under their names in the checkpoint. For a quantised
    matrix, the suffix ".weight" is replaced by those of its parts."""
    for name, tensor in tensors.items():
        linear = name.removesuffix(".weight")
        stored = source.tensors[f"{prefix}.{name}"].name
        if linear not in matrices:
            writer.add(stored, tensor.to(source.dtype))
            continue
        for suffix, part in matrices[linear].stored(layout):
            writer.add(f"{stored.removesuffix('.weight')}.{suffix}", part)


def _ignored(source: SourceCheckpoint, others: list[str]) -> list[str]:
    """Returns the names of the linear layers that are not quantised: the head, and matrices outside the
    decoder layers, except embeddings.

    Args:
        source: the checkpoint.
        others: names of the tensors outside the decoder layers.
    """
    names = {
        source.tensors[name].name.removesuffix(".weight")
        for name in others
        if name.endswith(".weight") and source.tensors[name].tensor.ndim == 2 and "embed" not in name
    }
    return sorted({"lm_head", *names})
