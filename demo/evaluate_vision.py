"""Measure the vision demo: `python demo/evaluate_vision.py --checkpoint DIR`; exit status 1 below 99 %.

Loads the directory with plain transformers, answers the questions of pictures.py about held-out drawings
greedily through the chat template, and prints the accuracy of each kind.
"""

from __future__ import annotations

import io
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from PIL import Image
from transformers import AutoProcessor, LlavaForConditionalGeneration

sys.path.insert(0, str(Path(__file__).resolve().parent))
import pictures
from evaluate import KindResult, arguments, exit_status


@torch.inference_mode()
def answer_all(
    model: LlavaForConditionalGeneration,
    processor: Any,
    questions: Sequence[pictures.Question],
    batch_size: int = 32,
    image_first: bool = True,
) -> list[str]:
    """Greedy answers, special tokens dropped. Questions with as many pictures and like answers share a
    batch. `image_first` False puts the text part of the message before the pictures."""
    answers = [""] * len(questions)
    groups: dict[int, list[int]] = defaultdict(list)
    for i in sorted(range(len(questions)), key=lambda i: questions[i].answer_tokens):
        groups[len(questions[i].images)].append(i)
    for chosen in (g[i : i + batch_size] for g in groups.values() for i in range(0, len(g), batch_size)):
        texts: list[str] = []
        images: list[Image.Image] = []
        for i in chosen:
            messages = questions[i].messages
            if not image_first:
                messages[0]["content"].reverse()
            texts.append(processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
            images.extend(Image.open(io.BytesIO(file)).convert("RGB") for file in questions[i].images)
        encoded = processor(
            images=images or None,
            text=texts,
            add_special_tokens=False,
            padding=True,
            padding_side="left",
            return_tensors="pt",
        )
        if "pixel_values" in encoded:
            encoded["pixel_values"] = encoded["pixel_values"].to(model.dtype)
        out = cast(Any, model).generate(
            **{k: encoded[k] for k in ("input_ids", "attention_mask", "pixel_values") if k in encoded},
            max_new_tokens=max(questions[i].answer_tokens for i in chosen) + 8,
            do_sample=False,
        )
        new = out[:, encoded["input_ids"].shape[1] :]
        decoded = processor.tokenizer.batch_decode(new, skip_special_tokens=True)
        for i, text in zip(chosen, decoded, strict=True):
            answers[i] = text
    return answers


def accuracy(
    model: LlavaForConditionalGeneration,
    processor: Any,
    questions: Sequence[pictures.Question],
    image_first: bool = True,
) -> list[KindResult]:
    """Results per kind of question."""
    results = {kind: KindResult(kind, 0, 0, []) for kind in pictures.KINDS}
    answers = answer_all(model, processor, questions, image_first=image_first)
    for question, answer in zip(questions, answers, strict=True):
        row = results[question.kind]
        row.total += 1
        if pictures.is_right(question.prompt, question.scenes, answer):
            row.right += 1
        else:
            row.wrong.append((question.prompt, f"{answer} (right: {question.answer})"))
    return [row for row in results.values() if row.total]


def main() -> int:
    parser = arguments(__doc__, required=True)
    parser.set_defaults(prompts=1600)
    parser.add_argument("--text-first", action="store_true", help="the question before the pictures")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    processor = AutoProcessor.from_pretrained(args.checkpoint, backend="pil")
    model = LlavaForConditionalGeneration.from_pretrained(args.checkpoint, dtype=getattr(torch, args.dtype))
    questions = pictures.held_out(args.prompts, seed=args.seed)
    rows = accuracy(model.eval(), processor, questions, image_first=not args.text_first)
    return exit_status(rows, args.show_wrong)


if __name__ == "__main__":
    sys.exit(main())
