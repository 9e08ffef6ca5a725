"""Which tokenizer a frontend takes: the one that is named, and nothing in its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fixtures import fake_pb_utils

fake_pb_utils.install()

from quire import LLM  # noqa: E402
from quire.config import EngineConfig  # noqa: E402
from quire.errors import ConfigError  # noqa: E402
from quire.triton.config_completion import read_engine_config  # noqa: E402
from quire.triton.frontend import _load_tokenizer  # noqa: E402
from quire_ensemble.errors import TokenizerError  # noqa: E402
from tests.fixtures.checkpoints import make_checkpoint  # noqa: E402


def test_a_tokenizer_that_is_named_and_not_there_is_no_checkpoint_without_one(tmp_path: Path) -> None:
    """A typo in `tokenizer` gave a model that refused texts: "this checkpoint has no tokenizer"."""
    checkpoint = make_checkpoint("llama", tmp_path / "llama")
    options = {"tokenizer": str(tmp_path / "typo"), "num_blocks": 64, "max_model_len": 64}
    with pytest.raises(TokenizerError, match="typo: tokenizer directory does not exist"):
        _load_tokenizer(EngineConfig.from_mapping({"model": str(checkpoint), **options}))
    with pytest.raises(TokenizerError, match="typo: tokenizer directory does not exist"):
        LLM(checkpoint, **options)


def test_a_tokenizer_that_is_no_text_is_refused_by_its_key(tmp_path: Path) -> None:
    """It was a TypeError of pathlib's, which named no key."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "quire.json").write_text('{"tokenizer": 5}')
    with pytest.raises(ConfigError, match="tokenizer must be text, got 5"):
        read_engine_config({}, tmp_path / "1")
