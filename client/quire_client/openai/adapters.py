"""LoRA adapters as models of the gateway: listing, finding, loading and unloading them.

An adapter belongs to the model that lists it and whose requests may name it (`lora_name`): a generator. A
client chooses it by its name, like a model. If a model has the same name, the name means the model.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from quire_client.aio import AsyncClient
from quire_client.errors import NotFound, QuireClientError
from quire_client.openai.errors import RequestError
from quire_client.protocol import ModelSchema

LISTED_S = 1.0
"""Seconds for which a server's list of adapters is cached."""
LOAD_FIELDS = frozenset({"lora_name", "lora_path", "load_inplace", "model"})
UNLOAD_FIELDS = frozenset({"lora_name", "drain", "model"})


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter. name: name in requests. root: the adapter's directory on the server. parent: the model
    that it belongs to."""

    name: str
    root: str
    parent: str


class Adapters:
    """The adapters of the gateway's servers. A server is asked for its adapters when models are listed, when
    a request names something that is not a model, and before an adapter is loaded that must not replace
    another; the answer is cached for LISTED_S."""

    def __init__(self) -> None:
        self._listed: WeakKeyDictionary[AsyncClient, tuple[float, dict[str, Adapter]]] = WeakKeyDictionary()

    async def list_adapters(self, client: AsyncClient) -> Mapping[str, Adapter]:
        """Returns the adapters of one server by name, without those that have a model's name. Models that do
        not list their adapters now, such as sleeping ones, are left out."""
        when, found = self._listed.get(client, (-LISTED_S, {}))
        if time.monotonic() - when >= LISTED_S:
            found = {}
            models = [info.name for info in await client.models()]
            for model in await bases(client):
                try:
                    answer = await client.adapters(model=model)
                except QuireClientError:
                    continue  # it may be asleep, or be another backend's model with inputs of these names
                for one in answer.get("adapters", ()):
                    if one["name"] not in models:
                        found.setdefault(one["name"], Adapter(one["name"], one["path"], model))
            self._listed[client] = time.monotonic(), found
        return found

    async def find(self, client: AsyncClient, name: str) -> tuple[ModelSchema, Adapter | None]:
        """Returns the schema of the model that serves a name, and the adapter if the name is an adapter's.

        Raises:
            NotFound: neither a model nor a listed adapter has this name.
        """
        when, found = self._listed.get(client, (-LISTED_S, {}))
        if name not in found or time.monotonic() - when >= LISTED_S:
            try:
                return await client._schema(name), None
            except NotFound:
                found = dict(await self.list_adapters(client))
                if name not in found:
                    raise
        return await client._schema(found[name].parent), found[name]

    async def load(self, clients: Sequence[AsyncClient], body: Mapping[str, Any]) -> str:
        """Loads an adapter on every server; returns the text that vLLM answers with.

        Raises:
            RequestError: a wrong body, an adapter of this name is listed and `load_inplace` is not set, or
                `model` is not stated and not exactly one model can have adapters.
            QuireClientError: a server refused or did not answer.

        After an error the servers asked before keep the adapter.
        """
        _check(body, LOAD_FIELDS, ("lora_name", "lora_path"))
        name, path = body["lora_name"], body["lora_path"]
        for client in clients:
            self._listed.pop(client, None)
            if not body.get("load_inplace") and name in await self.list_adapters(client):
                message = f"lora_name: the adapter {name!r} is loaded already; load_inplace replaces it"
                raise RequestError(message, param="lora_name")
            await client.load_adapter(name, path, model=await _base(client, body))
            self._listed.pop(client, None)
        return f"Success: LoRA adapter '{name}' added successfully."

    async def unload(self, clients: Sequence[AsyncClient], body: Mapping[str, Any]) -> str:
        """Unloads an adapter on every server, with `drain` after the adapter's requests have ended. Returns
        the text that vLLM answers with.

        Raises:
            RequestError: a wrong body, or `model` is not stated and not exactly one model can have adapters.
            QuireClientError: a server refused or did not answer.

        After an error the servers asked before have unloaded the adapter.
        """
        _check(body, UNLOAD_FIELDS, ("lora_name",))
        name = body["lora_name"]
        for client in clients:
            await client.unload_adapter(name, drain=bool(body.get("drain")), model=await _base(client, body))
            self._listed.pop(client, None)
        return f"Success: LoRA adapter '{name}' removed successfully."


async def bases(client: AsyncClient) -> list[str]:
    """Returns the names of the ready models that have the inputs to list and to name adapters, without models
    known not to stream."""
    found = []
    for info in await client.models():
        if info.ready:
            schema = await client._schema(info.name)
            has_inputs = {"lora_name", "cache_control"} <= schema.inputs.keys()
            if has_inputs and schema.decoupled is not False:
                found.append(info.name)
    return found


async def _base(client: AsyncClient, body: Mapping[str, Any]) -> str:
    """Returns the name of the model that must load or unload an adapter: `model` of the body, else the only
    ready model that can have adapters. Raises RequestError if none or several can."""
    if body.get("model") is not None:
        return str(body["model"])
    found = await bases(client)
    if len(found) != 1:
        names = ", ".join(found) or "none"
        raise RequestError(f"model: must say which model has the adapter; there are: {names}", param="model")
    return found[0]


def _check(body: Mapping[str, Any], fields: frozenset[str], texts: Sequence[str]) -> None:
    for field in body:
        if field not in fields:
            raise RequestError(
                f"{field:.80}: unknown field; there are {', '.join(sorted(fields))}", param=field
            )
    for field in texts:
        if not isinstance(body.get(field), str) or not body[field]:
            raise RequestError(f"{field}: must be text that is not empty", param=field)
    for field in ("load_inplace", "drain"):
        if not isinstance(body.get(field, False), bool):
            raise RequestError(f"{field}: must be true or false", param=field)
