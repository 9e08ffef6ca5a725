"""What a newcomer sees: the README's first commands against the demo, and whether its answers are right."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from demo.tasks import Task, held_out, prompts
from quire_client import AsyncClient
from tests.fixtures.server import ROOT, ServerProcess

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]


async def _answers(url: str, tasks: list[Task], model: str, at_once: int = 32) -> list[str]:
    gate = asyncio.Semaphore(at_once)
    async with AsyncClient(url) as client:

        async def ask(task: Task) -> str:
            async with gate:
                messages = [{"role": "user", "content": task.prompt}]
                stream = client.stream(messages=messages, model=model, max_tokens=600)
                return "".join([chunk.text async for chunk in stream])

        return await asyncio.gather(*(ask(task) for task in tasks))


@pytest.mark.row("A41", "A2")
def test_held_out_prompts_are_answered_right(demo_server: ServerProcess) -> None:
    """>= 99 % of prompts the trainer never saw, greedy, streamed through the ensemble, 32 at a time."""
    tasks = held_out(100, seed=7)
    answers = asyncio.run(_answers(demo_server.grpc_url, tasks, "chat"))
    wrong = Counter(
        task.kind for task, answer in zip(tasks, answers, strict=True) if answer.strip() != task.answer
    )
    right = 1 - wrong.total() / len(tasks)
    print(f"\nheld-out prompts right through gRPC: {right:.2%}; wrong by kind: {dict(wrong)}")
    assert right >= 0.99


def test_long_answers_stream(demo_server: ServerProcess) -> None:
    stream = prompts("count", seed=3, min_answer_tokens=60)
    tasks = [next(stream) for _ in range(8)]
    answers = asyncio.run(_answers(demo_server.grpc_url, tasks, "generator"))
    right = [answer.strip() == task.answer for task, answer in zip(tasks, answers, strict=True)]
    assert sum(right) >= 7


def test_the_commands_of_the_readme(demo_server: ServerProcess) -> None:
    """The first answer by quire-client and by curl, as they stand in README.md but for the ports."""
    readme = (ROOT / "README.md").read_text("utf-8")
    command = re.search(r'^\.venv/bin/quire-client chat "(.+)"\n(.+)$', readme, re.MULTILINE)
    assert command is not None
    client = [sys.executable, "-m", "quire_client.cli", "chat", "--url", demo_server.grpc_url, command[1]]
    shown = subprocess.run(client, capture_output=True, text=True, timeout=280, check=True).stdout
    assert shown.strip() == command[2] == "12 + 7 = 19"

    curl = re.search(r"^curl -s localhost:8000(\S+) \\\n\s+-d '(.+)'$", readme, re.MULTILINE)
    assert curl is not None
    body = curl[2].replace("'\\''", "'")
    url = f"http://{demo_server.http_url}{curl[1]}"
    command = ["curl", "-s", url, "-d", body]
    text = subprocess.run(command, capture_output=True, text=True, timeout=280, check=True).stdout
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    assert "".join(event["text_output"] for event in events).strip() == "12 + 7 = 19"


def test_the_demo_checkpoint_is_plain_transformers(demo_server: ServerProcess) -> None:
    """The same directory answers the same in transformers, without us."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = Path(ROOT / "model_repository/generator/1/demo")
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    tasks = held_out(12, seed=11)
    answers = asyncio.run(_answers(demo_server.grpc_url, tasks, "chat"))
    for task, answer in zip(tasks, answers, strict=True):
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": task.prompt}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        out = model.generate(**ids, max_new_tokens=600, do_sample=False)
        text = tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
        assert answer == text
