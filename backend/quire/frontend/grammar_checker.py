"""GrammarChecker: compiles clients' grammars in a process of its own, so that a hostile one does no harm.

The process runs this module with the arguments DIRECTORY VOCAB_SIZE. It answers each line, a StructuredOutput
as JSON, with a line of JSON: the reason why the grammar is refused, or an empty text. A process that uses far
too much time or memory ends, and the next new grammar starts another.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from pathlib import Path

import msgspec
import numpy as np

from quire.engine.processes import wait_readable
from quire.engine.run_module import RUN_MODULE
from quire.errors import InvalidArgumentError, UnavailableError, describe
from quire.request.structured_output import StructuredOutput

MAX_COMPILE_S = 0.5
"""CPU seconds allowed for compiling a grammar and trying TRIED_STEPS steps of it, together. A worker
compiles it again, and a step may wait for that."""
TRIED_STEPS = 4
"""Most steps, each with one allowed token, that are computed with a compiled grammar, to find out whether a
step exceeds the limits."""
MAX_WAIT_S = 10.0
"""Longest wait for the answer about a grammar, in seconds of wall-clock time. A busy machine needs more
than MAX_COMPILE_S."""
START_S = 60.0
MAX_MEMORY = 2**30
"""Most bytes of address space that the process may take in addition to what it has with the vocabulary."""
MAX_VERDICTS = 64
"""Most grammars whose results are remembered."""


class GrammarChecker:
    """Compiles grammars in a process of its own, and refuses those that do not compile within the limits.
    Threads that share a checker wait for each other.

    Args:
        directory: directory or file of the tokenizer.
        vocab_size: vocabulary size of the model.
    """

    def __init__(self, directory: str | Path, vocab_size: int) -> None:
        self._command = [sys.executable, RUN_MODULE, __name__, str(directory), str(vocab_size)]
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._verdicts: OrderedDict[StructuredOutput, str] = OrderedDict()

    def start(self) -> None:
        """Starts the process early. If it does not become ready, the first `check` starts another."""
        with self._lock, contextlib.suppress(UnavailableError):
            self._start()

    def check(self, structured: StructuredOutput) -> None:
        """Checks a grammar in the process, unless the answer is remembered from before.

        Raises:
            InvalidArgumentError: the grammar is refused; the error has the reason.
            UnavailableError: the process cannot start, was killed or did not answer in time.
        """
        with self._lock:
            reason = self._verdicts.get(structured)
            if reason is None:
                reason = self._verdicts[structured] = self._ask(structured)
                if len(self._verdicts) > MAX_VERDICTS:
                    self._verdicts.popitem(last=False)
            self._verdicts.move_to_end(structured)
        if reason:
            raise InvalidArgumentError("structured_output", reason)

    def close(self) -> None:
        """Ends the process."""
        with self._lock:
            self._end()

    def _start(self) -> str:
        """Starts the process. Returns why it cannot check grammars; empty if it can.

        Raises:
            UnavailableError: the process died or was not ready within START_S.
        """
        self._end()
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, start_new_session=True)
        started = self._answer(START_S)
        if started != "":
            self._end()
        if started is None:
            raise UnavailableError("structured_output: the process that checks grammars cannot start")
        return started

    def _ask(self, structured: StructuredOutput) -> str:
        if self._process is None or self._process.poll() is not None:
            started = self._start()
            if started:
                return started
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(msgspec.json.encode(structured) + b"\n")
            self._process.stdin.flush()
        answer = self._answer(MAX_WAIT_S)
        if answer is None:
            code = self._process.returncode
            self._end()
            # Its own limits end it, and by other signals: then alone is it the grammar that is judged.
            if code is None:
                raise UnavailableError(f"structured_output: was not checked within {MAX_WAIT_S:g} s")
            if code == -signal.SIGKILL:
                raise UnavailableError("structured_output: the process that checks grammars was killed")
            return f"takes more than {MAX_COMPILE_S} s or {MAX_MEMORY // 2**20} MiB to compile"
        return answer

    def _answer(self, timeout_s: float) -> str | None:
        """Waits for the process's next line and returns its text; None: it died, or `timeout_s` passed."""
        assert self._process is not None and self._process.stdout is not None
        if not wait_readable(self._process.stdout.fileno(), timeout_s):
            return None
        line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            self._process.wait()  # its output ends a moment before it has a status
            return None
        return msgspec.json.decode(line, type=str)

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def main(directory: str, vocab_size: int) -> None:
    """Checks one grammar per line of the standard input, until the input ends.

    Writes one line of JSON when it is ready, and one for each grammar: the reason for a refusal, or an empty
    text. If the vocabulary itself is refused, it writes that reason and ends.
    """
    from quire.grammar import Vocabulary

    def answer(reason: str) -> None:
        sys.stdout.buffer.write(msgspec.json.encode(reason) + b"\n")
        sys.stdout.buffer.flush()

    try:
        vocabulary = Vocabulary(directory, vocab_size, frozenset())
    except InvalidArgumentError as error:
        answer(error.reason)
        return
    _ = vocabulary.special
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    most = pages * os.sysconf("SC_PAGE_SIZE") + MAX_MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answer("")
    for line in sys.stdin.buffer:
        begun = time.process_time()
        # Ends it also where nobody is left to do that.
        resource.setrlimit(resource.RLIMIT_CPU, (int(begun + MAX_COMPILE_S) + 2, resource.RLIM_INFINITY))
        reason = _reason(vocabulary, msgspec.json.decode(line, type=StructuredOutput))
        took = time.process_time() - begun
        if not reason and took > MAX_COMPILE_S:
            reason = f"takes {took:.1f} s to compile, at most {MAX_COMPILE_S} are allowed"
        answer(reason)


def _reason(vocabulary: object, structured: StructuredOutput) -> str:
    from quire.grammar import Vocabulary, reason_of

    assert isinstance(vocabulary, Vocabulary)
    try:
        matcher = vocabulary.compile(structured)
        for _ in range(TRIED_STEPS):
            bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
            allowed = np.unpackbits(bits, bitorder="little")
            if matcher.is_stopped() or not allowed.any():
                break
            matcher.consume_token(int(allowed.argmax()))
        return reason_of(matcher) if matcher.is_error() else ""
    except InvalidArgumentError as error:
        return error.reason
    except Exception as error:
        return f"cannot be compiled: {describe(error)}"


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
