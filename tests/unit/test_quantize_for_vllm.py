"""What `quire quantize` writes is read by vLLM, of its own package for CPUs, which this test installs."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from benchmarks.machine import ROOT
from benchmarks.peers import registry, venvs
from quire.llm import LLM
from quire_quantize.quantize import quantize
from quire_quantize.schemes import SCHEMES
from tests.fixtures.perplexity import DEMO, demo_answers

NUM_TOKENS = 12


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.row("D19", clauses=("readable",))
@pytest.mark.parametrize("scheme", SCHEMES)
def test_vllm_and_we_answer_alike_with_what_the_tool_writes(scheme: str, tmp_path: Path) -> None:
    python = venvs.ensure(registry.VLLM)
    out = tmp_path / scheme
    quantize(DEMO, scheme, out, (ROOT / "README.md").read_text(), lambda done, count: None)
    prompts = [token_ids[:given] for token_ids, given in demo_answers(6)]
    preloaded = python.parents[1] / "lib" / "libiomp5.so"
    done = subprocess.run(
        [python, ROOT / "tests" / "fixtures" / "vllm_reads.py", out, str(NUM_TOKENS)],
        input=json.dumps(prompts),
        stdout=subprocess.PIPE,
        env={**os.environ, "LD_PRELOAD": str(preloaded), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        check=True,
        text=True,
    )
    theirs = json.loads(done.stdout.splitlines()[-1])
    llm = LLM(str(out), dtype="bfloat16", num_blocks=200)
    outputs = llm.generate(prompts, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    assert [output.token_ids for output in outputs] == theirs
    assert all(len(set(tokens)) > 3 for tokens in theirs), "an answer, not one token over and over"
