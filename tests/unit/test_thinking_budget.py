"""A thinking budget forces the closing tag behind so many tokens, whatever is done to the request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire import LLM, SamplingParams
from quire.errors import InvalidArgumentError
from quire.request.sampling_params import Thinking, parse_sampling_params
from quire.worker.token_history import ThinkingBudget
from tests.fixtures.checkpoints import make_checkpoint

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n{% if thinks %}<think>\n{% endif %}{# </think> #}"
)
MESSAGES = [{"role": "user", "content": "What is 2 + 3?"}]
OPTIONS: dict[str, Any] = {"max_model_len": 256, "num_blocks": 200, "block_size": 8, "num_threads": 1}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_checkpoint("llama", tmp_path_factory.mktemp("llama"))
    (path / "chat_template.jinja").write_text(CHAT_TEMPLATE, "utf-8")
    return path


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> LLM:
    return LLM(checkpoint, dtype="float32", **OPTIONS)


def asked(thinks: bool = True) -> dict[str, Any]:
    return {"messages": MESSAGES, "chat_template_kwargs": {"thinks": thinks}}


def drawn(budget: ThinkingBudget, prompt: list[int], model: list[int]) -> list[int]:
    """What comes of a model's own tokens."""
    tokens = list(prompt)
    for token_id in model:
        forced = budget.next(tokens)
        tokens.append(token_id if forced is None else forced)
    return tokens[len(prompt) :]


@pytest.mark.parametrize(
    ("is_open", "budget", "model", "expected"),
    [
        (True, 3, [5, 5, 5, 5, 5, 5, 5], [5, 5, 5, 1, 2, 5, 5]),
        (True, 0, [5, 5, 5, 5], [1, 2, 5, 5]),
        (True, 3, [5, 1, 2, 5, 5, 5, 5], [5, 1, 2, 5, 5, 5, 5]),  # closed by the model
        (True, 3, [5, 5, 1, 5, 5, 5], [5, 5, 1, 2, 5, 5]),  # which had begun with it
        (True, 2, [5, 1, 1, 5, 5], [5, 1, 2, 5, 5]),
        (False, 2, [8, 9, 5, 5, 5, 5, 5], [8, 9, 5, 5, 1, 2, 5]),
        (False, 2, [4, 8, 9, 5, 5, 5, 5], [4, 8, 9, 5, 5, 1, 2]),
        (False, 0, [8, 9, 5, 5, 5], [8, 9, 1, 2, 5]),
        (False, 0, [5] * 8 + [8, 9, 5, 5], [5] * 8 + [8, 9, 5, 5]),  # the tag is no beginning there
    ],
)
def test_the_closing_tag_follows_the_budget(
    is_open: bool, budget: int, model: list[int], expected: list[int]
) -> None:
    tags = Thinking(is_open, (8, 9), (1, 2), (1, 2))
    prompt = [8, 9, 1, 2, 1]
    assert drawn(ThinkingBudget(tags, budget, len(prompt)), prompt, model) == expected
    for end in range(len(expected)):  # seen at once, as after a preemption
        forced = ThinkingBudget(tags, budget, len(prompt)).next([*prompt, *expected[:end]])
        assert forced is None or forced == expected[end]
    long = Thinking(is_open, (8, 9), (1, 2), (1, 2, 7))
    found = drawn(ThinkingBudget(long, budget, len(prompt)), prompt, [*model, 5, 5])
    assert (7 in found) == (found[: found.index(7)][-2:] == [1, 2] if 7 in found else False)


@pytest.mark.row("A26", clauses=("budget",))
@pytest.mark.parametrize("budget", [0, 1, 7, 30])
def test_reasoning_ends_with_its_budget(llm: LLM, budget: int) -> None:
    """The tokens before are those without a budget; content and reasoning are apart; the count is exact."""
    free = llm.chat(asked(), max_tokens=60, ignore_eos=True)
    assert free.text == "" and free.num_reasoning_tokens == 60
    held = llm.chat(asked(), max_tokens=60, ignore_eos=True, thinking_budget=budget)
    assert llm.tokenizer is not None
    closing = llm.tokenizer.encode("</think>", add_special_tokens=False)
    assert held.token_ids[:budget] == free.token_ids[:budget]
    assert held.token_ids[budget : budget + len(closing)] == closing
    assert held.num_reasoning_tokens == budget + len(closing)
    whole = llm.tokenizer.hf.decode(held.token_ids, skip_special_tokens=True)
    assert whole.count("</think>") == 1
    assert held.reasoning == whole.partition("</think>")[0].lstrip("\n")
    assert held.text == whole.partition("</think>")[2].lstrip()


def test_what_a_grammar_does_not_allow_is_tried_again_for_a_while() -> None:
    """A character of several bytes was under way: the tag is tried again, and given up after some tokens."""
    tags = Thinking(True, (8, 9), (1, 2), (1, 2))
    for refused in range(8):
        budget = ThinkingBudget(tags, 1, 0)
        tokens = [5]
        for _ in range(refused):
            assert budget.next(tokens) in (1, None)
            tokens.append(5)
        wanted = 1 if refused <= 4 else None
        assert budget.next(tokens) == wanted == ThinkingBudget(tags, 1, 0).next(tokens)


def test_nothing_is_forced_without_reasoning(llm: LLM) -> None:
    free = llm.chat(asked(thinks=False), max_tokens=20, ignore_eos=True)
    held = llm.chat(asked(thinks=False), max_tokens=20, ignore_eos=True, thinking_budget=0)
    assert held.token_ids == free.token_ids and held.num_reasoning_tokens == 0


@pytest.mark.parametrize("few_blocks", [False, True])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_budget_holds_whatever_happens_to_the_request(
    checkpoint: Path, llm: LLM, few_blocks: bool, ahead: bool
) -> None:
    """Steps launched ahead, preemption, several choices: the tokens are those of each choice alone."""
    options = {**OPTIONS, "async_scheduling": ahead}
    if few_blocks:
        options |= {"num_blocks": 12, "max_model_len": 96}
    other = LLM(checkpoint, dtype="float32", **options)
    assert llm.tokenizer is not None
    sampling = {"max_tokens": 24, "ignore_eos": True, "temperature": 1.0, "seed": 3, "n": 2}
    encoded = llm.tokenizer.encode_chat(str(asked()).replace("'", '"').replace("True", "true"))
    budgets = [0, 5, 9, None]
    params = [SamplingParams(thinking_budget=budget, **sampling) for budget in budgets]
    expected = [llm.generate([encoded[0]], [one], chats=[encoded[1]])[0] for one in params]
    found = other.generate([encoded[0]] * 4, params, chats=[encoded[1]] * 4)
    for one, alone in zip(found, expected, strict=True):
        assert one.token_ids == alone.token_ids
        assert [choice.token_ids for choice in one.others] == [choice.token_ids for choice in alone.others]
    if few_blocks:
        assert other.core.stats().num_preemptions > 0
    closing = llm.tokenizer.encode("</think>", add_special_tokens=False)
    for one, budget in zip(found, budgets, strict=True):
        for choice in (one, *one.others):
            if budget is not None:
                assert choice.token_ids[budget : budget + len(closing)] == closing


def test_a_budget_that_cannot_hold_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidArgumentError, match="thinking_budget: needs chat messages"):
        llm.generate(["a"], thinking_budget=3)
    with pytest.raises(InvalidArgumentError, match="thinking_budget: must not be given with beam_width"):
        llm.chat(asked(), thinking_budget=3, beam_width=2)
    with pytest.raises(InvalidArgumentError, match="thinking_budget"):
        parse_sampling_params({"thinking_budget": -1})
    empty = msgspec.json.encode(SamplingParams(thinking_budget=1, thinking=Thinking(True, (), (1,), (1,))))
    with pytest.raises(msgspec.ValidationError, match="thinking"):
        msgspec.json.decode(empty, type=SamplingParams)
