"""Measure the demo checkpoint: `python demo/evaluate.py --checkpoint DIR`; exit status 1 below 99 %.

Loads the directory with plain transformers, answers the held-out prompts of tasks.py greedily through the
chat template, and prints the accuracy of each kind.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

sys.path.insert(0, str(Path(__file__).resolve().parent))
import tasks

DEFAULT_CHECKPOINT = Path(__file__).resolve().parents[1] / "model_repository" / "generator" / "1" / "demo"
REQUIRED = 0.99
REQUIRED_PER_KIND = 0.97


@dataclass
class KindResult:
    kind: str
    right: int
    total: int
    wrong: list[tuple[str, str]]

    @property
    def share(self) -> float:
        return self.right / self.total


@torch.inference_mode()
def answer_all(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    max_new_tokens: Sequence[int],
    batch_size: int = 64,
) -> list[str]:
    """Greedy answers to rendered prompts, special tokens dropped. Similar lengths share a batch."""
    answers = [""] * len(texts)
    order = sorted(range(len(texts)), key=lambda i: (max_new_tokens[i], len(texts[i])))
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        encoded = tokenizer(
            [texts[i] for i in chosen],
            add_special_tokens=False,
            padding=True,
            padding_side="left",
            return_tensors="pt",
        )
        out = cast(Any, model).generate(
            input_ids=encoded["input_ids"],
            attention_mask=encoded["attention_mask"],
            max_new_tokens=max(max_new_tokens[i] for i in chosen),
            do_sample=False,
        )
        new = out[:, encoded["input_ids"].shape[1] :]
        for i, text in zip(chosen, tokenizer.batch_decode(new, skip_special_tokens=True), strict=True):
            answers[i] = text
    return answers


def accuracy(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[tasks.Task] | Sequence[tasks.Conversation],
    bare: bool = False,
) -> list[KindResult]:
    """Results per kind of the last user message. `bare` leaves the chat template out."""
    last = [c.tasks[-1] if isinstance(c, tasks.Conversation) else c for c in conversations]
    if bare:
        texts = [tokenizer.bos_token + task.prompt for task in last]
    else:
        texts = [
            tokenizer.apply_chat_template(c.messages, tokenize=False, add_generation_prompt=True)
            for c in conversations
        ]
    answers = answer_all(model, tokenizer, texts, [task.answer_tokens + 8 for task in last])
    results: dict[str, KindResult] = defaultdict(lambda: KindResult("", 0, 0, []))
    for task, answer in zip(last, answers, strict=True):
        row = results[task.kind]
        row.kind, row.total = task.kind, row.total + 1
        if tasks.is_right(task.kind, task.prompt, answer):
            row.right += 1
        else:
            row.wrong.append((task.prompt, answer))
    return [results[kind] for kind in tasks.KINDS if kind in results]


def print_table(rows: Sequence[KindResult], show_wrong: int = 0) -> None:
    for row in rows:
        print(f"{row.kind:10} {row.right:5d} / {row.total:<5d} {row.share:8.2%}")
        for prompt, answer in row.wrong[:show_wrong]:
            print(f"    {prompt!r} -> {answer!r}")
    right, total = sum(row.right for row in rows), sum(row.total for row in rows)
    print(f"{'all':10} {right:5d} / {total:<5d} {right / total:8.2%}", flush=True)


def accuracy_of_all(rows: Sequence[KindResult]) -> float:
    return sum(row.right for row in rows) / sum(row.total for row in rows)


def exit_status(rows: Sequence[KindResult], show_wrong: int) -> int:
    """Prints the table; 0 when it is as good as is required, else 1."""
    print_table(rows, show_wrong)
    is_good = accuracy_of_all(rows) >= REQUIRED and all(row.share >= REQUIRED_PER_KIND for row in rows)
    return 0 if is_good else 1


def arguments(description: str | None, **checkpoint: Any) -> argparse.ArgumentParser:
    """What both evaluations take; `checkpoint`: whether it has a default."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, **checkpoint)
    parser.add_argument("--prompts", type=int, help="held-out ones, all kinds in turn")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--show-wrong", type=int, default=3, help="wrong answers to print per kind")
    parser.add_argument("--threads", type=int, default=2)
    return parser


def main() -> int:
    parser = arguments(__doc__, default=DEFAULT_CHECKPOINT)
    parser.set_defaults(prompts=2200)
    parser.add_argument("--turns", type=int, default=1, help="conversations of up to this many turns instead")
    parser.add_argument("--bare", action="store_true", help="without the chat template")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.checkpoint)
    model = AutoModelForCausalLM.from_pretrained(args.checkpoint, dtype=getattr(torch, args.dtype)).eval()
    if args.turns > 1:
        asked: Sequence = tasks.conversations(args.prompts, seed=args.seed, max_turns=args.turns)
    else:
        asked = tasks.held_out(args.prompts, seed=args.seed)
    return exit_status(accuracy(model, tokenizer, asked, bare=args.bare), args.show_wrong)


if __name__ == "__main__":
    sys.exit(main())
