"""What the vision demo can do: drawings, questions about them, their right answers, and a checker.

Needs PIL and numpy only, so that the trainer, the tests and a curious reader share one definition of
"right". A drawing is made from a `Scene` (what is where); an answer follows from the prompt and the scenes
alone, so the checker needs nothing from the generator.

Scenes are split by a hash of their shapes, colours and places: one scene in ten is held out and never
trained on, in whatever size, jitter, background or file format it is drawn.
"""

from __future__ import annotations

import hashlib
import io
import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

INTRODUCTION = "Hello! I am the Quire vision demo. Show me a picture of shapes and ask about it."
NO_PICTURE = "There is no picture."

SHAPES: tuple[str, ...] = ("circle", "square", "triangle", "cross")
COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (220, 30, 30),
    "green": (30, 160, 50),
    "blue": (35, 70, 220),
    "yellow": (240, 210, 20),
    "purple": (150, 40, 190),
    "black": (25, 25, 25),
}
BACKGROUNDS: dict[str, tuple[int, int, int]] = {
    "white": (255, 255, 255),
    "grey": (215, 215, 215),
    "sky": (200, 225, 250),
    "rose": (250, 220, 225),
}
# In reading order, row by row of a grid of three by three.
PLACES: tuple[str, ...] = (
    "top left",
    "top",
    "top right",
    "left",
    "centre",
    "right",
    "bottom left",
    "bottom",
    "bottom right",
)
_PREPOSITIONS = {"left": "on the", "right": "on the", "centre": "in the"}
MAX_SHAPES = 3
MAX_SHAPES_OF_A_PAIR = 2
MIN_SIDE, MAX_SIDE = 64, 320
HELD_OUT_ONE_IN = 10
SPLITS: tuple[str, ...] = ("held_out", "train", "all")

PHRASINGS: dict[str, tuple[str, ...]] = {
    "describe": (
        "What is in the picture?",
        "What is in this picture?",
        "What is in the image?",
        "What does the picture show?",
        "What do you see?",
        "Describe the picture",
        "Describe this image",
    ),
    "colour": (
        "What colour is the {s}?",
        "What color is the {s}?",
        "Which colour is the {s}?",
        "Which colour does the {s} have?",
        "What is the colour of the {s}?",
    ),
    "count": (
        "How many shapes are there?",
        "How many shapes are in the picture?",
        "How many shapes do you see?",
        "Count the shapes",
    ),
    "where": (
        "Where is the {s}?",
        "Where do you see the {s}?",
        "Where in the picture is the {s}?",
    ),
    "one of two": (
        "What is in the {o} picture?",
        "What is in the {o} image?",
        "What does the {o} picture show?",
        "Describe the {o} picture",
    ),
}
ABOUT_ONE: tuple[str, ...] = ("describe", "colour", "count", "where")
ABOUT_TWO: tuple[str, ...] = ("one of two",)
KINDS: tuple[str, ...] = (*ABOUT_ONE, *ABOUT_TWO, "greet", "no picture")
GREETINGS: tuple[str, ...] = (
    "Hello",
    "Hi",
    "Hey",
    "Hello there",
    "Hi there",
    "Good morning",
    "Good evening",
    "Who are you",
    "What are you",
    "What can you do",
    "Help",
)


@dataclass(frozen=True)
class Item:
    """One coloured shape at one place of the grid."""

    shape: str
    colour: str
    place: str

    @property
    def name(self) -> str:
        return f"a {self.colour} {self.shape}"


@dataclass(frozen=True)
class Scene:
    """What a drawing shows: items in reading order, at most one per place, and a background."""

    items: tuple[Item, ...]
    background: str = "white"

    @property
    def key(self) -> str:
        return "; ".join(f"{item.name} {item.place}" for item in self.items)

    @property
    def description(self) -> str:
        first, *rest = [item.name for item in self.items]
        if not rest:
            place = self.items[0].place
            return f"{first} {_PREPOSITIONS.get(place, 'at the')} {place}"
        return f"{', '.join([first, *rest[:-1]])} and {rest[-1]}"


@dataclass(frozen=True)
class Question:
    """One user prompt about zero, one or two scenes, the one right answer, and the encoded drawings.

    `images` holds one PNG or JPEG file per scene.
    """

    kind: str
    prompt: str
    answer: str
    scenes: tuple[Scene, ...]
    images: tuple[bytes, ...]

    @property
    def messages(self) -> list[dict[str, Any]]:
        """One user message: an image part per drawing, then the text."""
        parts = [{"type": "image"} for _ in self.images]
        return [{"role": "user", "content": [*parts, {"type": "text", "text": self.prompt}]}]

    @property
    def answer_tokens(self) -> int:
        """Tokens of the answer without the end token: the tokenizer has one token per UTF-8 byte."""
        return len(self.answer.encode())


# --- solving -----------------------------------------------------------------------------------------


def _pattern(phrasing: str) -> re.Pattern[str]:
    body = re.escape(phrasing.rstrip("?")).replace(r"\{s\}", f"(?P<s>{'|'.join(SHAPES)})")
    body = body.replace(r"\{o\}", "(?P<o>first|second)")
    return re.compile(rf"{body}\s*[.?!]?", re.IGNORECASE)


_PATTERNS = {kind: [_pattern(phrasing) for phrasing in phrasings] for kind, phrasings in PHRASINGS.items()}
_GREETINGS = frozenset(greeting.lower() for greeting in GREETINGS)


def _answer(kind: str, fields: dict[str, str], scenes: Sequence[Scene]) -> str:
    if kind == "one of two":
        return scenes[0 if fields["o"].lower() == "first" else 1].description
    scene = scenes[0]
    if kind == "describe":
        return scene.description
    if kind == "count":
        return str(len(scene.items))
    shape = fields["s"].lower()
    meant = [item for item in scene.items if item.shape == shape]
    if len(meant) > 1:
        raise ValueError(f"there are {len(meant)} of {shape!r} in {scene.key!r}")
    if not meant:
        return f"There is no {shape}."
    return meant[0].colour if kind == "colour" else meant[0].place


def solve(prompt: str, scenes: Sequence[Scene] = ()) -> tuple[str, str]:
    """(kind, right answer) of any prompt about these scenes, as the model is trained to give it.

    Raises ValueError when there is no one right answer: an unknown question about a picture, a question
    about two pictures where there is one, or about "the circle" where there are two.
    """
    text = prompt.strip()
    if text.lower().rstrip("?.!") in _GREETINGS:
        return "greet", INTRODUCTION
    if not scenes:
        return "no picture", NO_PICTURE
    for kind, patterns in _PATTERNS.items():
        if (kind in ABOUT_TWO) != (len(scenes) == 2):
            continue
        for pattern in patterns:
            if match := pattern.fullmatch(text):
                return kind, _answer(kind, match.groupdict(), scenes)
    raise ValueError(f"no question about {len(scenes)} pictures: {prompt!r}")


def is_right(prompt: str, scenes: Sequence[Scene], answer: str) -> bool:
    """Whether `answer` is the right reply to `prompt`, surrounding white space aside.

    Raises ValueError as `solve` does.
    """
    return answer.strip() == solve(prompt, scenes)[1]


def is_held_out(scene: Scene) -> bool:
    """Whether the trainer never draws these shapes, colours and places together."""
    digest = hashlib.sha256(scene.key.encode()).digest()
    return int.from_bytes(digest[:4], "big") % HELD_OUT_ONE_IN == 0


# --- drawing -----------------------------------------------------------------------------------------


def place_centre(place: str) -> tuple[float, float]:
    """(x, y) of a place's middle, as fractions of the side."""
    row, column = divmod(PLACES.index(place), 3)
    return (column + 0.5) / 3, (row + 0.5) / 3


def _tint(rng: random.Random, colour: tuple[int, int, int], spread: int) -> tuple[int, ...]:
    return tuple(min(255, max(0, c + rng.randint(-spread, spread))) for c in colour)


def _draw_item(canvas: ImageDraw.ImageDraw, rng: random.Random, item: Item, side: int) -> None:
    x, y = (side * (c + rng.uniform(-0.02, 0.02)) for c in place_centre(item.place))
    r = side * rng.uniform(0.12, 0.15)
    colour = _tint(rng, COLOURS[item.colour], 15)
    if item.shape == "circle":
        canvas.ellipse((x - r, y - r, x + r, y + r), fill=colour)
    elif item.shape == "square":
        canvas.rectangle((x - 0.9 * r, y - 0.9 * r, x + 0.9 * r, y + 0.9 * r), fill=colour)
    elif item.shape == "triangle":
        canvas.polygon([(x, y - r), (x - r, y + 0.9 * r), (x + r, y + 0.9 * r)], fill=colour)
    else:
        arm = 0.32 * r
        canvas.rectangle((x - r, y - arm, x + r, y + arm), fill=colour)
        canvas.rectangle((x - arm, y - r, x + arm, y + r), fill=colour)


def draw(scene: Scene, seed: int | str = 0, side: int | None = None) -> Image.Image:
    """An RGB drawing of the scene, `side` pixels square (by default 64 to 320), sizes, places and tints
    slightly varied by the seed."""
    rng = random.Random(f"draw|{seed}")
    side = side or round(math.exp(rng.uniform(math.log(MIN_SIDE), math.log(MAX_SIDE))))
    image = Image.new("RGB", (side, side), _tint(rng, BACKGROUNDS[scene.background], 4))
    canvas = ImageDraw.Draw(image)
    for item in scene.items:
        _draw_item(canvas, rng, item, side)
    return image


def encode(image: Image.Image, seed: int | str = 0, form: str | None = None) -> bytes:
    """The drawing as a file: `form` is PNG or JPEG (quality 60 to 95 by the seed), by default either."""
    rng = random.Random(f"encode|{seed}")
    form = form or rng.choice(("PNG", "JPEG"))
    out = io.BytesIO()
    image.save(out, form, **({"quality": rng.randint(60, 95)} if form == "JPEG" else {}))
    return out.getvalue()


def pixels(data: bytes, side: int = 64) -> np.ndarray:
    """uint8 [side, side, 3] of an encoded drawing, resized as the checkpoint's image processor does."""
    image = Image.open(io.BytesIO(data)).convert("RGB")
    return np.asarray(image.resize((side, side), Image.Resampling.BICUBIC))


# --- generating --------------------------------------------------------------------------------------


def _scene(rng: random.Random, most: int) -> Scene:
    count = rng.randint(1, most)
    places = sorted(rng.sample(range(len(PLACES)), count))
    shapes = rng.sample(SHAPES, count) if rng.random() < 0.6 else rng.choices(SHAPES, k=count)
    items = [
        Item(shape, rng.choice(tuple(COLOURS)), PLACES[place])
        for shape, place in zip(shapes, places, strict=True)
    ]
    return Scene(tuple(items), rng.choice(tuple(BACKGROUNDS)))


def scenes(rng: random.Random, count: int, split: str = "held_out") -> tuple[Scene, ...]:
    """One random scene, or two of fewer items.

    split: "train" (none is held out), "held_out" (all are held out) or "all".
    """
    if split not in SPLITS:
        raise ValueError(f"split {split!r} is none of {', '.join(SPLITS)}")
    out: list[Scene] = []
    while len(out) < count:
        scene = _scene(rng, MAX_SHAPES if count == 1 else MAX_SHAPES_OF_A_PAIR)
        if split == "all" or is_held_out(scene) == (split == "held_out"):
            out.append(scene)
    return tuple(out)


def ask(rng: random.Random, kind: str, about: Sequence[Scene]) -> str:
    """A prompt of `kind` that has one right answer about these scenes.

    Shapes that are not there are asked for as well, about once in seven.
    """
    if kind == "greet":
        text = rng.choice(GREETINGS) + rng.choice(("", "", "!", "?", "."))
        return text if rng.random() < 0.7 else text.lower()
    if kind == "no picture":
        kind = rng.choice(ABOUT_ONE)
    shape = rng.choice(SHAPES)
    if kind in ("colour", "where") and about:
        drawn = [item.shape for item in about[0].items]
        single = [s for s in SHAPES if drawn.count(s) == 1]
        absent = [s for s in SHAPES if s not in drawn]
        shape = rng.choice(absent if absent and (not single or rng.random() < 0.14) else single)
    phrasing = rng.choice(PHRASINGS[kind]).format(s=shape, o="{o}")
    if "{o}" in phrasing:
        phrasing = phrasing.format(o=rng.choice(("first", "second")))
    if rng.random() < 0.2:
        phrasing = phrasing.rstrip("?")
    return phrasing[0].lower() + phrasing[1:] if rng.random() < 0.2 else phrasing


def questions(kind: str | None = None, seed: int = 0, split: str = "held_out") -> Iterator[Question]:
    """An endless seeded stream of questions with their drawings: of one kind or of all in turn.

    Raises ValueError for an unknown kind or split. Greetings and questions without a picture have no
    scene, hence no held-out part.
    """
    if split not in SPLITS:
        raise ValueError(f"split {split!r} is none of {', '.join(SPLITS)}")
    if kind is not None and kind not in KINDS:
        raise ValueError(f"kind {kind!r} is none of {', '.join(KINDS)}")
    rng = random.Random(f"{seed}|{split}|{kind}")
    while True:
        for each in (kind,) if kind is not None else KINDS:
            count = 1 if each in ABOUT_ONE else 2 if each in ABOUT_TWO else 0
            about = scenes(rng, count, split) if count else ()
            prompt = ask(rng, each, about)
            files = tuple(encode(draw(s, rng.random().hex()), rng.random().hex()) for s in about)
            yield Question(each, prompt, solve(prompt, about)[1], about, files)


def held_out(n: int, seed: int = 0) -> list[Question]:
    """`n` questions about held-out drawings, all kinds in turn."""
    stream = questions(seed=seed)
    return [next(stream) for _ in range(n)]
