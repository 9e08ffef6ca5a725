"""Attention to the positions that an indexer chooses (DeepSeek V3.2, GLM-5), against `transformers`."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.errors import CheckpointError
from quire.layers.config import DecoderConfig
from quire.layers.hf_config import HFConfig
from quire.layers.indexer import _scores, choose, key_cache
from quire.models.kv_spec import LatentKV
from quire.models.registry import model_class
from quire_kernels.metadata import AttentionMetadata
from tests.fixtures.checkpoints import Checkpoints, make_checkpoint
from tests.fixtures.drive import Driver, hf_greedy, hf_logits, hf_model
from tests.fixtures.heads import edit_config, make_mtp_checkpoint
from tests.fixtures.runner_of import runner_of

FAMILIES = ("deepseek_v32", "glm_moe_dsa")
TOPK = 16
"""Positions that the fixture's families choose."""
IDS = torch.randint(5, 512, (75,), generator=torch.Generator().manual_seed(0)).tolist()
each_family = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return Checkpoints(tmp_path_factory.mktemp("families"))


def parsed(path: Path) -> DecoderConfig:
    hf = HFConfig.read(path)
    config = model_class(hf).parse_config(hf, torch.float32)
    assert isinstance(config, DecoderConfig)
    return config


@each_family
def test_where_all_positions_are_chosen(family: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """The same weights. Choices matter from the first token on that sees more positions than are chosen."""
    path = make_checkpoint(family, tmp_path, tokenizer=False, index_topk=len(IDS))
    model = hf_model(path)
    expected = hf_logits(model, IDS)
    found = Driver.load(path).logits(IDS, 7)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0.0)
    prompts = [IDS[:length] for length in (1, 16, 30)]
    assert Driver.load(path).greedy(prompts, 24, 7) == [hf_greedy(model, prompt, 24) for prompt in prompts]
    differences = (found - Driver.load(checkpoints[family]).logits(IDS)).abs().amax(1)
    assert differences[:TOPK].max() == 0 and differences[TOPK + 4 :].min() > 0.1


@each_family
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_depend_neither_on_chunks_nor_on_the_batch(
    family: str, dtype: str, checkpoints: dict[str, Path]
) -> None:
    """Also for tokens that see few positions, which a step with longer sequences computes in another way."""
    driver = Driver.load(checkpoints[family], dtype=dtype)
    whole = driver.logits(IDS)
    for chunk in (1, 5, 16):
        assert torch.equal(driver.logits(IDS, chunk), whole), chunk
    short, long = driver.add(IDS[:12]), driver.add(IDS)
    together = driver.step([(short, 10), (long, 70)]) + driver.step([(short, 2), (long, 5)])
    assert torch.equal(torch.cat(together[::2]), whole[:12])
    assert torch.equal(torch.cat(together[1::2]), whole)


@each_family
def test_bytes_of_a_token(family: str, checkpoints: dict[str, Path]) -> None:
    """Float32, latent, rotated part and indexer key: also in layers that share an indexer."""
    llm = LLM(checkpoints[family], max_model_len=64, num_blocks=32, block_size=8, num_threads=1)
    layers = parsed(checkpoints[family]).num_layers
    assert llm.core.info.kv_cache_bytes == 32 * 8 * layers * 4 * (64 + 16 + 32)
    llm.core.close()


def test_a_prefix_hit_brings_the_indexer_keys(checkpoints: dict[str, Path]) -> None:
    """Other keys behind the latents of a cached prefix give other tokens: they are read from there."""
    llm = LLM(checkpoints["deepseek_v32"], max_model_len=128, num_blocks=32, block_size=8, num_threads=1)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    (cold,), (warm,) = llm.generate([IDS], params), llm.generate([IDS], params)
    assert warm.num_cached_tokens == 72 and warm.token_ids == cold.token_ids
    cache = runner_of(llm.core).kv_cache
    with torch.inference_mode():
        for layer in range(3):
            key_cache(cache.layer(layer), 32)[:, 0].neg_()
    (changed,) = llm.generate([IDS], params)
    assert changed.num_cached_tokens == 72 and changed.token_ids != cold.token_ids
    llm.core.close()


def test_choices_are_the_largest_scores_and_of_equal_ones_the_first() -> None:
    generator = torch.Generator().manual_seed(3)
    query_lens, seq_lens, topk, block_size = [3, 1, 9], [7, 30, 9], 5, 4
    memory = torch.full((20, LatentKV(6, torch.float32, 8).layer_bytes(block_size)), 255, dtype=torch.uint8)
    keys = key_cache(LatentKV(6, torch.float32, 8).view(memory, block_size), 8)
    order = torch.randperm(20, generator=generator).tolist()
    tables = [order[:2], order[2:10], order[10:13]]
    meta = AttentionMetadata.build(query_lens, seq_lens, tables, block_size)
    contexts = [torch.randn((length, 8), generator=generator) for length in seq_lens]
    contexts[1][20:] = contexts[1][:10]  # ten pairs of equal scores
    for blocks, context in zip(tables, contexts, strict=True):
        for position, key in enumerate(context):
            keys[blocks[position // block_size], 0, 0, position % block_size] = key
    query = torch.randn((13, 2, 8), generator=generator)
    weights = torch.randn((13, 2), generator=generator)
    found = choose(query, weights, keys, meta, topk)
    row = 0
    for blocks, context, query_len, seq_len in zip(tables, contexts, query_lens, seq_lens, strict=True):
        for position in range(seq_len - query_len, seq_len):
            scores = (weights[row, :, None] * (query[row] @ context[: position + 1].T).clamp(min=0)).sum(0)
            ranked = sorted(range(position + 1), key=lambda p: (-round(float(scores[p]), 5), p))
            wanted = sorted(ranked[:topk])
            wanted += [position] * (topk - len(wanted))
            assert found.blocks[row].tolist() == [blocks[p // block_size] for p in wanted]
            assert found.offsets[row].tolist() == [p % block_size for p in wanted]
            row += 1
    alone, together = (_scores(query[4:], weights[4:], contexts[2], each_alone=way) for way in (True, False))
    torch.testing.assert_close(alone, together)
    assert together.isneginf().sum() == 9 * 8 / 2


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"index_topk_freq": 3},
        {"index_topk_freq": 2, "index_skip_topk_offset": 3},
        {"index_topk_pattern": "FSSFSS"},
        {"index_topk_pattern": ["full", "full", "shared", "full", "shared", "full"]},
        {"indexer_types": ["full"] * 5 + ["shared"], "index_topk_freq": 2},
    ],
)
def test_layers_without_an_indexer(keys: dict[str, Any], tmp_path: Path) -> None:
    from transformers import GlmMoeDsaConfig

    make_checkpoint("glm_moe_dsa", tmp_path, tokenizer=False)
    values = json.loads((tmp_path / "config.json").read_text())
    del values["indexer_types"], values["mlp_layer_types"], values["layer_types"]
    values |= {"num_hidden_layers": 6, **keys}
    (tmp_path / "config.json").write_text(json.dumps(values))
    config, theirs = parsed(tmp_path), GlmMoeDsaConfig(**values)
    assert config.latent is not None and config.latent.index is not None and config.experts is not None
    types = ["shared" if layer in config.latent.index.shared_layers else "full" for layer in range(6)]
    assert types == theirs.indexer_types
    sparse = ["sparse" if layer in config.experts.layers else "dense" for layer in range(6)]
    assert sparse == theirs.mlp_layer_types


@pytest.mark.parametrize(
    ("family", "keys", "complaint"),
    [
        ("deepseek_v32", {"q_lora_rank": None}, "q_lora_rank null is not supported"),
        ("deepseek_v32", {"index_topk": 0}, "index_topk must be a positive whole number"),
        ("deepseek_v32", {"index_head_dim": 8}, "index_head_dim=8 is less than qk_rope_head_dim=16"),
        ("deepseek_v32", {"rope_interleave": False}, "rope_interleave false is not supported"),
        ("deepseek_v32", {"indexer_rope_interleave": True}, "indexer_rope_interleave is always false"),
        ("glm_moe_dsa", {"indexer_rope_interleave": False}, "indexer_rope_interleave is always true"),
        ("glm_moe_dsa", {"mlp_layer_types": ["dense"]}, "mlp_layer_types ['dense'] must be dense or sparse"),
        ("glm_moe_dsa", {"indexer_types": ["full"]}, "indexer_types ['full'] must be full or shared"),
        ("glm_moe_dsa", {"indexer_types": ["shared"] * 4}, "full for the first"),
        (
            "glm_moe_dsa",
            {"indexer_types": None, "index_topk_freq": 2, "index_skip_topk_offset": 0},
            "index_topk_freq 2 must be",
        ),
        (
            "glm_moe_dsa",
            {"indexer_types": None, "index_topk_pattern": "FFXF"},
            "index_topk_pattern 'FFXF' must be full or shared",
        ),
    ],
)
def test_files_that_are_refused(
    family: str, keys: dict[str, Any], complaint: str, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copy(checkpoints[family] / "config.json", tmp_path)
    edit_config(tmp_path, **keys)
    with pytest.raises(CheckpointError, match=re.escape(complaint)):
        parsed(tmp_path)


@each_family
def test_layers_for_multi_token_prediction_are_left_out(
    family: str, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    path = make_mtp_checkpoint(family, tmp_path / "model")
    assert torch.equal(Driver.load(path).logits(IDS), Driver.load(checkpoints[family]).logits(IDS))
