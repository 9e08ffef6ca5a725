"""Drain: notices that the model is being unloaded, and says when the time of its running requests is over.

Triton calls a backend's `finalize` only when the last request has ended, for which it waits without a limit.
Until then, only questions to the server over HTTP show that it is unloading the model.
"""

from __future__ import annotations

import contextlib
import http.client
import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger("quire")

LOOK_S = 0.5
"""Seconds between two checks whether the model is being unloaded, made while requests are open and while it
is being unloaded."""
ANSWER_S = 2.0
"""Seconds of silence from the server after which a question counts as not answered."""
SEARCH_S, MAX_SEARCH_S = 0.1, 5.0
"""Seconds from the start of a search for the server's HTTP port until the next one is due. They are SEARCH_S
at first, and again at the first question. Each search doubles them for the next, up to MAX_SEARCH_S."""
MAX_VAIN = 10
"""Number of questions without a known HTTP port at which a warning is logged. A few are normal, as a starting
server opens its ports one after the other."""
_NO = frozenset({400, 404, 503})


class Drain:
    """Decides when a model that is being unloaded ends its open requests. Owned by the responder's thread.

    Args:
        is_wanted: returns whether Triton still gives the model requests; None: not known. It must not wait.
        limit_s: seconds that open requests may go on once Triton gives the model no more.
    """

    def __init__(self, is_wanted: Callable[[], bool | None] = lambda: None, limit_s: float = 0.0) -> None:
        self._is_wanted, self._limit_s = is_wanted, limit_s
        self._ends_at: float | None = None
        self.next_look = 0.0

    @property
    def is_on(self) -> bool:
        """Whether it was noticed that the model is being unloaded; then no more prompts are accepted."""
        return self._ends_at is not None

    def is_over(self, now: float) -> bool:
        """Whether the model is being unloaded and the time limit for its open requests has passed. Asks
        `is_wanted` before, if `next_look` has come.

        Args:
            now: CLOCK_MONOTONIC seconds.
        """
        if now >= self.next_look:
            self.next_look = now + LOOK_S
            match self._is_wanted():
                case True:
                    self._ends_at = None
                case False if self._ends_at is None:
                    logger.info("frontend: unloading; requests may go on for %g s", self._limit_s)
                    self._ends_at = now + self._limit_s
        if self._ends_at is None:
            return False
        if now < self._ends_at:
            self.next_look = min(self.next_look, self._ends_at)
        return now >= self._ends_at


class ServerAnswer(threading.Thread):
    """Thread that asks the server, at its own HTTP port, whether it gives requests to a model.

    The question is for the model's metadata: a server answers it from its list of models and asks no backend.
    Whether the model is *ready* must not be asked from here. From 26.03 on the server puts that question to
    the instance (`is_ready`), and `pb_utils.is_model_ready` keeps the interpreter's lock meanwhile, which the
    instance needs: all streams stand still for 5 s, and the answer is no.

    A server that ends takes no new connection, so it cannot be asked then.
    """

    def __init__(self, model: str, version: str, server_pid: int) -> None:
        super().__init__(name="quire-drain", daemon=True)
        self._path, self._server_pid = f"/v2/models/{model}/versions/{version}", server_pid
        self._address: tuple[str, int] | None = None
        """Host and port at which the server has confirmed that it has the model; None: not found yet."""
        self._pause_s, self._next_search = SEARCH_S, 0.0
        """Seconds between the next search for the server's port and the one after it, and the time at which
        the next one is due (CLOCK_MONOTONIC seconds)."""
        self._num_vain = 0
        """Number of questions so far that could not be put, as the server's port was not found."""
        self._question = threading.Event()
        self._answer: bool | None = None

    def is_wanted(self) -> bool | None:
        """Returns whether the server gives the model requests, as it answered since the last call; None: not
        known. Has the thread ask again, and does not wait."""
        answer, self._answer = self._answer, None
        self._question.set()
        return answer

    def run(self) -> None:
        while True:
            # The model may be unloaded during its first request: who tells of it is found before that.
            is_found = self._address is not None
            if self._question.wait(None if is_found else max(0.0, self._next_search - time.monotonic())):
                self._question.clear()
                self._answer = self.ask()
            else:
                self._search()

    def ask(self) -> bool | None:
        """Asks the server and waits for its answer; None: no answer came, or one that says neither yes nor
        no. After a no it asks again, and the second answer counts."""
        answer = self._ask()
        return self._ask() if answer is False else answer

    def _ask(self) -> bool | None:
        if self._address is not None:
            status, _ = self._get(self._address)
            return True if status == 200 else False if status in _NO else None
        if not self._num_vain:  # the first request: the server is open by now, however long it took to start
            self._pause_s, self._next_search = SEARCH_S, 0.0
        if time.monotonic() >= self._next_search and self._search():
            return True
        self._num_vain += 1
        if self._num_vain == MAX_VAIN:
            logger.warning(
                "frontend: the server does not answer %s over HTTP: that the model is being unloaded is "
                "noticed when its last request has ended",
                self._path,
            )
        return None

    def _search(self) -> bool:
        """Searches the server's listening ports for one that knows the model, and keeps it in `_address`.

        Only a port found so is asked later, because a no means an unloaded model only from such a port.

        Returns:
            Whether one was found.
        """
        import psutil

        self._next_search = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, MAX_SEARCH_S)
        with contextlib.suppress(psutil.Error, OSError):  # no descriptor is free, for example
            found = psutil.Process(self._server_pid).net_connections("tcp")
            for address in sorted({one.laddr[:2] for one in found if one.status == psutil.CONN_LISTEN}):
                status, body = self._get(address)
                if status == 200 and body.startswith(b"{"):  # the metrics' port has a 200 for everything
                    self._address = address
                    return True
        return False

    def _get(self, address: tuple[str, int]) -> tuple[int, bytes]:
        """HTTP status and body of the answer to the question at an address; status 0: there is no answer, or
        the question cannot be put."""
        connection = http.client.HTTPConnection(*address, timeout=ANSWER_S)
        try:
            connection.request("GET", self._path)
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException, ValueError):  # a name that no URL can have, for example
            return 0, b""
        finally:
            connection.close()
