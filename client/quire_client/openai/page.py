"""The chat page at `/`: one file that loads no other file. Its Content-Security-Policy allows its own script
and style, `data:` images, and requests to this gateway."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response


async def chat_page(request: Request) -> Response:
    text, policy = _page()
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return Response(text, media_type="text/html", headers=headers)


@cache
def _page() -> tuple[str, str]:
    """Returns the page and its Content-Security-Policy, which allows the page's script and style by their
    hashes."""
    text = resources.files("quire_client.openai").joinpath("page.html").read_text("utf-8")
    policy = {
        "default-src": "'none'",
        "script-src": _hash(text, "script"),
        "style-src": _hash(text, "style"),
        "img-src": "data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return text, "; ".join(f"{name} {value}" for name, value in policy.items())


def _hash(text: str, tag: str) -> str:
    (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    digest = hashlib.sha256(content.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
