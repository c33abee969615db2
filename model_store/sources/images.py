"""Images as rows: one decoding for training and for the service.

PNG, JPEG, WebP and BMP files of 8 bits a channel become rows of pixels from 0 to 255. Grey rows
have shape (H, W), colour rows (3, H, W). An image is converted to the model's mode (colour to grey
by ITU-R 601 luma); transparency is dropped, and orientation tags are ignored. An image of another
size is stretched, or resized in proportion and cropped like torchvision's `Resize` and `CenterCrop`
do with Pillow's images.

Pillow reads the files. Bounds on pixels, scans and reads limit the memory and time of a file.
"""

import base64
import io
from typing import Any

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageFile, PngImagePlugin

from model_store.artifacts.manifest import ImageSpec
from model_store.errors import InvalidInput, describe_value

FORMATS = ("PNG", "JPEG", "WEBP", "BMP")  # of requests; training reads others too
MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr")  # of 8 bits a channel
GREY_MODES = ("1", "L", "LA")
MAX_SIDE = 65_535  # pixels: JPEG's own limit; longer ones cost far more than their pixels to resize
MAX_PIXELS = 1 << 25  # of one image: 33 million, more than cameras' 24
MAX_SCANS = 100  # of a JPEG file: encoders write up to a dozen
BMP_RUN_LENGTHS = (1, 2)  # kinds of compression that are decoded a run at a time, in Python
RESAMPLING = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
SCANS_PER_PASS = 10  # that count as one pass over the pixels: usual in a progressive image
JPEG_START = b"\xff\xd8"
JPEG_SCAN = b"\xff\xda"  # coded pixels contain no such bytes
# Upper bounds: 64 pixels of a JPEG file take a bit or more, and deflate has a ratio of 1,032
PIXELS_PER_BYTE = {"JPEG": 512, "MPO": 512, "PNG": 8 * 1032}
MAX_READS = 100_000  # of a file: Pillow makes about four for each part of it
PngImagePlugin.MAX_TEXT_MEMORY = 1 << 22  # bytes of a file's texts, once inflated
# Upper bounds for decoding and converting a pixel; WebP's decoder keeps two frames
DECODED_BYTES = {"PNG": 10, "BMP": 10, "JPEG": 14, "MPO": 14, "WEBP": 18}
RESIZED_BYTES = 10  # per pixel of `resized_pixels`
SIDE_BYTES = 64  # per row and column
DECODER_BYTES = 1 << 16  # per image


class BoundedFile(io.BytesIO):
    """A file's content that can be read `MAX_READS` times.

    Pillow goes over the parts of a file one by one, and a part takes a few bytes. Without a bound a
    small file of many parts keeps a processor busy for minutes.
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
    """Return an image file's content from bytes or base64."""
    if isinstance(row, bytes):
        return row
    if not isinstance(row, str):
        raise InvalidInput(
            field, "base64 of an image file, as the row before it", describe_value(row)
        )
    try:
        return base64.b64decode(row, validate=True)
    except ValueError:  # binascii.Error, or text beyond ASCII
        expected = "base64 of an image file"
        raise InvalidInput(field, expected, f"{describe_value(row)} that is not base64") from None


def open_image(
    content: bytes, field: str, formats: tuple[str, ...] = FORMATS
) -> ImageFile.ImageFile:
    """Read an image's header; `pixels` decodes its pixels."""
    expected = f"a {', '.join(formats[:-1])} or {formats[-1]} file"
    try:
        image = Image.open(BoundedFile(content), formats=formats)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise InvalidInput(
            field, f"an image of at most {MAX_PIXELS} pixels", "a larger one"
        ) from None
    except Exception:  # Pillow raises many kinds for damaged headers
        raise InvalidInput(field, expected, "something else") from None
    if image.width * image.height > MAX_PIXELS:
        raise InvalidInput(
            field, f"an image of at most {MAX_PIXELS} pixels", f"{image.width} x {image.height}"
        )
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
    """Return how many pixels decoding processes; many scans process them several times."""
    return image.width * image.height * -(-_count_scans(image) // SCANS_PER_PASS)


def _count_scans(image: ImageFile.ImageFile) -> int:
    """Return how many scans a JPEG file has at most; 1 for other files.

    Each scan of a progressive image (ISO/IEC 10918-1, annex B) may go over all pixels again and
    takes a few bytes.
    """
    assert isinstance(image.fp, io.BytesIO)
    content = image.fp.getvalue()
    if not content.startswith(JPEG_START):
        return 1
    if image.format == "JPEG":  # Pillow has read the first scan's header
        return 1 + content.count(JPEG_SCAN, image.fp.tell())
    return max(1, content.count(JPEG_SCAN))


def resized_pixels(image: Image.Image, shape: tuple[int, ...], spec: ImageSpec, field: str) -> int:
    """Return how many pixels resizing computes, first along rows, then along columns."""
    width, height = size = _size(image, shape, spec)
    if size == image.size:
        return 0
    if spec.shorter is not None and width * height > MAX_PIXELS:
        expected = (
            f"an image of at most {MAX_PIXELS} pixels once its shorter side has {spec.shorter}"
        )
        raise InvalidInput(field, expected, f"one of {image.width} x {image.height}")
    return width * (image.height + height)


def decoding_bytes(image: ImageFile.ImageFile, resized: int) -> int:
    """Return an upper bound for the memory of `pixels` in bytes, without the file."""
    decoded = DECODED_BYTES[str(image.format)] * image.width * image.height
    of_sides = SIDE_BYTES * (image.width + image.height)
    return decoded + RESIZED_BYTES * resized + of_sides + DECODER_BYTES


def _size(image: Image.Image, shape: tuple[int, ...], spec: ImageSpec) -> tuple[int, int]:
    """Return the size (width, height) that an image is resized to."""
    return (
        (shape[-1], shape[-2]) if spec.shorter is None else in_proportion(image.size, spec.shorter)
    )


def in_proportion(size: tuple[int, int], shorter: int) -> tuple[int, int]:
    """Return (width, height) in proportion for a given shorter side; torchvision's rounding."""
    width, height = size
    longer = int(shorter * max(size) / min(size))
    return (shorter, longer) if width <= height else (longer, shorter)


def pixels(
    image: ImageFile.ImageFile, shape: tuple[int, ...], spec: ImageSpec, field: str
) -> UInt8[np.ndarray, "I"]:
    """Decode an image to the model's colour mode and shape, and flatten it."""
    size = (shape[-1], shape[-2])
    if image.size != size and not spec.resize:
        expected = f"an image of {size[0]} x {size[1]} pixels (width x height)"
        raise InvalidInput(field, expected, f"{image.width} x {image.height}")
    resized_pixels(image, shape, spec, field)
    try:
        return as_row(image, shape, spec)
    except Exception:  # Pillow raises many kinds for damaged pixels
        raise _broken(image, field) from None


def _broken(image: ImageFile.ImageFile, field: str) -> InvalidInput:
    return InvalidInput(field, f"a whole {image.format} image", "missing or broken pixels")


def as_row(image: Image.Image, shape: tuple[int, ...], spec: ImageSpec) -> UInt8[np.ndarray, "I"]:
    """Convert an image to a flat row of a model's mode and shape; stretch or crop it to size."""
    width, height = shape[-1], shape[-2]
    converted = image.convert(spec.mode)
    size = _size(converted, shape, spec)
    if converted.size != size:
        converted = converted.resize(size, RESAMPLING[spec.interpolation])
    if size != (width, height):
        left, top = (
            round((side - target) / 2.0) for side, target in zip(size, (width, height), strict=True)
        )
        converted = converted.crop((left, top, left + width, top + height))
    decoded = np.asarray(converted, dtype=np.uint8)
    return (decoded if spec.mode == "L" else decoded.transpose(2, 0, 1)).reshape(-1)
