"""API keys: who may use the gateway, for which tenant, and how many tokens a minute.

The file is JSON, one entry per key by the name that logs show:

    {"alice": {"sha256": "9f86d0...", "tenant": "research", "tokens_per_minute": 60000}}

The file holds hashes in place of the keys. Keys made by `new_key` are random and long, so a plain SHA-256
hides them. A key is looked up by its hash, so the time of a lookup does not tell how much of it was right.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import secrets
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire_client.openai.errors import RequestError

MAX_KEYS = 65536
MAX_FILE_BYTES = 64 * 2**20
MAX_TOKENS_PER_MINUTE = 10**12
_HASH = re.compile(r"[0-9a-f]{64}")
_FIELDS = frozenset({"sha256", "tenant", "tokens_per_minute", "admin"})


@dataclass(frozen=True)
class ApiKey:
    """One entry of the file of API keys."""

    name: str
    sha256: str
    """Hex digest of the key."""
    tenant: str
    """Tenant of the key's requests; by default the key's name."""
    tokens_per_minute: int | None = None
    """Limit for tokens of prompts and answers together; None: no limit."""
    admin: bool = False
    """Whether requests with the key may load and unload LoRA adapters."""


class Budget:
    """Token bucket that holds at most a minute's tokens. Tokens are charged when their number is known, so
    the bucket may go into debt. Then new requests are refused until the debt is paid."""

    def __init__(self, per_minute: int) -> None:
        self._rate = per_minute / 60
        self._most = self._left = float(per_minute)
        self._at = time.monotonic()

    def set_rate(self, per_minute: int) -> None:
        """Changes the bucket's size and how fast it fills. A debt stays, and the tokens left stay as far as
        they fit."""
        self._refill()
        self._rate, self._most = per_minute / 60, float(per_minute)

    def _refill(self) -> None:
        now = time.monotonic()
        self._left = min(self._most, self._left + (now - self._at) * self._rate)
        self._at = now

    @property
    def retry_after(self) -> int:
        """Whole seconds after which the bucket is neither empty nor in debt; 0 if it is neither now."""
        self._refill()
        return 0 if self._left > 0 else math.floor(-self._left / self._rate) + 1

    def spend(self, tokens: int) -> None:
        self._refill()
        self._left -= tokens


class KeyRing:
    """The keys of a file. After a change `find` reads the file again. If the changed file has an error, the
    old keys stay valid, and the error is written to stderr.

    Raises:
        ValueError: the file cannot be read, or is wrong.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = _version(path)
        self._keys = read_keys(path)
        self._budgets: dict[str, Budget] = {}
        """Budgets of keys that have a limit and were used, by the key's name."""

    def find(self, authorization: str | None) -> ApiKey:
        """Returns the entry of the key in a request's header `Authorization: Bearer KEY`.

        Raises:
            RequestError: the request has no key, or an unknown one (401).
        """
        self._reload()
        scheme, _, shown = (authorization or "").partition(" ")
        key = self._keys.get(_digest(shown.strip())) if scheme.lower() == "bearer" else None
        if key is None:
            message = "the request has no valid API key: Authorization: Bearer KEY"
            raise RequestError(message, status=401, code="invalid_api_key")
        return key

    def admit(self, key: ApiKey) -> None:
        """Checks that a new request may begin with this key.

        Raises:
            RequestError: the key's tokens are used up for now (429).
        """
        budget = self._budget(key)
        if budget is not None and (seconds := budget.retry_after):
            message = f"the key {key.name!r} has used its {key.tokens_per_minute} tokens per minute"
            raise RequestError(message, status=429, retry_after=seconds, code="rate_limit_exceeded")

    def charge(self, key: ApiKey, tokens: int) -> None:
        """Charges the key's budget, if it has one, with tokens that a request has used."""
        budget = self._budget(key)
        if budget is not None:
            budget.spend(tokens)

    def _budget(self, key: ApiKey) -> Budget | None:
        if key.tokens_per_minute is None:
            return None
        budget = self._budgets.get(key.name)
        if budget is None:
            budget = self._budgets[key.name] = Budget(key.tokens_per_minute)
        return budget

    def _reload(self) -> None:
        version = _version(self._path)
        if version == self._seen:
            return
        self._seen = version
        try:
            self._keys = read_keys(self._path)
        except ValueError as error:
            print(f"quire-client: the API keys stay as they were: {error}", file=sys.stderr, flush=True)
            return
        rates = {k.name: k.tokens_per_minute for k in self._keys.values() if k.tokens_per_minute is not None}
        self._budgets = {name: budget for name, budget in self._budgets.items() if name in rates}
        for name, budget in self._budgets.items():
            budget.set_rate(rates[name])


def check_admin(key: ApiKey | None) -> None:
    """Raises RequestError (403) if the key lacks `admin`. Without a file of keys everybody may load
    adapters."""
    if key is not None and not key.admin:
        raise RequestError(f"the key {key.name!r} is not an administrator's", status=403, code="forbidden")


def new_key() -> str:
    """Returns a new key with 256 random bits."""
    return f"sk-{secrets.token_urlsafe(32)}"


def entry_of(key: str) -> dict[str, Any]:
    """Returns the key's entry for the file of keys, with its hash alone."""
    return {"sha256": _digest(key)}


def read_keys(path: Path) -> dict[str, ApiKey]:
    """Returns the entries of a file of keys, by `sha256`.

    Raises:
        ValueError: the file cannot be read, or is wrong.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    if len(text) > MAX_FILE_BYTES:
        raise ValueError(f"{path}: is longer than {MAX_FILE_BYTES} bytes")
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"{path}: is not JSON") from None
    if not isinstance(entries, dict) or not 0 < len(entries) <= MAX_KEYS:
        raise ValueError(f"{path}: must be an object of 1 to {MAX_KEYS} keys by name")
    keys: dict[str, ApiKey] = {}
    for name, entry in entries.items():
        key = _key(path, name, entry)
        if key.sha256 in keys:
            raise ValueError(f"{path}: {key.name!r} and {keys[key.sha256].name!r} have the same sha256")
        keys[key.sha256] = key
    return keys


def _key(path: Path, name: str, entry: Any) -> ApiKey:
    where = f"{path}: {name!r}"
    if not 0 < len(name) <= 256 or not name.isprintable():
        raise ValueError(f"{where}: the name must have 1 to 256 printable characters")
    if not isinstance(entry, Mapping):
        raise ValueError(f"{where}: must be an object")
    for field in entry:
        if field not in _FIELDS:
            raise ValueError(f"{where}: unknown field {field!r}, there are {', '.join(sorted(_FIELDS))}")
    digest, tenant, rate = entry.get("sha256"), entry.get("tenant", name), entry.get("tokens_per_minute")
    if not isinstance(digest, str) or not _HASH.fullmatch(digest):
        raise ValueError(f"{where}: sha256 must be 64 lower-case hex digits")
    if not isinstance(tenant, str):
        raise ValueError(f"{where}: tenant must be a string")
    is_count = isinstance(rate, int) and not isinstance(rate, bool)
    if rate is not None and not (is_count and 0 < rate <= MAX_TOKENS_PER_MINUTE):
        raise ValueError(f"{where}: tokens_per_minute must be an integer in [1, {MAX_TOKENS_PER_MINUTE}]")
    if not isinstance(entry.get("admin", False), bool):
        raise ValueError(f"{where}: admin must be true or false")
    return ApiKey(name, digest, tenant, rate, entry.get("admin", False))


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def _version(path: Path) -> tuple[int, int, int]:
    """Returns modification time (ns), size and inode of a file, to see whether it has changed; zeros if they
    cannot be read."""
    try:
        stat = path.stat()
    except OSError:
        return 0, 0, 0
    return stat.st_mtime_ns, stat.st_size, stat.st_ino
