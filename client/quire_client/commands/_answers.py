"""`AnswerRun`: gets the answers for `quire-client chat` and `generate`, and prints them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from quire_client._terminal import AnswerWriter, Waiting
from quire_client.client import Client
from quire_client.protocol import conversation
from quire_client.types import Choice, Message, Result, Timing, collect


class AnswerRun:
    """One invocation of `chat` or `generate`: the connection, the sampling parameters, and how answers are
    printed."""

    def __init__(
        self, url: str, model: str | None, options: dict[str, Any], tools: Path | None = None
    ) -> None:
        self.model = model
        self.as_json: bool = options.pop("as_json")
        self.stats: bool = options.pop("stats")
        self.timeout: float | None = options.pop("timeout")
        schema: Path | None = options.pop("schema")
        self._schema = None if schema is None else _json_file("--schema", schema)
        self._tools = None if tools is None else _json_file("--tools", tools)
        params = _json_params(options.pop("params"))
        options["stop"] = list(options["stop"]) or None
        self.sampling = {**params, **{k: v for k, v in options.items() if v is not None}}
        self.client = Client(url)

    def answer(
        self,
        prompt: str | None = None,
        *,
        messages: list[Message] | None = None,
        images: tuple[str, ...] = (),
    ) -> Result | None:
        """Gets an answer and prints it: as text, the first choice while it is generated and any others after
        it; as JSON, all at the end.

        Choices that are ranked (best_of, beam search) are known only at the end, so none of them is printed
        before.

        Returns:
            The answer; None when Ctrl-C ended it.
        """
        arguments = {
            "messages": messages and self._conversation(messages),
            "images": images,
            "model": self.model,
            "timeout": self.timeout,
            **self.sampling,
        }
        if self._schema is not None and messages is None:
            arguments["structured_output"] = {"json": self._schema}
        writer = AnswerWriter()
        try:
            with Waiting("waiting for the answer") as waiting:
                if self.sampling.get("best_of") or self.sampling.get("beam_width"):
                    result = self.client.generate(prompt, **arguments)
                    waiting.over()
                    if not self.as_json:
                        writer.reasoning(result.reasoning)
                        writer.text(result.text)
                else:
                    stream = self.client.stream(prompt, **arguments)
                    chunks = []
                    with stream:
                        for chunk in stream:
                            waiting.over()
                            chunks.append(chunk)
                            if not self.as_json and not chunk.index:
                                writer.reasoning(chunk.reasoning)
                                writer.text(chunk.text)
                    result = collect(stream.request_id, stream.model, stream.started_at, chunks)
        except KeyboardInterrupt:
            if not self.as_json:
                click.echo()
            click.echo("cancelled", err=True)
            return None
        if self.as_json:
            click.echo(json.dumps(_result_fields(result), ensure_ascii=False))
        else:
            click.echo()
            self._write_calls(writer, result.choices[0])
            for choice in result.choices[1:]:
                click.echo(f"--- choice {choice.index}")
                writer.text(f"{choice.text}\n")
                self._write_calls(writer, choice)
        if self.stats:
            click.echo(_stats_line(result.timing, result.finish_reason), err=True)
        return result

    def _conversation(self, messages: list[Message]) -> list[Message] | dict[str, Any]:
        schema = self._schema
        wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        return conversation(messages, tools=self._tools, response_format=None if schema is None else wanted)

    @staticmethod
    def _write_calls(writer: AnswerWriter, choice: Choice) -> None:
        for call in choice.tool_calls:
            function = call["function"]
            writer.text(f"-> {function['name']}({function['arguments']})\n")


def _json_params(params: tuple[str, ...]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for entry in params:
        name, equals, text = entry.partition("=")
        if not equals or not name:
            raise click.UsageError(f"--param: NAME=JSON expected, got {entry!r}")
        try:
            values[name] = json.loads(text)
        except (ValueError, RecursionError):
            values[name] = text
    return values


def _json_file(option: str, path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise click.UsageError(f"{option}: {path}: {error}") from None


def _choice_fields(choice: Choice) -> dict[str, Any]:
    """Returns fields of a choice for JSON: text and finish reason, and some others if they are not empty."""
    rest = {
        "reasoning": choice.reasoning,
        "tool_calls": list(choice.tool_calls),
        "stop_reason": choice.stop_reason,
        "logprobs": [entry for part in choice.logprobs for entry in part or ()],
        "server_timing": choice.server_timing,
    }
    told = {name: value for name, value in rest.items() if value}
    return {"text": choice.text, "finish_reason": choice.finish_reason, **told}


def _result_fields(result: Result) -> dict[str, Any]:
    timing: Timing = result.timing
    rate = timing.tokens_per_second
    others = [{"index": c.index, **_choice_fields(c)} for c in result.choices[1:]]
    return {
        **_choice_fields(result.choices[0]),
        "token_ids": list(result.token_ids),
        "model": result.model,
        "request_id": result.request_id,
        "num_output_tokens": result.num_output_tokens,
        **({"others": others} if others else {}),
        "timing": {
            "ttft_s": None if timing.ttft is None else round(timing.ttft, 6),
            "total_s": round(timing.total, 6),
            "tokens_per_s": None if rate is None else round(rate, 2),
        },
    }


def _stats_line(timing: Timing, finish_reason: str | None) -> str:
    parts = [] if timing.ttft is None else [f"TTFT {timing.ttft * 1e3:.1f} ms"]
    if timing.tokens_per_second is not None:
        parts += [f"{timing.num_tokens} tokens", f"{timing.tokens_per_second:.1f} tokens/s"]
    return ", ".join([*parts, f"{timing.total:.3f} s", f"finish: {finish_reason or 'unknown'}"])
