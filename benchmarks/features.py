"""What a feature of requests costs beside plain greedy decoding, where all requests ask for it.

    python -m benchmarks.features                      # W1: Qwen3-0.6B's shape, bf16, 16 x (64 + 128) tokens
    python -m benchmarks.features --shape tiny --rounds 2

Rounds take the features in turns, forwards and backwards, on one engine as `quire.LLM` runs it, with random
weights. Ratios are of medians of tokens/s, and of the least CPU time of the process, which others on the
machine disturb less. The vocabulary is made up of what real ones have most: words in small letters, with a
space before them or not.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks import machine, report
from benchmarks.growth import engine
from benchmarks.peers.checkpoints import SHAPES, Shape
from quire.engine.core import EngineCore
from quire.request.sampling_params import parse_sampling_params

TEXTS = {"type": "array", "items": {"type": "string", "minLength": 30}, "minItems": 50}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "logprobs": {"logprobs": 5},
    "json": {"structured_output": {"json": TEXTS}},
    "regex": {"structured_output": {"regex": "[a-z ]{2000}"}},
    "json + logprobs": {"structured_output": {"json": TEXTS}, "logprobs": 5},
    "temperature": {"temperature": 1.0, "seed": 1},
}
"""Parameters of requests. Grammars' outputs are as long as all others."""


@dataclass(frozen=True)
class Run:
    """All requests of one feature, from the first step to the last."""

    tokens: int
    wall_s: float
    cpu_s: float
    """Of the process, all threads."""


def write_vocabulary(folder: Path, size: int) -> None:
    """A tokenizer.json of so many tokens; without merges, as nothing is tokenized."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    rng, letters = random.Random(0), "abcdefghijklmnopqrstuvwxyz"
    tokens = dict.fromkeys(sorted(pre_tokenizers.ByteLevel.alphabet()))
    while len(tokens) < size:
        word = "".join(rng.choices(letters, k=rng.choice((2, 3, 4, 5, 6, 8))))
        kind = rng.random()
        if kind < 0.15:  # two bytes a character, as byte-level vocabularies write them
            word = "".join("Ã" + chr(rng.randrange(0xA1, 0xAC)) for _ in range(rng.randrange(1, 5)))
        elif kind < 0.25:
            word = str(rng.choice((word.title(), word.upper(), f"_{word}", f"{word}.", rng.randrange(999))))
        tokens["Ġ" * rng.randrange(2) + word] = None
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def run(core: EngineCore, prompts: Sequence[list[int]], max_tokens: int, asked: dict[str, Any]) -> Run:
    """Generates `max_tokens` tokens for each prompt."""
    params = parse_sampling_params(
        {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, **asked}
    )
    tokens, cpu, wall = 0, time.process_time(), time.perf_counter()
    for number, prompt in enumerate(prompts):
        core.add_request(f"features-{number}", prompt, params)
    while core.has_work:
        for output in core.step():
            assert output.error is None, output.error
            tokens += len(output.new_token_ids)
    found = Run(tokens, time.perf_counter() - wall, time.process_time() - cpu)
    assert tokens == max_tokens * len(prompts), f"{tokens} tokens of {asked}"
    return found


def measure(
    shape: Shape,
    names: Sequence[str],
    requests: int,
    prompt: int,
    max_tokens: int,
    rounds: int,
    threads: int | None = None,
) -> dict[str, list[Run]]:
    """Runs of features by name, in turns: so many requests at a time with prompts of `prompt` tokens."""
    rng, runs = random.Random(1), {name: list[Run]() for name in names}
    with tempfile.TemporaryDirectory() as folder:
        write_vocabulary(Path(folder), shape.vocab_size)
        options = {
            "tokenizer": folder,
            "num_threads": threads,
            "max_num_seqs": requests,
            "max_model_len": prompt + max_tokens + 16,
            "num_blocks": requests * ((prompt + max_tokens) // 16 + 2),
        }
        with engine(shape, **options) as core:
            for number in range(rounds + 1):
                for name in names[:: 1 if number % 2 else -1]:
                    prompts = [
                        [rng.randrange(3, shape.vocab_size) for _ in range(prompt)] for _ in range(requests)
                    ]
                    found = run(core, prompts, max_tokens, FEATURES[name])
                    if number:  # the first round compiles grammars
                        runs[name].append(found)
                        click.echo(f"features: {name}: {found}", err=True)
    return runs


def costs(runs: dict[str, list[Run]]) -> dict[str, float]:
    """Seconds of CPU time per token of each feature: the least, which others on the machine disturb least."""
    return {name: min(one.cpu_s / one.tokens for one in each) for name, each in runs.items()}


def table(runs: dict[str, list[Run]]) -> str:
    """Markdown; "plain" is among the runs."""
    rates = {name: statistics.median(one.tokens / one.wall_s for one in each) for name, each in runs.items()}
    cpu = costs(runs)
    return report.table(
        ("all requests with", "tokens/s", "of plain", "CPU us per token", "plain's CPU of it"),
        [
            [
                name,
                f"{rates[name]:.1f}",
                f"{rates[name] / rates['plain']:.3f}",
                f"{1e6 * cpu[name]:.0f}",
                f"{cpu['plain'] / cpu[name]:.3f}",
            ]
            for name in runs
        ],
    )


@click.command()
@click.option("--shape", type=click.Choice(sorted(SHAPES)), default="qwen3-0.6b", show_default=True)
@click.option("--requests", default=16, show_default=True)
@click.option("--prompt", default=64, show_default=True, help="Tokens.")
@click.option("--max-tokens", default=128, show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--threads", type=int)
def main(shape: str, requests: int, prompt: int, max_tokens: int, rounds: int, threads: int | None) -> None:
    """Measures, writes JSON under benchmarks/out, prints a table."""
    runs = measure(SHAPES[shape], list(FEATURES), requests, prompt, max_tokens, rounds, threads)
    out = report.output_directory()
    document = {
        "environment": machine.environment(),
        "settings": {"shape": shape, "requests": requests, "prompt": prompt, "max_tokens": max_tokens},
        "runs": {name: [asdict(one) for one in each] for name, each in runs.items()},
    }
    (out / "features.json").write_text(json.dumps(document, indent=1))
    click.echo(f"{table(runs)}\n\n{out}")


if __name__ == "__main__":
    main()
