"""AdapterRegistry: the LoRA adapters that an engine knows, by name."""

from __future__ import annotations

from quire.adapters import Adapter
from quire.config import AdapterConfig
from quire.errors import InvalidArgumentError
from quire_ensemble.errors import shown


class AdapterRegistry:
    """Which adapters requests may name."""

    def __init__(self, config: AdapterConfig) -> None:
        self._config = config
        self._by_name: dict[str, Adapter] = {}

    def get(self, name: str) -> Adapter:
        """The adapter that a new request names.

        Raises:
            InvalidArgumentError: there is none.
        """
        if not self._config.enable_lora:
            raise InvalidArgumentError("lora_name", "the model has no adapters: enable_lora is not set")
        if name not in self._by_name:
            raise InvalidArgumentError("lora_name", f"{shown(name)} is not the name of an adapter")
        return self._by_name[name]
