"""Requests and answers of /v1/classify, /v1/score and /v1/rerank, in the forms of vLLM, Jina and Cohere."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quire_client.openai.errors import RequestError
from quire_client.openai.requests import (
    EMBEDDING_SCHEDULING,
    MAX_INPUTS,
    SERVICE_FIELDS,
    boolean,
    check_fields,
    check_messages,
    is_input,
    model_name,
)
from quire_client.types import Scores

_COMMON = SERVICE_FIELDS | {"model", "use_activation", *EMBEDDING_SCHEDULING}
_CLASSIFY_FIELDS = _COMMON | {"input", "messages", "chat_template_kwargs", "add_generation_prompt"}
_SCORE_FIELDS = _COMMON | {"text_1", "text_2"}
_RERANK_FIELDS = _COMMON | {"query", "documents", "top_n", "return_documents"}


@dataclass(frozen=True)
class ScoringRequest:
    """One request for scores, of prompts, of a conversation, or of pairs of texts."""

    model: str
    input: str | list[int] | list[str] | list[list[int]] = ""
    messages: dict[str, Any] | None = None
    firsts: str | list[str] = ""
    seconds: list[str] | None = None
    """Second text of each pair; a single first text belongs to all of them. None: `input` or `messages` is
    scored."""
    top_n: int | None = None
    """Number of best documents to return; None: all."""
    returns_documents: bool = True
    pair_field: str = ""
    """Field of the body that holds the second texts."""
    sampling: dict[str, Any] = field(default_factory=dict)
    """Parameters for the server, such as `use_activation` and those of scheduling."""

    @property
    def source(self) -> str:
        """Name of an input that a model needs for this request."""
        if self.messages is not None:
            return "messages"
        return "input_ids" if self.seconds is None else "text_pair"


def parse_classify(body: Mapping[str, Any]) -> ScoringRequest:
    """Parses a body of /v1/classify; raises as `parse_chat` does."""
    check_fields(body, _CLASSIFY_FIELDS, {})
    model, messages = model_name(body), body.get("messages")
    given: Any = body.get("input")
    if (given is None) == (messages is None):
        raise RequestError("input: exactly one of input and messages must be given", param="input")
    if messages is not None:
        if not isinstance(messages, list) or not messages:
            raise RequestError("messages: must be a list of messages", param="messages")
        check_messages(messages)
        kwargs = body.get("chat_template_kwargs")
        stated: dict[str, Any] = {
            "messages": messages,
            "add_generation_prompt": boolean("add_generation_prompt", body.get("add_generation_prompt")),
        }
        if kwargs is not None:
            stated["chat_template_kwargs"] = kwargs
        return ScoringRequest(model, messages=stated, sampling=_sampling(body))
    is_list = isinstance(given, list) and 0 < len(given) <= MAX_INPUTS and all(map(is_input, given))
    if not (is_list or is_input(given)):
        kinds = f"a string, a list of token ids, or a list of 1 to {MAX_INPUTS} of either, none of them empty"
        raise RequestError(f"input: must be {kinds}", param="input")
    return ScoringRequest(model, given, sampling=_sampling(body))


def parse_score(body: Mapping[str, Any]) -> ScoringRequest:
    """Parses a body of /v1/score; raises as `parse_chat` does."""
    check_fields(body, _SCORE_FIELDS, {})
    firsts, seconds = body.get("text_1"), body.get("text_2")
    if not isinstance(firsts, str):
        firsts = _texts("text_1", firsts)
    seconds = _texts("text_2", [seconds] if isinstance(seconds, str) else seconds)
    if isinstance(firsts, list) and len(firsts) == 1:
        firsts = firsts[0]
    if isinstance(firsts, list) and len(firsts) != len(seconds):
        raise RequestError(
            f"text_2: must hold as many texts as text_1 ({len(firsts)}), got {len(seconds)}", param="text_2"
        )
    return ScoringRequest(
        model_name(body), firsts=firsts, seconds=seconds, pair_field="text_2", sampling=_sampling(body)
    )


def parse_rerank(body: Mapping[str, Any]) -> ScoringRequest:
    """Parses a body of /v1/rerank; raises as `parse_chat` does."""
    check_fields(body, _RERANK_FIELDS, {})
    query, documents, most = body.get("query"), body.get("documents"), body.get("top_n")
    if not isinstance(query, str):
        raise RequestError("query: must be a string", param="query")
    if isinstance(documents, list):
        documents = [one.get("text") if isinstance(one, Mapping) else one for one in documents]
    if most is not None and (type(most) is not int or most < 1):
        raise RequestError("top_n: must be a positive integer", param="top_n")
    given = body.get("return_documents")
    return ScoringRequest(
        model_name(body),
        firsts=query,
        seconds=_texts("documents", documents),
        top_n=most,
        returns_documents=given is None or boolean("return_documents", given),
        pair_field="documents",
        sampling=_sampling(body),
    )


def classify_reply(request: ScoringRequest, found: Scores) -> dict[str, Any]:
    """Returns the answer of /v1/classify, as vLLM's."""
    data = [
        {"index": index, "label": label, "probs": values, "num_classes": len(values)}
        for index, (label, values) in enumerate(zip(found.labels, found.values, strict=True))
    ]
    return _listed("classify", request, found, data)


def score_reply(request: ScoringRequest, found: Scores) -> dict[str, Any]:
    """Returns the answer of /v1/score, as vLLM's. Raises RequestError if the model gives several scores of a
    pair."""
    data = [{"index": index, "object": "score", "score": one} for index, one in enumerate(_singles(found))]
    return _listed("score", request, found, data)


def rerank_reply(request: ScoringRequest, found: Scores) -> dict[str, Any]:
    """Returns the answer of /v1/rerank, as Jina's: results by descending score, at most `top_n`. Raises
    RequestError if the model gives several scores of a pair."""
    results: list[dict[str, Any]] = []
    scores, documents = _singles(found), request.seconds or []
    for index in sorted(range(len(scores)), key=lambda at: -scores[at])[: request.top_n]:
        document = {"document": {"text": documents[index]}} if request.returns_documents else {}
        results.append({"index": index, **document, "relevance_score": scores[index]})
    usage = {"total_tokens": found.num_input_tokens}
    return {"id": f"rerank-{uuid.uuid4().hex}", "model": request.model, "usage": usage, "results": results}


def _listed(kind: str, request: ScoringRequest, found: Scores, data: list[dict[str, Any]]) -> dict[str, Any]:
    count = found.num_input_tokens
    return {
        "id": f"{kind}-{uuid.uuid4().hex}",
        "object": "list",
        "created": int(time.time()),
        "model": request.model,
        "data": data,
        "usage": {"prompt_tokens": count, "total_tokens": count, "completion_tokens": 0},
    }


def _singles(found: Scores) -> list[float]:
    """Returns the one score of each pair; raises RequestError if the model gives several."""
    if any(len(values) != 1 for values in found.values):
        raise RequestError(
            f"model: gives {len(found.values[0])} scores of a pair, and not one: see /v1/classify",
            param="model",
        )
    return [values[0] for values in found.values]


def _texts(name: str, value: Any) -> list[str]:
    """Returns the value if it is a list of 1 to MAX_INPUTS texts; else raises RequestError, which names the
    field."""
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise RequestError(f"{name}: must be a list of strings", param=name)
    if not 1 <= len(value) <= MAX_INPUTS:
        raise RequestError(f"{name}: 1 to {MAX_INPUTS} are allowed, got {len(value)}", param=name)
    return value


def _sampling(body: Mapping[str, Any]) -> dict[str, Any]:
    stated = {name: body[name] for name in EMBEDDING_SCHEDULING if body.get(name) is not None}
    if body.get("use_activation") is not None:
        stated["use_activation"] = boolean("use_activation", body["use_activation"])
    return stated
