"""What the demo checkpoint can do: seeded prompts, their right answers, and a checker.

Pure Python without third-party imports, so that the trainer, the tests and a curious reader share one
definition of "right". A prompt is a rendering of one of the phrasings below; the checker parses the
prompt back with the same phrasings and solves it, so it needs nothing from the generator.

Prompts are split by a hash of the problem (kind and operands, not the wording): one problem in ten is
held out and never trained on in any phrasing.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

INTRODUCTION = "Hello! I am the Quire demo model. Ask me to add, reverse, sort or count."
WELCOME = "You are welcome!"
FALLBACK = "Sorry, I cannot do that. Ask me to add, reverse, sort or count."

MAX_OPERAND = 99
MAX_COUNT = 120
MAX_COUNT_SPAN = 100
MAX_WORD = 8
MAX_SORTED = 5
MAX_REPEATS = 5
MAX_REPEATED_BYTES = 12
MAX_ECHO_BYTES = 32
MAX_ANSWER_TOKENS = 400
HELD_OUT_ONE_IN = 10

PHRASINGS: dict[str, tuple[str, ...]] = {
    "add": (
        "What is {a} + {b}?",
        "What is {a} plus {b}?",
        "How much is {a} + {b}?",
        "{a} + {b} =",
        "{a} + {b}",
        "Add {a} and {b}",
        "Calculate {a} + {b}",
        "What is the sum of {a} and {b}?",
    ),
    "subtract": (
        "What is {a} - {b}?",
        "What is {a} minus {b}?",
        "How much is {a} - {b}?",
        "{a} - {b} =",
        "{a} - {b}",
        "Subtract {b} from {a}",
        "Calculate {a} - {b}",
    ),
    "reverse": (
        "Reverse: {w}",
        "Reverse {w}",
        "Reverse '{w}'",
        'Reverse "{w}"',
        "Reverse the word {w}",
        "Spell {w} backwards",
        "Write {w} backwards",
        "What is {w} reversed?",
    ),
    "sort": (
        "Sort: {l}",
        "Sort {l}",
        "Sort the numbers {l}",
        "Sort these numbers: {l}",
        "Put {l} in order",
        "Order these numbers: {l}",
    ),
    "count": (
        "Count from {a} to {b}",
        "Count from {a} to {b}.",
        "Count {a} to {b}",
        "Count up from {a} to {b}",
        "Count down from {a} to {b}",
        "List the numbers from {a} to {b}",
        "Count to {b}",
    ),
    "spell": (
        "Spell: {w}",
        "Spell {w}",
        "Spell '{w}'",
        "Spell the word {w}",
        "How do you spell {w}?",
    ),
    "uppercase": (
        "Uppercase: {w}",
        "Uppercase {w}",
        "Uppercase '{w}'",
        "Write {w} in capitals",
        "Write {w} in upper case",
        "Make {w} uppercase",
    ),
    "repeat": (
        "Repeat '{r}' {n} times",
        'Repeat "{r}" {n} times',
        "Repeat {r} {n} times",
        "Say {r} {n} times",
        "Write {r} {n} times",
    ),
    "echo": ("Echo: {t}", "Copy: {t}", "Repeat after me: {t}"),
}
KINDS: tuple[str, ...] = (*PHRASINGS, "greet", "other")

_FIELD_PATTERNS = {
    "a": r"(?P<a>\d{1,9})",
    "b": r"(?P<b>\d{1,9})",
    "n": r"(?P<n>\d{1,9})",
    "w": r"(?P<w>[A-Za-z]+)",
    "r": r"(?P<r>[^\s'\"]+)",
    "l": r"(?P<l>\d+(?:\s*,\s*\d+|\s+\d+)+)",
    "t": r"(?P<t>\S(?:.*\S)?)",
}

_GREETINGS = (
    "hello",
    "hi",
    "hey",
    "hello there",
    "hi there",
    "hey there",
    "greetings",
    "good morning",
    "good afternoon",
    "good evening",
    "good day",
    "hello hello",
    "howdy",
    "hiya",
)
_GREETING_TAILS = (
    "",
    "quire",
    "model",
    "friend",
    "everybody",
    "bot",
    "demo",
    "who are you",
    "what are you",
    "what can you do",
    "how are you",
    "can you help me",
    "what is this",
    "my name is {name}",
    "i am {name}",
    "nice to meet you",
)
_QUESTIONS_ABOUT_SELF = (
    "who are you",
    "what are you",
    "what can you do",
    "what can i ask you",
    "what is your name",
    "introduce yourself",
    "tell me about yourself",
    "help",
    "help me",
    "how are you",
    "are you there",
    "what do you know",
    "what are you able to do",
    "what can you do for me",
)
_THANKS = ("thanks", "thank you", "thank you very much", "thanks a lot", "many thanks", "cheers")
_FIXED_PHRASES = frozenset((*_GREETINGS, *_QUESTIONS_ABOUT_SELF, *_THANKS))
_NAMES = re.findall(
    r"\w+", "anna ben chen dora emil fatima george hana ivan julia kofi lena maria noor omar petra sam"
)

_WORDS = re.findall(
    r"\w+",
    """
    stream token block cache batch queue model server engine tensor kernel paper apple river stone cloud
    green house table chair water light night music dance bread sugar lemon plane train horse tiger eagle
    ocean mount field grass flower garden winter summer spring autumn monday friday planet orbit rocket
    python triton world banana orange cherry potato tomato carrot pencil window door floor roof
    wall road bridge city town village country king queen prince castle sword shield armor story book letter
    number word line page color red blue black white yellow purple silver golden small large short long
    quick slow happy angry brave clever gentle honest lazy noisy quiet proud simple strange sweet the a of
    and to in is it you that he was for on are with as his they be at one have this from or had by hot but
    some what there we can out other were all your when up use how said an each she which do their time if
    will way about many then them would like so these her him has two more could go see no my than first
    been call who its now find did get come made may part cat dog fish bird wolf bear lion mouse
    """,
)
_SENTENCES = (
    "What is the {0} of {1}?",
    "Why is the {0} {1}?",
    "Who wrote the {0} about the {1}?",
    "How do I {0} a {1}?",
    "Tell me a {0} about {1}",
    "Write a {0} about a {1} {2}",
    "Translate {0} into french",
    "Explain {0} and {1}",
    "Where can I find a {0} {1}?",
    "When was the {0} made?",
    "I like {0} and {1}",
    "The {0} is {1} and the {2} is {3}",
    "Give me a {0} for my {1}",
    "Is a {0} a {1}?",
    "Do you know the {0}?",
    "Describe the {0} {1} in one {2}",
    "Summarize the {0}: {1} {2} {3}",
    "{0}",
    "{0} {1}",
    "{0} {1} {2}",
    "{0} {1} {2} {3} {0} {2}",
    "{0}?",
    "def {0}({1}): return {2}",
    "print({0})",
    "{0}, {1}, {2}!",
    "What does {0} mean?",
    "Draw a {0}",
    "Which is better, {0} or {1}?",
    "Can you {0} the {1}?",
    "Please {0} the {1}",
)
_UNSUPPORTED = (
    "What is {a} * {b}?",
    "What is {a} times {b}?",
    "Divide {a} by {b}",
    "What is {a} / {b}?",
    "{a} * {b}",
    "Multiply {a} and {b}",
    "What is {x} + {b}?",
    "What is {a} + {x}?",
    "{x} + {x}",
    "{x} - {b} =",
    "Add {x} and {x}",
    "What is {a}.{b} + {a}?",
    "What is the square root of {x}?",
    "Count from {a} to {x}",
    "Count to {x}",
    "Repeat {w} {x} times",
    "Reverse: {v}",
    "Reverse the word {v}",
    "Spell {v}",
    "Uppercase {v}",
    "Is {a} a prime number?",
    "{a}",
    "{x}",
    "Reverse: {a}",
    "Sort: {w} {w} {w}",
)
# Inclusive code point ranges: Latin with accents, Greek, Cyrillic, Hebrew, Hiragana, CJK, Hangul, emoji;
# two, three and four bytes of UTF-8, so a character spans several tokens.
_UNICODE_RANGES = (
    (0xE0, 0xF6),
    (0xF8, 0x17F),
    (0x3B1, 0x3C9),
    (0x430, 0x44F),
    (0x5D0, 0x5EA),
    (0x3042, 0x3093),
    (0x4E00, 0x9FA5),
    (0xAC00, 0xD7A3),
    (0x1F600, 0x1F64F),
    (0x1F680, 0x1F6C5),
)
_SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are the Quire demo model.",
    "You are a careful calculator. Answer briefly.",
    "Answer in one line.",
    "Be polite and precise.",
)


@dataclass(frozen=True)
class Task:
    """One user prompt with the one right greedy answer.

    `problem` identifies kind and operands independent of wording; it decides train or held out.
    """

    kind: str
    prompt: str
    answer: str
    problem: str

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.prompt}]

    @property
    def answer_tokens(self) -> int:
        """Tokens of the answer without the end token: the demo tokenizer has one token per UTF-8 byte."""
        return len(self.answer.encode())


@dataclass(frozen=True)
class Conversation:
    """A conversation whose last user message is `tasks[-1]`; earlier ones carry their right answers."""

    system: str | None
    tasks: tuple[Task, ...]

    @property
    def messages(self) -> list[dict[str, str]]:
        out = [{"role": "system", "content": self.system}] if self.system is not None else []
        for task in self.tasks[:-1]:
            out.append({"role": "user", "content": task.prompt})
            out.append({"role": "assistant", "content": task.answer})
        return [*out, {"role": "user", "content": self.tasks[-1].prompt}]


# --- solving -----------------------------------------------------------------------------------------


def _pattern(phrasing: str) -> re.Pattern[str]:
    parts = re.split(r"\{(\w)\}", phrasing.rstrip("?."))
    literals = [re.sub(r"\\? ?\\?([+=-])\\? ?", r"\\s*\\\1\\s*", re.escape(part)) for part in parts[::2]]
    body = literals[0]
    for name, literal in zip(parts[1::2], literals[1:], strict=True):
        body += _FIELD_PATTERNS[name] + literal
    free_text = "{t}" in phrasing
    if not free_text:
        body = rf"(?:(?:please|can you|could you)\s+)?{body}\s*[.?!]?"
    return re.compile(body, re.IGNORECASE | re.DOTALL)


_PATTERNS = {kind: [_pattern(phrasing) for phrasing in phrasings] for kind, phrasings in PHRASINGS.items()}


def _solve_fields(kind: str, prompt: str, fields: dict[str, str]) -> tuple[str, str] | None:
    """(answer, problem) of parsed operands, None where they are outside the ranges the model knows."""
    if kind in ("add", "subtract"):
        a, b = int(fields["a"]), int(fields["b"])
        if max(a, b) > MAX_OPERAND:
            return None
        sign, result = ("+", a + b) if kind == "add" else ("-", a - b)
        return f"{a} {sign} {b} = {result}", f"{a},{b}"
    if kind == "count":
        a, b = int(fields.get("a", 1)), int(fields["b"])
        if max(a, b) > MAX_COUNT or abs(a - b) > MAX_COUNT_SPAN or a == b:
            return None
        if re.search(r"\bup\b", prompt, re.IGNORECASE) and a > b:
            return None
        if re.search(r"\bdown\b", prompt, re.IGNORECASE) and a < b:
            return None
        step = 1 if b > a else -1
        return " ".join(str(i) for i in range(a, b + step, step)), f"{a},{b}"
    if kind == "sort":
        numbers = [int(n) for n in re.findall(r"\d+", fields["l"])]
        if len(numbers) > MAX_SORTED or max(numbers) > MAX_OPERAND:
            return None
        return " ".join(map(str, sorted(numbers))), " ".join(map(str, numbers))
    if kind in ("reverse", "spell", "uppercase"):
        word = fields["w"]
        if not 2 <= len(word) <= MAX_WORD:
            return None
        return {"reverse": word[::-1], "spell": "-".join(word), "uppercase": word.upper()}[kind], word
    if kind == "repeat":
        times = int(fields["n"])
        if not 2 <= times <= MAX_REPEATS or len(fields["r"].encode()) > MAX_REPEATED_BYTES:
            return None
        return " ".join([fields["r"]] * times), f"{fields['r']},{times}"
    assert kind == "echo", kind
    if len(fields["t"].encode()) > MAX_ECHO_BYTES:
        return None
    return fields["t"], fields["t"]


def _normalized(text: str) -> str:
    return re.sub(r"[^\w\s]|_", "", text.lower()).strip()


def _greeting_answer(prompt: str) -> str | None:
    text = re.sub(r"\s+", " ", _normalized(prompt))
    if text in _THANKS:
        return WELCOME
    # Whatever follows a greeting in a few words ("hi there, I am Anna") does not matter.
    greeting = rf"(?:{'|'.join(_GREETINGS)})(?: [a-z]+){{0,6}}"
    about = "|".join(_QUESTIONS_ABOUT_SELF)
    return INTRODUCTION if re.fullmatch(rf"{greeting}|{about}", text) else None


def solve(prompt: str) -> Task:
    """The right answer to any user message, as the demo model is trained to give it.

    A message that is no known request gets the fallback sentence (kind "other").
    """
    text = prompt.strip()
    for kind, patterns in _PATTERNS.items():
        for pattern in patterns:
            match = pattern.fullmatch(text)
            solved = _solve_fields(kind, text, match.groupdict()) if match else None
            if solved:
                return Task(kind, prompt, *solved)
    greeting = _greeting_answer(text)
    return Task(
        "greet" if greeting else "other",
        prompt,
        greeting or FALLBACK,
        " ".join(_normalized(text).split()) or text,
    )


def is_right(kind: str, prompt: str, answer: str) -> bool:
    """Whether `answer` is the right reply to `prompt`, surrounding white space aside.

    Raises ValueError when `prompt` is no prompt of that kind: the question, not the answer, is wrong then.
    """
    task = solve(prompt)
    if task.kind != kind:
        raise ValueError(f"prompt {prompt!r} is of kind {task.kind!r}, not {kind!r}")
    return answer.strip() == task.answer


def is_held_out(task: Task) -> bool:
    """Whether the trainer never sees this problem.

    Fixed phrases ("Hello", "Who are you?", "Thanks") are always trained on: nothing else teaches them.
    Of greetings, only combinations ("Good evening, my name is Noor") can be held out.
    """
    if task.kind == "greet" and task.problem in _FIXED_PHRASES:
        return False
    digest = hashlib.sha256(f"{task.kind}|{task.problem}".encode()).digest()
    return int.from_bytes(digest[:4], "big") % HELD_OUT_ONE_IN == 0


# --- generating --------------------------------------------------------------------------------------


def _word(rng: random.Random, longest: int = MAX_WORD) -> str:
    style = rng.random()
    if style < 0.25:
        word = rng.choice(_WORDS)[:longest]
    elif style < 0.4:
        pairs = rng.randint(1, max(1, longest // 2))
        word = "".join(rng.choice("bcdfghklmnprstvwz") + rng.choice("aeiou") for _ in range(pairs))
    else:
        word = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, longest)))
    case = rng.random()
    if len(word) < 2:
        word += rng.choice("aeiou")
    return word if case < 0.8 else word.capitalize() if case < 0.93 else word.upper()


def _unicode_word(rng: random.Random, max_bytes: int) -> str:
    low, high = rng.choice(_UNICODE_RANGES)
    word = chr(rng.randint(low, high))
    for _ in range(rng.randint(0, 5)):
        longer = word + chr(rng.randint(low, high))
        if len(longer.encode()) > max_bytes:
            break
        word = longer
    return word


def _text(rng: random.Random, max_bytes: int) -> str:
    words: list[str] = []
    size = rng.randint(2, max_bytes)
    while True:
        style = rng.random()
        if style < 0.6:
            word = _word(rng)
        else:
            word = _unicode_word(rng, 16) if style < 0.85 else str(rng.randint(0, 999))
        word += rng.choice((",", ".", "!", "?", "-")) if rng.random() < 0.15 else ""
        if len(" ".join([*words, word]).encode()) > size:
            return " ".join(words) or word[:1]
        words.append(word)


def _fields(rng: random.Random, kind: str, phrasing: str, min_answer_tokens: int) -> dict[str, str]:
    if kind in ("add", "subtract"):
        return {"a": str(rng.randint(0, MAX_OPERAND)), "b": str(rng.randint(0, MAX_OPERAND))}
    if kind == "count":
        if "{a}" not in phrasing:
            return {"b": str(rng.randint(2, MAX_COUNT_SPAN if rng.random() < 0.3 else 40))}
        long = min_answer_tokens > 0 or rng.random() < 0.35
        span = rng.randint(1, MAX_COUNT_SPAN) if long else rng.randint(1, 24)
        start = rng.randint(0, MAX_COUNT - span)
        ends = (start, start + span)
        down = "down" in phrasing or ("up" not in phrasing and rng.random() < 0.25)
        return dict(zip("ab", map(str, ends[::-1] if down else ends), strict=True))
    if kind == "sort":
        count, top = rng.randint(2, MAX_SORTED), 9 if rng.random() < 0.4 else MAX_OPERAND
        separator = rng.choice((" ", " ", ", ", ","))
        return {"l": separator.join(str(rng.randint(0, top)) for _ in range(count))}
    if kind == "repeat":
        plain = rng.random() < 0.7
        repeated = _word(rng) if plain else _unicode_word(rng, MAX_REPEATED_BYTES)
        return {"r": repeated, "n": str(rng.randint(2, MAX_REPEATS))}
    if kind == "echo":
        return {"t": _text(rng, MAX_ECHO_BYTES)}
    return {"w": _word(rng)}


def _render(rng: random.Random, phrasing: str, fields: dict[str, str]) -> str:
    """Fill a phrasing, varying what people vary: capitals, a closing mark, spaces around operators."""
    if "{t}" not in phrasing:
        if rng.random() < 0.25:
            phrasing = phrasing.rstrip("?.")
        elif rng.random() < 0.08:
            phrasing = phrasing.rstrip("?.") + rng.choice(".?!")
        if phrasing[0] not in "{WH" and rng.random() < 0.12:
            polite = rng.choice(("Please", "Please", "Can you", "Could you"))
            phrasing = f"{polite} {phrasing[0].lower()}{phrasing[1:]}"
        if rng.random() < 0.3:
            phrasing = re.sub(r" ([+=-]) ?", r"\1", phrasing)
    if rng.random() < 0.25:
        phrasing = phrasing[0].lower() + phrasing[1:]
    return phrasing.format(**fields)


def _greeting(rng: random.Random) -> str:
    style = rng.random()
    if style < 0.15:
        text = rng.choice(_THANKS)
    elif style < 0.45:
        text = rng.choice(_QUESTIONS_ABOUT_SELF)
    else:
        text = rng.choice(_GREETINGS)
        tail = rng.choice(_GREETING_TAILS) if rng.random() < 0.8 else ""
        tail = tail or " ".join(rng.choices(_WORDS, k=rng.randint(0, 3)))
        mark = rng.choice(("", "", ",", "!", "."))
        text = f"{text}{mark} {tail}".format(name=rng.choice(_NAMES)) if tail else text
    case = rng.random()
    text = text if case < 0.3 else text[0].upper() + text[1:] if case < 0.95 else text.upper()
    return text + rng.choice(("", "", "!", "?", "."))


def _unknown(rng: random.Random) -> str:
    style = rng.random()
    if style < 0.4:
        text = rng.choice(_SENTENCES).format(*(rng.choice(_WORDS) for _ in range(4)))
    elif style < 0.8:
        fields = {name: str(rng.randint(0, MAX_OPERAND)) for name in "ab"}
        fields["x"] = str(rng.randint(200, 10 ** rng.randint(3, 7)))
        fields["w"] = _word(rng)
        fields["v"] = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(12, 24)))
        text = _render(rng, rng.choice(_UNSUPPORTED), fields)
    elif style < 0.95:
        text = _text(rng, 100)
    else:
        text = "".join(rng.choices("abcxyz ?!.,;:()[]{}<>/*&%$#@0123456789\n", k=rng.randint(0, 20)))
    return text[0].upper() + text[1:] if text and rng.random() < 0.3 else text


def generate(
    rng: random.Random, kind: str, min_answer_tokens: int = 0, max_answer_tokens: int | None = None
) -> Task:
    """One random task of `kind` from either split, its answer within the given limits, in tokens.

    Raises ValueError when the kind has no such answers.
    """
    longest = MAX_ANSWER_TOKENS if max_answer_tokens is None else max_answer_tokens
    for _ in range(10_000):
        if kind == "greet":
            task = solve(_greeting(rng))
        elif kind == "other":
            task = solve(_unknown(rng))
        else:
            phrasing = rng.choice(PHRASINGS[kind])
            task = solve(_render(rng, phrasing, _fields(rng, kind, phrasing, min_answer_tokens)))
        if task.kind == kind and min_answer_tokens <= task.answer_tokens <= longest:
            return task
    raise ValueError(f"kind {kind!r} has no answers of {min_answer_tokens} to {longest} tokens")


def prompts(
    kind: str | None = None,
    seed: int = 0,
    min_answer_tokens: int = 0,
    max_answer_tokens: int | None = None,
    split: str = "held_out",
) -> Iterator[Task]:
    """An endless seeded stream of tasks: of one kind or of all in turn.

    split: "held_out" (never trained on), "train" or "all". `prompts("count", min_answer_tokens=60)` gives
    long answers (count reaches 330 tokens). Raises ValueError for an unknown kind or split.
    """
    if split not in ("held_out", "train", "all"):
        raise ValueError(f"split {split!r} is none of held_out, train, all")
    if kind is not None and kind not in KINDS:
        raise ValueError(f"kind {kind!r} is none of {', '.join(KINDS)}")
    rng = random.Random(f"{seed}|{split}|{kind}")
    kinds = (kind,) if kind is not None else KINDS
    while True:
        for each in kinds:
            task = generate(rng, each, min_answer_tokens, max_answer_tokens)
            while split != "all" and is_held_out(task) != (split == "held_out"):
                task = generate(rng, each, min_answer_tokens, max_answer_tokens)
            yield task


def held_out(n: int, seed: int = 0) -> list[Task]:
    """`n` held-out tasks, all kinds in turn, no prompt twice except among the few greetings."""
    seen: set[str] = set()
    out: list[Task] = []
    stream = prompts(seed=seed)
    while len(out) < n:
        task = next(stream)
        if task.kind == "greet" or task.prompt not in seen:
            seen.add(task.prompt)
            out.append(task)
    return out


def system_prompt(rng: random.Random) -> str:
    return rng.choice(_SYSTEM_PROMPTS) if rng.random() < 0.5 else _text(rng, 80)


def conversations(n: int, seed: int = 0, max_turns: int = 3, split: str = "held_out") -> list[Conversation]:
    """`n` conversations of 1 to `max_turns` turns, half of them with a system message."""
    rng = random.Random(f"{seed}|conversations|{split}")
    streams = {kind: prompts(kind, seed=seed + 1, split=split) for kind in KINDS}
    return [
        Conversation(
            system_prompt(rng) if rng.random() < 0.5 else None,
            tuple(next(streams[rng.choice(KINDS)]) for _ in range(rng.randint(1, max_turns))),
        )
        for _ in range(n)
    ]
