"""`load_format: dummy` with quantised weights: random codes, of numbers that a model can compute with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.drive import Driver

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
FP8 = {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"}
MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["self_attn", "router", "embed_tokens", "lm_head"],
}


@pytest.mark.parametrize(
    ("family", "rules"),
    [("llama", None), ("llama", AWQ), ("llama", GPTQ), ("llama", FP8), ("gpt_oss", None), ("gpt_oss", MXFP4)],
    ids=["llama", "awq", "gptq", "fp8", "gpt_oss", "mxfp4"],
)
def test_random_weights_of_each_kind_give_numbers(
    family: str, rules: dict[str, Any] | None, tmp_path: Path
) -> None:
    path = make_checkpoint(family, tmp_path, tokenizer=False)
    (path / "model.safetensors").unlink()
    values = json.loads((path / "config.json").read_text())
    if rules is not None:
        values["quantization_config"] = rules
    (path / "config.json").write_text(json.dumps(values))
    logits = Driver.load(path, load_format="dummy").logits(list(range(5, 25)))
    assert torch.isfinite(logits).all() and logits.std() > 0
