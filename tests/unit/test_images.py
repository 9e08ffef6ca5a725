"""Images of a request: every form and format decodes as with Pillow, and bad ones are refused in time."""

from __future__ import annotations

import base64
import dataclasses
import io
import re
import struct
import subprocess
import sys
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFile, ImageOps

from quire_common.errors import InputError
from quire_ensemble.images import MAX_SCANS, PILLOW_MAX_PIXELS, ImageLimits, read_image, split_pixels

LIMITS = ImageLimits()


def decode_image(raw: bytes | str, index: int, limits: ImageLimits) -> Image.Image:
    return read_image(raw, index, limits).decode()


def picture(width: int = 37, height: int = 23, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """A smooth random picture, so that lossy formats keep it recognisable."""
    rng = np.random.default_rng(seed)
    channels = {"RGBA": 4, "CMYK": 4, "L": 1, "LA": 2}.get(mode, 3)
    small = rng.integers(0, 256, (4, 5, channels), dtype=np.uint8)
    bands = [Image.fromarray(small[..., c]).resize((width, height)) for c in range(channels)]
    merged = Image.merge({1: "L", 2: "LA", 3: "RGB"}.get(channels, mode), bands)
    return merged.convert(mode) if merged.mode != mode else merged


def encode(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def png_claiming(width: int, height: int) -> bytes:
    """A PNG of a hundred bytes whose header states any size."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(bytes(1000)))
        + chunk(b"IEND", b"")
    )


def webp_claiming(width: int, height: int, kind: bytes) -> bytes:
    """The head of a WebP file whose header states any size."""
    if kind == b"VP8X":
        body = b"VP8X" + struct.pack("<I", 10) + bytes(4)
        body += (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
        still = (
            b"VP8L"
            + struct.pack("<I", 6)
            + b"\x2f"
            + ((width - 1) | (height - 1) << 14).to_bytes(5, "little")
        )
        body += still
    elif kind == b"VP8L":
        body = (
            b"VP8L"
            + struct.pack("<I", 12)
            + b"\x2f"
            + ((width - 1) | (height - 1) << 14).to_bytes(4, "little")
        )
        body += bytes(8)
    else:
        body = (
            b"VP8 " + struct.pack("<I", 20) + b"\x10\x00\x00\x9d\x01\x2a" + struct.pack("<HH", width, height)
        )
        body += bytes(10)
    return b"RIFF" + struct.pack("<I", len(body) + 4) + b"WEBP" + body


def refusal(raw: bytes | str, index: int = 0, limits: ImageLimits = LIMITS) -> str:
    with pytest.raises(InputError) as refused:
        decode_image(raw, index, limits)
    assert refused.value.field == f"image[{index}]"
    assert "\n" not in refused.value.reason
    return refused.value.reason


@pytest.mark.parametrize(
    ("mode", "kind", "options"),
    [
        ("RGB", "JPEG", {}),
        ("L", "JPEG", {}),
        ("CMYK", "JPEG", {}),
        ("RGB", "JPEG", {"progressive": True}),
        ("RGB", "PNG", {}),
        ("RGBA", "PNG", {}),
        ("LA", "PNG", {}),
        ("L", "PNG", {}),
        ("P", "PNG", {}),
        ("1", "PNG", {}),
        ("RGB", "WEBP", {}),
        ("RGBA", "WEBP", {"lossless": True}),
        ("P", "GIF", {}),
    ],
)
def test_every_form_of_every_format_decodes_as_pillow_does(
    mode: str, kind: str, options: dict[str, Any]
) -> None:
    raw = encode(picture(mode=mode), kind, **options)
    expected = Image.open(io.BytesIO(raw))
    text = base64.b64encode(raw)
    lines = base64.encodebytes(raw)
    forms: list[bytes | str] = [
        raw,
        text,
        text.decode(),
        lines,
        b"data:image/x-any;base64," + text,
        f"DATA:;charset=utf-8;BASE64,{lines.decode()}",
    ]
    for form in forms:
        image = decode_image(form, 0, LIMITS)
        assert image.mode == expected.mode
        assert image.size == (37, 23)
        assert np.array_equal(np.asarray(image), np.asarray(expected))


def test_of_an_animation_the_first_frame_is_taken() -> None:
    frames = [picture(mode="L", seed=seed) for seed in range(3)]
    for kind, options in (("GIF", {}), ("WEBP", {"lossless": True}), ("PNG", {})):
        raw = encode(frames[0], kind, save_all=True, append_images=frames[1:], **options)
        assert getattr(Image.open(io.BytesIO(raw)), "n_frames", 1) == 3
        decoded = np.asarray(decode_image(raw, 0, LIMITS).convert("L")).astype(int)
        assert abs(decoded - np.asarray(frames[0]).astype(int)).max() <= 2


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied_as_transformers_load_image_does(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    raw = encode(picture(), "PNG", exif=exif)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(raw)))
    decoded = decode_image(raw, 0, LIMITS)
    assert decoded.size == ((23, 37) if orientation > 4 else (37, 23))
    assert np.array_equal(np.asarray(decoded), np.asarray(expected))


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
@pytest.mark.parametrize(
    "exif", [b"Exif\0\0garbage", b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x02\0\0\0\x04oops"]
)
def test_unreadable_metadata_does_not_refuse_the_picture(exif: bytes) -> None:
    assert decode_image(encode(picture(), "JPEG", exif=exif), 0, LIMITS).size == (37, 23)


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "must not be empty"),
        ("", "must not be empty"),
        (b"hello, this is no image", "neither the bytes of an image"),
        (bytes(range(256)), "neither the bytes of an image"),
        ("schöne Grüße", "neither the bytes of an image"),
        (b"%PDF-1.7 ...", "neither the bytes of an image"),
        (
            b"aGVsbG8=",
            r"not an image of a known format \(JPEG, PNG, WEBP, GIF\); it begins with b'hello'",
        ),
        (b"aGVsbG8", "bad base64: Incorrect padding"),
        (b"iVBO" * 20 + b"*" + b"iVBO" * 20, "bad base64"),
        ("http://example.com/cat.png", "URLs are not fetched, this one begins with 'http:'"),
        ("https://example.com/cat.png", "URLs are not fetched, this one begins with 'https:'"),
        ("file:///etc/passwd", "URLs are not fetched, this one begins with 'file:'"),
        ("data:image/png,%89PNG", "a data: URL must have the form data:image/png;base64"),
        ("data:image/png;base64", "a data: URL must have the form data:image/png;base64"),
        ("data:image/png;base64,", "must not be empty"),
        (b" \n ", "must not be empty"),
        ("data:image/png;base64,http://example.com", "bad base64|neither"),
        (b"\x89PNG\r\n\x1a\n", "cannot be read as an image"),
        (b"GIF89a\0\0\0", "cannot identify image file the data"),
        (b"BM\x9e\0\0\0", r"\(JPEG, PNG, WEBP, GIF\) nor base64 text nor a data: URL; BMP is not supported"),
    ],
)
def test_what_is_no_image_is_refused_by_name(raw: bytes | str, reason: str) -> None:
    found = refusal(raw, index=3)
    assert re.search(reason, found) and "object at 0x" not in found


@pytest.mark.parametrize("kind", ["BMP", "TIFF", "ICO", "PPM", "JPEG2000"])
def test_other_formats_are_refused_though_pillow_reads_them(kind: str) -> None:
    """A small BMP of single runs of pixels took 2.8 s, as Pillow reads them in Python."""
    raw = encode(picture(64, 64), kind)
    assert Image.open(io.BytesIO(raw)).format == kind
    assert re.search("neither the bytes of an image|not an image of a known format", refusal(raw))
    assert "not an image of a known format" in refusal(base64.b64encode(raw))
    named = {"PPM": "it begins with", "JPEG2000": "it begins with"}.get(kind, f"{kind} is not supported")
    assert named in refusal(raw) and named in refusal(base64.b64encode(raw))


def test_sixteen_bit_grey_is_refused_for_pillow_would_clip_it_to_white() -> None:
    raw = encode(Image.fromarray(np.full((4, 4), 1000, dtype=np.uint16)), "PNG")
    assert np.asarray(Image.open(io.BytesIO(raw)).convert("RGB")).min() == 255, "what it would look like"
    assert refusal(raw).startswith("pixel format 'I;16' is not supported; known are 1, L, LA,")


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF"])
def test_cut_off_files_are_refused_at_every_length(kind: str) -> None:
    raw = encode(picture(200, 160), kind)
    for share in (0.02, 0.1, 0.3, 0.5, 0.8, 0.95):
        reason = refusal(raw[: int(len(raw) * share)])
        assert re.search("truncated or damaged|cannot be read as an image", reason)
    assert decode_image(raw, 0, LIMITS).size == (200, 160)


def test_damaged_files_never_raise_anything_else() -> None:
    rng = np.random.default_rng(5)
    outcomes = {"decoded": 0, "refused": 0}
    for kind in ("JPEG", "PNG", "WEBP", "GIF"):
        raw = encode(picture(60, 40), kind)
        for _ in range(60):
            damaged = bytearray(raw)
            for place in rng.integers(0, len(raw), 4):
                damaged[place] = rng.integers(256)
            try:
                decode_image(bytes(damaged), 0, LIMITS)
                outcomes["decoded"] += 1
            except InputError:
                outcomes["refused"] += 1
    assert min(outcomes.values()) > 20


def test_the_limit_on_bytes_holds_before_anything_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = encode(picture(300, 300), "PNG")
    exact, below = ImageLimits(max_image_bytes=len(raw)), ImageLimits(max_image_bytes=len(raw) - 1)
    text = base64.b64encode(raw)
    spread = b"\r\n".join(text[i : i + 8] for i in range(0, len(text), 8))
    for form in (raw, text, spread):
        assert decode_image(form, 0, exact).size == (300, 300)
    with monkeypatch.context() as patch:
        patch.setattr(base64, "b64decode", lambda *_, **__: pytest.fail("decoded"))
        patch.setattr(Image, "open", lambda *_, **__: pytest.fail("opened"))
        for form in (raw, text, spread, b"data:image/png;base64," + text):
            assert refusal(form, 1, below) == (
                f"{len(raw)} bytes, at most {len(raw) - 1} are allowed (max_image_bytes)"
            )
        # Not even white space is removed from text that is far too long.
        assert "bytes, at most 10 are allowed" in refusal(b" " * 1000, 1, ImageLimits(max_image_bytes=10))


def test_the_limit_on_pixels_names_both_numbers() -> None:
    raw = encode(picture(100, 50), "PNG")
    assert decode_image(raw, 0, ImageLimits(max_image_pixels=5000)).size == (100, 50)
    assert refusal(raw, 2, ImageLimits(max_image_pixels=4999)) == (
        "100 x 50 = 5000 pixels, at most 4999 are allowed (max_image_pixels)"
    )


@pytest.mark.row("H1")
@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (png_claiming(50_000, 50_000), "pixels, at most 33554432 are allowed"),
        (png_claiming(12_000, 12_000), "12000 x 12000 = 144000000 pixels, at most 33554432 are allowed"),
        (png_claiming(6_000, 6_000), "6000 x 6000 = 36000000 pixels, at most 33554432 are allowed"),
        (webp_claiming(16_383, 16_383, b"VP8X"), "16383 x 16383 = 268402689 pixels, at most 33554432"),
        (webp_claiming(16_383, 16_383, b"VP8L"), "16383 x 16383 = 268402689 pixels, at most 33554432"),
        (webp_claiming(16_383, 16_383, b"VP8 "), "16383 x 16383 = 268402689 pixels, at most 33554432"),
    ],
)
def test_a_decompression_bomb_is_refused_by_its_header_and_takes_no_memory(raw: bytes, reason: str) -> None:
    """Decoded it would take 150 MB and more; in a process of its own, so that the peak is this image's."""
    assert len(raw) < 200
    program = (
        "import sys\n"
        "from PIL import Image\n"
        "from quire_common.errors import InputError\n"
        "from quire_ensemble.images import ImageLimits, read_image\n"
        "raw = sys.stdin.buffer.read()\n"
        "Image.init()\n"
        "def peak(): return next(int(l.split()[1]) for l in open('/proc/self/status') if 'VmPeak' in l)\n"
        "before, reason = peak(), ''\n"
        "try: read_image(raw, 0, ImageLimits()).decode()\n"
        "except InputError as error: reason = error.reason\n"
        "print(peak() - before, reason)\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], input=raw, capture_output=True, check=True)
    grown, _, said = ran.stdout.decode().strip().partition(" ")
    assert reason in said
    assert int(grown) < 20_000, "KiB of address space"


def test_a_jpeg_of_many_scans_is_refused_by_its_markers() -> None:
    """A progressive file may have a scan of a few bytes for each of thousands of passes over all pixels."""
    raw = encode(picture(64, 64), "JPEG", progressive=True)
    assert 1 < raw.count(b"\xff\xda") <= 12
    assert decode_image(raw, 0, LIMITS).size == (64, 64)
    start = raw.rindex(b"\xff\xda")
    scan = raw[start : raw.rindex(b"\xff\xd9")]
    assert (
        refusal(raw[:start] + scan * MAX_SCANS + raw[start:], 0, LIMITS)
        == "a JPEG file of more than 100 scans"
    )


def _chunk(name: bytes) -> bytes:
    return struct.pack(">I", 0) + name + struct.pack(">I", zlib.crc32(name))


@pytest.mark.parametrize(
    ("kind", "at", "part"),
    [
        ("JPEG", 2, b"\xff\xe1\0\x0aExif\0\0xx"),
        ("JPEG", 2, b"\xff\xef\0\2"),
        ("JPEG", 2, b"\xff"),
        ("PNG", 33, _chunk(b"abCd")),
        ("PNG", -12, _chunk(b"abCd")),
        ("GIF", None, b"!\xfe\1x\0"),
    ],
    ids=["EXIF", "segments", "padding", "chunks before pixels", "chunks after pixels", "comments"],
)
def test_a_file_of_many_tiny_parts_is_refused(kind: str, at: int | None, part: bytes) -> None:
    """Pillow takes minutes for 20 MiB of EXIF segments, and gigabytes for the comments of three GIF files."""
    raw = encode(picture(), kind)
    if at is None:
        at = 13 + (3 << (raw[10] & 7) + 1 if raw[10] & 128 else 0)
    for count in (100, 200_000):
        damaged = raw[:at] + part * count + raw[at:]
        if count == 100:
            assert decode_image(damaged, 0, LIMITS).size == (37, 23)
        else:
            assert refusal(damaged, 0, LIMITS) == "a file of too many small parts"


def test_a_file_of_many_parts_of_a_usual_size_is_decoded() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (1000, 1000, 3), dtype=np.uint8)
    for kind in ("PNG", "GIF", "JPEG", "WEBP"):
        options = {"icc_profile": bytes(5_000_000)} if kind == "JPEG" else {}
        assert decode_image(encode(Image.fromarray(noise), kind, **options), 0, LIMITS).size == (1000, 1000)


def test_reading_the_header_decodes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a request's images are added up before memory is taken for the first of them."""
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda *_: pytest.fail("decoded"))
    for kind in ("PNG", "JPEG", "WEBP", "GIF"):
        assert read_image(encode(picture(30, 20), kind), 0, LIMITS).size == (30, 20)


def test_limits_are_checked_themselves() -> None:
    for name in (field.name for field in dataclasses.fields(ImageLimits)):
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
            ImageLimits(**{name: 0})
    with pytest.raises(ValueError, match=f"max_image_pixels must be at most {PILLOW_MAX_PIXELS}"):
        ImageLimits(max_image_pixels=PILLOW_MAX_PIXELS + 1)


def test_an_array_of_pixels_becomes_images() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3, 5, 3, 3), dtype=np.uint8)
    images = split_pixels(pixels[:, :, ::-1], LIMITS)
    assert [image.size for image in images] == [(3, 5)] * 3
    assert np.array_equal(np.stack([np.asarray(image) for image in images]), pixels[:, :, ::-1])
    assert split_pixels(np.zeros((0, 5, 3, 3), dtype=np.uint8), LIMITS) == []


@pytest.mark.parametrize(
    ("pixels", "reason"),
    [
        (np.zeros((1, 4, 4, 3), np.float32), "must be UINT8, got float32"),
        (np.zeros((4, 4, 3), np.uint8), "must have shape [n, height, width, 3], got [4, 4, 3]"),
        (np.zeros((1, 4, 4, 4), np.uint8), "must have shape [n, height, width, 3], got [1, 4, 4, 4]"),
        (np.zeros((1, 0, 4, 3), np.uint8), "must have shape [n, height, width, 3], got [1, 0, 4, 3]"),
        (
            np.zeros((1, 7, 15, 3), np.uint8),
            "15 x 7 = 105 pixels, at most 100 are allowed (max_image_pixels)",
        ),
    ],
)
def test_a_wrong_array_is_refused(pixels: np.ndarray, reason: str) -> None:
    with pytest.raises(InputError) as refused:
        split_pixels(pixels, ImageLimits(max_image_pixels=100))
    assert (refused.value.field, refused.value.reason) == ("image_pixels", reason)


def test_too_many_images_in_an_array_are_refused() -> None:
    with pytest.raises(InputError, match=r"image: 3 images, at most 2 are allowed \(max_images\)"):
        split_pixels(np.zeros((3, 4, 4, 3), np.uint8), ImageLimits(max_images=2))


@pytest.mark.parametrize("kind", [b"VP8X", b"VP8L", b"VP8 "])
def test_the_sides_of_a_webp_are_told_apart(kind: bytes) -> None:
    """Each form has them in bits of its own; bombs that are square said nothing about the second one."""
    with pytest.raises(InputError, match=r"16383 x 4000 = 65532000 pixels"):
        decode_image(webp_claiming(16_383, 4000, kind), 0, ImageLimits())
