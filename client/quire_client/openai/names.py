"""`Names`: what clients call the server's models, and which of these the gateway lists."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from quire_client.aio import AsyncClient
from quire_client.protocol import ModelSchema

UNARY = "_unary"
"""How the name of a model's twin ends that answers once."""


@dataclass(frozen=True)
class Names:
    """aliases: model by the name that stands for it."""

    aliases: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, stated: Sequence[str], default: str) -> Names:
        """Names as the command line states them.

        Args:
            stated: NAME=MODEL, or NAME alone for the default model.

        Raises:
            ValueError: an empty name, or one that stands for two models.
        """
        aliases: dict[str, str] = {}
        for entry in stated:
            name, _, model = entry.partition("=")
            model = model or default
            if not name or aliases.setdefault(name, model) != model:
                raise ValueError(f"must be NAME or NAME=MODEL, each name once, got {entry!r}")
        return cls(aliases)

    def model_of(self, name: str) -> str:
        """The model that a client means; a model's own name always is good."""
        return self.aliases.get(name, name)

    def listed(self, schemas: Mapping[str, ModelSchema]) -> dict[str, str]:
        """The names to list, and the model of each: the aliases, and models without one that are neither a
        part of an ensemble nor the twin of another.

        Args:
            schemas: of all ready models.
        """
        inner = {step for schema in schemas.values() for step in schema.steps}
        twins = {name for name in schemas if name.endswith(UNARY) and name.removesuffix(UNARY) in schemas}
        hidden = inner | twins | set(self.aliases.values())
        own = {name: name for name in schemas if name not in hidden}
        return {**{name: model for name, model in self.aliases.items() if model in schemas}, **own}


async def part_that(
    client: AsyncClient, schema: ModelSchema, is_able: Callable[[ModelSchema], bool]
) -> ModelSchema:
    """The model, or where it cannot do something the last part of the ensemble that can, if there is one."""
    if not is_able(schema):
        for step in reversed(schema.steps):
            part = await client._schema(step)
            if is_able(part):
                return part
    return schema
