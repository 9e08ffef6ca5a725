"""Vision prompts: makes token ids, pixel values and positions of a text or messages with images.

The image processor of the checkpoint (transformers, with Pillow and numpy; neither torch nor torchvision)
makes the pixel values. The other work of a model's processor on images and text is done here, and so are the
M-RoPE positions of the Qwen models.
"""

from __future__ import annotations

import contextlib
import io
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from quire_common.errors import InputError, one_line
from quire_ensemble import messages as chat
from quire_ensemble.chat_format import ChatFormat
from quire_ensemble.errors import VisionError
from quire_ensemble.images import (
    EncodedImage,
    ImageLimits,
    check_count,
    check_total,
    read_image,
    split_pixels,
)
from quire_ensemble.memory_gate import MemoryGate
from quire_ensemble.mrope import mrope_positions
from quire_ensemble.text_limits import TextLimits
from quire_ensemble.tokenizer import Tokenizer
from quire_ensemble.vision_config import Grid, QwenConfig, read_vision_config

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_SCALED_PIXELS = 2**26
"""Most pixels that an image may have after a processor has scaled or padded it, unless it has more before. It
is the square on the longer side of an image of 1:2 with the most pixels that are allowed by default."""
THREADS = 4
"""Most images, of prompts with several, that a VisionProcessor processes at a time; encoded ones are not
decoded before. The image of a prompt with only one is processed in the caller's thread."""


@dataclass(frozen=True)
class VisionPrompt:
    """Outputs of the model `vision_preprocessor` for one request, in the types and `dims` it declares."""

    input_ids: np.ndarray
    """int32 [tokens]; an image's placeholder is there once for each of its embedding rows."""
    pixel_values: np.ndarray
    """float32 [rows, row_size]; the model family decides what a row is (see `VisionConfig`)."""
    image_grid: np.ndarray
    """int32 [images, 3]: grid of each image; the model family decides what the three numbers mean."""
    image_spans: np.ndarray
    """int32 [spans, 2]: first token and number of tokens of each run of placeholders. An image has one run;
    with Pixtral, one for each line of its rows."""
    position_ids: np.ndarray
    """int32 [3, tokens]: positions in time, height and width; of shape [0, 0] for models without M-RoPE."""
    chat_format: np.ndarray
    """bytes [1]: JSON of `ChatFormat`; empty for a text."""


_WARM_UP = b'[{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "warm-up"}]}]'


class _ProcessedImage(NamedTuple):
    pixels: np.ndarray
    """float32 [rows, row_size]: the image's part of `VisionPrompt.pixel_values`."""
    grid: Grid


class VisionProcessor:
    """A checkpoint's processor of prompts with images. Safe to use from several threads."""

    def __init__(
        self,
        path: str | Path,
        tokenizer: Tokenizer,
        limits: ImageLimits | None = None,
        texts: TextLimits | None = None,
    ) -> None:
        """Loads the image processor and tries it.

        Args:
            path: checkpoint directory.
            tokenizer: tokenizer of the same checkpoint.
            limits: limits on the images of one request; None: the defaults.
            texts: limits on the text of one request; None: the defaults. Messages may be longer by what their
                images may take.

        Raises:
            VisionError: config.json or the image processor's file is missing or broken, the model is of no
                known family, or its tokenizer, image processor and configuration do not fit together.
        """
        self.path = Path(path)
        self.tokenizer = tokenizer
        self.limits = limits or ImageLimits()
        self.texts = texts or TextLimits()
        self.config = read_vision_config(self.path)
        self._image_processor = _load_image_processor(self.path)
        self.placeholder_id, self._placeholder, self._placeholder_line = self._find_placeholder()
        self._marked = "".join(
            part if isinstance(part, str) else tokenizer.hf.convert_ids_to_tokens(part)
            for part in self.config.mark_parts
        )
        self._most_marks = self.limits.max_images + 1  # more are refused, whatever they are replaced by
        self._extra_ids = [self._added_id(name) for name in self.config.extra_tokens]
        self._template_takes_images = tokenizer.takes_images(self._placeholder)
        self.row_size = self._try_processor()
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="images")
        self._gate = MemoryGate(self.limits.max_image_pixels)

    def warm_up(self) -> None:
        """Processes an image, so that no request waits for one-time work. Call this before there are
        requests.

        Raises:
            TokenizerError: the chat template takes more time or memory than it may.
        """
        from PIL import Image as pil

        self.tokenizer.warm_up()
        data = io.BytesIO()
        pil.new("RGB", (96, 64)).save(data, "PNG")
        prompts = ((_WARM_UP, None), (None, self._placeholder.encode()))
        for messages, text in prompts:
            with contextlib.suppress(InputError):  # a template, or a limit, may refuse it
                self.process(messages, text, [data.getvalue()])

    def close(self) -> None:
        """Ends the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def process(
        self,
        messages: bytes | None,
        text: bytes | None,
        images: Sequence[bytes | str] | None = None,
        pixels: np.ndarray | None = None,
    ) -> VisionPrompt:
        """Makes the prompt of one request.

        Args:
            messages: chat messages as JSON (`quire_ensemble.messages`); each image part without data stands
                for the next one of `images` or `pixels`, which must hold exactly as many images as there are
                such parts.
            text: prompt that holds the checkpoint's placeholder, such as <image>, once for each image.
                Exactly one of `messages` and `text` is given.
            images: encoded images (see `read_image`).
            pixels: uint8 [n, height, width, 3]: images instead of `images`, RGB.

        Raises:
            InputError: an input is wrong. For one wrong image the field is usually `image[i]`, where i counts
                the prompt's images from 0.
        """
        if images and pixels is not None:
            raise InputError("image, image_pixels", "at most one is allowed, both are given")
        sources: list[bytes | str | Image] = list(images or [])
        if pixels is not None:
            sources = list(split_pixels(pixels, self.limits))
        if messages is not None and text is None:
            token_ids, sources, chat_format = self._encode_messages(messages, sources)
        else:
            chat_format = b""
            if text is not None:
                text = text.replace(self._placeholder.encode(), self._marked.encode(), self._most_marks)
            token_ids = self.texts.encode(self.tokenizer, text, messages)
        check_count(len(sources), self.limits)
        found = token_ids.count(self.placeholder_id)
        if found != len(sources):
            raise InputError(
                "text_input" if messages is None else chat.FIELD,
                f"the prompt has {_count(found, 'placeholder')} {self._placeholder!r} and "
                f"{_count(len(sources), 'image')}; there must be one for each image",
            )
        read = self._read_images(sources)
        run: Callable[..., Any] = map if len(read) < 2 else self._pool.map
        process = partial(self._process_image, is_alone=len(read) == 1)
        processed = list(run(process, range(len(read)), read))
        return self._assemble(token_ids, processed, chat_format)

    def _encode_messages(
        self, raw: bytes, given: list[bytes | str | Image]
    ) -> tuple[list[int], list[bytes | str | Image], bytes]:
        """Returns the token ids of messages, all their images in order, and their `chat_format`. `given`: the
        images for the image parts without data."""
        max_bytes = self.texts.max_prompt_bytes + self.limits.max_request_bytes * 4 // 3  # as base64
        conversation = chat.parse_conversation(raw, allow_images=True, max_bytes=max_bytes)
        messages, found = chat.split_images(conversation.messages)
        wanted = sum(data is None for data in found)
        if wanted != len(given):
            raise InputError(
                chat.FIELD,
                f"{_count(wanted, 'image part')} without data, and {_count(len(given), 'image')} in `image` "
                "or `image_pixels`; the numbers must be equal",
            )
        if found and not self._template_takes_images:
            messages = chat.join_images(messages, self._placeholder_line)
        text = self.tokenizer.render(
            replace(conversation, messages=messages), max_bytes=self.texts.max_prompt_bytes
        )
        text = text.replace(self._placeholder, self._marked, self._most_marks)
        bos = self.tokenizer.hf.bos_token
        # The rule of transformers' processors, unlike that of its tokenizers: templates that come with an
        # image processor may leave BOS to the tokenizer.
        starts = bool(bos) and text.startswith(bos)
        token_ids = self.tokenizer.encode(
            text, add_special_tokens=not starts, field=chat.FIELD, max_tokens=self.texts.max_model_len
        )
        rest = iter(given)
        sources = [next(rest) if data is None else data for data in found]
        return token_ids, sources, ChatFormat.from_conversation(conversation, text).to_json()

    def _read_images(self, sources: Sequence[bytes | str | Image]) -> list[EncodedImage | Image]:
        """Reads the headers of the images that are encoded, and checks each image and all images together
        against the limits. No image is decoded."""
        images: list[EncodedImage | Image] = []
        num_bytes = num_pixels = num_patches = 0
        is_alone = len(sources) == 1
        for index, source in enumerate(sources):
            image = read_image(source, index, self.limits) if isinstance(source, (bytes, str)) else source
            if isinstance(image, EncodedImage):
                num_bytes += len(image.data)
            num_pixels += self._most_pixels(image.size, index, is_alone)
            num_patches += self._num_patches(image.size, index, is_alone)
            check_total("max_request_bytes", num_bytes, self.limits)
            check_total("max_request_pixels", num_pixels, self.limits)
            check_total("max_request_patches", num_patches, self.limits)
            images.append(image)
        return images

    def _process_image(self, index: int, source: EncodedImage | Image, *, is_alone: bool) -> _ProcessedImage:
        with self._gate.hold(self._most_pixels(source.size, index, is_alone)):
            image = source.decode() if isinstance(source, EncodedImage) else source
            try:
                out = self.config.preprocess(self._image_processor, _to_rgb(image), is_alone)
            except ValueError as error:
                raise _refused(index, error) from None
        return _ProcessedImage(*self.config.processed(out))

    def _num_patches(self, size: tuple[int, int], index: int, is_alone: bool) -> int:
        """Returns the number of patches that the vision tower computes for an image of this size. Raises
        InputError if the image processor would refuse it."""
        try:
            return self.config.planned_patches(self._image_processor, size[1], size[0], is_alone)
        except ValueError as error:  # Qwen: an aspect ratio above 200
            raise _refused(index, error) from None

    def _most_pixels(self, size: tuple[int, int], index: int, is_alone: bool) -> int:
        """Returns the number of pixels of an image, or of what `VisionConfig.scaled_size` says is made of
        it, whichever is larger. A line of pixels that is scaled to the height of a LLaVA image, or padded to
        a square, becomes huge, which the limits on files do not see.

        Raises:
            InputError: the latter is more than MAX_SCALED_PIXELS, and more than the image has.
        """
        short, long = sorted(size)
        scaled = self.config.scaled_size(self._image_processor, short, long, is_alone)
        if scaled[0] * scaled[1] > max(MAX_SCALED_PIXELS, short * long):
            raise InputError(
                f"image[{index}]",
                f"{size[0]} x {size[1]} pixels are too long and narrow: the image processor would make "
                f"{scaled[0]} x {scaled[1]} of them, at most {MAX_SCALED_PIXELS} pixels are allowed",
            )
        return max(short * long, scaled[0] * scaled[1])

    def _assemble(
        self, token_ids: list[int], images: list[_ProcessedImage], chat_format: bytes
    ) -> VisionPrompt:
        expanded: list[int] = []
        spans: list[tuple[int, int]] = []
        rest = iter(images)
        for token_id in token_ids:
            if token_id != self.placeholder_id:
                expanded.append(token_id)
                continue
            sequence = self.config.sequence(next(rest).grid, token_id, self._extra_ids)
            for is_row, run in itertools.groupby(sequence, token_id.__eq__):
                ids = list(run)
                if is_row:
                    spans.append((len(expanded), len(ids)))
                expanded += ids
        grids = [image.grid for image in images]
        return VisionPrompt(
            input_ids=np.asarray(expanded, dtype=np.int32),
            pixel_values=np.concatenate(
                [np.empty((0, self.row_size), dtype=np.float32), *(image.pixels for image in images)]
            ),
            image_grid=np.asarray(grids, dtype=np.int32).reshape(-1, 3),
            image_spans=np.asarray(spans, dtype=np.int32).reshape(-1, 2),
            position_ids=mrope_positions(len(expanded), spans, grids, self.config.merge)
            if isinstance(self.config, QwenConfig)
            else np.zeros((0, 0), dtype=np.int32),
            chat_format=np.array([chat_format], dtype=np.object_),
        )

    def _find_placeholder(self) -> tuple[int, str, str]:
        """Returns the placeholder's id, the text of `VisionConfig.mark`, and the text of
        `VisionConfig.marks`, which stands for an image: the mark, between markers if the family has any.
        Raises VisionError if the tokenizer does not have these as added tokens."""
        found, ids = self.config.hf.image_token_id, self.config.marks
        hf = self.tokenizer.hf
        needed = {*ids, *(part for part in self.config.mark_parts if isinstance(part, int))}
        added = needed <= set(hf.added_tokens_decoder)
        line = "".join(hf.convert_ids_to_tokens(int(i)) or "" for i in ids) if added else ""
        if not added or self.tokenizer.encode(line, add_special_tokens=False) != ids:
            raise VisionError(f"{self.path}: the tokenizer has no special tokens for {ids} of config.json")
        return int(found), hf.convert_ids_to_tokens(int(self.config.mark)), line

    def _added_id(self, name: str) -> int:
        found = self.tokenizer.hf.convert_tokens_to_ids(name)
        if found not in self.tokenizer.hf.added_tokens_decoder:
            raise VisionError(f"{self.path}: the tokenizer has no special token {name}")
        return int(found)

    def _try_processor(self) -> int:
        """Runs the image processor once, so that a broken one fails here, with VisionError. Returns the size
        of a row of its pixels."""
        from PIL import Image as pil

        try:
            self.config.check_settings(self._image_processor)
        except Exception as error:  # of another family it does not have these settings
            raise VisionError(f"{self.path}: {one_line(error)}") from error
        try:
            out = self.config.preprocess(self._image_processor, pil.new("RGB", (96, 64)), True)
        except Exception as error:  # its settings come from a file
            raise VisionError(f"{self.path}: the image processor does not work: {one_line(error)}") from error
        try:
            return self.config.check_processor(self._image_processor, out)
        except Exception as error:  # of another family it does not have these outputs
            raise VisionError(f"{self.path}: {one_line(error)}") from error


def _load_image_processor(path: Path) -> Any:
    from transformers import AutoImageProcessor

    try:
        return AutoImageProcessor.from_pretrained(
            str(path), backend="pil", local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # the loaders of transformers raise whatever their files make them raise
        raise VisionError(f"{path}: image processor cannot be loaded: {one_line(error)}") from error


def _to_rgb(image: Image) -> Image:
    """Returns the image in RGB, with transparency over white. Most image processors do so themselves, but
    their files may switch it off."""
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    from PIL import Image as pil
    from transformers.image_transforms import convert_to_rgb

    return pil.fromarray(cast("np.ndarray", convert_to_rgb(image, return_numpy=True)))


def _refused(index: int, error: ValueError) -> InputError:
    return InputError(f"image[{index}]", f"refused by the image processor: {error}")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
