"""HFConfig: the keys of config.json (or a GGUF file), with the file's path, so that errors can name the file.
Importing this module does not import torch."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.errors import CheckpointError
from quire_common.errors import in_line, shown
from quire_common.gguf_file import GGUFFile


def read_json(path: Path, kind: type[Any] = dict) -> Any:
    """Reads a JSON object or list from a file.

    Args:
        path: the file.
        kind: dict or list.

    Raises:
        CheckpointError: the file is missing or unreadable, is not JSON, or holds another kind of value. The
            message names the file.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: file not found") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(values, kind):
        raise CheckpointError(f"{path}: must hold a JSON {'object' if kind is dict else 'list'}")
    return values


_OUTER_KEYS = (
    "architectures",
    "tie_word_embeddings",
    "dtype",
    "torch_dtype",
    "quantization_config",
    "compression_config",
    "eos_token_id",
    "vision_config",
    "image_token_id",
)
"""Keys beside `text_config` that `HFConfig.read` keeps, unless they are null. They usually replace equal keys
in `text_config`."""

_SIZES = {
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
}
"""Keys by which `HFConfig.read` recognises a complete `text_config`. If one is missing, the defaults of the
text model's type fill the gaps."""


MAX_SIZE = 2**24
"""Largest number that `HFConfig.require_int` and `HFConfig.whole` accept by default. With this bound and
MAX_HEADS on the sizes in a file, the bytes of the model's matrices fit a 64-bit number."""
MAX_HEADS = 2**16
"""Largest number of heads, and largest size of a head, that a file may state. It is less than MAX_SIZE,
because the product of the two is a dimension of matrices."""


def _completed(path: Path, text: dict[str, Any]) -> dict[str, Any]:
    """Returns a text_config as transformers completes it: keys that it lacks have the defaults of its
    model_type (without one, of llama). Raises CheckpointError if transformers does not know the model_type or
    refuses a value."""
    from transformers import CONFIG_MAPPING

    model_type = text.get("model_type", "llama")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise CheckpointError(f"{path}: text_config has the unknown model_type {shown(model_type)}")
    try:
        return dict(CONFIG_MAPPING[model_type](**text).to_dict())
    except Exception as error:  # transformers' checks raise what they like
        raise CheckpointError(f"{path}: text_config: {in_line(str(error))}") from None


@dataclass(frozen=True)
class HFConfig:
    """Keys of a Hugging Face config.json, or a GGUF file's metadata under the same keys."""

    path: Path
    values: dict[str, Any]
    gguf: GGUFFile | None = None
    """GGUF file that the keys were read from; None: they are from config.json, or were changed afterwards by
    `replace` or `with_defaults`."""
    unused: tuple[str, ...] = ()
    """Keys about the model in a GGUF file's metadata that were not read, although they may matter."""

    @classmethod
    def read(cls, directory: Path) -> HFConfig:
        """Reads config.json of a checkpoint directory; raises CheckpointError.

        The keys of a multimodal checkpoint's text part (`text_config`) appear at the top, beside some keys of
        the whole, such as `architectures`.
        """
        path = directory / "config.json"
        values = read_json(path)
        text = values.get("text_config")
        if not isinstance(text, dict):
            return cls(path, values)
        if not text.keys() >= _SIZES:
            # Files such as LLaVA 1.5's state what differs from the defaults of the text model's type only.
            text = _completed(path, text)
        outer = {key: values[key] for key in _OUTER_KEYS if values.get(key) is not None}
        if outer.get("tie_word_embeddings") is False and text.get("tie_word_embeddings"):
            del outer["tie_word_embeddings"]  # the whole's default; older files state it in text_config only
        return cls(path, {**text, **outer})

    def get(self, key: str, default: Any = None) -> Any:
        """Returns the value, or the default if the key is missing or null."""
        value = self.values.get(key)
        return default if value is None else value

    def with_defaults(self, **values: Any) -> HFConfig:
        """Returns this config with values for keys that are missing. A null is kept. `gguf` and `unused` are
        not carried over."""
        return self.replace(**{**values, **self.values})

    def replace(self, **values: Any) -> HFConfig:
        """Returns this config with other values for some keys. `gguf` and `unused` are not carried over."""
        return HFConfig(self.path, {**self.values, **values})

    def require_int(self, key: str, default: int | None = None, *, most: int = MAX_SIZE) -> int:
        """Returns the value, or the default if the key is missing or null. Raises CheckpointError, which
        names the key and the file, if that is no whole number from 1 to `most`."""
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise self.error(f"{key} must be a positive whole number up to {most}, got {value!r:.40}")
        return value

    def whole(self, key: str, default: int, *, most: int = MAX_SIZE) -> int:
        """Returns the value, or the default if the key is missing or null. Raises CheckpointError, which
        names the key and the file, if that is no whole number from 0 to `most`."""
        value = self.get(key, default)
        is_zero = value is None or (type(value) is int and value == 0)
        return 0 if is_zero else self.require_int(key, default, most=most)

    def number(self, key: str, default: float | None) -> float:
        """Returns the value, or the default if the key is missing or null. Raises CheckpointError, which
        names the key and the file, if that is no finite number of at least 0."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise self.error(f"{key} must be a number that is not negative, got {value!r:.40}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Returns the value, or the default if the key is missing or null. Raises CheckpointError, which
        names the key and the file, if that is neither true nor false."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.error(f"{key} must be true or false, got {value!r:.40}")
        return value

    def error(self, message: str) -> CheckpointError:
        """Returns the error to raise for a wrong value in this file. It names the file, and has `message` in
        one line."""
        return CheckpointError(f"{self.path}: {in_line(message)}")

    @property
    def architecture(self) -> str:
        """Returns the first entry of `architectures`, a class name; raises CheckpointError if it is none."""
        names = self.values.get("architectures")
        if not isinstance(names, list) or not names or not isinstance(names[0], str):
            raise self.error(f"architectures must name the model's class, got {names!r}")
        return names[0]
