"""Tokenizer: turns text or chat messages into token ids, by the files of a checkpoint.

The models before a generator and the generator's frontend share this code. Nothing of transformers is
imported until a tokenizer is loaded. Neither Python code from the checkpoint nor the network is used.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from quire_common.checkpoint_files import check_directory
from quire_common.client_json import decode_utf8
from quire_common.errors import InputError, is_panic, one_line
from quire_ensemble import messages as chat
from quire_ensemble.chat_format import ChatFormat
from quire_ensemble.errors import TokenizerError

if TYPE_CHECKING:
    from quire_common.gguf_file import GGUFFile

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "sentencepiece.bpe.model",
    "spiece.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
)
"""Files of tokenizers. A checkpoint directory counts as having a tokenizer if it has one of these files, or
without a config.json a .gguf file that holds a tokenizer."""

_CHARACTERS_PER_TOKEN = 4
"""A text with at most so many characters for each allowed token is tokenized at once, without a look at its
first pieces, because most such texts fit."""
_PIECE = 2**16
"""Characters of the pieces in which a long text is looked at, to see whether it can fit. Pieces are longer
where a token may be very long. A text of at most so many characters is not looked at."""

_PROBE, _ARGUMENT, _TOOL = "part-probe", "argument-probe", "tool-probe"
_PROBE_TOOL = {
    "type": "function",
    "function": {"name": _TOOL, "description": "", "parameters": {"type": "object", "properties": {}}},
}


def forbid_torch() -> None:
    """Makes `import torch` fail in this process, for processes that only tokenize.

    transformers imports torch wherever it finds it, although tokenizers do not need torch. Without torch a
    tokenizer process takes a third of the time to start and a quarter of the memory. Does nothing if torch is
    imported already. Call it before the first `Tokenizer`.
    """
    if "torch" not in sys.modules:
        sys.modules["torch"] = None  # type: ignore[assignment]
        # transformers would tell the server's log that it cannot run models.
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


class Tokenizer:
    """A checkpoint's tokenizer and chat template.

    Safe to use from several threads: after loading, no call changes the state of the underlying tokenizer.
    (Loading switches truncation and padding off, so that transformers has not to switch them in a call.)
    """

    def __init__(self, path: str | Path) -> None:
        """Loads the tokenizer.

        Args:
            path: checkpoint directory, where a plain `tokenizer.json` is enough; or a .gguf file.

        Raises:
            TokenizerError: the path does not exist, has no tokenizer, or one that cannot be read, or
                chat_template.json is broken.
            OSError: the directory cannot be listed.
        """
        self.path = Path(path)
        self.hf: Any = _load(self.path)
        """The tokenizer of transformers. Calls that pad or truncate must not be made on it."""
        rust = getattr(self.hf, "backend_tokenizer", None)
        if rust is not None:
            rust.no_truncation()
            rust.no_padding()
            rust.encode_special_tokens = self.hf.split_special_tokens
        if not self.hf.chat_template:
            self.hf.chat_template = _processor_template(self.path)

    def warm_up(self) -> None:
        """Does most of the one-time work, such as compiling the template, so that requests do not wait for
        it. Call this before there are requests.

        Raises:
            TokenizerError: the chat template takes more time or memory than it may.
        """
        from quire_ensemble.template_bounds import limited_memory

        self.encode("warm-up")
        try:
            with limited_memory():
                self.encode_chat('[{"role": "user", "content": "warm-up"}]')
                _ = self._reads_arguments_as_text
        except InputError as error:  # a template may want other messages; there may be none
            if isinstance(error.__cause__, MemoryError | TimeoutError):
                raise TokenizerError(f"{self.path}: {error.reason}") from None

    @staticmethod
    def exists(path: str | Path) -> bool:
        """Whether a checkpoint has files of a tokenizer, which may still be broken. A generator without a
        tokenizer reads no texts and no messages."""
        path = Path(path)
        return _gguf_file(path) is not None or any((path / name).is_file() for name in TOKENIZER_FILES)

    @classmethod
    def find(cls, named: str, own: str | Path) -> Tokenizer | None:
        """Returns the tokenizer of the checkpoint `named`. If `named` is empty, returns that of the
        checkpoint `own`, or None if it has none.

        Raises:
            TokenizerError: `named` has no tokenizer, or the tokenizer cannot be loaded.
        """
        return cls(named or own) if named or cls.exists(own) else None

    def encode(
        self,
        text: str,
        add_special_tokens: bool = True,
        *,
        field: str = "text_input",
        max_tokens: int | None = None,
    ) -> list[int]:
        """Returns the token ids of a text.

        Args:
            text: any text; may be empty.
            add_special_tokens: whether the tokenizer adds its BOS and the like.
            field: name of the input for errors.
            max_tokens: most tokens of a prompt; None: no limit. A text of more than 65536 characters, and of
                more than four for each of these tokens, is refused if its first pieces show that it has too
                many tokens. Other texts with too many tokens are returned.

        Raises:
            InputError: the text is too long, the tokenizer gives up on it, or it holds an unpaired surrogate
                (JSON can spell one), which has no UTF-8 form.
        """
        if max_tokens is not None and len(text) > max(_CHARACTERS_PER_TOKEN * max_tokens, _PIECE):
            self._check_pieces(field, text, max_tokens)
        return self._ids(field, text, add_special_tokens)

    def _check_pieces(self, field: str, text: str, max_tokens: int) -> None:
        """Raises InputError if the first pieces of a text show that the whole text has more than
        `max_tokens`.

        A cut changes tokens only near itself: one token of the whole text may become many there, and a few
        tokens beside it may differ. So that a text that fits is not refused, a piece counts as three quarters
        of its tokens, less the length of the longest token. (BERT's tokenizers make an exception possible: a
        text with words of more than 100 characters at each cut, and next to nothing between them.)
        """
        _refuse_surrogates(field, text)
        counted = text
        if self._stripping is not None:  # these take in any number of spaces beside them
            counted = "".join(_with_short_edges(part) for part in self._stripping.split(text))
        size, least = max(_PIECE, 8 * self._longest_token), 0
        for start in range(0, len(counted), size):
            found = len(self._ids(field, counted[start : start + size], False))
            least += max(found * 3 // 4 - self._longest_token, 0)
            if least > max_tokens:
                num_bytes = len(text.encode())
                raise InputError(
                    field, f"{num_bytes} bytes are more than {max_tokens} tokens can hold (max_model_len)"
                )

    @functools.cached_property
    def _longest_token(self) -> int:
        """Upper bound of the bytes of the vocabulary's longest token (a token's name may spell one byte with
        two). It is at least 100, because BERT's tokenizers make a word of more than 100 characters one
        token."""
        return max(100, max(len(name.encode("utf-8", "replace")) for name in self.hf.get_vocab()))

    @functools.cached_property
    def _fast(self) -> Any:
        """The tokenizer in Rust that `hf` calls, if `hf` calls it by transformers' own methods. A direct call
        costs half, because `hf` also asks for the place of each token. None: the tokenizer is written in
        Python, wholly or in part."""
        from transformers import PreTrainedTokenizerFast

        own = (getattr(type(self.hf), name, None) for name in ("__call__", "_encode_plus"))
        plain = (PreTrainedTokenizerFast.__call__, PreTrainedTokenizerFast._encode_plus)
        return self.hf.backend_tokenizer if tuple(own) == plain else None

    @functools.cached_property
    def _stripping(self) -> re.Pattern[str] | None:
        """Pattern of the added tokens that swallow the spaces beside them; None: there are none."""
        added = self.hf.added_tokens_decoder.values()
        names = [re.escape(token.content) for token in added if token.lstrip or token.rstrip]
        return re.compile(f"({'|'.join(names)})", re.IGNORECASE) if names else None

    def _ids(self, field: str, text: str, add_special_tokens: bool) -> list[int]:
        try:
            if self._fast is not None:
                batch = self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)
                return list(batch[0].ids)
            encoded = self.hf(
                text,
                add_special_tokens=add_special_tokens,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,
            )
        except (UnicodeEncodeError, TypeError):
            _refuse_surrogates(field, text)
            raise
        except BaseException as error:
            if not is_panic(error):
                raise
            # Ten million spaces are more than some patterns may go back over.
            raise InputError(field, f"the tokenizer gives up on it: {one_line(error)}") from None
        return list(encoded["input_ids"])

    def encode_bytes(self, field: str, raw: bytes, *, max_tokens: int | None = None) -> list[int]:
        """Returns the token ids of an input tensor's element, with special tokens.

        Raises:
            InputError: the element is empty or not UTF-8 (with the byte offset), or `encode` refuses it.
        """
        text = decode_utf8(field, raw)
        if not text:
            raise InputError(field, "must not be empty")
        return self.encode(text, field=field, max_tokens=max_tokens)

    def encode_pair(
        self, first: str, second: str, *, fields: tuple[str, str], max_tokens: int | None = None
    ) -> tuple[list[int], int]:
        """Returns the token ids of two texts as one prompt, with the special tokens of pairs.

        Args:
            first: for rerankers the query.
            second: for rerankers the document.
            fields: names of the inputs, for errors about the first and the second text.
            max_tokens: see `encode`; each text is checked alone.

        Returns:
            The token ids, and the index of the first token of type 1; 0: the tokenizer gives all tokens
            type 0.

        Raises:
            InputError: as `encode`.
        """
        for field, text in zip(fields, (first, second), strict=True):
            _refuse_surrogates(field, text)
            if max_tokens is not None and len(text) > max(_CHARACTERS_PER_TOKEN * max_tokens, _PIECE):
                self._check_pieces(field, text, max_tokens)
        try:
            if self._fast is not None:
                one = self._fast.encode_batch_fast([(first, second)])[0]
                token_ids, types = one.ids, one.type_ids
            else:
                found = self.hf(first, second, return_token_type_ids=True, verbose=False)
                token_ids, types = found["input_ids"], found["token_type_ids"]
        except BaseException as error:
            if not is_panic(error):
                raise
            raise InputError(fields[1], f"the tokenizer gives up on it: {one_line(error)}") from None
        return list(token_ids), types.index(1) if 1 in types else 0

    def render(self, conversation: chat.Conversation, max_bytes: int = chat.MAX_BYTES) -> str:
        """Returns the prompt text that the checkpoint's chat template makes of messages.

        Args:
            conversation: messages and options. Lists with image parts reach the template unchanged; give them
                only to a template that `takes_images`.
            max_bytes: most characters that the template may write.

        Raises:
            InputError: the checkpoint has no chat template; the template has no place for tools (with
                tool_choice auto), fails or refuses the messages, or takes too much time or writes too much;
                or `chat_template_kwargs` set a name that clients must not set.
        """
        if not self.hf.chat_template:
            raise InputError(
                chat.FIELD, "the checkpoint has no chat template; send text_input or input_ids instead"
            )
        if conversation.tools and conversation.tool_choice == "auto" and not self._shows_tools:
            raise InputError(
                chat.FIELD,
                "the checkpoint's chat template has no place for tools: the model would not see them",
            )
        kwargs = conversation.template_kwargs
        # Templates write special tokens with every message: a long text for one would be there 4 096 times.
        names = _reserved_template_names() | set(self.hf.SPECIAL_TOKENS_ATTRIBUTES)
        reserved = sorted(names & set(kwargs))
        if reserved:
            raise InputError(chat.FIELD, f"chat_template_kwargs must not set {reserved[0]!r}")
        messages = chat.without_empty_calls(conversation.messages)
        if self._content_form == "strings":
            messages = chat.join_text_parts(messages)
        elif self._content_form == "parts":
            messages = chat.wrap_strings(messages)
        if any(message.get("tool_calls") for message in messages):
            messages = chat.with_call_arguments(messages, as_text=self._reads_arguments_as_text)
        given: dict[str, Any] = {
            "tools": conversation.tools,
            "add_generation_prompt": conversation.add_generation_prompt,
            "continue_final_message": conversation.continue_final_message,
            **kwargs,
        }
        try:
            return self._render(messages, max_bytes, **given)
        except InputError:
            raise
        except Exception as error:  # a template is a program of the checkpoint: it may raise anything
            if any(message.get("content") is None for message in messages):
                with contextlib.suppress(Exception):  # some read the content of calls, which have none
                    return self._render(chat.with_empty_contents(messages), max_bytes, **given)
            raise InputError(chat.FIELD, f"refused by the chat template: {one_line(error)}") from error

    def encode_chat(
        self, raw_json: str | bytes, *, max_bytes: int = chat.MAX_BYTES, max_tokens: int | None = None
    ) -> tuple[list[int], ChatFormat]:
        """Returns the token ids of chat messages, and their ChatFormat for the generator.

        The ids are those of the text from `render`. A template is expected to write BOS, so none is added.
        Raises InputError as `parse_conversation`, `render` and `encode` do.

        Args:
            raw_json: a JSON list of messages, or an object (see `quire_ensemble.messages`).
            max_bytes: most bytes of the JSON text, and most characters of the rendered text.
            max_tokens: see `encode`.
        """
        conversation = chat.parse_conversation(raw_json, max_bytes=max_bytes)
        text = self.render(conversation, max_bytes)
        token_ids = self.encode(text, add_special_tokens=False, field=chat.FIELD, max_tokens=max_tokens)
        return token_ids, ChatFormat.from_conversation(conversation, text)

    def _render(self, messages: list[dict[str, Any]], max_bytes: int = chat.MAX_BYTES, **kwargs: Any) -> str:
        from quire_ensemble.template_bounds import bounded

        with bounded(chat.FIELD, max_bytes):
            return self.hf.apply_chat_template(messages, tokenize=False, **kwargs)

    def takes_images(self, placeholder: str) -> bool:
        """Whether the template writes the placeholder once for an image part, and the text beside the image
        once, and does not print the list of parts as it is."""
        parts = [{"type": "image"}, {"type": "text", "text": _PROBE}]
        text = self._try_render(parts) or ""
        return text.count(placeholder) == 1 and text.count(_PROBE) == 1 and not _shows_lists(text)

    @functools.cached_property
    def _content_form(self) -> Literal["any", "parts", "strings"]:
        """The form in which the template reads the content of a message: strings, lists of parts, or either.

        A template made for strings prints a list's Python form or raises; one made for a processor of images
        may render nothing of a string.
        """
        from_parts = self._try_render([{"type": "text", "text": _PROBE}]) or ""
        if _PROBE not in from_parts or _shows_lists(from_parts):
            return "strings"
        return "any" if _PROBE in (self._try_render(_PROBE) or "") else "parts"

    @functools.cached_property
    def _reads_arguments_as_text(self) -> bool:
        """Whether the template writes the arguments of an earlier call unchanged, so that they must be JSON
        text. A template counts as such if it writes a text, but writes an object in Python's form or not at
        all, or raises for an object."""
        arguments = {_ARGUMENT: _ARGUMENT}

        def is_written(text: str | None) -> bool:
            return text is not None and _ARGUMENT in text and repr(arguments) not in text

        if is_written(self._try_render_call(arguments)):
            return False
        return is_written(self._try_render_call(json.dumps(arguments)))

    def _try_render_call(self, arguments: Any) -> str | None:
        """Renders messages with a tool call and its result, and returns the text; None if the template
        fails."""
        function = {"name": _TOOL, "arguments": arguments}
        call = {
            "id": "probe0000",
            "type": "function",
            "function": function,
        }  # Mistral's ids have 9 characters
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": _PROBE},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "probe0000", "name": _TOOL, "content": _PROBE},
        ]
        if self._content_form == "parts":
            messages = chat.wrap_strings(messages)
        return self._try_render_all(messages, tools=[_PROBE_TOOL])

    @functools.cached_property
    def _shows_tools(self) -> bool:
        """Whether the template writes the name of a tool, or fails for the message that it is tried with."""
        text = self._try_render("hi", tools=[_PROBE_TOOL])
        return text is None or _TOOL in text

    def _try_render(self, content: Any, **kwargs: Any) -> str | None:
        """Renders a user's message with this content, and returns the text; None if the template fails."""
        return self._try_render_all([{"role": "user", "content": content}], **kwargs)

    def _try_render_all(self, messages: list[dict[str, Any]], **kwargs: Any) -> str | None:
        try:
            return self._render(messages, **kwargs)
        except Exception:  # a template is a program: it may raise anything
            return None


def _with_short_edges(part: str) -> str:
    """Returns a text with at most one space at each end. One stays, because a word may be one token only with
    the space before it, and not every token that swallows spaces swallows that one."""
    core = part.strip()
    begin = part.find(core)
    return part[max(begin - 1, 0) : begin + len(core) + 1]


def _shows_lists(text: str) -> bool:
    return "'type': 'text'" in text or '"type": "text"' in text


def _gguf_file(path: Path) -> GGUFFile | None:
    """Opens the GGUF file at a checkpoint's path. None: there is none or several, it cannot be read, it holds
    no tokenizer, or the path is a directory with a config.json."""
    # The package takes a while to import, and most checkpoints need it not.
    if path.suffix != ".gguf" and (not path.is_dir() or (path / "config.json").exists()):
        return None
    from quire_common.gguf_file import GGUFFile, find_gguf

    try:
        found = find_gguf(path)
        opened = None if found is None else GGUFFile.open(found)
    except (OSError, ValueError):
        return None
    return None if opened is None or "tokenizer.ggml.model" not in opened.metadata else opened


def tokenizer_json(path: Path) -> str:
    """Returns the text of a checkpoint's tokenizer.json; for a .gguf file, the equivalent text.

    Raises:
        OSError: there is no such file, or it cannot be read.
        UnicodeDecodeError: tokenizer.json is not UTF-8.
        TokenizerError: the tokenizer of a .gguf file cannot be read.
    """
    gguf = _gguf_file(path)
    if gguf is None:
        return (path / "tokenizer.json").read_text(encoding="utf-8")
    from quire_ensemble.gguf_tokenizer import gguf_tokenizer_json

    return gguf_tokenizer_json(gguf)


def _load(path: Path) -> Any:
    """Loads transformers' tokenizer of a checkpoint; arguments and errors as for `Tokenizer`."""
    gguf = _gguf_file(path)
    if gguf is not None:
        from quire_ensemble.gguf_tokenizer import load_gguf_tokenizer

        return load_gguf_tokenizer(gguf)
    if not path.is_dir():
        raise TokenizerError(f"{path}: tokenizer directory does not exist")
    if not Tokenizer.exists(path):
        raise TokenizerError(f"{path}: no tokenizer files; expected one of {', '.join(TOKENIZER_FILES)}")
    from transformers import AutoTokenizer

    check_directory(path, TokenizerError)
    try:
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except BaseException as error:  # the loaders of transformers raise whatever their files make them raise
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        raise TokenizerError(f"{path}: tokenizer cannot be loaded: {one_line(error)}") from error


def _processor_template(path: Path) -> str | None:
    """Returns the chat template in chat_template.json, where older processors keep it and tokenizers do not
    read it; None if there is no such file. Raises TokenizerError if the file is broken."""
    file = path / "chat_template.json"
    if not file.is_file():
        return None
    try:
        template = json.loads(file.read_text(encoding="utf-8"))["chat_template"]
    except (OSError, ValueError, RecursionError, LookupError, TypeError) as error:
        raise TokenizerError(f"{file}: cannot be read: {one_line(error)}") from None
    if not isinstance(template, str):
        raise TokenizerError(f"{file}: chat_template must be a string")
    return template


@functools.cache
def _reserved_template_names() -> frozenset[str]:
    """Returns names that `chat_template_kwargs` must not set, because they are arguments of the renderer or
    defined by it. For example, `chat_template` would let a request bring its own program."""
    from jinja2.defaults import DEFAULT_NAMESPACE
    from transformers import PreTrainedTokenizerBase
    from transformers.utils.chat_template_utils import render_jinja_template

    names = {"messages", "raise_exception", "strftime_now", *DEFAULT_NAMESPACE}
    for function in (PreTrainedTokenizerBase.apply_chat_template, render_jinja_template):
        names |= set(inspect.signature(function).parameters)
    return frozenset(names - {"kwargs"})


def _refuse_surrogates(field: str, text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(
            field, f"unpaired surrogate U+{ord(text[error.start]):04X} at character {error.start}"
        ) from None
