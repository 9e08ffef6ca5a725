"""What a prompt with images takes in the preprocessor, beside transformers' image processor and tokenizer.

    python -m benchmarks.images                         # the demo's checkpoint
    python -m benchmarks.images --checkpoint DIR --sizes 640x480,1920x1080 --images 1,4

Both get the same JPEG files and the same text, in turns, in one process; both decode, scale and tokenize, and
what they make of the pixels is compared. What is beside that work is ours: limits, placeholders, positions.
"""

from __future__ import annotations

import io
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks import machine, report
from quire_ensemble.tokenizer import Tokenizer
from quire_ensemble.vision import VisionProcessor

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "model_repository" / "vision_generator" / "1" / "demo"
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Result:
    """Medians of one kind of prompt."""

    size: tuple[int, int]
    """Width and height of each image."""
    images: int
    quire_s: float
    transformers_s: float


def jpeg(size: tuple[int, int], seed: int) -> bytes:
    """A smooth picture, as photographs are."""
    from PIL import Image

    noise = np.random.default_rng(seed).integers(0, 256, (12, 16, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC).save(out, "JPEG", quality=90)
    return out.getvalue()


def measure(checkpoint: Path, sizes: list[tuple[int, int]], counts: list[int], rounds: int) -> list[Result]:
    """Raises AssertionError where the two make other pixels."""
    from PIL import Image
    from transformers import AutoImageProcessor

    tokenizer = Tokenizer(checkpoint)
    ours = VisionProcessor(checkpoint, tokenizer)
    theirs = AutoImageProcessor.from_pretrained(str(checkpoint), backend="pil")
    mark = tokenizer.hf.convert_ids_to_tokens(ours.placeholder_id)
    results = []
    for size in sizes:
        for count in counts:
            files = [jpeg(size, seed) for seed in range(count)]
            text = f"{mark * count} What is in these pictures?"

            def quire(files: list[bytes] = files, text: str = text) -> Any:
                return ours.process(None, text.encode(), files).pixel_values

            def transformers(files: list[bytes] = files, text: str = text) -> Any:
                tokenizer.hf(text)
                images = [Image.open(io.BytesIO(file)) for file in files]
                return theirs(images=images, return_tensors="np")["pixel_values"]

            pixels = quire()
            np.testing.assert_allclose(
                pixels, np.asarray(transformers()).reshape(pixels.shape), rtol=0, atol=TOLERANCE
            )
            taken: tuple[list[float], list[float]] = [], []
            for number in range(rounds):
                order = (0, 1) if number % 2 else (1, 0)
                for which in order:
                    taken[which].append(seconds((quire, transformers)[which]))
            results.append(Result(size, count, *map(statistics.median, taken)))
    ours.close()
    return results


def seconds(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def table(results: list[Result]) -> str:
    """Markdown."""
    return report.table(
        ("images", "pixels of each", "quire ms", "transformers ms", "of transformers'"),
        [
            [
                str(one.images),
                "x".join(map(str, one.size)),
                f"{1e3 * one.quire_s:.1f}",
                f"{1e3 * one.transformers_s:.1f}",
                f"{one.quire_s / one.transformers_s:.2f}",
            ]
            for one in results
        ],
    )


@click.command()
@click.option("--checkpoint", type=click.Path(path_type=Path), default=DEMO, show_default=True)
@click.option("--sizes", default="224x224,640x480,1920x1080,4000x3000", show_default=True)
@click.option("--images", default="1,4", show_default=True, help="In a prompt.")
@click.option("--rounds", default=15, show_default=True)
def main(checkpoint: Path, sizes: str, images: str, rounds: int) -> None:
    """Measures, writes JSON under benchmarks/out, prints a table."""
    pairs = [tuple(map(int, one.split("x"))) for one in sizes.split(",")]
    results = measure(checkpoint, [(w, h) for w, h in pairs], list(map(int, images.split(","))), rounds)
    out = report.output_directory()
    document = {"environment": machine.environment(), "results": [asdict(one) for one in results]}
    (out / "images.json").write_text(json.dumps(document, indent=1))
    click.echo(f"{table(results)}\n\n{out}")


if __name__ == "__main__":
    main()
