"""`Names`: what clients call the server's models, and which of these names the gateway lists."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from quire_client.aio import AsyncClient
from quire_client.protocol import ModelSchema

UNARY = "_unary"
"""Suffix in the name of a model's twin that answers with one response."""


@dataclass(frozen=True)
class Names:
    """Names by which clients call the server's models. aliases: the model's own name, by alias."""

    aliases: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, stated: Sequence[str], default: str) -> Names:
        """Parses names from the command line.

        Args:
            stated: entries NAME=MODEL, or NAME alone for the default model.

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
        """Returns the model's own name for an alias; any other name is returned unchanged."""
        return self.aliases.get(name, name)

    def listed(self, schemas: Mapping[str, ModelSchema]) -> dict[str, str]:
        """Returns the models to list, by the name to list. These are the ready models that have aliases, by
        each alias, and by their own names the ready models that have no alias and are neither members of a
        ready ensemble nor the `_unary` twin of another.

        Args:
            schemas: schema of each ready model, by the model's name.
        """
        inner = {step for schema in schemas.values() for step in schema.steps}
        twins = {name for name in schemas if name.endswith(UNARY) and name.removesuffix(UNARY) in schemas}
        hidden = inner | twins | set(self.aliases.values())
        own = {name: name for name in schemas if name not in hidden}
        return {**{name: model for name, model in self.aliases.items() if model in schemas}, **own}


async def part_that(
    client: AsyncClient, schema: ModelSchema, is_able: Callable[[ModelSchema], bool]
) -> ModelSchema:
    """Returns the model itself if `is_able` accepts it, else the ensemble's last member that `is_able`
    accepts.

    If `is_able` accepts neither the model nor a member, the model itself is returned.
    """
    if not is_able(schema):
        for step in reversed(schema.steps):
            part = await client._schema(step)
            if is_able(part):
                return part
    return schema
