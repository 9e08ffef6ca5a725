"""A fuzzer of checkpoints' files: keys of config.json, generation_config.json and GGUF headers are dropped,
null, spelt in another way, of another type or of another value.

The engine then generates what transformers does, or refuses the file. File `k` of seed `s` depends on nothing
else: `python -m tests.fault.mutated_files SEED FIRST COUNT`.
"""

from __future__ import annotations

import collections
import copy
import functools
import json
import logging
import random
import shutil
import sys
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, GGUFValueType, GGUFWriter

from quire.errors import QuireError
from quire.llm import LLM
from quire.request.sampling_params import _UNUSED_DEFAULTS
from quire_ensemble.errors import TokenizerError
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.gguf_files import write_gguf

FAMILIES = (
    *("llama3", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "olmo2"),
    *("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"),
)
GGUF_FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
OPTIONS: dict[str, dict[str, Any]] = {"gemma2": {"sliding_window": 12}, "gemma3": {"sliding_window": 12}}
GGUF_OPTIONS: dict[str, dict[str, Any]] = {"qwen3_moe": {"decoder_sparse_step": 1, "mlp_only_layers": []}}
PROMPT = [1, *range(40, 400, 19)]
NUM_NEW = 6
GENERATION = {
    "bos_token_id": 1,
    "pad_token_id": 0,
    "eos_token_id": [2, 3],
    "do_sample": False,
    "temperature": 0.7,
    "repetition_penalty": 1.3,
    "no_repeat_ngram_size": 2,
    "suppress_tokens": [5, 6],
    "bad_words_ids": [[7], [8, 9]],
    "max_new_tokens": NUM_NEW,
    "min_new_tokens": 2,
    "transformers_version": "5.0.0",
}


OF_GGUF = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "rope.freq_base": "rope_parameters.rope_theta",
    "rope.scaling.type": "rope_parameters.rope_type",
    "rope.scaling.factor": "rope_parameters.factor",
    "rope.scaling.original_context_length": "rope_parameters.original_max_position_embeddings",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
"""Keys of GGUF headers behind the architecture's name, and those of config.json that are the same."""
_NUMBERS = (
    *(GGUFValueType.UINT32, GGUFValueType.INT32, GGUFValueType.UINT64, GGUFValueType.INT64),
    *(GGUFValueType.FLOAT32, GGUFValueType.FLOAT64, GGUFValueType.BOOL, GGUFValueType.UINT8),
)


@dataclass(frozen=True)
class Change:
    """One change of one key of one family's file."""

    family: str
    file: str
    """config.json, generation_config.json or header (of a GGUF file)."""
    key: tuple[str, ...]
    """A path into the file's objects."""
    kind: str
    value: Any = None

    def __str__(self) -> str:
        shown = "" if self.kind in ("drop", "null") else f" {self.value!r}"
        return f"{self.family} {self.file} {'.'.join(self.key)}: {self.kind}{shown}"


def paths(values: dict[str, Any], before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in values.items():
        yield (*before, name)
        if isinstance(value, dict):
            yield from paths(value, (*before, name))


def other_types(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [int(value), str(value), str(value).lower(), [value], {}]
    if isinstance(value, int):
        return [str(value), float(value), [value], value + 0.5, {}, True]
    if isinstance(value, float):
        return [str(value), int(value), [value], {"value": value}, False]
    if isinstance(value, str):
        return [3, [value], {value: value}, True, ""]
    if isinstance(value, list):
        return [{}, value[0] if value else 0, str(value), [str(one) for one in value], [value], 4]
    return [[], "object", 1, True]


def other_values(value: Any, rng: random.Random) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [0, -1, value + 1, max(value // 2, 1), value * 2, 1]
    if isinstance(value, float):
        return [0.0, -value, value * 2, value / 2, 1e-30, 1e30]
    if isinstance(value, str):
        return [value.upper(), value + "x", "other"]
    if isinstance(value, list):
        return [[], value[:-1], value * 2, rng.sample(value, len(value)), [*value[:-1], None]]
    return [{}]


def respelt(name: str, rng: random.Random) -> str:
    first, *rest = name.split("_")
    return rng.choice(
        [name.replace("_", "-") + "_", first + "".join(map(str.title, rest)) + "X", name.upper()]
    )


def stated(values: dict[str, Any], key: tuple[str, ...]) -> tuple[dict[str, Any], str]:
    for name in key[:-1]:
        values = values[name]
    return values, key[-1]


def changed(values: dict[str, Any], change: Change) -> dict[str, Any]:
    values = copy.deepcopy(values)
    place, name = stated(values, change.key)
    if change.kind == "drop":
        del place[name]
    elif change.kind == "null":
        place[name] = None
    elif change.kind == "respelt":
        place[change.value] = place.pop(name)
    else:
        place[name] = change.value
    return values


Header = tuple[Any, ...]
"""A value of a GGUF header, its type, and that of an array's elements."""


class Files:
    """The unchanged checkpoints, made once, below a directory."""

    def __init__(self, root: Path) -> None:
        self._root = root

    @functools.cache  # noqa: B019 - as long as the process
    def original(self, family: str) -> Path:
        path = self._root / family
        make_checkpoint(family, path, tokenizer=False, **OPTIONS.get(family, {}))
        (path / "generation_config.json").write_text(json.dumps(GENERATION))
        return path

    @functools.cache  # noqa: B019
    def with_tokenizer(self, family: str) -> Path:
        """The checkpoint that a GGUF file is made of, which holds the tokenizer."""
        scaling = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16}
        options = GGUF_OPTIONS.get(family, {})
        return make_checkpoint(family, self._root / f"{family}-gguf", rope_scaling=scaling, **options)

    @functools.cache  # noqa: B019
    def gguf(self, family: str) -> tuple[GGUFReader, dict[str, Header]]:
        reader = GGUFReader(write_gguf(self.with_tokenizer(family), self._root / f"{family}.gguf"))
        fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
        return reader, {name: (field.contents(), *field.types[:2]) for name, field in fields.items()}

    def change(self, seed: int, number: int) -> Change:
        rng = random.Random(f"{seed} {number}")
        file = rng.choice(["config.json"] * 6 + ["generation_config.json"] * 2 + ["header"] * 2)
        if file == "header":
            return self._change_of_header(rng)
        family = rng.choice(FAMILIES)
        values = json.loads((self.original(family) / file).read_text())
        key = rng.choice(list(paths(values)))
        place, name = stated(values, key)
        kind = rng.choice(("drop", "null", "respelt", "type", "type", "value", "value"))
        value: Any = None
        if kind == "respelt":
            value = respelt(name, rng)
        elif kind == "type":
            value = rng.choice(other_types(place[name]))
        elif kind == "value":
            value = rng.choice(other_values(place[name], rng)) if place[name] is not None else 1
        return Change(family, file, key, kind, value)

    def _change_of_header(self, rng: random.Random) -> Change:
        family = rng.choice(GGUF_FAMILIES)
        _, header = self.gguf(family)
        key = rng.choice([name for name in header if name != "general.architecture"])
        kind = rng.choice(("drop", "respelt", "type", "type", "value", "value"))
        value, type_, *_ = header[key]
        if kind == "drop":
            return Change(family, "header", (key,), kind)
        if kind == "respelt":
            return Change(family, "header", (key,), kind, rng.choice([key + "s", key.upper(), key[1:]]))
        if kind == "value":
            choices = other_values(value, rng)
            if type_ == GGUFValueType.ARRAY:  # an array has one type, and no null
                choices = [one for one in choices if one and None not in one]
            elif type_ == GGUFValueType.UINT32:
                choices = [one for one in choices if one >= 0]
            return Change(family, "header", (key,), kind, rng.choice(choices))
        return Change(family, "header", (key,), kind, rng.choice(("string", "array", "number")))

    def write_gguf(self, change: Change, target: Path) -> Path:
        """A GGUF file with a changed header; `target` gets a checkpoint with the same change."""
        reader, header = self.gguf(change.family)
        (key,) = change.key
        file = target / "model.gguf"
        target.mkdir()
        writer = GGUFWriter(file, header["general.architecture"][0])
        header = {name: one for name, one in header.items() if name != "general.architecture"}
        if change.kind in ("drop", "respelt"):
            old = header.pop(key)
            if change.kind == "respelt":
                header[change.value] = old
        elif change.kind == "value":
            header[key] = (change.value, *header[key][1:])
        else:
            header[key] = of_type(header[key], change.value)
        for name, (value, type_, *sub_type) in header.items():
            writer.add_key_value(name, value, type_, *sub_type)
        for tensor in reader.tensors:
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        source = self.with_tokenizer(change.family)
        (target / "model.safetensors").symlink_to(source / "model.safetensors")
        values = json.loads((source / "config.json").read_text())
        theirs = OF_GGUF.get(key.partition(".")[2], "")
        if theirs and change.kind != "type":
            place = tuple(theirs.split("."))
            if place[-1] in stated(values, place)[0]:
                kind, value = ("value", change.value) if change.kind == "value" else ("drop", None)
                # As llama.cpp: a factor without a type is linear scaling's, and one of 0 is none.
                if theirs.endswith("rope_type") and kind == "drop":
                    kind, value = "value", "linear"
                elif theirs.endswith("factor"):
                    kind, value = "value", value or 1.0
                values = changed(values, Change(change.family, "config.json", place, kind, value))
        (target / "config.json").write_text(json.dumps(values))
        return file

    def write(self, change: Change, target: Path) -> Path:
        """Writes what is changed, and returns what the engine is to read."""
        if change.file == "header":
            return self.write_gguf(change, target)
        source = self.original(change.family)
        target.mkdir()
        for file in source.iterdir():
            if file.suffix == ".json":
                shutil.copy(file, target)
            else:
                (target / file.name).symlink_to(file)
        values = changed(json.loads((source / change.file).read_text()), change)
        (target / change.file).write_text(json.dumps(values))
        return target


def of_type(one: Header, wanted: str) -> Header:
    """A header's value, of another of GGUF's types."""
    value, type_, *_ = one
    if wanted == "string":
        return str(value), GGUFValueType.STRING
    if type_ == GGUFValueType.ARRAY:
        return (
            (len(value), GGUFValueType.UINT32)
            if wanted == "number"
            else ([str(v) for v in value], *one[1:2], GGUFValueType.STRING)
        )
    if wanted == "array":
        return [value], GGUFValueType.ARRAY, type_
    if isinstance(value, str):
        return 7, GGUFValueType.UINT32
    for other in _NUMBERS:
        if other != type_ and (isinstance(value, int) or "FLOAT" in other.name):
            return value, other
    raise AssertionError(one)


class Unknown(Exception):
    """transformers refuses the file, or loads weights that it does not hold."""


def of_transformers(path: Path, unused: set[str]) -> list[int]:
    """Greedy tokens.

    Args:
        unused: keys of generation_config.json that the engine says it does not use.

    Raises:
        Unknown: there are none.
    """
    from transformers import AutoModelForCausalLM, GenerationConfig

    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        if found := [name for name in ("missing_keys", "mismatched_keys") if info[name]]:
            raise Unknown(f"{found[0]}: {sorted(map(str, info[found[0]]))[:3]}")
        file = path / "generation_config.json"
        given = json.loads(file.read_text()) if file.exists() else {}
        given = {name: value for name, value in given.items() if name not in unused}
        generation = GenerationConfig.from_dict({**given, "do_sample": False, "temperature": None})
        if generation.max_new_tokens is None:
            generation.max_new_tokens = NUM_NEW
        prompt = torch.tensor([PROMPT])
        # Without a mask ids that are the padding's would be masked in the prompt; its cache forgets nothing
        # where the window is 1.
        whole = torch.ones_like(prompt)
        ids = model.eval().generate(
            prompt, attention_mask=whole, generation_config=generation, use_cache=False
        )
        return ids[0, len(PROMPT) :].tolist()
    except Unknown:
        raise
    except Exception as error:
        raise Unknown(f"{type(error).__name__}: {str(error)[:200]}") from None


class _Unused(logging.Handler):
    """Keys of generation_config.json that the engine's log says are not used."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        if "not supported, and not used" in record.msg:
            self.names |= set(str(record.args[0] if record.args else "").split(", "))


def of_quire(path: Path) -> tuple[list[int], set[str]]:
    """Greedy tokens, and the keys that are named as not used.

    Raises:
        QuireError, TokenizerError: refused.
    """
    unused = _Unused()
    logger = logging.getLogger("quire")
    logger.addHandler(unused)
    try:
        llm = LLM(path, dtype="float32", num_blocks=64, max_model_len=96, num_threads=1)
        try:
            # Ends of a GGUF file are those of tokens' names: tests/unit/test_gguf_tokenizer.py.
            is_gguf = path.suffix == ".gguf"
            limits = {} if llm.default_params.max_tokens is not None else {"max_tokens": NUM_NEW}
            (output,) = llm.generate([PROMPT], temperature=0.0, ignore_eos=is_gguf, **limits)
            return list(output.token_ids), unused.names & set(_UNUSED_DEFAULTS)
        finally:
            llm.core.close()
    finally:
        logger.removeHandler(unused)


def outcome(files: Files, change: Change) -> tuple[str, str]:
    """What became of a file, and the reason.

    equal; refused by both; strict: refused, and not by transformers; lenient: refused by transformers alone;
    differs; broken: the engine failed.
    """
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "checkpoint"
        read = files.write(change, path)
        ours, unused, reason = None, set[str](), ""
        try:
            ours, unused = of_quire(read)
        except (QuireError, TokenizerError) as error:
            reason = str(error).replace(str(path), "")
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            return "broken", f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"
        try:
            expected = of_transformers(path, unused)
        except Unknown as error:
            return ("refused", reason) if ours is None else ("lenient", str(error))
        if ours is None:
            return "strict", reason
        return ("equal", "") if ours == expected else ("differs", f"{ours} for {expected}")


def quiet() -> None:
    from transformers.utils import logging as of_transformers

    of_transformers.disable_progress_bar()
    of_transformers.set_verbosity(logging.CRITICAL)


def main() -> None:
    seed, first, count = map(int, sys.argv[1:4])
    torch.set_num_threads(1)
    quiet()
    seen: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as root:
        files = Files(Path(root))
        for number in range(first, first + count):
            change = files.change(seed, number)
            kind, reason = outcome(files, change)
            seen[kind] += 1
            if kind != "equal":
                print(f"{number} {kind}: {change}: {reason}", flush=True)
    print(dict(seen))


if __name__ == "__main__":
    main()
