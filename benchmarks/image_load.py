"""What images do to text: inter-token latency of text streams with and without image requests beside them.

    python -m benchmarks.image_load --url localhost:8001 --model vision_chat

Alternates quiet and loaded rounds on one server (A-B-A-B). Every image is another one, so each costs a run of
the encoder; all requests go through the same ensemble and the same engine.
"""

from __future__ import annotations

import io
import itertools
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import click
from PIL import Image, ImageDraw

from benchmarks.report import environment, hardware_note, percentile
from quire_client import Client


def drawing(rng: random.Random, side: int) -> bytes:
    """A PNG that no other call has made."""
    image = Image.new("RGB", (side, side), tuple(rng.randrange(256) for _ in range(3)))
    draw = ImageDraw.Draw(image)
    x, y = rng.randrange(side // 2), rng.randrange(side // 2)
    draw.ellipse((x, y, x + side // 3, y + side // 3), fill=tuple(rng.randrange(256) for _ in range(3)))
    image.putpixel((0, 0), tuple(rng.randrange(256) for _ in range(3)))
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def text_gaps(client: Client, model: str, max_tokens: int) -> list[float]:
    """Seconds between the responses of one text stream."""
    times = []
    for chunk in client.stream(
        messages=[{"role": "user", "content": "Hello"}], model=model, max_tokens=max_tokens, ignore_eos=True
    ):
        if chunk.token_ids:
            times.append(time.perf_counter())
    return [b - a for a, b in itertools.pairwise(times)]


@click.command()
@click.option("--url", default="localhost:8001", show_default=True)
@click.option("--model", default="vision_chat", show_default=True)
@click.option("--streams", default=8, show_default=True, help="Text streams at once.")
@click.option("--clients", default=4, show_default=True, help="Image requests at once.")
@click.option("--max-tokens", default=128, show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--side", default=256, show_default=True, help="Pixels of an image's side.")
def main(url: str, model: str, streams: int, clients: int, max_tokens: int, rounds: int, side: int) -> None:
    """Prints the inter-token latency of text without and with images."""
    client = Client(url)
    rng = random.Random(time.time_ns())
    gaps: dict[str, list[float]] = {"text alone": [], "text beside images": []}
    answered = 0
    loaded_seconds = 0.0

    def ask_about_images(stop: threading.Event) -> int:
        count = 0
        while not stop.is_set():
            client.chat("What is in the picture?", images=[drawing(rng, side)], model=model, max_tokens=32)
            count += 1
        return count

    def round_of_text() -> list[float]:
        with ThreadPoolExecutor(streams) as pool:
            found = pool.map(lambda _: text_gaps(client, model, max_tokens), range(streams))
            return [gap for gaps in found for gap in gaps]

    round_of_text()
    for _ in range(rounds):
        gaps["text alone"] += round_of_text()
        stop = threading.Event()
        with ThreadPoolExecutor(clients) as pool:
            counts = [pool.submit(ask_about_images, stop) for _ in range(clients)]
            began = time.perf_counter()
            gaps["text beside images"] += round_of_text()
            loaded_seconds += time.perf_counter() - began
            stop.set()
            answered += sum(count.result() for count in counts)
    click.echo("| load | gaps | ITL p50 ms | p90 | p99 | max |\n| --- | ---: | ---: | ---: | ---: | ---: |")
    for load, seconds in gaps.items():
        cells = [f"{percentile(seconds, q) * 1e3:.1f}" for q in (50, 90, 99, 100)]
        click.echo(f"| {load} | {len(seconds)} | {' | '.join(cells)} |")
    click.echo(
        f"\n{streams} text streams of {max_tokens} tokens; {clients} image clients, {side} x {side} pixels, "
        f"{answered} images answered in {loaded_seconds:.1f} s.\n{hardware_note(environment())}"
    )


if __name__ == "__main__":
    main()
