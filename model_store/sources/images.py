"""Decode images with Pillow for training and the service.

PNG, JPEG, WebP and BMP files with 8 bits per channel become pixels from 0 to 255, of shape (H, W)
for grey images and (3, H, W) for colour. Colour is converted to grey with ITU-R 601 luma.
Transparency and orientation tags are ignored. Images are resized like torchvision's `Resize` and
`CenterCrop`. Limits on pixels, scans and reads bound memory and time.
"""

import base64
import io
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageFile, PngImagePlugin

from model_store.artifacts.manifest import ImageSpec
from model_store.errors import InvalidInput, describe_value
from model_store.overrides import Override

FORMATS = ("PNG", "JPEG", "WEBP", "BMP")  # in requests; training accepts more
MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr")  # 8 bits per channel
GREY_MODES = ("1", "L", "LA")
MAX_SIDE = 65_535  # pixels, the limit of JPEG
MAX_PIXELS = 1 << 25  # per image
AT_MOST = f"an image of at most {MAX_PIXELS} pixels"
MAX_SCANS = 100  # per JPEG file; encoders write up to a dozen
BMP_RUN_LENGTHS = (1, 2)  # compressions that Pillow decodes slowly, in Python
RESAMPLING = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
SCANS_PER_PASS = 10  # scans of a usual progressive image
JPEG_START = b"\xff\xd8"
JPEG_SCAN = b"\xff\xda"  # does not occur in coded pixels
# Upper bounds: 64 JPEG pixels take at least a bit, and deflate has a ratio of 1,032
PIXELS_PER_BYTE = {"JPEG": 512, "MPO": 512, "PNG": 8 * 1032}
MAX_READS = 100_000  # per file; Pillow makes about four per part
MAX_TEXT_BYTES = 1 << 22  # of uncompressed text chunks in PNG files
# Upper bounds per pixel; the WebP decoder needs two frames
DECODED_BYTES = {"PNG": 10, "BMP": 10, "JPEG": 14, "MPO": 14, "WEBP": 18}
RESIZED_BYTES = 10  # per pixel of `resized_pixels`
SIDE_BYTES = 64  # per row and column
DECODER_BYTES = 1 << 16  # per image

_short_texts = Override(
    lambda: PngImagePlugin.MAX_TEXT_MEMORY,
    partial(setattr, PngImagePlugin, "MAX_TEXT_MEMORY"),
    MAX_TEXT_BYTES,
)


class BoundedFile(io.BytesIO):
    """A file that can be read only a limited number of times.

    Otherwise a small file with many tiny parts could keep Pillow busy for minutes.
    """

    def __init__(self, content: bytes) -> None:
        super().__init__(content)
        self._reads = 0

    def read(self, size: int | None = -1) -> bytes:
        self._reads += 1
        if self._reads > MAX_READS:
            raise ValueError("too many parts")
        return super().read(size)


def image_content(row: Any, field: str) -> bytes:
    if isinstance(row, bytes):
        return row
    if not isinstance(row, str):
        expected = "base64 of an image file, like the previous row"
        raise InvalidInput(field, expected, describe_value(row))
    try:
        return base64.b64decode(row, validate=True)
    except ValueError:  # binascii.Error, or not ASCII
        expected = "base64 of an image file"
        raise InvalidInput(field, expected, f"{describe_value(row)} that is not base64") from None


def open_image(
    content: bytes, field: str, formats: tuple[str, ...] = FORMATS
) -> ImageFile.ImageFile:
    """Open an image and check its size and format without decoding it."""
    expected = f"a {', '.join(formats[:-1])} or {formats[-1]} file"
    try:
        with _short_texts:
            image = Image.open(BoundedFile(content), formats=formats)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise InvalidInput(field, AT_MOST, "a larger one") from None
    except Exception:  # Pillow raises many types for damaged headers
        raise InvalidInput(field, expected, "something else") from None
    if image.width * image.height > MAX_PIXELS:
        raise InvalidInput(field, AT_MOST, f"{image.width} x {image.height}")
    if max(image.size) > MAX_SIDE:
        expected = f"an image of at most {MAX_SIDE} pixels a side"
        raise InvalidInput(field, expected, f"{image.width} x {image.height}")
    if content.startswith(JPEG_START):
        scans = _count_scans(image)
        if scans > MAX_SCANS:
            raise InvalidInput(field, f"a JPEG file of at most {MAX_SCANS} scans", f"{scans}")
    ratio = PIXELS_PER_BYTE.get(str(image.format), MAX_PIXELS)
    if image.width * image.height > ratio * len(content):
        raise _broken(image, field)
    if image.format == "BMP" and image.info.get("compression") in BMP_RUN_LENGTHS:
        raise InvalidInput(field, "a BMP file of plain pixels", "one of run lengths")
    if image.mode not in MODES:
        raise InvalidInput(field, "an image of 8 bits a channel", f"one of mode {image.mode}")
    return image


def decoded_pixels(image: ImageFile.ImageFile) -> int:
    """Return the number of pixels to decode, counted once for each pass over the image."""
    return image.width * image.height * -(-_count_scans(image) // SCANS_PER_PASS)


def _count_scans(image: ImageFile.ImageFile) -> int:
    """Return an upper bound on the number of scans in a JPEG file, or 1 for other formats.

    Each scan of a progressive image (ISO/IEC 10918-1, annex B) can process all pixels again.
    """
    assert isinstance(image.fp, io.BytesIO)
    content = image.fp.getvalue()
    if not content.startswith(JPEG_START):
        return 1
    if image.format == "JPEG":  # the first scan's header was read
        return 1 + content.count(JPEG_SCAN, image.fp.tell())
    return max(1, content.count(JPEG_SCAN))


def resized_pixels(image: Image.Image, shape: tuple[int, ...], spec: ImageSpec, field: str) -> int:
    """Count the pixels that resizing computes, for the intermediate and the final image."""
    width, height = size = _size(image, shape, spec)
    if size == image.size:
        return 0
    if spec.shorter is not None and width * height > MAX_PIXELS:
        expected = f"{AT_MOST} once its shorter side has {spec.shorter}"
        raise InvalidInput(field, expected, f"one of {image.width} x {image.height}")
    return width * (image.height + height)


def decoding_bytes(image: ImageFile.ImageFile, resized: int) -> int:
    """Return an upper bound on the memory needed to decode an image, in bytes."""
    decoded = DECODED_BYTES[str(image.format)] * image.width * image.height
    sides = SIDE_BYTES * (image.width + image.height)
    return decoded + RESIZED_BYTES * resized + sides + DECODER_BYTES


def _size(image: Image.Image, shape: tuple[int, ...], spec: ImageSpec) -> tuple[int, int]:
    if spec.shorter is not None:
        return proportional_size(image.size, spec.shorter)
    return shape[-1], shape[-2]


def proportional_size(size: tuple[int, int], shorter: int) -> tuple[int, int]:
    """Return (width, height) after resizing the shorter side, rounded as in torchvision."""
    width, height = size
    longer = int(shorter * max(size) / min(size))
    return (shorter, longer) if width <= height else (longer, shorter)


def pixels(
    image: ImageFile.ImageFile, shape: tuple[int, ...], spec: ImageSpec, field: str
) -> UInt8[np.ndarray, "I"]:
    """Decode an image to the model's colour mode and shape and flatten it."""
    size = (shape[-1], shape[-2])
    if image.size != size and not spec.resize:
        expected = f"an image of {size[0]} x {size[1]} pixels (width x height)"
        raise InvalidInput(field, expected, f"{image.width} x {image.height}")
    resized_pixels(image, shape, spec, field)
    try:
        return image_row(image, shape, spec)
    except Exception:  # Pillow raises many types for damaged pixels
        raise _broken(image, field) from None


def _broken(image: ImageFile.ImageFile, field: str) -> InvalidInput:
    return InvalidInput(field, f"a whole {image.format} image", "missing or broken pixels")


def image_row(
    image: Image.Image, shape: tuple[int, ...], spec: ImageSpec
) -> UInt8[np.ndarray, "I"]:
    """Convert an image to the model's colour mode, resize it and flatten it."""
    width, height = shape[-1], shape[-2]
    with _short_texts:
        converted = image.convert(spec.mode)
    size = _size(converted, shape, spec)
    if converted.size != size:
        converted = converted.resize(size, RESAMPLING[spec.interpolation])
    if size != (width, height):
        left, top = round((size[0] - width) / 2.0), round((size[1] - height) / 2.0)
        converted = converted.crop((left, top, left + width, top + height))
    decoded = np.asarray(converted, dtype=np.uint8)
    return (decoded if spec.mode == "L" else decoded.transpose(2, 0, 1)).reshape(-1)
