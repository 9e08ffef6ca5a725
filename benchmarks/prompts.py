"""Prompts the load is made of, the same for every tool and every run."""

from __future__ import annotations

import random
import string


def prompts(count: int, *, words: tuple[int, int] = (1, 1), seed: int = 0) -> list[str]:
    """Questions of the kinds the demo checkpoint knows, each `words[0]` to `words[1]` questions long.

    The content does not matter to a measurement (lengths are fixed by `max_tokens` and `ignore_eos`), but
    prompts must differ, or prefix caching would be measured.
    """
    rng = random.Random(seed)
    return [" ".join(_question(rng) for _ in range(rng.randint(*words))) for _ in range(count)]


def _question(rng: random.Random) -> str:
    kind = rng.randrange(3)
    if kind == 0:
        return f"What is {rng.randint(0, 99)} + {rng.randint(0, 99)}?"
    if kind == 1:
        return f"Reverse the word {''.join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 8)))}."
    return f"Sort the numbers {', '.join(str(rng.randint(0, 99)) for _ in range(rng.randint(3, 6)))}."
