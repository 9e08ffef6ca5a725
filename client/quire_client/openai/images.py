"""Images of chat messages: `data:` URLs are passed on, http(s) URLs are fetched from hosts the operator
allowed.

Any client chooses the URL, so a fetch must not reach addresses that are not public, unless the host is
allowed by its exact name. The host of every redirect must be allowed, too. For each request the host is
resolved once, and the connection goes to one of these addresses, so that a second DNS answer cannot lead
elsewhere.
"""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any

import httpx

from quire_client.openai.errors import RequestError
from quire_client.openai.intake import Hold

MAX_IMAGE_BYTES = 20 * 2**20
"""Default of `ImagePolicy.max_bytes`; the server has the same default limit for one encoded image."""
MAX_REDIRECTS = 3
FETCH_TIMEOUT = 10.0
"""Default of `ImagePolicy.timeout`: seconds for fetching one image, redirects and body included."""
_REDIRECTS = (301, 302, 303, 307, 308)
_IMAGE_TYPE = re.compile(r"image/[a-z0-9.+-]{1,60}")
_HOST = re.compile(r"(\*\.)?[^\s/@*?#\\]+")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")

Resolve = Callable[[str, int], Awaitable[list[str]]]
"""Function that resolves host and port to IP addresses; it may raise OSError."""


@dataclass(frozen=True)
class ImagePolicy:
    """Limits on the images that may be fetched.

    hosts: exact names, or `*.suffix` for every name below it, on any port; empty: nothing is fetched.
    max_bytes: largest size of one image file.
    timeout: seconds for fetching one image.

    Raises:
        ValueError: a host that is not of these forms.
    """

    hosts: tuple[str, ...] = ()
    max_bytes: int = MAX_IMAGE_BYTES
    timeout: float = FETCH_TIMEOUT

    def __post_init__(self) -> None:
        object.__setattr__(self, "hosts", tuple(_normal_pattern(host) for host in self.hosts))

    def allows(self, host: str) -> bool:
        return self.names(host) or any(p.startswith("*.") and host.endswith(p[1:]) for p in self.hosts)

    def names(self, host: str) -> bool:
        """Whether the host was allowed by its exact name; then its private addresses are allowed, too."""
        return host in self.hosts


def _normal_pattern(pattern: str) -> str:
    if _HOST.fullmatch(pattern) is None:
        raise ValueError(f"must be a host name or *.suffix, got {pattern!r}")
    star = "*." if pattern.startswith("*.") else ""
    bare = pattern[len(star) :].removeprefix("[").removesuffix("]")
    try:
        url = httpx.URL(f"http://[{bare}]/" if bare.count(":") > 1 else f"http://{bare}/")
    except httpx.InvalidURL as error:
        raise ValueError(f"must be a host name or *.suffix, got {pattern!r}: {error}") from None
    if bare.count(":") == 1 or not _normal_host(url):
        raise ValueError(f"must be a host name or *.suffix without a port, got {pattern!r}")
    return star + _normal_host(url)


def _normal_host(url: httpx.URL) -> str:
    """Returns the host of a URL, normalised: lower case, IDNA, without a trailing dot and without the
    brackets of an IPv6 address."""
    return url.raw_host.decode("ascii").lower().removesuffix(".")


def is_public(address: str) -> bool:
    """Whether an IP address belongs to the public internet. If it is an IPv6 address that embeds an IPv4
    address (mapped, 6to4 or NAT64), the IPv4 address must be public. Teredo addresses never count as
    public."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:  # a scope, as in fe80::1%eth0
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour
        if ip in _NAT64:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
        if ip.teredo is not None or ip.is_site_local:
            return False
    return ip.is_global and not ip.is_multicast and not ip.is_reserved


async def resolve(host: str, port: int) -> list[str]:
    """Returns the IP addresses of a host, in the system's order of preference."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class ImageFetcher:
    """Fetches the images that an ImagePolicy allows; an async context manager that closes its connections."""

    def __init__(
        self,
        policy: ImagePolicy,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        resolve: Resolve = resolve,
    ) -> None:
        self._policy = policy
        self._resolve = resolve
        # Nothing from the environment (proxies, credentials), no cookie kept from one image to the next, and
        # no connection: it was opened by one host's certificate, but the pool goes by address.
        self._http = httpx.AsyncClient(
            transport=transport,
            trust_env=False,
            follow_redirects=False,
            timeout=policy.timeout,
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
            limits=httpx.Limits(max_keepalive_connections=0),
        )

    async def __aenter__(self) -> ImageFetcher:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def with_images(self, messages: list[Any], hold: Hold) -> list[Any]:
        """Returns the messages with the http(s) URLs of `image_url` parts replaced by `data:` URLs. The
        messages given stay as they are.

        Raises:
            RequestError: there is an `input_audio` part, or as `fetch`.
        """
        copies = []
        for i, message in enumerate(messages):
            content = message.get("content") if isinstance(message, dict) else None
            if not isinstance(content, list):
                copies.append(message)
                continue
            parts = []
            for j, part in enumerate(content):
                place = f"messages[{i}].content[{j}]"
                url = _part_url(part, place)
                if url is not None and url[:5].lower() != "data:":
                    part = _with_url(part, await self.fetch(url, f"{place}.image_url", hold))
                parts.append(part)
            copies.append({**message, "content": parts})
        return copies

    async def fetch(self, url: str, place: str, hold: Hold) -> str:
        """Returns the image at an http(s) URL, as a `data:` URL.

        Raises:
            RequestError: the image may not be fetched, or its fetch failed (the message names `place`), it
                has more bytes than the request may bring, or there is no room for them.
        """
        try:
            return await asyncio.wait_for(self._fetch(url, hold), self._policy.timeout)
        except _Refused as error:
            reason = str(error)
        except (asyncio.TimeoutError, TimeoutError, httpx.TimeoutException):
            reason = f"the image did not come within {self._policy.timeout:g} s"
        except httpx.InvalidURL as error:
            reason = f"not a valid URL: {error}"
        except (httpx.HTTPError, OSError, UnicodeError) as error:
            reason = f"the image cannot be fetched: {type(error).__name__}"
        raise RequestError(f"{place}: {reason}", param=place) from None

    async def _fetch(self, text: str, hold: Hold) -> str:
        url = httpx.URL(text)
        for _ in range(MAX_REDIRECTS + 1):
            response = await self._get(url)
            try:
                if response.status_code not in _REDIRECTS:
                    return await self._data_url(response, hold)
                location = response.headers.get("location", "")
            finally:
                await response.aclose()
            url = url.join(location)
        raise _Refused(f"more than {MAX_REDIRECTS} redirects")

    async def _get(self, url: httpx.URL) -> httpx.Response:
        """Requests one URL, without following redirects. Returns the response, whose body is not yet read."""
        host = self._checked_host(url)
        port = url.port or (443 if url.scheme == "https" else 80)
        if not 0 < port < 2**16:
            raise _Refused("the port is out of range")
        addresses = await self._resolve(host, port)
        if not addresses:
            raise OSError(f"no address of {host}")
        if not self._policy.names(host) and not all(map(is_public, addresses)):
            raise _Refused(f"{host} has an address that is not public; allow the host by its exact name")
        failure: Exception | None = None
        for address in addresses:
            # The name is in the Host header and in TLS (SNI and certificate), the address in the URL.
            request = self._http.build_request(
                "GET",
                url.copy_with(host=address),
                headers={
                    "Host": url.netloc.decode("ascii"),
                    "Accept": "image/*",
                    "Accept-Encoding": "identity",
                    "User-Agent": "quire-client",
                },
                extensions={"sni_hostname": host},
            )
            try:
                return await self._http.send(request, stream=True)
            except httpx.ConnectError as error:
                failure = error
        assert failure is not None
        raise failure

    def _checked_host(self, url: httpx.URL) -> str:
        if url.scheme not in ("http", "https"):
            raise _Refused("must be a data:, http: or https: URL")
        if not self._policy.hosts:
            raise _Refused(
                "this gateway fetches no URLs; send a data: URL (or start it with --allow-image-host HOST)"
            )
        host = _normal_host(url)
        if not host or url.userinfo:
            raise _Refused("must have a host and no user name")
        if not self._policy.allows(host):
            raise _Refused(f"the host {host[:80]} is not allowed")
        return host

    async def _data_url(self, response: httpx.Response, hold: Hold) -> str:
        limit = self._policy.max_bytes
        too_long = f"the image is longer than {limit} bytes"
        if response.status_code != 200:
            raise _Refused(f"the host answered with status {response.status_code}")
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            raise _Refused("the host sent a compressed body")
        stated = response.headers.get("content-length", "")
        if stated.isdecimal() and int(stated[:20]) > limit:
            raise _Refused(too_long)
        body = bytearray()
        async for piece in response.aiter_raw():
            hold.receive(len(piece) * 4 // 3)  # in base64
            body += piece
            if len(body) > limit:
                raise _Refused(too_long)
        kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        if _IMAGE_TYPE.fullmatch(kind) is None:
            kind = "application/octet-stream"
        encoded = await hold.work(base64.b64encode, body)
        return f"data:{kind};base64,{encoded.decode('ascii')}"


class _Refused(Exception):
    """Raised if an image may not be fetched, or the host's answer is not accepted; the message says why."""


def _part_url(part: Any, place: str) -> str | None:
    """Returns the URL of an `image_url` part; None for other parts and wrong shapes, which the server checks.
    Raises RequestError for an `input_audio` part."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "input_audio":
        raise RequestError(f"{place}: input_audio is not supported", param=place)
    if kind != "image_url":
        return None
    value = part.get("image_url")
    url = value.get("url") if isinstance(value, dict) else value
    return url if isinstance(url, str) else None


def _with_url(part: dict[str, Any], url: str) -> dict[str, Any]:
    value = part["image_url"]
    return {**part, "image_url": {**value, "url": url} if isinstance(value, dict) else url}
