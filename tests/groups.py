"""Which tests may run beside each other when several processes share them (`make test`, pytest-xdist).

All files with tests that start the real server are one group, so that no two servers fight for the cores;
each other file is a group, so that what its tests share is made once.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
SERVER = "server"
_SIGNS = ("mark.server", "serve_repository")
"""Whoever starts the server uses this mark or this fixture."""


@functools.cache
def group_of(path: str) -> str:
    """Of a test file, named as in node ids."""
    file = ROOT / path
    text = file.read_text("utf-8") if file.is_file() else ""
    return SERVER if any(sign in text for sign in _SIGNS) else path


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid.partition("::")[0])

        def _assign_work_unit(self, node: Any) -> None:
            if SERVER in self.workqueue:  # it takes longest, so it must not begin last
                self.workqueue.move_to_end(SERVER, last=False)
            super()._assign_work_unit(node)

        def remove_node(self, node: Any) -> str | None:
            """A test that ended its process is not begun again: it would end the next one, and so on, until
            xdist gives up and those after it have not run."""
            units = self.assigned_work[node].values()
            ended = next(((unit, test) for unit in units for test, done in unit.items() if not done), None)
            if ended is None:
                return super().remove_node(node)
            unit, test = ended
            unit[test] = True
            super().remove_node(node)
            return test

    return Groups(config, log)
