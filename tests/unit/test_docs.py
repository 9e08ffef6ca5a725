"""Links of the documentation lead somewhere."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests.rows import ROOT

_LINK = re.compile(r"\]\((?!https?:|mailto:)([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
_CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def pages() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, check=True, capture_output=True, text=True)
    return [ROOT / name for name in listed.stdout.split()]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = _HEADING.findall(_CODE.sub("", page.read_text("utf-8")))
    shown = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in shown}


def test_every_link_leads_to_a_file_and_a_heading() -> None:
    lost = []
    for page in pages():
        for link in _LINK.findall(_CODE.sub("", page.read_text("utf-8"))):
            name, _, anchor = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            if anchor and target.is_dir():
                target /= "README.md"
            if not target.exists() or (anchor and anchor not in anchors(target)):
                lost.append(f"{page.relative_to(ROOT)}: {link}")
    assert lost == []
