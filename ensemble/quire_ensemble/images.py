"""Images of a request: encoded bytes, base64 text or data URLs, checked and decoded.

Limits are checked before the work they bound: the length of base64 text before it is decoded, the number of
encoded bytes before Pillow reads them, width and height (which the header states) before pixels are decoded.
URLs are not fetched. Importing this module does not import Pillow.
"""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass, fields
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np

from quire_common.errors import InputError, ParameterError, one_line

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("JPEG", "PNG", "WEBP", "GIF")
"""Accepted file formats. Pillow decodes their pixels in compiled code. It decodes many other formats, such as
BMP with run lengths, in Python, where a small file may take seconds."""
_REFUSED = {b"BM": "BMP", b"II*\0": "TIFF", b"MM\0*": "TIFF", b"\0\0\1\0": "ICO"}
"""Names of some other file formats, for error messages, by the first bytes of a file."""
MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK")
"""Accepted pixel formats, by Pillow's names. 16-bit grey (I;16) is not accepted, because Pillow clips it to
white where it makes RGB of it."""
PILLOW_MAX_PIXELS = 178_956_970
"""Largest allowed value of `ImageLimits.max_image_pixels`. Pillow itself refuses larger images."""

MAX_SCANS = 100
"""Most scans of a JPEG file. Each may cost a pass over all pixels, however few bytes it has. Encoders of
progressive files make about a dozen."""
MAX_HEADER_READS = 4096
"""Most reads by Pillow while it opens an image file. It makes about four for each segment of a JPEG file (a
large profile or XMP may have hundreds of them), two for each block of a GIF comment."""
_BYTES_PER_READ = 64
"""While the pixels of an open file are decoded, Pillow may make one read for so many bytes of the file, and
MAX_HEADER_READS more."""

_SIGNATURE = re.compile(rb"\xff\xd8\xff|\x89PNG\r\n\x1a\n|RIFF....WEBP|GIF8[79]a", re.DOTALL)
_URL = re.compile(rb"[A-Za-z][A-Za-z0-9+.-]*:")
_BASE64 = re.compile(rb"[A-Za-z0-9+/=]+")
_DATA_HEADER = 256
# Values of the EXIF tag Orientation, by names of Pillow's Transpose.
_UPRIGHT = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}


@dataclass(frozen=True)
class ImageLimits:
    """Limits of one request.

    max_image_bytes: encoded size of one image, before base64.
    max_image_pixels: width times height of one image. It also bounds the pixels of all requests to a model
        instance that are processed at a time, at about 20 bytes each. An image that scaling makes larger than
        that is processed all the same, alone.
    max_images: images in one prompt.
    max_request_bytes: encoded size of all images of a request.
    max_request_pixels: pixels of all images of a request. If the image processor scales or pads images to
        sizes that grow with them, the larger one of an image's sizes before and after that counts.
    max_request_patches: patches that the vision encoder computes for all images of a request.
    """

    max_image_bytes: int = 20 * 2**20
    max_image_pixels: int = 33_554_432
    max_images: int = 16
    max_request_bytes: int = 64 * 2**20
    max_request_pixels: int = 67_108_864
    max_request_patches: int = 65_536

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 1:
                raise ParameterError(f"{field.name} must be at least 1, got {getattr(self, field.name)}")
        if self.max_image_pixels > PILLOW_MAX_PIXELS:
            raise ParameterError(
                f"max_image_pixels must be at most {PILLOW_MAX_PIXELS}, got {self.max_image_pixels}"
            )


@dataclass(frozen=True)
class EncodedImage:
    """An image file whose header has been read."""

    data: bytes
    size: tuple[int, int]
    """Width and height in pixels, before the EXIF orientation is applied."""
    field: str
    """Name of the field in errors."""

    def decode(self) -> Image:
        """Decodes and returns the image, upright, in one of MODES.

        The EXIF orientation is applied, as transformers does where it loads an encoded image itself
        (`load_image`); its image processors get decoded images and know nothing of it. Of an animation, only
        the first frame is decoded.

        Raises:
            InputError: the image has another mode, is truncated or damaged, is stored in too many small
                parts, or has another size than its header said.
        """
        from PIL import Image as pil

        file = _BoundedFile(self.data, self.field)
        image = _open(file)
        file.reads_left = MAX_HEADER_READS + len(self.data) // _BYTES_PER_READ
        if image.size != self.size:
            raise InputError(self.field, f"damaged: {image.size} pixels, the header says {self.size}")
        if image.mode not in MODES:
            raise InputError(
                self.field, f"pixel format {image.mode!r} is not supported; known are {', '.join(MODES)}"
            )
        try:
            image.load()
        except (InputError, MemoryError):
            raise
        except Exception as error:
            raise InputError(self.field, f"truncated or damaged: {_one_line(error)}") from None
        turn = _UPRIGHT.get(_orientation(image))
        return image if turn is None else image.transpose(pil.Transpose[turn])


def read_image(raw: bytes | str, index: int, limits: ImageLimits) -> EncodedImage:
    """Reads the header of an image of a request, and checks its size. No pixels are decoded.

    Args:
        raw: the bytes of a file of FORMATS, base64 text of them, or a `data:` URL with base64.
        index: number of the image in its prompt, for errors.

    Raises:
        InputError: of field `image[index]`: `raw` is empty, exceeds one of `limits` (the message names it
            with its value), is a URL that would have to be fetched, is wrong base64 or no image of FORMATS,
            or has too many scans or small parts.
    """
    field = f"image[{index}]"
    encoded = _encoded_bytes(raw, field, limits)
    if _SIGNATURE.match(encoded) is None:
        raise InputError(
            field, f"not an image of a known format ({', '.join(FORMATS)}); {_beginning(encoded)}"
        )
    # Pillow's WebP decoder allocates the whole canvas when it reads the header.
    size = _webp_canvas(encoded)
    if size is None:
        # Data escapes these bytes, so that they are a marker; metadata may hold a few more.
        if encoded[:2] == b"\xff\xd8" and encoded.count(b"\xff\xda") > MAX_SCANS:
            raise InputError(field, f"a JPEG file of more than {MAX_SCANS} scans")
        image = _open(_BoundedFile(encoded, field), limits.max_image_pixels)
        size = image.width, image.height
    _check_pixels(*size, field, limits)
    return EncodedImage(encoded, size, field)


class _BoundedFile(BytesIO):
    """An image file that allows a bounded number of calls of `read`, and raises InputError after them.
    Pillow reads each part of a file in Python and keeps it (joining EXIF data anew with each part), so a file
    of many tiny parts could take minutes."""

    def __init__(self, encoded: bytes, field: str) -> None:
        super().__init__(encoded)
        self.field = field
        self.reads_left = MAX_HEADER_READS

    def read(self, size: int | None = -1, /) -> bytes:
        if not self.reads_left:
            raise InputError(self.field, "a file of too many small parts")
        self.reads_left -= 1
        return super().read(size)


def _open(file: _BoundedFile, max_pixels: int = PILLOW_MAX_PIXELS) -> Any:
    """Opens an image with Pillow, which reads its header, but does not decode its pixels. Raises InputError
    for a file that Pillow refuses. `max_pixels` is the limit named in the message for too large an image."""
    from PIL import Image as pil

    field = file.field
    try:
        return pil.open(file, formats=FORMATS)
    except InputError:
        raise
    except pil.DecompressionBombError:
        raise InputError(
            field,
            f"more than {PILLOW_MAX_PIXELS} pixels, at most {max_pixels} are allowed (max_image_pixels)",
        ) from None
    except MemoryError:
        raise
    except Exception as error:  # decoders raise whatever a damaged file makes them raise
        raise InputError(field, f"cannot be read as an image: {_one_line(error)}") from None


def split_pixels(pixels: np.ndarray, limits: ImageLimits) -> list[Image]:
    """Returns the images (mode RGB) in an array.

    Args:
        pixels: uint8 [n, height, width, 3].

    Raises:
        InputError: the type or shape is wrong, there are too many images, or each has too many pixels.
    """
    from PIL import Image as pil

    field = "image_pixels"
    if pixels.dtype != np.uint8:
        raise InputError(field, f"must be UINT8, got {pixels.dtype}")
    if pixels.ndim != 4 or pixels.shape[3] != 3 or 0 in pixels.shape[1:3]:
        raise InputError(field, f"must have shape [n, height, width, 3], got {list(pixels.shape)}")
    check_count(len(pixels), limits)
    _check_pixels(pixels.shape[2], pixels.shape[1], field, limits)
    return [pil.fromarray(np.ascontiguousarray(one)) for one in pixels]


def check_total(name: str, total: int, limits: ImageLimits) -> None:
    """Raises InputError where the images of a request exceed the limit `name` of `ImageLimits`."""
    most = getattr(limits, name)
    if total > most:
        noun = name.rpartition("_")[2]
        raise InputError(
            "image", f"more than {most} {noun} in the images of the request are not allowed ({name})"
        )


def check_count(count: int, limits: ImageLimits) -> None:
    """Raises InputError where a prompt has more images than allowed."""
    if count > limits.max_images:
        raise InputError("image", f"{count} images, at most {limits.max_images} are allowed (max_images)")


def _check_pixels(width: int, height: int, field: str, limits: ImageLimits) -> None:
    if width * height > limits.max_image_pixels:
        raise InputError(
            field,
            f"{width} x {height} = {width * height} pixels, at most {limits.max_image_pixels} are allowed "
            "(max_image_pixels)",
        )


def _encoded_bytes(raw: bytes | str, field: str, limits: ImageLimits) -> bytes:
    """Returns the bytes of an image file that comes as such, as base64 text or as a `data:` URL with base64.
    Raises InputError for other input, and for more bytes than `limits` allow."""
    data = raw.encode("utf-8", "replace") if isinstance(raw, str) else raw
    if not data:
        raise InputError(field, "must not be empty")
    if _SIGNATURE.match(data) is None:
        data = _decode_base64(_base64_text(data, field), field, limits)
    if len(data) > limits.max_image_bytes:
        raise InputError(field, _too_long(len(data), limits))
    return data


def _base64_text(data: bytes, field: str) -> bytes:
    """Returns the base64 text in the data: all of it, or what follows the header of a data URL. Raises
    InputError for a malformed data URL, and for data that begins like another URL."""
    if data[:5].lower() == b"data:":
        header, comma, _ = data[:_DATA_HEADER].partition(b",")
        if not comma or not header.lower().endswith(b";base64"):
            raise InputError(field, "a data: URL must have the form data:image/png;base64,...")
        return data[len(header) + 1 :]
    scheme = _URL.match(data[:32])
    if scheme is not None:
        raise InputError(
            field,
            f"URLs are not fetched, this one begins with {scheme.group().decode()!r}; "
            "send the image's bytes, base64 text or a data: URL",
        )
    return data


def _decode_base64(text: bytes, field: str, limits: ImageLimits) -> bytes:
    # Twice the size leaves room for line breaks.
    if len(text) > 2 * limits.max_image_bytes + 8:
        raise InputError(field, _too_long(len(text) * 3 // 4, limits))
    text = text.translate(None, b" \t\r\n")
    if not text:
        raise InputError(field, "must not be empty")
    size = len(text) * 3 // 4 - text[-2:].count(b"=")
    if size > limits.max_image_bytes:
        raise InputError(field, _too_long(size, limits))
    if _BASE64.fullmatch(text[:64]) is None:
        raise InputError(
            field,
            f"neither the bytes of an image ({', '.join(FORMATS)}) nor base64 text nor a data: URL; "
            f"{_beginning(text)}",
        )
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise InputError(field, f"bad base64: {_one_line(error)}") from None


def _beginning(data: bytes) -> str:
    """Describes data in none of FORMATS, for an error: by the name of its format if that is in _REFUSED, else
    by its first bytes."""
    named = [name for magic, name in _REFUSED.items() if data.startswith(magic)]
    return f"{named[0]} is not supported" if named else f"it begins with {data[:8]!r}"


def _webp_canvas(encoded: bytes) -> tuple[int, int] | None:
    """Returns the width and height that the header of a WebP file states; None for other files, and for a
    WebP file that is too short to state them."""
    if encoded[:4] != b"RIFF" or len(encoded) < 30:
        return None
    chunk = encoded[12:16]
    if chunk == b"VP8X":
        width, height = (int.from_bytes(encoded[at : at + 3], "little") + 1 for at in (24, 27))
        return width, height
    if chunk == b"VP8L":
        bits = int.from_bytes(encoded[21:25], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    width, height = (int.from_bytes(encoded[at : at + 2], "little") & 0x3FFF for at in (26, 28))
    return width, height


def _orientation(image: Any) -> int:
    try:
        return int(image.getexif().get(0x0112, 1))
    except Exception:  # metadata that cannot be read states no orientation
        return 1


def _too_long(size: int, limits: ImageLimits) -> str:
    return f"{size} bytes, at most {limits.max_image_bytes} are allowed (max_image_bytes)"


def _one_line(error: Exception) -> str:
    # Pillow's messages show the file object with its address.
    return re.sub(r"<[\w.]+ object at 0x[0-9a-fA-F]+>", "the data", one_line(error))
