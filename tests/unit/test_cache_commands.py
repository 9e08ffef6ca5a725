"""Cache commands: what is taken, and that a refusal repeats nothing of what a client sent."""

from __future__ import annotations

import pytest

from quire.engine.cache_commands import (
    MAX_COMMAND_BYTES,
    CacheCommand,
    Health,
    Inspect,
    Profile,
    Requests,
    Reset,
    Sleep,
    Unpin,
    Wake,
    parse_cache_command,
)
from quire.errors import InvalidArgumentError


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ('{"command": "inspect"}', Inspect()),
        (' {"command": "reset"} ', Reset()),
        ('{"command": "health"}', Health()),
        ('{"command": "unpin", "all": true}', Unpin(all=True)),
        ('{"command": "requests"}', Requests()),
        ('{"command": "sleep"}', Sleep()),
        ('{"command": "sleep", "drain": true}', Sleep(drain=True)),
        ('{"command": "wake"}', Wake()),
        ('{"command": "profile"}', Profile()),
        ('{"command": "profile", "steps": 2000, "seconds": 0.5}', Profile(2000, 0.5)),
        ('{"command": "requests", "all": true}', Requests(all=True)),
        ('{"command": "requests", "tenant": "a"}', Requests(tenant="a")),
        ('{"session": "s", "command": "unpin", "tenant": "t"}', Unpin(session="s", tenant="t")),
        ('{"command": "unpin", "session": "' + "\u00e4" * 256 + '"}', Unpin(session="\u00e4" * 256)),
    ],
)
def test_commands(text: str, command: CacheCommand) -> None:
    assert parse_cache_command(text.encode()) == command


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"SECRET",
        b"[]",
        b"{}",
        b"\xff",
        b'{"command": "SECRET"}',
        b'{"command": ["SECRET"]}',
        b'{"command": "reset", "SECRET": 1}',
        b'{"command": "inspect", "SECRET": ' + b"[" * 984 + b"]" * 984 + b"}",
        b"[" * 60_000 + b"]",
        b'{"command": "unpin"}',
        b'{"command": "sleep", "drain": 1}',
        b'{"command": "wake", "SECRET": true}',
        b'{"command": "profile", "steps": 0}',
        b'{"command": "profile", "steps": 2001}',
        b'{"command": "profile", "seconds": 0}',
        b'{"command": "profile", "seconds": 601}',
        b'{"command": "profile", "file": "/SECRET"}',
        b'{"command": "unpin", "all": false}',
        b'{"command": "unpin", "all": 1}',
        b'{"command": "requests", "all": true, "tenant": "SECRET"}',
        b'{"command": "requests", "all": 1}',
        b'{"command": "requests", "tenant": 7}',
        b'{"command": "unpin", "all": true, "session": "SECRET"}',
        b'{"command": "unpin", "all": true, "tenant": "SECRET"}',
        b'{"command": "unpin", "tenant": "SECRET"}',
        b'{"command": "unpin", "session": "' + b"S" * 257 + b'"}',
        b'{"command": "unpin", "session": ' + b"7" * 30 + b"}",
        b'{"command": "unpin", "session": "\\ud800SECRET"}',
        b'{"command": "reset"}' + b" " * MAX_COMMAND_BYTES,
    ],
)
def test_anything_else_is_refused_without_an_echo(data: bytes) -> None:
    """A refusal that showed the command by repr ended the engine where the command was nested."""
    with pytest.raises(InvalidArgumentError, match=r"^cache_control: ") as refused:
        parse_cache_command(data)
    assert "SECRET" not in str(refused.value) and "SS" not in str(refused.value)
    assert refused.value.__cause__ is None
