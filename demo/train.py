"""Train the demo checkpoint: `python demo/train.py --out DIR`.

Writes a complete Hugging Face directory (Llama architecture, byte-level tokenizer, chat template) that
answers the prompts of tasks.py. The data is generated on the fly, the loss counts answer tokens only, and
a run is reproducible for one torch build, processor kind and number of replicas.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).resolve().parent))
import tasks
from evaluate import accuracy, accuracy_of_all, print_table

SPECIAL_TOKENS = (
    "<|begin|>",
    "<|end|>",
    "<|endoftext|>",
    "<|pad|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|reserved|>",
)
# A byte token's id is its byte value; the special tokens follow.
TOKEN_ID = {token: 256 + i for i, token in enumerate(SPECIAL_TOKENS)}
BEGIN, END, PAD = TOKEN_ID["<|begin|>"], TOKEN_ID["<|end|>"], TOKEN_ID["<|pad|>"]
SYSTEM, USER, ASSISTANT = TOKEN_ID["<|system|>"], TOKEN_ID["<|user|>"], TOKEN_ID["<|assistant|>"]

MAX_POSITIONS = 2048
HIDDEN = 128
CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
  {%- if message['role'] not in ['system', 'user', 'assistant'] -%}
    {{- raise_exception("role '" ~ message['role'] ~ "' is none of system, user, assistant") -}}
  {%- endif -%}
  {%- if message['content'] is string -%}
    {%- set text = message['content'] -%}
  {%- else -%}
    {%- set parts = message['content'] | selectattr('type', 'equalto', 'text') -%}
    {%- set text = parts | map(attribute='text') | join('') -%}
  {%- endif -%}
  {{- '<|' ~ message['role'] ~ '|>' ~ (text | trim) ~ '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|assistant|>' -}}
{%- endif -%}
"""

# How often each kind is asked; arithmetic is mostly learned from recitals, see ConversationSampler.
KIND_WEIGHTS = {
    "add": 1.2,
    "subtract": 1.2,
    "reverse": 2.0,
    "sort": 5.0,
    "count": 3.0,
    "spell": 0.8,
    "uppercase": 0.8,
    "repeat": 1.2,
    "echo": 1.5,
    "greet": 1.2,
    "other": 1.5,
}


RATE = 2.5e-3
REPLICAS = 2
"""Worker threads, one batch each per step."""
BATCH_TOKENS = 2048
"""Tokens of one replica's batch."""
CHECK_EVERY = 1000
"""Steps between accuracy tables."""


@dataclass(frozen=True)
class Mix:
    """Shares of the data in one phase of the curriculum.

    recitals: rows of bare sums, the densest practice in arithmetic.
    bare: prompts without the chat template.
    long: conversations of many turns, up to the model length.
    full_length: answers to counting and sorting of any length, not only short ones.
    """

    recitals: float
    bare: float
    long: float
    full_length: float


PHASES = (
    (0.35, Mix(recitals=0.40, bare=0.04, long=0.0, full_length=0.0)),
    (0.70, Mix(recitals=0.20, bare=0.06, long=0.03, full_length=0.5)),
    (1.00, Mix(recitals=0.05, bare=0.08, long=0.06, full_length=0.8)),
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE without merges: one token per UTF-8 byte, so every text can be encoded and every
    letter and digit is one token."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    symbols = {byte: chr(byte) for byte in printable}
    # The byte-level convention writes the remaining bytes as the code points from 256 on, in byte order.
    symbols.update({b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in symbols)})
    tokenizer = Tokenizer(models.BPE(vocab={symbols[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A",
        pair="<|begin|> $A $B",
        special_tokens=[("<|begin|>", BEGIN)],
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|begin|>",
        eos_token="<|end|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|system|>", "<|user|>", "<|assistant|>", "<|endoftext|>"],
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_config(intermediate: int = 384) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=256 + len(SPECIAL_TOKENS),
        hidden_size=HIDDEN,
        intermediate_size=intermediate,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=HIDDEN // 4,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=BEGIN,
        eos_token_id=[END, TOKEN_ID["<|endoftext|>"]],
        pad_token_id=PAD,
        attention_dropout=0.0,
    )


# --- data --------------------------------------------------------------------------------------------


class ConversationSampler:
    """Endless tokenized training rows: (input ids, weight of predicting each id).

    Weights are 0 outside of answers. The tokens of one answer weigh `length ** -0.5` each, or long
    counting answers would drown the rest; results of sums, sorted numbers and the ends of answers weigh
    more, since they decide whether an answer is right.
    """

    DECISIVE = 0.5

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(f"train|{seed}")
        self._streams = {k: tasks.prompts(k, seed=seed, split="train") for k in tasks.KINDS}
        short = {"count": 36, "sort": 14}
        self._short_streams = {
            k: tasks.prompts(k, seed=seed + 1, max_answer_tokens=n, split="train") for k, n in short.items()
        }

    def sample(self, mix: Mix) -> tuple[list[int], list[float]]:
        style = self._rng.random()
        if style < mix.recitals:
            return self._recital()
        if style < mix.recitals + mix.bare:
            return self._bare_text(mix)
        return self._conversation(mix)

    def _task(self, mix: Mix) -> tasks.Task:
        kind = self._rng.choices(tuple(KIND_WEIGHTS), tuple(KIND_WEIGHTS.values()))[0]
        if kind in self._short_streams and self._rng.random() >= mix.full_length:
            return next(self._short_streams[kind])
        return next(self._streams[kind])

    def _conversation(self, mix: Mix) -> tuple[list[int], list[float]]:
        rng = self._rng
        target = 0
        if rng.random() < mix.long:
            target = MAX_POSITIONS if rng.random() < 0.1 else rng.randint(200, 700)
        turns = 1 if rng.random() < 0.6 else rng.randint(2, 3)
        ids, weights = [BEGIN], [0.0]
        if rng.random() < 0.25:
            self._append(ids, weights, [SYSTEM, *tasks.system_prompt(rng).strip().encode(), END])
        turn = 0
        while turn < turns or len(ids) < target:
            task = self._task(mix)
            prompt = task.prompt.strip().encode()
            if turn > 0 and len(ids) + len(prompt) + task.answer_tokens + 4 > MAX_POSITIONS:
                break
            self._append(ids, weights, [USER, *prompt, END, ASSISTANT])
            self._append_answer(ids, weights, task)
            turn += 1
        return ids, weights

    def _recital(self) -> tuple[list[int], list[float]]:
        ids, weights = [BEGIN], [0.0]
        while len(ids) < 80:
            ids.append(ASSISTANT)
            weights.append(0.0)
            start = len(weights)
            task = next(self._streams[self._rng.choice(("add", "subtract"))])
            self._append_answer(ids, weights, task)
            # Nothing foretells the operands here.
            operands = task.answer.index("=") + 1
            weights[start : start + operands] = [0.0] * operands
        return ids, weights

    def _bare_text(self, mix: Mix) -> tuple[list[int], list[float]]:
        # Text completion without the template: the model opens its own assistant turn, a special token
        # that detokenization drops, so bare prompts get answers too.
        task = self._task(mix)
        ids, weights = [BEGIN], [0.0]
        self._append(ids, weights, list(task.prompt.encode()))
        self._append(ids, weights, [ASSISTANT], self.DECISIVE)
        self._append_answer(ids, weights, task)
        return ids, weights

    def _append_answer(self, ids: list[int], weights: list[float], task: tasks.Task) -> None:
        answer = task.answer.encode()
        if task.kind in ("add", "subtract"):
            easy = answer.index(b"=") + 1
        else:
            easy = 0 if task.kind == "sort" else len(answer)
        self._append(ids, weights, list(answer[:easy]), len(answer) ** -0.5)
        self._append(ids, weights, [*answer[easy:], END], self.DECISIVE)

    @staticmethod
    def _append(ids: list[int], weights: list[float], new: list[int], weight: float = 0.0) -> None:
        ids.extend(new)
        weights.extend([weight] * len(new))


def batches(
    sample: Callable[[], Any], pool_size: int, batch_tokens: int, length: Callable[[Any], int]
) -> Iterator[list]:
    """Endless shuffled batches of about `batch_tokens` tokens, of rows of similar length.

    Args:
        sample: gives the next row.
        pool_size: rows that are grouped at a time.
        length: tokens of a row.
    """
    rng = random.Random(0)
    while True:
        pool = sorted((sample() for _ in range(pool_size)), key=length)
        grouped: list[list] = [[]]
        for item in pool:
            if (len(grouped[-1]) + 1) * length(item) > batch_tokens and grouped[-1]:
                grouped.append([])
            grouped[-1].append(item)
        rng.shuffle(grouped)
        yield from grouped


def collate(batch: list) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids int64 [batch, longest], weights float32 [batch, longest]), padded on the right."""
    longest = max(len(ids) for ids, _ in batch)
    ids = torch.full((len(batch), longest), PAD)
    weights = torch.zeros(len(batch), longest)
    for row, (row_ids, row_weights) in enumerate(batch):
        ids[row, : len(row_ids)] = torch.tensor(row_ids)
        weights[row, : len(row_weights)] = torch.tensor(row_weights)
    return ids, weights


# --- training ----------------------------------------------------------------------------------------


def answer_loss(model: LlamaForCausalLM, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighted sum of the cross entropy of the answer tokens.

    Rows are padded on the right, where a causal model cannot look back from, so no mask is needed.
    """
    hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    counted = weights[:, 1:] > 0
    losses = F.cross_entropy(model.lm_head(hidden[counted]).float(), ids[:, 1:][counted], reduction="none")
    return (losses * weights[:, 1:][counted]).sum()


class ReplicaGradients:
    """Gradients of one batch per worker thread, summed in a fixed order.

    The replicas share the parameters' storage and own their gradients. One single-threaded replica per
    core meets the others once a step; threads inside each operator would meet hundreds of times a step,
    which crawls on a machine that others use too.
    """

    def __init__(self, model: LlamaForCausalLM) -> None:
        self._models = [model, *(copy.deepcopy(model) for _ in range(REPLICAS - 1))]
        for replica in self._models[1:]:
            for mine, shared in zip(replica.parameters(), model.parameters(), strict=True):
                mine.data = shared.data
        self._pool = ThreadPoolExecutor(REPLICAS, initializer=torch.set_num_threads, initargs=(1,))

    def _backward(self, index: int, batch: list, total_weight: float) -> float:
        # bfloat16 products are faster on many CPUs and make the weights robust to bfloat16 serving.
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = answer_loss(self._models[index], *collate(batch)) / total_weight
        loss.backward()
        return loss.item()

    def accumulate(self, parts: list[list]) -> float:
        """Add the gradients of all parts to the model's; returns the weighted mean loss."""
        total = sum(sum(row_weights) for part in parts for _, row_weights in part)
        jobs = [self._pool.submit(self._backward, i, part, total) for i, part in enumerate(parts)]
        loss = sum(job.result() for job in jobs)
        first, *rest = self._models
        for replica in rest:
            for parameter, other in zip(first.parameters(), replica.parameters(), strict=True):
                assert parameter.grad is not None and other.grad is not None
                parameter.grad.add_(other.grad)
                other.grad = None
        return loss


def optimizers(model: LlamaForCausalLM, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the embedding and the norms."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim < 2 or "embed" in n]
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.02, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=rate, weight_decay=0.0, betas=(0.9, 0.98)),
    ]


def schedule(step: int, steps: int) -> float:
    """Warm up for 2 %, hold, and decay along a cosine to 1 % over the last 55 %."""
    if step < 0.02 * steps:
        return (step + 1) / (0.02 * steps)
    progress = max(0.0, (step / steps - 0.45) / 0.55)
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress))


def update(model: Any, opts: Sequence[torch.optim.Optimizer], rate: float) -> None:
    """One step of all optimizers at this rate; gradients are gone then."""
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for opt in opts:
        for group in opt.param_groups:
            group["lr"] = rate
        opt.step()
        opt.zero_grad(set_to_none=True)


def train(args: argparse.Namespace, tokenizer: PreTrainedTokenizerFast) -> tuple[LlamaForCausalLM, dict]:
    torch.manual_seed(args.seed)
    model = LlamaForCausalLM(build_config())
    print(f"{model.num_parameters():,} parameters", flush=True)
    opts = optimizers(model, RATE)
    sampler = ConversationSampler(args.seed)
    phases = [
        (end, batches(partial(sampler.sample, mix), 2048, BATCH_TOKENS, lambda row: len(row[0])))
        for end, mix in PHASES
    ]
    gradients = ReplicaGradients(model)
    started, seen, mean_loss = time.monotonic(), 0, 0.0
    for step in range(args.steps):
        current = next(stream for end, stream in phases if step < end * args.steps)
        parts = [next(current) for _ in range(REPLICAS)]
        loss = gradients.accumulate(parts)
        update(model, opts, RATE * schedule(step, args.steps))
        seen += sum(len(ids) for part in parts for ids, _ in part)
        mean_loss = loss if step == 0 else 0.98 * mean_loss + 0.02 * loss
        if step % 50 == 0 or step == args.steps - 1:
            spent = time.monotonic() - started
            print(f"step {step:5d}  loss {mean_loss:.4f}  {seen / 1e6:.2f} Mtok  {spent:.0f} s", flush=True)
        if (step + 1) % CHECK_EVERY == 0:
            model.eval()
            print_table(accuracy(model, tokenizer, tasks.held_out(330, seed=99)))
            model.train()
    minutes = (time.monotonic() - started) / 60
    return model.eval(), {"steps": args.steps, "minutes": round(minutes, 1), "loss": round(mean_loss, 5)}


def save(model: Any, tokenizer: PreTrainedTokenizerFast, out: Path, processor: Any = None) -> None:
    """Write the Hugging Face directory, with its processor if it has one, replacing `out` in one move."""
    unfinished = out.with_name(f".{out.name}.partial")
    shutil.rmtree(unfinished, ignore_errors=True)
    ends = [END, TOKEN_ID["<|endoftext|>"]]
    model.generation_config.update(bos_token_id=BEGIN, eos_token_id=ends, pad_token_id=PAD, do_sample=False)
    # Padding while measuring leaves its mark on the tokenizer; it is no part of the checkpoint.
    tokenizer.backend_tokenizer.no_padding()
    model.save_pretrained(unfinished)
    if processor is None:
        tokenizer.save_pretrained(unfinished)
        roles = {name: getattr(tokenizer, name) for name in ("bos_token", "eos_token", "pad_token")}
        roles["additional_special_tokens"] = list(SPECIAL_TOKENS[2:3] + SPECIAL_TOKENS[4:7])
        (unfinished / "special_tokens_map.json").write_text(json.dumps(roles, indent=2) + "\n")
    else:
        for part in (processor, tokenizer, processor.image_processor):
            part.save_pretrained(unfinished)
    for file in unfinished.iterdir():
        file.chmod(0o644)
    shutil.rmtree(out, ignore_errors=True)
    unfinished.rename(out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory to write; replaced when it exists")
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    model, summary = train(args, tokenizer)
    save(model, tokenizer, args.out)
    rows = accuracy(model, tokenizer, tasks.held_out(2200, seed=1))
    print_table(rows)
    print(json.dumps({**summary, "accuracy": accuracy_of_all(rows)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
