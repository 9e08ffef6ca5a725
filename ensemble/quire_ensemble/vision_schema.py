"""Tensors of the two vision models, stated once: the builder renders their config.pbtxt from these.

Both models have a batch dimension, along which Triton's dynamic batcher may join requests. So each tensor of
a request has a first dimension of 1 that `dims` does not list. The encoder answers with plain rows, without
this dimension, which Triton allows.
"""

from __future__ import annotations

from quire_ensemble.generator_schema import (
    CHAT_FORMAT,
    IMAGE_INPUTS,
    ONE_TEXT_INPUTS,
    PROMPT_INPUTS,
    TensorSpec,
)

PREPROCESSOR_INPUTS: tuple[TensorSpec, ...] = (
    *ONE_TEXT_INPUTS,
    TensorSpec(
        "image",
        "TYPE_STRING",
        (-1,),
        doc="Encoded images (JPEG, PNG, WebP, GIF): bytes, base64 or data URL.",
    ),
    TensorSpec("image_pixels", "TYPE_UINT8", (-1, -1, -1, 3), doc="Raw images [n, height, width, RGB]."),
)

ENCODER_INPUTS: tuple[TensorSpec, ...] = (
    TensorSpec("pixel_values", "TYPE_FP32", (-1, -1), optional=False, doc="Rows of processed pixels."),
    TensorSpec(
        "image_grid",
        "TYPE_INT32",
        (-1, 3),
        optional=False,
        doc="Of each image: (t, h, w) in patches, or tiles and pixels (LLaVA-NeXT).",
    ),
)
ENCODER_OUTPUTS: tuple[TensorSpec, ...] = (
    TensorSpec("image_embeds", "TYPE_FP32", (-1,), doc="[embedding rows of all images, hidden size]."),
)

PREPROCESSOR_OUTPUTS: tuple[TensorSpec, ...] = (
    *(spec for spec in PROMPT_INPUTS if spec.name == "input_ids"),
    *(TensorSpec(s.name, s.datatype, s.dims, doc=s.doc) for s in ENCODER_INPUTS),
    *(spec for spec in IMAGE_INPUTS if spec.name in ("image_spans", "position_ids")),
    CHAT_FORMAT,
)
