"""Train the vision demo checkpoint: `python demo/train_vision.py --out DIR`.

Writes a complete Hugging Face directory (LLaVA architecture: CLIP vision tower, projector, Llama; byte-level
tokenizer, chat template, image processor) that answers the questions of pictures.py. Pictures are drawn on
the fly, the loss counts answer tokens only, and a run is reproducible for one torch build and processor kind.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F
from transformers import (
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

sys.path.insert(0, str(Path(__file__).resolve().parent))
import pictures
import tasks
import train as text_demo
from evaluate import accuracy_of_all, print_table
from evaluate_vision import accuracy
from train import ASSISTANT, BEGIN, END, SYSTEM, USER

IMAGE_TOKEN = "<image>"
IMAGE = 256 + len(text_demo.SPECIAL_TOKENS)
SIDE, PATCH = 64, 8
VISION_HIDDEN = 96
VISION_BATCH = 40
"""Pictures of a step of the vision tower alone."""
BATCH_TOKENS = 3072
CHECK_EVERY = 500
"""Steps between accuracy tables."""
GRID = SIDE // PATCH
PATCHES = GRID * GRID
MEAN, STD = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
# How often each kind is asked about one picture.
KIND_WEIGHTS = {"describe": 0.35, "colour": 0.25, "count": 0.12, "where": 0.28}
CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
  {%- if message['role'] not in ['system', 'user', 'assistant'] -%}
    {{- raise_exception("role '" ~ message['role'] ~ "' is none of system, user, assistant") -}}
  {%- endif -%}
  {{- '<|' ~ message['role'] ~ '|>' -}}
  {%- if message['content'] is string -%}
    {{- message['content'] | trim -}}
  {%- else -%}
    {%- for part in message['content'] -%}
      {%- if part['type'] in ['image', 'image_url'] -%}
        {{- '<image>' -}}
      {%- elif part['type'] == 'text' -%}
        {{- part['text'] | trim -}}
      {%- else -%}
        {{- raise_exception("content part '" ~ part['type'] ~ "' is none of text, image, image_url") -}}
      {%- endif -%}
    {%- endfor -%}
  {%- endif -%}
  {{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|assistant|>' -}}
{%- endif -%}
"""


def build_processor() -> LlavaProcessor:
    tokenizer = text_demo.build_tokenizer()
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [IMAGE_TOKEN]}, replace_extra_special_tokens=False
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    size = {"height": SIDE, "width": SIDE}
    images = CLIPImageProcessorPil(
        size=size, crop_size=size, image_mean=list(MEAN), image_std=list(STD), do_convert_rgb=True
    )
    # The class token counts as an additional one, which the strategy "default" then drops.
    return LlavaProcessor(
        images,
        tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        chat_template=CHAT_TEMPLATE,
        image_token=IMAGE_TOKEN,
        num_additional_image_tokens=1,
    )


def build_config() -> LlavaConfig:
    vision = CLIPVisionConfig(
        hidden_size=VISION_HIDDEN,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=VISION_HIDDEN // 32,
        projection_dim=VISION_HIDDEN,
        image_size=SIDE,
        patch_size=PATCH,
    )
    text = text_demo.build_config(256)
    text.vocab_size = IMAGE + 1
    return LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=IMAGE,
        image_seq_length=PATCHES,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        projector_hidden_act="gelu",
        tie_word_embeddings=True,
    )


# --- data --------------------------------------------------------------------------------------------


@dataclass
class Row:
    """One tokenized conversation.

    ids: every picture is PATCHES placeholders. weights: of predicting each id, 0 outside of answers.
    images: uint8 [SIDE, SIDE, 3] each. labels: int64 [PATCHES, 2] each, see `patch_labels`.
    """

    ids: list[int] = field(default_factory=lambda: [BEGIN])
    weights: list[float] = field(default_factory=lambda: [0.0])
    images: list[np.ndarray] = field(default_factory=list)
    labels: list[np.ndarray] = field(default_factory=list)

    def append(self, ids: list[int], weight: float = 0.0) -> None:
        self.ids.extend(ids)
        self.weights.extend([weight] * len(ids))

    def append_answer(self, answer: str) -> None:
        # A long description must not drown the one-word answers.
        self.append([*answer.encode(), END], len(answer) ** -0.5)


def patch_labels(scene: pictures.Scene) -> np.ndarray:
    """int64 [PATCHES, 2]: the item (shape and colour) that each patch's middle shows, and its place, both
    counted from 1; 0 where there is nothing."""
    labels = np.zeros((GRID, GRID, 2), np.int64)
    middles = (np.arange(GRID) + 0.5) / GRID
    for item in scene.items:
        x, y = pictures.place_centre(item.place)
        near = (abs(middles[:, None] - y) < 0.12) & (abs(middles[None, :] - x) < 0.12)
        colour = tuple(pictures.COLOURS).index(item.colour)
        look = pictures.SHAPES.index(item.shape) * len(pictures.COLOURS) + colour
        labels[near] = 1 + look, 1 + pictures.PLACES.index(item.place)
    return labels.reshape(PATCHES, 2)


def drawn(rng: random.Random, scene: pictures.Scene) -> np.ndarray:
    """uint8 [SIDE, SIDE, 3]: the scene drawn, saved and loaded."""
    file = pictures.encode(pictures.draw(scene, rng.random().hex()), rng.random().hex())
    return pictures.pixels(file, SIDE)


class RowSampler:
    """Endless training rows about pictures that are not held out.

    One picture answers several questions in one conversation, so its 64 positions are paid once.
    """

    def __init__(self, seed: int, pairs: float) -> None:
        """pairs: share of rows about two pictures."""
        self._pairs = pairs
        self._rng = random.Random(f"train|{seed}")
        self._other = tasks.prompts("other", seed=seed, split="train")

    def sample(self) -> Row:
        rng = self._rng
        style = rng.random()
        row = Row()
        if rng.random() < 0.1:
            row.append([SYSTEM, *tasks.system_prompt(rng).strip().encode(), END])
        if style < 0.08:
            self._without_picture(row)
        elif style < 1 - self._pairs:
            self._about(row, pictures.scenes(rng, 1, "train"), KIND_WEIGHTS)
        else:
            self._about(row, pictures.scenes(rng, 2, "train"), dict.fromkeys(pictures.ABOUT_TWO, 1.0))
        return row

    def _turn(self, row: Row, prompt: str, about: tuple[pictures.Scene, ...], images: int) -> None:
        text = prompt.encode()
        placeholders = [IMAGE] * PATCHES
        if self._rng.random() < 0.7:
            content = [*placeholders * images, *text]
        elif self._rng.random() < 0.5:
            content = [*[*placeholders, *b"\n"] * images, *text]
        else:
            content = [*text, *placeholders * images]
        row.append([USER, *content, END, ASSISTANT])
        row.append_answer(pictures.solve(prompt, about)[1])

    def _about(self, row: Row, about: tuple[pictures.Scene, ...], kinds: dict[str, float]) -> None:
        rng = self._rng
        if rng.random() < 0.05:
            self._turn(row, pictures.ask(rng, "greet", ()), (), 0)
        for scene in about:
            row.images.append(drawn(rng, scene))
            row.labels.append(patch_labels(scene))
        for turn in range(rng.randint(1, 5 if len(about) == 1 else 3)):
            kind = "greet" if rng.random() < 0.02 else rng.choices(tuple(kinds), tuple(kinds.values()))[0]
            self._turn(row, pictures.ask(rng, kind, about), about, len(about) if turn == 0 else 0)

    def _without_picture(self, row: Row) -> None:
        rng = self._rng
        for _ in range(rng.randint(1, 3)):
            kind = rng.choice(("greet", "no picture", "other"))
            prompt = next(self._other).prompt.strip() if kind == "other" else pictures.ask(rng, kind, ())
            self._turn(row, prompt, (), 0)


# --- training ----------------------------------------------------------------------------------------


def normalized(images: list[np.ndarray]) -> torch.Tensor:
    """float32 [n, 3, SIDE, SIDE] of uint8 [SIDE, SIDE, 3] images, as the image processor gives them."""
    pixels = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 255
    return (pixels - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]


class Probe(torch.nn.Module):
    """Reads the item and its place from every picture embedding; dropped after training.

    It gives the vision tower a direct signal long before the language model knows where to look.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self._sizes = [1 + len(pictures.SHAPES) * len(pictures.COLOURS), 1 + len(pictures.PLACES)]
        self.read = torch.nn.Linear(hidden, sum(self._sizes))

    def loss(self, embeddings: torch.Tensor, labels: list[np.ndarray]) -> torch.Tensor:
        """Cross entropy of embeddings [PATCHES * pictures, hidden] against `patch_labels`."""
        wanted = torch.from_numpy(np.concatenate(labels))
        item, place = self.read(embeddings).float().split(self._sizes, dim=-1)
        return F.cross_entropy(item, wanted[:, 0]) + F.cross_entropy(place, wanted[:, 1])


def losses(
    model: LlavaForConditionalGeneration, probe: Probe, rows: list[Row]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weighted mean cross entropy of the answer tokens, the probe's loss)."""
    ids, weights = text_demo.collate([(row.ids, row.weights) for row in rows])
    images = [image for row in rows for image in row.images]
    out = model.model(
        input_ids=ids[:, :-1],
        pixel_values=normalized(images) if images else None,
        use_cache=False,
    )
    counted = weights[:, 1:] > 0
    logits = model.lm_head(out.last_hidden_state[counted]).float()
    tokens = F.cross_entropy(logits, ids[:, 1:][counted], reduction="none")
    counted_weights = weights[:, 1:][counted]
    answer_loss = (tokens * counted_weights).sum() / counted_weights.sum()
    if not images:
        return answer_loss, torch.zeros(())
    return answer_loss, probe.loss(out.image_hidden_states, [label for row in rows for label in row.labels])


def vision_loss(
    model: LlavaForConditionalGeneration, probe: Probe, rng: random.Random, count: int
) -> torch.Tensor:
    """The probe's loss on `count` new pictures, without the language model."""
    scenes = [pictures.scenes(rng, 1, "train")[0] for _ in range(count)]
    features = model.model.get_image_features(
        normalized([drawn(rng, scene) for scene in scenes]),
        vision_feature_layer=model.config.vision_feature_layer,
        vision_feature_select_strategy=model.config.vision_feature_select_strategy,
    )
    return probe.loss(torch.cat(features.pooler_output), [patch_labels(scene) for scene in scenes])


def train(args: argparse.Namespace, processor: LlavaProcessor) -> tuple[LlavaForConditionalGeneration, dict]:
    torch.manual_seed(args.seed)
    if args.start:
        model = LlavaForConditionalGeneration.from_pretrained(args.start, dtype=torch.float32).train()
    else:
        model = LlavaForConditionalGeneration(build_config())
    print(f"{model.num_parameters():,} parameters", flush=True)
    if args.steps == 0:
        return model.eval(), {"steps": 0}
    probe = Probe(text_demo.HIDDEN)
    opts = text_demo.optimizers(model, args.rate)
    opts.append(torch.optim.AdamW(probe.parameters(), lr=args.rate, weight_decay=0.0))
    sampler = RowSampler(args.seed, args.pairs)
    stream = text_demo.batches(sampler.sample, 512, BATCH_TOKENS, lambda row: len(row.ids))
    rng = random.Random(f"vision|{args.seed}")
    started, means = time.monotonic(), [0.0, 0.0]
    for step in range(-args.vision_steps, args.steps):
        if step < 0:
            answer_loss, probe_loss = torch.zeros(()), vision_loss(model, probe, rng, VISION_BATCH)
        else:
            answer_loss, probe_loss = losses(model, probe, next(stream))
        (answer_loss + args.probe_weight * probe_loss).backward()
        text_demo.update(model, opts, args.rate * (1 if step < 0 else text_demo.schedule(step, args.steps)))
        for i, loss in enumerate((answer_loss, probe_loss)):
            means[i] = (
                loss.item() if step in (0, -args.vision_steps) else 0.98 * means[i] + 0.02 * loss.item()
            )
        if step % 50 == 0 or step == args.steps - 1:
            spent = time.monotonic() - started
            print(f"step {step:5d}  loss {means[0]:.4f}  probe {means[1]:.4f}  {spent:.0f} s", flush=True)
        if step > 0 and step % CHECK_EVERY == 0:
            model.eval()
            print_table(accuracy(model, processor, pictures.held_out(240, seed=99)), show_wrong=2)
            model.train()
    minutes = (time.monotonic() - started) / 60
    return model.eval(), {"steps": args.steps, "minutes": round(minutes, 1), "loss": round(means[0], 5)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory to write; replaced when it exists")
    parser.add_argument("--start", type=Path, help="go on from this checkpoint's weights")
    parser.add_argument("--pairs", type=float, default=0.22, help="share of rows about two pictures")
    parser.add_argument("--vision-steps", type=int, default=250, help="of the vision tower alone, first")
    parser.add_argument("--steps", type=int, default=2600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=2.5e-3)
    parser.add_argument("--probe-weight", type=float, default=0.5, help="of the probe's loss")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    processor = build_processor()
    model, summary = train(args, processor)
    text_demo.save(model, processor.tokenizer, args.out, processor)
    rows = accuracy(model, processor, pictures.held_out(1600, seed=1))
    print_table(rows, show_wrong=3)
    print(json.dumps({**summary, "accuracy": accuracy_of_all(rows)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
