"""The demo that sees: held-out drawings through gRPC and HTTP, and the README's commands."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import subprocess
import sys
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from demo.pictures import Question, held_out, is_right
from quire_client import AsyncClient
from tests.fixtures.server import ROOT, ServerProcess

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]


async def answers(url: str, questions: list[Question], concurrency: int = 16) -> list[str]:
    limit = asyncio.Semaphore(concurrency)
    async with AsyncClient(url) as client:

        async def ask(question: Question) -> str:
            async with limit:
                images = question.images
                stream = client.stream(messages=question.messages, images=images, model="vision_chat")
                return "".join([chunk.text async for chunk in stream])

        return await asyncio.gather(*(ask(question) for question in questions))


def check(questions: list[Question], got: list[str]) -> None:
    wrong = Counter(
        question.kind
        for question, answer in zip(questions, got, strict=True)
        if not is_right(question.prompt, question.scenes, answer)
    )
    right = 1 - wrong.total() / len(questions)
    print(f"\nheld-out drawings right: {right:.2%} of {len(questions)}; wrong by kind: {dict(wrong)}")
    assert right >= 0.99


@pytest.mark.row("H1", "H2")
def test_held_out_drawings_are_answered_right(demo_server: ServerProcess) -> None:
    """Images as bytes, streamed through the ensemble, 16 at a time."""
    questions = held_out(100, seed=7)
    check(questions, asyncio.run(answers(demo_server.grpc_url, questions)))


def test_held_out_drawings_as_base64_over_http(demo_server: ServerProcess) -> None:
    questions = held_out(50, seed=8)
    url = f"http://{demo_server.http_url}/v2/models/vision_chat/generate_stream"

    def ask(question: Question) -> str:
        body = {"messages": json.dumps(question.messages), "stream": True}
        if question.images:
            body["image"] = [base64.b64encode(image).decode() for image in question.images]
        request = urllib.request.Request(url, json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=120) as reply:
            lines = reply.read().decode().splitlines()
        return "".join(json.loads(line[6:])["text_output"] for line in lines if line.startswith("data: "))

    with ThreadPoolExecutor(8) as pool:
        check(questions, list(pool.map(ask, questions)))


def test_the_picture_of_the_readme(demo_server: ServerProcess) -> None:
    """The command and its answer, as they stand in README.md."""
    readme = (ROOT / "README.md").read_text("utf-8")
    shown = re.search(r'^\.venv/bin/quire-client chat --image (\S+) "(.+)"\n(.+)$', readme, re.MULTILINE)
    assert shown is not None
    image, question, expected = shown.groups()
    assert f"]({image})" in readme, "the picture is shown there"
    client = [sys.executable, "-m", "quire_client.cli", "chat", "--url", demo_server.grpc_url]
    command = [*client, "--image", image, question]
    run = subprocess.run(command, capture_output=True, text=True, timeout=280, check=True, cwd=ROOT)
    assert run.stdout.strip() == expected
