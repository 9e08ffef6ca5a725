"""What the vision tests share: drawn images, what transformers says to a prompt with images, a server."""

from __future__ import annotations

import io
import random
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tritonclient.grpc as grpcclient
from PIL import Image, ImageDraw

from tests.fixtures.drive import hf_vision_model
from tests.fixtures.server import ServerProcess

VISION_KINDS = ("llava", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")


def picture(seed: int, size: tuple[int, int] = (64, 48), *, mode: str = "RGB", kind: str = "PNG") -> bytes:
    """An encoded image with a few random rectangles."""
    rng = random.Random(seed)
    image = Image.new("RGB", size, tuple(rng.randrange(256) for _ in range(3)))
    draw = ImageDraw.Draw(image)
    for _ in range(4):
        xs, ys = sorted(rng.choices(range(size[0]), k=2)), sorted(rng.choices(range(size[1]), k=2))
        draw.rectangle((xs[0], ys[0], xs[1], ys[1]), fill=tuple(rng.randrange(256) for _ in range(3)))
    out = io.BytesIO()
    image.convert(mode).save(out, kind)
    return out.getvalue()


class WholeModel:
    """A vision-language checkpoint in transformers: processor and model, uncached, unbatched."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoImageProcessor, AutoTokenizer

        self.model = hf_vision_model(path)
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.processor = AutoImageProcessor.from_pretrained(path, backend="pil")
        self.image_token = self.model.config.image_token_id

    @property
    def _settings(self) -> dict[str, Any]:
        """What transformers' processor gives its image processor."""
        config = self.model.config
        if config.model_type == "internvl":
            return {"crop_to_patches": True}
        if config.vision_config.model_type == "pixtral":
            return {"patch_size": config.vision_config.patch_size * getattr(config, "spatial_merge_size", 1)}
        return {}

    def _features(self, inputs: dict[str, Any]) -> list[torch.Tensor]:
        """Rows of each image."""
        tiles = inputs.pop("num_patches", None)
        inputs.pop("num_soft_tokens_per_image", None)
        features = self.model.get_image_features(**inputs).pooler_output
        if tiles is None:
            return list(features)
        return [part.flatten(0, 1) for part in features.split(tiles.tolist())]

    def _expanded(self, index: int, features: list[torch.Tensor], inputs: dict[str, Any]) -> list[int]:
        """Token ids in place of an image's placeholder, as transformers' processors have it."""
        names: list[str] = []
        image = self.tokenizer.convert_ids_to_tokens(self.image_token)
        count = len(features[index])
        if self.model.config.model_type == "internvl":
            names = ["<img>", *[image] * count, "</img>"]
        elif self.model.config.model_type == "gemma4":
            names = ["<|image>", *[image] * count, "<image|>"]
        elif self.model.config.vision_config.model_type == "pixtral":
            lines, columns = (int(n) // self._settings["patch_size"] for n in inputs["image_sizes"][index])
            assert lines * columns == count
            names = ([image] * columns + ["[IMG_BREAK]"]) * lines
            names[-1] = "[IMG_END]"
        else:
            names = [image] * count
        found: list[int] = self.tokenizer.convert_tokens_to_ids(names)
        return found

    def answer(self, messages: list[dict[str, Any]], images: Sequence[bytes], max_tokens: int) -> list[int]:
        """Greedy tokens; end tokens are ignored."""
        return self.generate(messages, images, max_tokens)[0]

    @torch.no_grad()
    def generate(
        self, messages: list[dict[str, Any]], images: Sequence[bytes], max_tokens: int
    ) -> tuple[list[int], torch.Tensor]:
        """The answer, and log-probabilities of all tokens at each of its places."""
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        if self.model.config.model_type == "gemma3":
            return self._answer(self._gemma3_inputs(text, images), max_tokens)
        starts = bool(self.tokenizer.bos_token) and text.startswith(self.tokenizer.bos_token)
        short = self.tokenizer(text, add_special_tokens=not starts)["input_ids"]
        inputs: dict[str, Any] = {}
        features: list[torch.Tensor] = []
        if images:
            decoded = [Image.open(io.BytesIO(image)) for image in images]
            # A list of its own says that they are those of one prompt.
            given = [decoded] if self.model.config.model_type == "llava_onevision" else decoded
            inputs = dict(self.processor(images=given, return_tensors="pt", **self._settings))
            features = self._features(inputs)
        rest = iter(range(len(images)))
        token_ids: list[int] = []
        for token_id in short:
            if token_id != self.image_token:
                token_ids.append(token_id)
            else:
                token_ids += self._expanded(next(rest), features, inputs)
        ids = torch.tensor([token_ids])
        if self.model.config.model_type == "gemma4" or "qwen" in self.model.config.model_type:
            inputs["mm_token_type_ids"] = (ids == self.image_token).int()
        return self._answer({"input_ids": ids, **inputs}, max_tokens)

    def _gemma3_inputs(self, text: str, images: Sequence[bytes]) -> dict[str, Any]:
        """Of its processor, whose texts for images are tokenized together with what is beside them."""
        from transformers import Gemma3Processor

        count = self.model.config.mm_tokens_per_image
        whole = Gemma3Processor(self.processor, self.tokenizer, image_seq_length=count)
        decoded = [Image.open(io.BytesIO(image)) for image in images]
        return dict(whole(text=text, images=decoded or None, return_tensors="pt"))

    def _answer(self, inputs: dict[str, Any], max_tokens: int) -> tuple[list[int], torch.Tensor]:
        ids = inputs["input_ids"]
        out = self.model.generate(
            **inputs | {"attention_mask": torch.ones_like(ids)},
            max_new_tokens=max_tokens,
            output_logits=True,
            return_dict_in_generate=True,
        )
        return out.sequences[0, ids.shape[1] :].tolist(), torch.cat(out.logits).log_softmax(-1)


@dataclass
class VisionServer:
    """Models `<kind>_generator`, `<kind>_vision_chat` and so on for each kind."""

    server: ServerProcess
    whole: dict[str, WholeModel]

    def statistics(self, model: str) -> Any:
        with grpcclient.InferenceServerClient(self.server.grpc_url) as client:
            return client.get_inference_statistics(model).model_stats[0]

    def metric(self, name: str, kind: str) -> float:
        with urllib.request.urlopen(f"http://{self.server.metrics_url}/metrics") as reply:
            lines = reply.read().decode().splitlines()
        found = [line for line in lines if line.startswith(name + "{") and f"{kind}_vision_encoder" in line]
        assert len(found) == 1, f"{name}: {found}"
        return float(found[0].rpartition(" ")[2])
