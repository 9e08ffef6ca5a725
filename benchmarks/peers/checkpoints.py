"""Checkpoints of real models' shapes with random weights, and their GGUF and OpenVINO forms.

Genuine Hugging Face directories, written as the tests' tiny ones are (`tests/fixtures/checkpoints.py`):
seeded, bfloat16, scaled so that the layers outweigh the tied embedding and the whole history decides the next
token. Everything is made once, under `benchmarks/out/checkpoints`; what is interrupted is made again.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.machine import ROOT

DIRECTORY = ROOT / "benchmarks" / "out" / "checkpoints"
BITS_PER_WEIGHT = {"bf16": 16.0, "int8": 8.5, "int4": 4.5}
"""Bits of a weight with its share of one fp16 scale per 32 weights, as Q8_0 and Q4_0 have."""


@dataclass(frozen=True)
class Shape:
    """Dimensions of a dense decoder with tied embeddings."""

    name: str
    family: str
    """Family of tests/fixtures/checkpoints.py."""
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    inner: int
    vocab_size: int
    extra: dict[str, Any] = field(default_factory=dict)
    """Further keys of `make_checkpoint`."""

    @property
    def layer_params(self) -> int:
        """Weights of all layers' matrices: what a prompt token passes through."""
        attention = self.hidden * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        return self.num_layers * (attention + 3 * self.hidden * self.inner)

    @property
    def params(self) -> int:
        """Weights that a decode step reads, with the LM head, which is the embedding."""
        return self.layer_params + self.hidden * self.vocab_size

    @property
    def stored_params(self) -> int:
        """Weights of the whole model."""
        return self.params

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's keys and values at 16 bits."""
        return 2 * 2 * self.num_layers * self.num_kv_heads * self.head_dim

    def weight_bytes(self, precision: str = "bf16") -> float:
        """Bytes that a decode step of one row reads."""
        return self.params * BITS_PER_WEIGHT[precision] / 8


@dataclass(frozen=True)
class CountedShape(Shape):
    """Dimensions of a decoder with experts, states or latents. Quire counts its weights."""

    @cached_property
    def _model(self) -> Any:
        import torch

        from quire.config import ModelConfig
        from quire.loader.load import empty_model

        return empty_model(ModelConfig(model=str(huggingface(self))), torch.device("meta")).model

    @property
    def layer_params(self) -> int:
        """See Shape. Of the experts, those that compute a token are counted."""
        experts = self._model.config.experts
        count: int = self._model.config.layer_weights(0 if experts is None else experts.routing.num_chosen)
        return count

    @property
    def stored_params(self) -> int:
        """See Shape."""
        count: int = self._model.config.num_weights
        return count

    @property
    def kv_bytes_per_token(self) -> int:
        """See Shape."""
        groups = [group for group in self._model.kv_groups if not group.is_state]
        count: int = self._model.kv_spec("auto").layer_bytes(1)
        return count * sum(len(group.layers) for group in groups)


_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_DELTA = {
    "full_attention_interval": 4,
    "layer_types": None,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "rope_scaling": {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25},
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": True,
}
_LATENT = {
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": False,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 1,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
}
SHAPES = {
    shape.name: shape
    for shape in (
        Shape(
            "llama-1b",
            "llama3",
            num_layers=16,
            hidden=2048,
            num_heads=32,
            num_kv_heads=8,
            head_dim=64,
            inner=8192,
            vocab_size=128256,
            extra={"rope_scaling": _LLAMA3_ROPE, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072},
        ),
        Shape(
            "qwen3-0.6b",
            "qwen3",
            num_layers=28,
            hidden=1024,
            num_heads=16,
            num_kv_heads=8,
            head_dim=128,
            inner=3072,
            vocab_size=151936,
            extra={
                "rope_scaling": {"rope_type": "default", "rope_theta": 1000000.0},
                "rms_norm_eps": 1e-6,
                "max_position_embeddings": 40960,
            },
        ),
        # SmolLM2-135M.
        Shape(
            "smollm2",
            "llama3",
            num_layers=30,
            hidden=576,
            num_heads=9,
            num_kv_heads=3,
            head_dim=64,
            inner=1536,
            vocab_size=49152,
            extra={
                "rope_scaling": {"rope_type": "default", "rope_theta": 100000.0},
                "rms_norm_eps": 1e-5,
                "max_position_embeddings": 8192,
            },
        ),
        # Qwen3.5-0.8B.
        CountedShape(
            "qwen3.5-0.8b",
            "qwen3_5",
            num_layers=24,
            hidden=1024,
            num_heads=8,
            num_kv_heads=2,
            head_dim=256,
            inner=3584,
            vocab_size=248320,
            extra=_DELTA,
        ),
        # No model's: 0.6 B of 2.3 B weights compute a token.
        CountedShape(
            "qwen3.5-moe",
            "qwen3_5_moe",
            num_layers=24,
            hidden=1024,
            num_heads=8,
            num_kv_heads=2,
            head_dim=256,
            inner=512,
            vocab_size=151936,
            extra={
                **_DELTA,
                "num_experts": 48,
                "num_experts_per_tok": 6,
                "moe_intermediate_size": 512,
                "shared_expert_intermediate_size": 512,
            },
        ),
        # DeepSeek-V2-Lite's layers, latents and heads, with half of its hidden size and of its experts, which
        # are smaller. llama.cpp knows the kind by its 27 layers.
        CountedShape(
            "deepseek-v2-mini",
            "deepseek_v2",
            num_layers=27,
            hidden=1024,
            num_heads=16,
            num_kv_heads=16,
            head_dim=64,
            inner=5472,
            vocab_size=102400,
            extra={**_LATENT, "n_routed_experts": 32, "moe_intermediate_size": 352},
        ),
        # For what needs no weights of its own (`write_config`).
        Shape(
            "llama-8b",
            "llama3",
            num_layers=32,
            hidden=4096,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            inner=14336,
            vocab_size=128256,
            extra={"rms_norm_eps": 1e-5, "max_position_embeddings": 16384, "tie_word_embeddings": False},
        ),
        # Qwen3-30B-A3B.
        CountedShape(
            "qwen3-30b-a3b",
            "qwen3_moe",
            num_layers=48,
            hidden=2048,
            num_heads=32,
            num_kv_heads=4,
            head_dim=128,
            inner=6144,
            vocab_size=151936,
            extra={
                "num_experts": 128,
                "num_experts_per_tok": 8,
                "moe_intermediate_size": 768,
                "mlp_only_layers": [],
                "rms_norm_eps": 1e-6,
                "max_position_embeddings": 40960,
                "tie_word_embeddings": False,
            },
        ),
        # gpt-oss-20b, with experts in MXFP4 as its file has them.
        CountedShape(
            "gpt-oss-20b",
            "gpt_oss",
            num_layers=24,
            hidden=2880,
            num_heads=64,
            num_kv_heads=8,
            head_dim=64,
            inner=2880,
            vocab_size=201088,
            extra={
                "num_local_experts": 32,
                "num_experts_per_tok": 4,
                "sliding_window": 128,
                "rope_scaling": {
                    "rope_type": "yarn",
                    "rope_theta": 150000.0,
                    "factor": 32.0,
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                    "truncate": False,
                    "original_max_position_embeddings": 4096,
                },
                "max_position_embeddings": 131072,
                "tie_word_embeddings": False,
                "quantization_config": {
                    "quant_method": "mxfp4",
                    "modules_to_not_convert": [
                        "model.layers.*.self_attn",
                        "model.layers.*.mlp.router",
                        "model.embed_tokens",
                        "lm_head",
                    ],
                },
            },
        ),
        # DeepSeek-V2-Lite.
        CountedShape(
            "deepseek-v2-lite",
            "deepseek_v2",
            num_layers=27,
            hidden=2048,
            num_heads=16,
            num_kv_heads=16,
            head_dim=64,
            inner=10944,
            vocab_size=102400,
            extra={**_LATENT, "n_routed_experts": 64, "moe_intermediate_size": 1408},
        ),
        # No model's: for trying the harness out.
        Shape(
            "tiny",
            "qwen3",
            num_layers=4,
            hidden=256,
            num_heads=8,
            num_kv_heads=4,
            head_dim=64,
            inner=768,
            vocab_size=2048,
        ),
    )
}


_QUANTISE = """
import sys
import llama_cpp
source, path, kind = sys.argv[1:]
params = llama_cpp.llama_model_quantize_default_params()
params.ftype = getattr(llama_cpp, "LLAMA_FTYPE_MOSTLY_" + kind)
sys.exit(llama_cpp.llama_model_quantize(source.encode(), path.encode(), params))
"""


def write_config(shape: Shape, folder: Path) -> Path:
    """A directory with the config.json of a model of this shape alone, for `load_format: dummy`."""
    from tests.fixtures.checkpoints import model_config

    values = model_config(shape.family, **_dimensions(shape), **shape.extra).to_dict()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values | {"dtype": "bfloat16"}), encoding="utf-8")
    return folder


def _dimensions(shape: Shape) -> dict[str, int]:
    return {
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.inner,
        "vocab_size": shape.vocab_size,
    }


def huggingface(shape: Shape) -> Path:
    """The bfloat16 checkpoint directory; made in a minute or two where it does not exist."""

    def make(path: Path) -> None:
        from tests.fixtures.checkpoints import make_checkpoint

        make_checkpoint(
            shape.family,
            path,
            dtype="bfloat16",
            tokenizer=False,
            **_dimensions(shape),
            **shape.extra,
        )
        _write_tokenizer(path, shape.vocab_size)

    return _once(DIRECTORY / shape.name, make)


def without_weights(shape: Shape) -> Path:
    """A directory with config.json and the tokenizer of `huggingface`, for a fake device."""

    def make(path: Path) -> None:
        write_config(shape, path)
        _write_tokenizer(path, shape.vocab_size)

    return _once(DIRECTORY / f"{shape.name}-config", make)


def gguf(shape: Shape, kind: str, llama_python: Path) -> Path:
    """A GGUF file of the same weights.

    Args:
        kind: BF16, or a mixture of types that llama.cpp makes of that: Q8_0, Q4_0, Q4_K_M, ...
        llama_python: interpreter with llama-cpp-python.
    """

    if kind == "BF16":
        return pure_gguf(shape, kind)

    def quantise(path: Path) -> None:
        source = pure_gguf(shape, "BF16")
        subprocess.run([llama_python, "-c", _QUANTISE, source, path, kind], check=True)

    return _once(DIRECTORY / f"{shape.name}-{kind}.gguf", quantise)


def pure_gguf(shape: Shape, kind: str) -> Path:
    """A GGUF file of the same weights, whose matrices are all of one type that the package gguf can write."""

    def make(path: Path) -> None:
        from tests.fixtures.gguf_files import write_gguf

        write_gguf(huggingface(shape), path, kind)

    return _once(DIRECTORY / f"{shape.name}-{kind}-pure.gguf", make)


def openvino(shape: Shape, python: Path, log: Path) -> Path:
    """OpenVINO's form of the same weights (fp16 on disk), by optimum-cli of the venv of `python`.

    Raises:
        subprocess.CalledProcessError: the export failed; `log` has its words.
    """

    def make(path: Path) -> None:
        command = [str(python.parent / "optimum-cli"), "export", "openvino", "--model", str(source)]
        command += ["--task", "text-generation-with-past", "--weight-format", "fp16", str(path)]
        with log.open("a") as output:
            subprocess.run(command, check=True, stdout=output, stderr=output, stdin=subprocess.DEVNULL)

    source = huggingface(shape)
    return _once(DIRECTORY / f"{shape.name}-openvino", make)


def _once(path: Path, make: Callable[[Path], None]) -> Path:
    if not path.exists():
        part = path.with_name(f"{path.name}.part")
        if part.is_dir():
            shutil.rmtree(part)
        part.unlink(missing_ok=True)
        part.parent.mkdir(parents=True, exist_ok=True)
        make(part)
        part.rename(path)
    return path


def _write_tokenizer(path: Path, vocab_size: int) -> None:
    """A byte-level BPE that fills the whole vocabulary: GGUF and OpenVINO files must hold one.

    Nothing is ever tokenized: after special tokens, bytes and one merge come made-up words.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from tests.fixtures.checkpoints import SPECIAL_TOKENS

    tokens = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet()), "aa"]
    tokens += [f"word{number}" for number in range(len(tokens), vocab_size)]
    vocab = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "a")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<|endoftext|>"
    ).save_pretrained(path)


def describe(shape: Shape) -> dict[str, Any]:
    """Facts of the shape for the result file."""
    config = json.loads((huggingface(shape) / "config.json").read_text())
    return {"params": shape.params, "layer_params": shape.layer_params, "config": config}
