"""Finds docstrings that withhold their noun, and functions whose names say nothing.

python .ci/check_docstrings.py [FOLDER ...]
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

FOLDERS = ("backend", "kernels", "ensemble", "common", "client")
WITHOUT_A_NOUN = re.compile(r"(Of|As|By|What|Those|Which|Behind|And|In what)\b")
NAMES = ("take", "_take", "of", "_of", "told", "_told")


def docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """Docstrings of a module, its classes and functions, and the texts below its assignments and fields."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        can_have_one = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        described = [can_have_one, *(isinstance(one, ast.Assign | ast.AnnAssign) for one in body)]
        for is_described, statement in zip(described, body, strict=False):
            if is_described and isinstance(statement, ast.Expr):
                value = statement.value
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield value


def complaints(file: Path) -> Iterator[str]:
    """One line for each docstring or function of a file that is not allowed."""
    tree = ast.parse(file.read_text("utf-8"))
    for one in docstrings(tree):
        text = str(one.value).strip()
        if WITHOUT_A_NOUN.match(text):
            yield f"{file}:{one.lineno}: docstring names no noun: {text.splitlines()[0]}"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name in NAMES:
            yield f"{file}:{node.lineno}: the name {node.name} does not say what the function does"


def main(folders: list[str]) -> int:
    found = [
        line
        for folder in folders or FOLDERS
        for file in sorted(Path(folder).rglob("*.py"))
        for line in complaints(file)
    ]
    print(*found, sep="\n", end="\n" if found else "")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
