"""Reads what a checkpoint says besides its weights, such as configuration and end tokens, and lists its
files. This module does not import torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quire.errors import CheckpointError, ConfigError
from quire.layers.hf_config import MAX_SIZE, HFConfig, read_json
from quire_common.checkpoint_files import check_directory
from quire_common.errors import in_line, one_line
from quire_common.gguf_file import GGUFError, find_gguf, part_names


def read_configs(path: str | Path) -> tuple[HFConfig, dict[str, Any]]:
    """Returns config.json, and generation_config.json (an empty dict if there is none).

    Args:
        path: a directory or a GGUF file. The metadata of a GGUF file appears under the keys of config.json.

    Raises:
        CheckpointError: a file is missing, broken or not supported. The message is one line that names the
            file or the directory.
    """
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"{path}: no such checkpoint directory or file")
    if path.is_dir():
        check_directory(path, CheckpointError)
    gguf = gguf_file(path)
    if gguf is not None:
        from quire.loader.gguf.metadata import read_gguf_config

        hf = read_gguf_config(gguf)
    elif path.is_dir():
        hf = HFConfig.read(path)
    else:
        raise CheckpointError(f"{path}: neither a checkpoint directory nor a .gguf file")
    generation = path / "generation_config.json"
    return hf, read_json(generation) if generation.exists() else {}


def end_token_ids(hf: HFConfig, generation: dict[str, Any]) -> frozenset[int]:
    """Returns the ids of the tokens that end a checkpoint's sequences.

    They come from generation_config.json, or else from config.json, and the tokenizer's EOS is added if it is
    an added token. If none of these names any, and config.json has no key `eos_token_id`, the default of
    transformers' class counts.
    With a GGUF file, its metadata stand for config.json, and neither the tokenizer nor that default counts.
    Ids outside the vocabulary are left out.

    Args:
        hf: config.json from `read_configs`.
        generation: generation_config.json from `read_configs`.

    Raises:
        CheckpointError: the tokenizer's files are broken, or a file lists something that is no id.
    """
    stated = _token_ids(hf.path.parent / "generation_config.json", generation.get("eos_token_id"))
    ends = stated or _token_ids(hf.path, hf.get("eos_token_id"))
    if hf.gguf is None:
        # Chat models are published with the configuration of their base, and a tokenizer that ends turns.
        ends |= _tokenizer_eos(hf.path.parent)
        if not ends and "eos_token_id" not in hf.values:
            ends = _token_ids(hf.path, _default_eos(hf.get("model_type")))
    return frozenset(one for one in ends if one < hf.get("vocab_size", MAX_SIZE))


def _token_ids(file: Path, value: Any, key: str = "eos_token_id") -> frozenset[int]:
    """Returns the ids that a file states as one id, a list, or None. Raises CheckpointError, which names the
    file and the key."""
    if value is None:
        return frozenset()
    ids = value if isinstance(value, list) else [value]
    if any(type(one) is not int or not 0 <= one < MAX_SIZE for one in ids):
        shown = in_line(repr(value))[:80]
        raise CheckpointError(f"{file}: {key} must be the id of a token or a list of them, got {shown}")
    return frozenset(ids)


def _tokenizer_eos(directory: Path) -> frozenset[int]:
    """Returns the id of the tokenizer's `eos_token`; empty: there is none, or it is not an added token.
    Raises CheckpointError if the tokenizer's files are broken."""
    files = [directory / name for name in ("tokenizer_config.json", "special_tokens_map.json")]
    configs = [read_json(file) for file in files if file.exists()]
    named = [config["eos_token"] for config in configs if config.get("eos_token")]
    source, whole = files[0], directory / "tokenizer.json"
    if not named:
        return frozenset()
    try:
        token = named[0]["content"] if isinstance(named[0], dict) else named[0]
        added = [(one["content"], int(at)) for at, one in configs[0].get("added_tokens_decoder", {}).items()]
        if not added and whole.exists():
            source, text = whole, whole.read_text(encoding="utf-8")
            begin = text.index("[", text.index('"added_tokens"'))
            # They stand at the beginning; behind them are megabytes.
            added = [(one["content"], one["id"]) for one in json.JSONDecoder().raw_decode(text, begin)[0]]
        value = dict(added).get(token)
    except (AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError) as error:
        raise CheckpointError(f"{directory}: its tokenizer cannot be read: {one_line(error)}") from None
    return _token_ids(source, value, f"eos_token {in_line(repr(token))[:80]}")


def _default_eos(model_type: Any) -> Any:
    from transformers import CONFIG_MAPPING

    known = isinstance(model_type, str) and model_type in CONFIG_MAPPING
    return CONFIG_MAPPING[model_type]().to_dict().get("eos_token_id") if known else None


def named_tokens(tokenizer: str, names: str) -> list[tuple[str, int]]:
    """Returns name and id of the two tokens that `classifier_from_token` names.

    Args:
        tokenizer: directory of the tokenizer, or a .gguf file.
        names: the names, separated by a comma.

    Raises:
        ConfigError: the names are not two tokens of the tokenizer, or the tokenizer cannot be read.
    """
    from tokenizers import Tokenizer

    from quire_ensemble.tokenizer import tokenizer_json

    key, split = "classifier_from_token", [name.strip() for name in names.split(",")]
    try:
        read = Tokenizer.from_str(tokenizer_json(Path(tokenizer)))
    except Exception as error:  # the tokenizers library raises no narrower class
        raise ConfigError(f"{key}: the tokenizer cannot be read: {one_line(error)}") from None
    found = [(name, at) for name in split if (at := read.token_to_id(name)) is not None]
    if not len(split) == len(found) == 2:
        raise ConfigError(f"{key}={names!r:.80}: must name two tokens of the tokenizer, separated by a comma")
    return found


_CHECKPOINT_SUFFIXES = frozenset((".json", ".safetensors", ".gguf", ".bin", ".pt", ".model", ".jinja"))


def checkpoint_state(*paths: str) -> list[tuple[str, int, int]]:
    """Returns (path, bytes, modification time in ns) of each of `checkpoint_files`. If a later result
    differs, the checkpoints have probably changed. Empty: there are no files."""
    found = [(file, file.stat()) for file in checkpoint_files(*paths)]
    return [(str(file), stat.st_size, stat.st_mtime_ns) for file, stat in found]


def checkpoint_files(*paths: str) -> list[Path]:
    """Returns the files of some checkpoints that have a suffix in _CHECKPOINT_SUFFIXES, sorted, each once.

    Args:
        paths: directories, without those below them; or GGUF files, with all parts of a split one; "" is
            skipped.

    Raises:
        OSError: a directory cannot be read.
    """
    found = set()
    for path in map(Path, filter(None, paths)):
        for file in path.iterdir() if path.is_dir() else map(path.with_name, part_names(path.name)):
            if file.suffix in _CHECKPOINT_SUFFIXES and file.is_file():
                found.add(file)
    return sorted(found)


def gguf_file(path: Path) -> Path | None:
    """Returns the GGUF file of a checkpoint, found by `find_gguf`; None: there is none. Raises
    CheckpointError if a directory holds several."""
    try:
        return find_gguf(path)
    except GGUFError as error:
        raise CheckpointError(f"{path}: {error}") from None
