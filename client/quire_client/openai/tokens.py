"""Token ids of texts and messages, by the model before a generator that makes them."""

from __future__ import annotations

from typing import Any

import grpc

from quire_client.aio import AsyncClient
from quire_client.errors import NotFound, ProtocolError, QuireClientError, error_from_rpc, error_from_text
from quire_client.openai.errors import RequestError
from quire_client.protocol import ModelSchema, build_tokenize, parse_token_ids

OUTPUT = "input_ids"


async def token_ids(
    client: AsyncClient, schema: ModelSchema, text: str | None, messages: bytes | None, timeout: float | None
) -> list[int]:
    """Token ids of a prompt, as the model would have them.

    Args:
        schema: of the model that would answer.
        text: the prompt, or None where it is messages.
        messages: JSON.
        timeout: seconds; None: no limit.

    Raises:
        RequestError: there is no model that tells them.
        QuireClientError: it refused the prompt.
    """
    prompt: str | bytes
    field, name, prompt = "prompt", "text_input", text or ""
    if messages is not None:
        field, name, prompt = "messages", "messages", messages
    tokenizer = await _tokenizer_of(client, schema)
    if tokenizer is None or name not in tokenizer.inputs:
        message = f"{field}: the model {schema.name!r} has no tokenizer model beside it"
        raise RequestError(message, param=field)
    call = client._send(build_tokenize(tokenizer, name, prompt), timeout)
    found: list[int] | None = None
    try:
        while (response := await call.receive()) is not None:
            if response.error_message:
                raise error_from_text(response.error_message)
            found = parse_token_ids(response.infer_response, OUTPUT) or found
    except grpc.RpcError as error:
        raise error_from_rpc(error, client._settings.url) from None
    finally:
        call.cancel()
    if found is None:
        raise ProtocolError(f"the model {tokenizer.name!r} has told no {OUTPUT}")
    return found


async def _tokenizer_of(client: AsyncClient, schema: ModelSchema) -> ModelSchema | None:
    """The part of the model's ensemble that makes token ids, or of an ensemble around the model."""
    for step in schema.steps:
        part = await client._schema(step)
        if part.outputs is not None and OUTPUT in part.outputs:
            return part
    if schema.steps:
        return None
    for info in await client.models():
        try:
            ensemble = await client._schema(info.name) if info.ready else None
        except NotFound:
            continue  # unloaded meanwhile
        if ensemble is not None and schema.name in ensemble.steps:
            found = await _tokenizer_of(client, ensemble)
            if found is not None:
                return found
    return None


async def text_of(client: AsyncClient, schema: ModelSchema, ids: list[int], **arguments: Any) -> str:
    """The text of token ids, special tokens included, by a generator that is to add none.

    Raises:
        QuireClientError: it has no tokenizer, or the ids are not its vocabulary's.
    """
    found = await client.generate(
        input_ids=ids,
        model=schema.name,
        outputs=["text_output"],
        max_tokens=0,
        exclude_input_in_output=False,
        skip_special_tokens=False,
        **arguments,
    )
    return found.text


async def max_model_len(client: AsyncClient, schema: ModelSchema, timeout: float) -> int | None:
    """Most tokens of prompt and answer together; None where the model does not tell."""
    if "cache_control" not in schema.inputs:
        return None
    try:
        told = (await client.adapters(model=schema.name, timeout=timeout)).get("max_model_len")
    except QuireClientError:
        return None
    return told if isinstance(told, int) else None
