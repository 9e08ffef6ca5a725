"""SourceCheckpoint: the checkpoint that is quantised."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from quire.config import ModelConfig
from quire.errors import CheckpointError
from quire.layers.config import DTYPES
from quire.layers.hf_config import read_json
from quire.loader.files import find_weights
from quire.loader.info import gguf_file, read_configs
from quire.loader.load import HEAD, TABLE, check_tied, checkpoint_errors
from quire.models.decoder import DecoderLayer, DecoderModel
from quire.models.registry import model_class, with_head
from quire_common.errors import one_line
from quire_common.weight_files import NamedTensor
from quire_ensemble.tokenizer import Tokenizer

_COPIED = (".json", ".jinja", ".model", ".txt", ".tiktoken")
"""Suffixes of the files that are copied from a directory to the quantised checkpoint. Exceptions are
config.json, which is written anew, and indexes of weight files."""


class SourceCheckpoint:
    """A checkpoint of plain matrices.

    Args:
        path: a directory, or a .gguf file. Tensors of a GGUF file are dequantised when they are read.

    Raises:
        CheckpointError: the checkpoint is missing, broken, already quantised, or not supported.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.is_gguf = path, gguf_file(path) is not None
        hf, _ = read_configs(path)
        if hf.get("quantization_config") is not None:
            raise hf.error("quantization_config: the weights are quantised already")
        self.hf = with_head(hf)
        kind = model_class(self.hf)
        name = str(self.hf.get("dtype") or self.hf.get("torch_dtype") or "float32").removeprefix("torch.")
        if name not in DTYPES:
            raise hf.error(f"dtype {name!r} is not supported; supported: {', '.join(DTYPES)}")
        self.dtype = DTYPES[name]
        with checkpoint_errors(self.hf):
            config = replace(kind.parse_config(self.hf, torch.float32), attention_backend=None)
        if config.latent is not None:
            raise hf.error(f"{self.hf.architecture} has latent attention, which this tool does not quantise")
        if config.experts is not None:
            raise hf.error(f"{self.hf.architecture} has experts, which this tool does not quantise")
        is_other = config.fused_qkv or config.fused_gate_up or config.norms.attention_input is None
        if (
            is_other
            or not issubclass(kind, DecoderModel)
            or kind.layer_class.forward is not DecoderLayer.forward
            or kind.layer_class.make_attention is not DecoderLayer.make_attention
        ):
            raise hf.error(
                f"{self.hf.architecture} has fused projections, or other layers than Llama's, which this "
                "tool does not quantise"
            )
        with checkpoint_errors(self.hf):
            self.model: DecoderModel = kind(config, config.max_position_embeddings, torch.device("meta"))
        """The model in float32 on the "meta" device."""
        self.tensors: dict[str, NamedTensor] = {}
        """Stored tensors by their names in `DecoderModel.weights`. A tensor without such a name has its
        canonical name."""
        wanted = {name: memory.shape for name, memory, _ in self.model.weights()}
        files = find_weights(ModelConfig(model=str(path), quantization="dequantized"))
        for stored in files.tensors():
            own = self.model.canonical_name(stored.name)
            if own not in wanted and f"model.{own}" in wanted:
                own = f"model.{own}"
            shape = wanted.get(own, stored.tensor.shape)
            if stored.tensor.shape != shape:
                raise CheckpointError(
                    f"{stored.file}: {stored.name} has shape {list(stored.tensor.shape)}, config.json means "
                    f"{list(shape)}"
                )
            if own in self.tensors:
                raise CheckpointError(
                    f"{stored.file}: {stored.name} stands for {own}, as a tensor before it does"
                )
            self.tensors[own] = stored
        missing = sorted(wanted.keys() - self.tensors.keys())
        if missing:
            raise CheckpointError(
                f"{files.source}: {len(missing)} missing tensors, {missing[0]} is the first"
            )
        if config.tie_word_embeddings and HEAD in self.tensors:
            check_tied(self.tensors[HEAD], self.tensors[TABLE], self.dtype)

    def read(self, name: str) -> torch.Tensor:
        """Returns a tensor's content; raises CheckpointError if its file can no longer be read."""
        stored = self.tensors[name]
        try:
            return stored.read()
        except OSError as error:
            raise CheckpointError(f"{stored.file}: {stored.name} cannot be read: {one_line(error)}") from None

    def layer(self, index: int) -> dict[str, torch.Tensor]:
        """Returns a decoder layer's tensors in float32, by their names in the layer."""
        prefix = f"model.layers.{index}."
        return {
            name.removeprefix(prefix): self.read(name).float()
            for name, _, _ in self.model.weights()
            if name.startswith(prefix)
        }

    def config_json(self, quantization: dict[str, Any]) -> dict[str, Any]:
        """Returns the content of config.json for the quantised checkpoint.

        Raises:
            CheckpointError: a GGUF file's rotary embedding cannot be expressed in config.json.
        """
        if not self.is_gguf:
            return {**read_json(self.path / "config.json"), "quantization_config": quantization}
        if "frequency_factors" in self.hf.get("rope_parameters", {}):
            raise self.hf.error("rope_freqs.weight has no counterpart in config.json")
        values = {key: value for key, value in self.hf.values.items() if value is not None}
        model_type = self.hf.architecture.removesuffix("ForCausalLM").lower()
        return {**values, "model_type": model_type, "quantization_config": quantization}

    def copy_files(self, directory: Path) -> None:
        """Copies files into the directory of the quantised checkpoint: those that _COPIED describes, or the
        tokenizer and chat template of a GGUF file."""
        if not self.is_gguf:
            for file in sorted(self.path.iterdir()):
                is_other = file.name in ("config.json",) or file.name.endswith(".index.json")
                if file.is_file() and file.suffix in _COPIED and not is_other:
                    (directory / file.name).write_bytes(file.read_bytes())
            return
        tokenizer = Tokenizer.find("", self.path)
        if tokenizer is not None:
            tokenizer.hf.save_pretrained(directory)
