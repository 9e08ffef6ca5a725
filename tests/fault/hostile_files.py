"""Checkpoint files with lies in them, made of genuine ones, and a process that loads one after the other.

    python -m tests.fault.hostile_files KINDS FOLDER SEED FIRST COUNT

KINDS are some of KINDS, with commas, which take turns. FOLDER holds the genuine checkpoints by their kind,
and is where the others are written. Prints the number of each case before it is tried: a death is known by
the last. In the end comes a JSON object. The process may have little more address space than the genuine
files took: what takes memory by a lie fails.
"""

from __future__ import annotations

import io
import json
import pickletools
import random
import re
import resource
import shutil
import struct
import sys
import time
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

SPARE = 2**28
"""Bytes of address space beside what the genuine file took."""
MOST_S = 30.0
"""Of CPU, for one file: a hundred times what one takes."""
NUMBERS = (
    0,
    1,
    2,
    3,
    7,
    31,
    255,
    2**16,
    2**20,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**40,
    2**62,
    2**63 - 1,
    2**64 - 1,
)
VALUES: tuple[Any, ...] = (
    *NUMBERS, -1, -(2**63), 0.0, -1.5, 1e-320, 1e308, 10**400, float("nan"), float("inf"), "", "x\ny",
    "9" * 5000, "\x00", True, False, None, [], [0], [[[]]], [-1, 2**62], {}, {"a": {"b": [None]}},
    "float32", "silu",
)  # fmt: skip


class Field(NamedTuple):
    """A number in the head of a GGUF file."""

    at: int
    size: int
    """In bytes."""
    what: str


def gguf_fields(data: bytes) -> tuple[list[Field], list[tuple[int, int]], int]:
    """Every number of a head, begin and end of every entry, and where the head ends."""
    fields: list[Field] = []
    entries, at = [], 4
    sizes = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}

    def number(size: int, what: str) -> int:
        nonlocal at
        fields.append(Field(at, size, what))
        at += size
        return int.from_bytes(data[at - size : at], "little")

    def text(what: str) -> None:
        nonlocal at
        length = number(8, what)
        at += length

    number(4, "version")
    num_tensors, num_values = number(8, "count"), number(8, "count")
    for _ in range(num_values):
        begin = at
        text("key")
        kind = number(4, "type")
        of, count = (number(4, "type"), number(8, "length")) if kind == 9 else (kind, 1)
        for _ in range(count):
            text("text") if of == 8 else number(sizes[of], "value" if count == 1 else "element")
        entries.append((begin, at))
    for _ in range(num_tensors):
        begin = at
        text("name")
        for _ in range(number(4, "rank")):
            number(8, "dimension")
        number(4, "kind")
        number(8, "offset")
        entries.append((begin, at))
    return fields, entries, at


DEEP = ("value", "dimension", "kind", "offset", "length", "element")
"""Numbers whose lies the rest of a head survives."""


def lie_in_gguf(data: bytes, rng: random.Random) -> bytes:
    """A head with up to three changes of numbers, bytes or whole entries; sometimes shorter."""
    fields, entries, end = gguf_fields(data)
    by_what = {what: [field for field in fields if field.what == what] for _, _, what in fields}
    lies = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        choice = rng.random()
        if choice < 0.8:
            deep = [what for what in DEEP if what in by_what]
            at, size, _ = rng.choice(by_what[rng.choice(deep if choice < 0.65 else list(by_what))])
            old = int.from_bytes(lies[at : at + size], "little")
            near = (
                old + 1,
                old - 1,
                2 * old,
                old + 32,
                old ^ 1 << rng.randrange(8 * size),
                rng.getrandbits(64),
            )
            new = rng.choice([*NUMBERS, *near])
            lies[at : at + size] = (new % 2 ** (8 * size)).to_bytes(size, "little")
        elif choice < 0.88:
            lies[rng.randrange(end)] = rng.randrange(256)
        elif choice < 0.95:
            one, other = rng.choice(entries), rng.choice(entries)
            lies[one[0] : one[1]] = data[other[0] : other[1]]
        else:
            at = rng.randrange(end)
            lies[at:at] = rng.randbytes(rng.randrange(1, 40))
    if rng.random() < 0.1:
        del lies[rng.randrange(len(lies)) :]
    return bytes(lies)


def lie_in_json(value: Any, rng: random.Random) -> None:
    """One value somewhere in it becomes another; a key may get another name, or be gone."""
    while isinstance(value, dict | list) and value:
        key: Any = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
        if isinstance(value[key], dict | list) and value[key] and rng.random() < 0.9:
            value = value[key]
            continue
        old = value[key]
        near = [old + 1, old - 1, 2 * old] if isinstance(old, int) else []
        new = rng.choice([*VALUES, *near])
        if isinstance(value, dict) and rng.random() < 0.15:
            names = [*value, "", "x\ny", "n" * 10_000, "\ud800"]
            new = value.pop(key)
            key = rng.choice(names)
        value[key] = new
        if rng.random() < 0.05:
            del value[key]
        return


def lie_in_text(text: bytes, rng: random.Random) -> bytes:
    """Bytes changed, taken away or repeated; or depth that no reader follows."""
    lies = bytearray(text)
    at, choice = rng.randrange(len(lies)), rng.random()
    if choice < 0.4:
        lies[at] = rng.randrange(256)
    elif choice < 0.6:
        del lies[at : at + rng.randrange(1, 50)]
    elif choice < 0.8:
        begin = rng.randrange(len(lies))
        lies[at:at] = lies[begin : begin + rng.randrange(1, 200)]
    elif choice < 0.9:
        lies[at:at] = rng.choice((b"[", b'{"a":')) * rng.choice((10, 1000, 200_000))
    else:
        del lies[at:]
    return bytes(lies)


def lie_in_safetensors(data: bytes, rng: random.Random) -> bytes:
    """The same for the JSON that stands before the tensors, its length and what follows."""
    length = struct.unpack("<Q", data[:8])[0]
    head, rest = data[8 : 8 + length], data[8 + length :]
    if rng.random() < 0.7:
        values = json.loads(head)
        for _ in range(rng.randrange(1, 3)):
            lie_in_json(values, rng)
        head = json.dumps(values).encode()
        if rng.random() < 0.1:
            names = list(values)
            # The same name twice, which no dictionary can write.
            head = head.replace(json.dumps(names[-1]).encode(), json.dumps(names[0]).encode())
    else:
        head = lie_in_text(head, rng)
    stated = len(head) if rng.random() < 0.85 else rng.choice([*NUMBERS, len(head) + 1, len(data)])
    if rng.random() < 0.15:
        rest = rest[: rng.randrange(len(rest))] if rng.random() < 0.5 else rest + bytes(rng.randrange(1, 100))
    return struct.pack("<Q", stated % 2**64) + head + rest


def lie_in_json_file(data: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.3:
        return lie_in_text(data, rng)
    values = json.loads(data)
    for _ in range(rng.randrange(1, 4)):
        lie_in_json(values, rng)
    return json.dumps(values).encode()


def lie_in_pickle(data: bytes, rng: random.Random) -> bytes:
    """Numbers and bytes of the pickles that name the tensors; of what stands around them, too."""
    program = data
    if data.startswith(b"PK"):
        if rng.random() < 0.3:
            lies = bytearray(data)
            for _ in range(rng.randrange(1, 4)):
                at = len(lies) - 1 - rng.randrange(3000)
                lies[at : at + 4] = struct.pack("<I", rng.choice(NUMBERS) % 2**32)
            return bytes(lies[: rng.randrange(len(lies)) if rng.random() < 0.2 else None])
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = {entry.filename: archive.read(entry) for entry in archive.infolist()}
        name = next(name for name in entries if name.endswith("data.pkl"))
        program = entries[name]
    stream, operations = io.BytesIO(program), []
    for _ in range(1 if data.startswith(b"PK") else 5):
        operations += [(position, operation) for operation, _, position in pickletools.genops(stream)]
    lies = bytearray(program)
    sizes = {
        "BININT": 4,
        "BININT1": 1,
        "BININT2": 2,
        "BINGET": 1,
        "LONG_BINGET": 4,
        "LONG_BINPUT": 4,
        "BINUNICODE": 4,
    }
    for _ in range(rng.randrange(1, 4)):
        at, operation = rng.choice(operations)
        if size := sizes.get(operation.name):
            old = int.from_bytes(lies[at + 1 : at + 1 + size], "little")
            new = rng.choice([*NUMBERS, old + 1, old - 1, 2 * old])
            lies[at + 1 : at + 1 + size] = (new % 2 ** (8 * size)).to_bytes(size, "little")
        elif rng.random() < 0.3:
            lies[at] = ord(rng.choice("].})(tR0bQuse\x81\x85\x86\x87"))
    if not data.startswith(b"PK"):
        return bytes(lies) + data[len(program) :]
    entries[name] = bytes(lies)
    archive_bytes = io.BytesIO()
    with zipfile.ZipFile(archive_bytes, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return archive_bytes.getvalue()


KINDS: dict[str, tuple[tuple[str, ...], Callable[[bytes, random.Random], bytes], dict[str, str]]] = {
    "gguf": (("model.gguf",), lie_in_gguf, {}),
    "split": (("model-00001-of-00002.gguf", "model-00002-of-00002.gguf"), lie_in_gguf, {}),
    "safetensors": (("model.safetensors",), lie_in_safetensors, {}),
    "config": (("config.json", "generation_config.json"), lie_in_json_file, {}),
    "index": (("model.safetensors.index.json",), lie_in_json_file, {}),
    "bin": (("pytorch_model.bin",), lie_in_pickle, {"load_format": "bin"}),
    "old_bin": (("pytorch_model.bin",), lie_in_pickle, {"load_format": "bin"}),
}
"""By kind: the files of which one has the lies, what puts them there, and options of the load."""


def attempt(path: Path, number: int, options: dict[str, str]) -> str:
    """Loads a checkpoint as its users do: always its weights, sometimes all of an engine, and for a plan."""
    import torch

    from quire.config import EngineConfig, ModelConfig
    from quire.llm import LLM
    from quire.loader.load import load_model
    from quire.plan.capacity import predict
    from quire_ensemble.builder import build_repository, has_chat_template
    from quire_ensemble.tokenizer import Tokenizer

    whole = {"model": str(path), **options}
    if number % 16 == 1:
        has_chat_template(path)
        build_repository(path, path.parent / "repository", placement="path", force=True)
        return "built"
    if number % 16 == 2:
        predict(EngineConfig.from_mapping(whole), "cpu", 2**33)
        return "planned"
    if number % 16 == 3:
        llm = LLM(path, **options, kv_cache_memory="1MiB", max_num_seqs=2)
        llm.generate([[5, 6, 7]], max_tokens=2)
        return "generated"
    if number % 4 == 0 and Tokenizer.exists(path):
        Tokenizer(path).encode("hello")
    load_model(ModelConfig(**whole), torch.device("cpu"))
    return "loaded"


def main(kinds: list[str], folder: Path, seed: int, first: int, count: int) -> None:
    from quire.errors import QuireError
    from quire_common.errors import ReportedError

    for kind in kinds:
        genuine = folder / kind
        shutil.copytree(genuine, folder / f"{kind}-lies", dirs_exist_ok=True)
        for number in range(5):
            attempt(checkpoint(genuine), number, KINDS[kind][2])
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + SPARE, taken + SPARE))
    outcomes: Counter[str] = Counter()
    wrong: list[str] = []
    for number in range(first, first + count):
        print(number, flush=True)
        rng = random.Random(f"{seed} {number}")
        kind = kinds[number % len(kinds)]
        names, lie, options = KINDS[kind]
        path, file = folder / f"{kind}-lies", rng.choice(names)
        for name in names:
            data = (folder / kind / name).read_bytes()
            (path / name).write_bytes(lie(data, rng) if name == file else data)
        begin = time.process_time()
        try:
            outcome = attempt(checkpoint(path), number // len(kinds), options)
        except (QuireError, ReportedError) as error:
            outcome, message = "refused", str(error)
            is_late = re.search(
                r"alloc|\bmemory", message, re.IGNORECASE
            )  # some was taken for what is not there
            if not message.isprintable() or len(message) > 3000 or is_late:
                wrong.append(f"{kind} {number}: {message[:500]!r}")
        except BaseException as error:
            wrong.append(f"{kind} {number}: {type(error).__name__}: {str(error)[:500]}")
            continue
        outcomes[f"{kind} {outcome}"] += 1
        if time.process_time() - begin > MOST_S:
            wrong.append(f"{kind} {number}: took {time.process_time() - begin:.1f} s")
    print(json.dumps({"outcomes": outcomes, "wrong": wrong}))


def checkpoint(folder: Path) -> Path:
    return min(folder.glob("*.gguf"), default=folder)


if __name__ == "__main__":
    main(sys.argv[1].split(","), Path(sys.argv[2]), *map(int, sys.argv[3:]))
