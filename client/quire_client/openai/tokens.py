"""Token ids of texts and messages (from the tokenizer model in front of a generator), the text of token ids,
and the longest prompt and answer of a model."""

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
    """Returns the token ids of a prompt, as the tokenizer model in front of the model makes them.

    Args:
        schema: schema of the model that would answer.
        text: the prompt; None if the prompt is `messages`.
        messages: JSON of the messages; None if the prompt is `text`.
        timeout: seconds that the tokenizer model has; None: no limit.

    Raises:
        RequestError: no model of the server makes token ids of such a prompt for this model.
        QuireClientError: the tokenizer model refused the prompt, or a call failed.
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
            ids = parse_token_ids(response.infer_response, OUTPUT)
            found = found if ids is None else ids
    except grpc.RpcError as error:
        raise error_from_rpc(error, client._settings.url) from None
    finally:
        call.cancel()
    if found is None:
        raise ProtocolError(f"the model {tokenizer.name!r} has told no {OUTPUT}")
    return found


async def _tokenizer_of(client: AsyncClient, schema: ModelSchema) -> ModelSchema | None:
    """Returns the schema of an ensemble's tokenizer model: the first member with an output `input_ids`. For a
    model that is no ensemble, searches the ready ensembles that contain it. None: no tokenizer model."""
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
    """Returns the text of token ids, special tokens included. The text is empty if the generator has no
    tokenizer. The generator is asked for 0 further tokens.

    Raises:
        QuireClientError: the request failed, for example because an id is not in the vocabulary.
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
    """Returns the most tokens that prompt and answer may have together; None if the model does not say.

    Args:
        timeout: seconds that the model has to say it.
    """
    if "cache_control" not in schema.inputs:
        return None
    try:
        told = (await client.adapters(model=schema.name, timeout=timeout)).get("max_model_len")
    except QuireClientError:
        return None
    return told if isinstance(told, int) else None
