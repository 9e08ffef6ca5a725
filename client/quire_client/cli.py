"""`quire-client chat|generate|embed|models|requests|adapters|top|cache|profile|openai|api-key|completion`.

Exit status: 0 done, 1 the request or the server failed (one line on stderr), 2 wrong usage, 130 Ctrl-C.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any

import click
from click.shell_completion import get_completion_class

from quire_client import __version__
from quire_client._metrics import Scrape
from quire_client._terminal import AnswerWriter, Waiting, without_controls
from quire_client._top import frame
from quire_client.client import Client
from quire_client.errors import QuireClientError
from quire_client.protocol import CHAT_MODEL, GENERATOR_MODEL, conversation
from quire_client.types import Choice, Message, Result, Timing, collect

INTERRUPTED = 130
PROGRAM = "quire-client"
COMPLETE_VARIABLE = "_QUIRE_CLIENT_COMPLETE"
"""Environment variable by which the shell asks for completions."""
_PATH = click.Path(path_type=Path)
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


def _request_options(command: Callable[..., None]) -> Callable[..., None]:
    options = [
        click.option("--max-tokens", type=int, help="Most tokens to generate."),
        click.option("--temperature", type=float, help="0 is greedy."),
        click.option("--top-p", type=float),
        click.option("--top-k", type=int),
        click.option("--seed", type=int, help="Same seed, same answer."),
        click.option("--stop", multiple=True, help="Ends the answer; may be given several times."),
        click.option("--n", type=int, help="Choices to return."),
        click.option("--best-of", type=int, help="Choices to generate; the n most likely are returned."),
        click.option("--beam-width", type=int, help="Beam search; the n best beams are returned."),
        click.option("--priority", type=int, help="A smaller number is more urgent; 0 is usual."),
        click.option("--tenant", help="On whose account the request runs."),
        click.option("--lora-name", help="LoRA adapter to compute with."),
        click.option("--session", help="Conversation whose KV cache stays from turn to turn."),
        click.option("--cache-salt", help="Share cached prefixes only with requests of this salt."),
        click.option("--ttft-deadline-ms", type=int, help="Without a token by then the request ends."),
        click.option("--num-draft", type=int, help="Most tokens that a step tries beyond the next; 0: none."),
        click.option(
            "--param", "params", multiple=True, metavar="NAME=JSON", help="Any other sampling parameter."
        ),
        click.option("--schema", type=_FILE, help="JSON schema that the answer has to fit."),
        click.option("--timeout", type=float, help="Seconds for the whole answer."),
        click.option("--json", "as_json", is_flag=True, help="Print one JSON line at the end."),
        click.option("--stats", is_flag=True, help="Print TTFT and tokens/s on stderr."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def _url_option(command: Callable[..., None]) -> Callable[..., None]:
    return click.option(
        "--url",
        default="localhost:8001",
        envvar="QUIRE_URL",
        show_default=True,
        help="HOST:PORT of the gRPC endpoint (or the variable QUIRE_URL).",
    )(command)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="quire-client")
def cli() -> None:
    """Talks to a Quire server over gRPC."""


@cli.command()
@click.argument("prompt", required=False)
@_url_option
@click.option("--model", help="Default: chat, or vision_chat with images.")
@click.option("--system", help="System message.")
@click.option("--image", "images", multiple=True, metavar="FILE", help="An image; may be repeated.")
@click.option("--tools", type=_FILE, help="JSON list of tools, as in OpenAI's API; calls are shown.")
@_request_options
def chat(
    prompt: str | None,
    url: str,
    model: str | None,
    system: str | None,
    images: tuple[str, ...],
    tools: Path | None,
    **options: Any,
) -> None:
    """Answers PROMPT as a chat message; `-` reads it from stdin.

    Without PROMPT at a terminal: a conversation. Ctrl-C ends an answer, Ctrl-D the conversation.
    """
    start: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    run = _Run(url, model, options, tools)
    with run.client:
        if prompt is None and sys.stdin.isatty() and not images:
            _converse(run, start)
            return
        text = _prompt_text(prompt)
        if run.answer(messages=[*start, {"role": "user", "content": text}], images=images) is None:
            raise SystemExit(INTERRUPTED)


@cli.command()
@click.argument("prompt", required=False)
@_url_option
@click.option("--model", default=GENERATOR_MODEL, show_default=True)
@_request_options
def generate(prompt: str | None, url: str, model: str, **options: Any) -> None:
    """Continues PROMPT as raw text, without a chat template; `-` reads it from stdin."""
    run = _Run(url, model, options)
    with run.client:
        if run.answer(_prompt_text(prompt)) is None:
            raise SystemExit(INTERRUPTED)


@cli.command("embed")
@click.argument("texts", nargs=-1)
@_url_option
@click.option("--model", default=GENERATOR_MODEL, show_default=True)
@click.option("--dimensions", type=click.IntRange(min=1), help="The first so many alone.")
@click.option("--timeout", type=float, help="Seconds for all of them.")
def embed_texts(texts: tuple[str, ...], url: str, model: str, **options: Any) -> None:
    """Prints the embedding of each TEXT as a line of JSON; without any, of each line of stdin."""
    if not texts:
        texts = tuple(line for line in _prompt_text(None).split("\n") if line)
    with Client(url) as client:
        for vector in client.embed(texts, model=model, **options).vectors:
            click.echo(json.dumps(vector))


@cli.command()
@_url_option
@click.option("--json", "as_json", is_flag=True, help="One JSON line per model.")
def models(url: str, as_json: bool) -> None:
    """Lists the server's models."""
    with Client(url) as client:
        infos = client.models()
    if as_json:
        for info in infos:
            fields = {name: getattr(info, name) for name in type(info).__slots__}
            click.echo(json.dumps(fields, ensure_ascii=False))
        return
    rows = [("NAME", "VERSION", "STATE", "KIND", "STREAMS", "REASON")]
    streams = {True: "yes", False: "no", None: "-"}
    for info in infos:
        kind = info.kind or "-"
        rows.append((info.name, info.version or "-", info.state, kind, streams[info.decoupled], info.reason))
    _print_table(rows)


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        click.echo(without_controls(line))


@cli.command()
@_url_option
@click.option("--model", default=GENERATOR_MODEL, show_default=True)
@click.option("--tenant", default="", help="Whose; default: those of nobody in particular.")
@click.option("--json", "as_json", is_flag=True, help="The server's answer, as one JSON line.")
def requests(url: str, model: str, tenant: str, as_json: bool) -> None:
    """Lists the requests that run or wait in a generator, and what each waits for."""
    with Client(url) as client:
        answer = client.requests(model=model, tenant=tenant)
    if as_json:
        click.echo(json.dumps(answer, ensure_ascii=False))
        return
    columns = ("id", "state", "waits_for", "num_prompt_tokens", "num_output_tokens", "age_ms")
    rows: list[tuple[str, ...]] = [("ID", "STATE", "WAITS FOR", "PROMPT", "OUTPUT", "AGE MS")]
    rows += [
        tuple(str(entry.get(name) or "-") for name in columns)
        for entry in answer.get("requests", ())
        if isinstance(entry, dict)
    ]
    _print_table(rows)


@cli.command()
@click.argument("url", default="localhost:8002")
@click.option("--interval", type=click.FloatRange(min=0.1), default=2.0, show_default=True, help="Seconds.")
@click.option("--once", is_flag=True, help="Print one frame and end; figures are since the server's start.")
def top(url: str, interval: float, once: bool) -> None:
    """Shows what a server does, live: of URL's /metrics (HOST:PORT, or a whole URL)."""
    before: Scrape | None = None
    while True:
        try:
            now = Scrape.fetch(url)
        except (OSError, ValueError, HTTPException) as error:
            raise QuireClientError(f"{url}: {error}") from None
        # Home, the frame, and whatever was below it away: no flicker.
        click.echo(frame(now, before, url) if once else f"\x1b[H\x1b[2J{frame(now, before, url)}", nl=False)
        if once:
            return
        before = now
        time.sleep(interval)


@cli.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Prints the completion of this command for a shell; in bash: eval "$(quire-client completion bash)"."""
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(cli, {}, PROGRAM, COMPLETE_VARIABLE).source())


@cli.group()
def cache() -> None:
    """Looks into a generator's KV cache, empties it, or gives its memory back."""


def _cache_command(name: str, help_text: str, ask: Callable[..., dict[str, Any]]) -> click.Command:
    @cache.command(name, help=help_text)
    @_url_option
    @click.option("--model", default=GENERATOR_MODEL, show_default=True)
    def command(url: str, model: str, **options: Any) -> None:
        with Client(url) as client:
            answer = ask(client, model=model, **options)
        click.echo(json.dumps(answer, indent=2, ensure_ascii=False))

    return command


_cache_command("reset", "Forget all cached prefixes; running requests go on.", Client.cache_reset)
_cache_command("inspect", "Sizes, hit counters, pins, sessions, tiers.", Client.cache_inspect)
_unpin = _cache_command("unpin", "Unpin what SESSION has pinned; default: all.", Client.cache_unpin)
_sleep = _cache_command("sleep", "Give back the memory of weights and KV cache until wake.", Client.sleep)
_sleep.params += [click.Option(["--drain"], is_flag=True, help="Wait for the ends of requests.")]
_cache_command("wake", "Load the weights again and take requests.", Client.wake)
_unpin.params += [click.Option(["--session"]), click.Option(["--tenant"], default="")]


@cli.group()
def adapters() -> None:
    """Lists, loads and unloads a generator's LoRA adapters."""


def _adapter_options(command: Callable[..., None]) -> Callable[..., None]:
    command = click.option("--json", "as_json", is_flag=True, help="The server's answer, as one JSON line.")(
        command
    )
    return _url_option(click.option("--model", default=GENERATOR_MODEL, show_default=True)(command))


@adapters.command("list")
@_adapter_options
def list_adapters(url: str, model: str, as_json: bool) -> None:
    """Shows the adapters, and how much they are used."""
    with Client(url) as client:
        answer = client.adapters(model=model)
    _write_adapters(answer, answer.get("adapters", ()), as_json=as_json)


@adapters.command("load")
@click.argument("name")
@click.argument("path")
@_adapter_options
def load_adapter(name: str, path: str, url: str, model: str, as_json: bool) -> None:
    """Loads the adapter at PATH of the server, below its lora_root, for requests that name NAME."""
    with Client(url) as client:
        answer = client.load_adapter(name, path, model=model)
    _write_adapters(answer, [answer], as_json=as_json)


@adapters.command("unload")
@click.argument("name")
@click.option("--drain", is_flag=True, help="Wait for the ends of its requests.")
@_adapter_options
def unload_adapter(name: str, drain: bool, url: str, model: str, as_json: bool) -> None:
    """Forgets the adapter NAME."""
    with Client(url) as client:
        answer = client.unload_adapter(name, drain=drain, model=model)
    if as_json:
        click.echo(json.dumps(answer, ensure_ascii=False))


def _write_adapters(answer: dict[str, Any], entries: Sequence[Any], *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(answer, ensure_ascii=False))
        return
    columns = ("name", "rank", "slot", "num_running", "num_waiting", "num_hits", "num_loads", "path")
    rows: list[tuple[str, ...]] = [("NAME", "RANK", "SLOT", "RUNNING", "WAITING", "HITS", "LOADS", "PATH")]
    for entry in entries:
        told = {name: str(entry.get(name, "-")) for name in columns}
        rows.append(tuple("-" if told[name] == "-1" else told[name] for name in columns))
    _print_table(rows)


@cli.command()
@click.argument("file", type=click.Path(dir_okay=False, writable=True, path_type=Path))
@_url_option
@click.option("--model", default=GENERATOR_MODEL, show_default=True)
@click.option("--steps", type=int, default=100, show_default=True, help="Steps to record.")
@click.option("--seconds", type=float, default=10.0, show_default=True, help="Longest time for that.")
def profile(file: Path, url: str, model: str, steps: int, seconds: float) -> None:
    """Records what the engine does in its next steps, and writes it to FILE for Perfetto or chrome://tracing.

    Shows how near each kind of step came to the limits of the device. The first profile of an engine
    measures these, for which its steps wait half a second."""
    with Client(url) as client:
        command = {"command": "profile", "steps": steps, "seconds": seconds}
        answer = client.cache_control(command, model=model)
    file.write_text(json.dumps(answer), encoding="utf-8")
    roofline = answer["otherData"]["roofline"]
    rows = [("STEPS", "", "ROWS", "TOKENS", "MS", "GB/S", "MBU", "GFLOP/S", "MFU", "BOUND BY")]
    names = ("steps", "rows", "tokens", "step_ms", "gb_s", "mbu", "gflop_s", "mfu", "bound")
    for kind, phase in roofline["phases"].items():
        rows.append((kind, *(str(phase.get(name, "-")) for name in names)))
    _print_table(rows)
    if (limits := roofline["limits"]) is not None:
        click.echo(f"limits: {limits['gb_s']} GB/s, {limits['gflop_s']} GFLOP/s ({limits['method']})")
    if (share := roofline["computing"]) is not None:
        click.echo(f"computing {share:.0%} of the time")


@cli.command("openai")
@click.option(
    "--url",
    default="localhost:8001",
    envvar="QUIRE_URL",
    show_default=True,
    metavar="HOST:PORT[,HOST:PORT...]",
    help="gRPC endpoints (or the variable QUIRE_URL); several have the same models and share the requests.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at.")
@click.option("--port", type=click.IntRange(0, 65535), default=9000, show_default=True, help="0: a free one.")
@click.option("--timeout", type=float, help="Seconds for each answer.")
@click.option(
    "--exit-timeout",
    "grace_s",
    type=click.IntRange(min=0),
    default=5,
    show_default=True,
    help="Seconds that answers under way have to end after SIGTERM or Ctrl-C.",
)
@click.option(
    "--allow-image-host",
    "image_hosts",
    multiple=True,
    metavar="HOST",
    help="Fetch image URLs of this host, or of *.suffix; may be repeated. Default: fetch none.",
)
@click.option(
    "--max-image-bytes",
    type=click.IntRange(min=1),
    default=20 * 2**20,
    show_default=True,
    help="Largest image to fetch.",
)
@click.option(
    "--api-keys",
    type=_FILE,
    help="JSON file of keys, see `quire-client api-key`; without it nobody is asked for one.",
)
@click.option("--tls-cert", type=_FILE, help="PEM file: the certificate and its chain.")
@click.option("--tls-key", type=_FILE, help="PEM file: its private key.")
@click.option(
    "--cors-origin",
    "cors_origins",
    multiple=True,
    metavar="ORIGIN",
    help="Lets pages of this origin use it in a browser; may be repeated. Default: none.",
)
@click.option(
    "--served-model-name",
    "served",
    multiple=True,
    metavar="NAME[=MODEL]",
    help="What clients call a model (default: chat); may be repeated. Lists it by this name.",
)
@click.option("--metrics", is_flag=True, help="Serve /metrics for Prometheus.")
@click.option(
    "--access-log", type=_PATH, help="Add a line of JSON for each request, without its text; -: stderr."
)
def openai_gateway(
    url: str,
    host: str,
    port: int,
    timeout: float | None,
    grace_s: int,
    image_hosts: tuple[str, ...],
    max_image_bytes: int,
    tls_cert: Path | None,
    tls_key: Path | None,
    served: tuple[str, ...],
    **options: Any,
) -> None:
    """Serves the OpenAI API over HTTP, for any client of it. Without --api-keys keep it private."""
    try:
        from quire_client.openai.app import GatewaySettings
        from quire_client.openai.images import ImagePolicy
        from quire_client.openai.names import Names
        from quire_client.openai.server import Tls, serve
    except ImportError as error:
        packages = "starlette uvicorn httpx prometheus-client"
        raise click.ClickException(f"{error}: pip install {packages}") from None
    try:
        images = ImagePolicy(image_hosts, max_image_bytes)
    except ValueError as error:
        raise click.UsageError(f"--allow-image-host: {error}") from None
    try:
        names = Names.parse(served, CHAT_MODEL)
    except ValueError as error:
        raise click.UsageError(f"--served-model-name: {error}") from None
    if (tls_cert is None) != (tls_key is None):
        raise click.UsageError("--tls-cert and --tls-key go together")
    tls = None if tls_cert is None or tls_key is None else Tls(tls_cert, tls_key)
    try:
        settings = GatewaySettings(url, timeout, images, names=names, **options)
        serve(settings, host, port, listening=click.echo, tls=tls, grace_s=grace_s)
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    except OSError as error:
        raise click.ClickException(f"cannot listen at {host}:{port}: {error.strerror or error}") from None


@cli.command("api-key")
@click.argument("name")
@click.option("--tenant", help="On whose account its requests run; default: NAME.")
@click.option("--tokens-per-minute", type=click.IntRange(min=1), help="Of prompts and answers.")
@click.option("--admin", is_flag=True, default=None, help="May load and unload LoRA adapters.")
def api_key(name: str, **options: Any) -> None:
    """Makes a new key for the gateway: the key on stderr, stored nowhere, and on stdout its entry for the
    file of --api-keys."""
    from quire_client.openai.keys import entry_of, new_key

    key = new_key()
    click.echo(key, err=True)
    stated = {field: value for field, value in options.items() if value is not None}
    click.echo(json.dumps({name: {**entry_of(key), **stated}}, ensure_ascii=False))


def _prompt_text(prompt: str | None) -> str:
    if prompt is None and sys.stdin.isatty():
        raise click.UsageError("a PROMPT is needed (or `-` for stdin)")
    if prompt is None or prompt == "-":
        # Bytes that are not UTF-8 become lone surrogates and stay invalid on the wire, for the server.
        text = sys.stdin.buffer.read().decode("utf-8", "surrogateescape")
        return text.removesuffix("\n")
    return prompt


class _Run:
    """One invocation: the connection, the sampling parameters, and how answers are printed."""

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
        """Streams one answer (choice 0 of several); None when Ctrl-C ended it.

        Ranked choices are known only at the end; they are not streamed.
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


def _converse(run: _Run, messages: list[Message]) -> None:
    messages = list(messages)
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            click.echo()
            return
        except KeyboardInterrupt:
            click.echo()
            continue
        if not text:
            continue
        question: Message = {"role": "user", "content": text}
        try:
            answer = run.answer(messages=[*messages, question])
        except QuireClientError as error:
            # The conversation goes on: the user may shorten the message or wait for the server.
            click.echo(f"error: {_one_line(error)}", err=True)
            continue
        if answer is not None:
            said: Message = {"role": "assistant", "content": answer.text}
            if answer.tool_calls:
                said["tool_calls"] = list(answer.tool_calls)
            messages += [question, said]


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
    """The fields of a choice in JSON: text and finish reason always, the others where they are not empty."""
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


def _one_line(error: QuireClientError) -> str:
    return f"{error.code}: {' '.join(error.message.split())}"


def _terminate(signum: int, frame: object) -> None:
    # As an exception, so that a running stream is cancelled on the server on the way out.
    raise SystemExit(128 + signum)


def main(args: list[str] | None = None) -> None:
    """Entry point of `quire-client`."""
    signal.signal(signal.SIGTERM, _terminate)
    try:
        status = cli.main(args, prog_name=PROGRAM, complete_var=COMPLETE_VARIABLE, standalone_mode=False)
    except QuireClientError as error:
        click.echo(f"quire-client: {_one_line(error)}", err=True)
        status = 1
    except click.ClickException as error:
        error.show()
        status = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        status = INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has left (`| head`); nothing may be flushed to it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    sys.exit(status if isinstance(status, int) else 0)


if __name__ == "__main__":
    main()
