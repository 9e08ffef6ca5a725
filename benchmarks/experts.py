"""Offloaded experts: hits and speed with a part of the experts in memory, read ahead in three ways.

    python -m benchmarks.experts                        # a quarter of the experts
    python -m benchmarks.experts --slots 2,4 --clients 1,4 --disk

`faults` reads an expert when it is copied; `needed` first asks the system to read all experts that the layer
needs; `predicted`, what Quire does, also asks for those that the next layer will probably need. `--disk`
forgets each expert after it was copied, as a system with too little memory for all of them does.

Routing decides, so the models are trained: two small Mixtrals on the text of docs/, byte by byte, about a
minute each. One has the usual loss that makes routing even, the other has not. Then experts get inner
features of zeros, so that loading and computing them take as long as for larger models, while routes stay as
trained. The models compute text that they have not seen.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
import torch
from torch.nn.functional import pad

from benchmarks import machine, report
from quire import LLM, SamplingParams
from quire.engine.executor import RunnerExecutor
from quire.layers import expert_offload
from quire.layers.expert_offload import OffloadedMatrices
from quire.layers.moe import MixtureOfExperts
from quire.outputs import ExpertCounts
from quire_common.host_memory import read_ahead
from tests.fixtures.checkpoints import write_tokenizer

ROUTING = {"skewed": 0.0, "even": 0.02}
"""Weight of the loss for even routing, by the name of the model."""
NUM_EXPERTS, INNER = 8, 256
FIRST_BYTE = 5
"""Token of byte 0."""
PROMPT_TOKENS = 64
WAYS = ("faults", "needed", "predicted")
MADV_PAGEOUT = 21


@dataclass(frozen=True)
class Result:
    """One model, number of requests at a time, and way of keeping its experts."""

    routing: str
    clients: int
    slots: int | None
    """Experts in memory in each layer; None: all of them."""
    way: str
    tokens_per_s: float
    counts: ExpertCounts
    busiest: float | None
    """Share of a layer's most chosen expert in its routes, mean over the layers, at least 1 / NUM_EXPERTS;
    None: not counted."""

    @property
    def hit_rate(self) -> float | None:
        needed = self.counts.num_hits + self.counts.num_misses
        return self.counts.num_hits / needed if needed else None


def text() -> torch.Tensor:
    """Tokens of docs/; the last tenth is not trained on."""
    files = sorted((machine.ROOT / "docs").glob("*.md"))
    return torch.tensor(list(b"".join(one.read_bytes() for one in files))) + FIRST_BYTE


def train(path: Path, evenness: float, steps: int, inner: int) -> None:
    """Writes a checkpoint with 6 layers of 8 experts, 2 of which compute a token. `inner`: inner features of
    an expert, zeros included."""
    import transformers

    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": INNER,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": NUM_EXPERTS,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 1024,
    }
    config = transformers.MixtralConfig(**shape, router_aux_loss_coef=evenness, output_router_logits=True)
    model, tokens = transformers.MixtralForCausalLM(config), text()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(steps):
        starts = torch.randint(0, len(tokens) * 9 // 10 - 128, (6,)).tolist()
        batch = torch.stack([tokens[start : start + 128] for start in starts])
        optimizer.param_groups[0]["lr"] = 2e-3 * min(1.0, (step + 1) / 20) * (1 - 0.9 * step / steps)
        optimizer.zero_grad()
        model(input_ids=batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.config.output_router_logits = False
    model.config.intermediate_size = inner
    for layer in model.model.layers:
        gate_up, down = layer.mlp.experts.gate_up_proj.data, layer.mlp.experts.down_proj.data
        more = (0, 0, 0, inner - INNER)
        gate_up = torch.cat([pad(part, more) for part in gate_up.chunk(2, dim=1)], dim=1)
        layer.mlp.experts.gate_up_proj = torch.nn.Parameter(gate_up)
        layer.mlp.experts.down_proj = torch.nn.Parameter(pad(down, (0, inner - INNER)))
    model.save_pretrained(path)
    write_tokenizer(path)


def measure(
    path: Path, routing: str, clients: int, slots: int | None, way: str, num_tokens: int
) -> tuple[Result, list[list[int]]]:
    """Returns figures and the tokens of every client."""
    options: dict[str, Any] = {"max_model_len": 1024, "dtype": "float32", "max_resident_experts": slots}
    llm = LLM(
        str(path), max_num_seqs=clients, num_blocks=256 * clients, enable_prefix_caching=False, **options
    )
    assert isinstance(llm.core.executor, RunnerExecutor)
    runner: Any = llm.core.executor.runner
    mixtures = [one for one in runner.model.modules() if isinstance(one, MixtureOfExperts)]
    if way == "operators":
        runner.model._native = None
    for one in mixtures if way in ("faults", "needed") else ():
        assert one.offloaded is not None
        one.offloaded.following = None
    loads = torch.zeros(len(mixtures), NUM_EXPERTS)
    for layer, one in enumerate(mixtures):
        if way == "operators":  # a prediction asks routers, too
            one.gate.register_forward_hook(_counter(loads[layer]))
    held = text()[-8192:].tolist()
    prompts = [held[1024 * client :][:PROMPT_TOKENS] for client in range(clients)]
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=1.0, seed=1)
    with patch.object(expert_offload, "read_ahead", (lambda memory: None) if way == "faults" else read_ahead):
        llm.generate(prompts, SamplingParams(max_tokens=4, ignore_eos=True))
        before, begin = llm.core.stats().experts, time.perf_counter()
        outputs = llm.generate(prompts, params)
        seconds, after = time.perf_counter() - begin, llm.core.stats().experts
    llm.core.close()
    names = ExpertCounts.__struct_fields__
    counts = ExpertCounts(*(getattr(after, name) - getattr(before, name) for name in names))
    busiest = (loads.max(1).values / loads.sum(1)).mean().item() if loads.any() else None
    result = Result(routing, clients, slots, way, clients * num_tokens / seconds, counts, busiest)
    return result, [output.token_ids for output in outputs]


def load_and_forget(self: OffloadedMatrices, expert: int, slot: int) -> None:
    """Copies an expert's matrix into a slot, and has the system drop its pages."""
    home = self.homes[expert]
    self._slots[slot].copy_(home)
    begin = -(-home.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (home.data_ptr() + home.nbytes - begin) // mmap.PAGESIZE * mmap.PAGESIZE
    if ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), MADV_PAGEOUT):
        raise OSError("the system does not drop pages of files")


def _counter(loads: torch.Tensor) -> Any:
    def count(module: Any, inputs: Any, routes: Any) -> None:
        loads.add_(routes.experts.flatten().bincount(minlength=NUM_EXPERTS))

    return count


def table(results: list[Result]) -> str:
    rows, base = [], 0.0
    for one in results:
        base = one.tokens_per_s if one.way == "one call" else base
        rate, counts = one.hit_rate, one.counts
        used = counts.num_prefetch_hits / counts.num_prefetches if counts.num_prefetches else None
        rows.append(
            [
                *(one.routing, str(one.clients), str(one.slots or NUM_EXPERTS), one.way),
                *("" if share is None else f"{share:.0%}" for share in (one.busiest, rate, used)),
                f"{counts.num_loaded_bytes / 1e6:.0f}",
                f"{one.tokens_per_s:.0f}",
                f"{base / one.tokens_per_s:.1f}",
            ]
        )
    head = (
        "routing",
        "clients",
        "slots",
        "way",
        "busiest",
        "hits",
        "prefetches used",
        "MB",
        "tokens/s",
        "slower",
    )
    return report.table(head, rows)


@click.command()
@click.option("--slots", default="2", show_default=True, help="Of 8 experts in each layer.")
@click.option("--clients", default="1,4", show_default=True)
@click.option("--tokens", default=200, show_default=True, help="For each client.")
@click.option("--steps", default=260, show_default=True, help="Of training.")
@click.option(
    "--inner", default=4096, show_default=True, help="Inner features of an expert, most of them zero."
)
@click.option("--models", type=click.Path(path_type=Path), help="Where the trained models are kept.")
@click.option("--disk", is_flag=True, help="Forget each expert after it was copied.")
def main(
    slots: str, clients: str, tokens: int, steps: int, inner: int, models: Path | None, disk: bool
) -> None:
    """Measures, writes JSON under benchmarks/out, prints a table."""
    results = []
    if disk:
        OffloadedMatrices.load = load_and_forget  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as temporary:
        for routing, evenness in ROUTING.items():
            path = (models or Path(temporary)) / routing
            if not path.is_dir():
                train(path, evenness, steps, inner)
            for count in map(int, clients.split(",")):
                few = [(int(one), way) for one in slots.split(",") for way in WAYS]
                found = [
                    measure(path, routing, count, *setting, tokens)
                    for setting in ((None, "one call"), (None, "operators"), *few)
                ]
                assert all(ids == found[0][1] for _, ids in found), "tokens depend on where experts are"
                results += [one for one, _ in found]
    out = report.output_directory()
    shown = [{**asdict(one), "counts": json.loads(json.dumps(one.counts, default=_plain))} for one in results]
    (out / "experts.json").write_text(
        json.dumps({"environment": machine.environment(), "results": shown}, indent=1)
    )
    click.echo(f"{table(results)}\n\n{out}")


def _plain(counts: ExpertCounts) -> dict[str, int]:
    return {name: getattr(counts, name) for name in counts.__struct_fields__}


if __name__ == "__main__":
    main()
