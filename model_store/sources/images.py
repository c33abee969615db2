"""Images as rows: one decoding for training and for the service.

PNG, JPEG, WebP and BMP files of 8 bits a channel become rows of pixels from 0 to 255. Grey rows
have shape (H, W), colour rows (3, H, W). An image is converted to the model's mode (colour to grey
by ITU-R 601 luma); transparency is dropped, and notes on orientation are not followed. One of
another size is stretched, or resized in proportion and cut as torchvision's `Resize` and
`CenterCrop` do with Pillow's images. A PNG file with too few pixels is refused; the end of a JPEG
file that misses pixels, but is marked as an end, is not known to be wrong unless it is far too
short: its decoder fills the rest.
"""

import base64
import io
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageFile, PngImagePlugin

from model_store.artifacts.manifest import ImageSpec
from model_store.errors import InvalidInput, kind_of

FORMATS = ("PNG", "JPEG", "WEBP", "BMP")  # of requests; training reads others too
MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr")  # of 8 bits a channel
GREY_MODES = ("1", "L", "LA")
MAX_SIDE = 65_535  # pixels: JPEG's own limit; longer ones cost far more than their pixels to resize
MAX_PIXELS = 1 << 25  # of one image: 33 million, more than cameras' 24
MAX_SCANS = 100  # of a JPEG file: encoders write up to a dozen
BMP_RUN_LENGTHS = (1, 2)  # kinds of compression that are decoded a run at a time, in Python
RESAMPLING = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
SCANS_AT_ONCE = 10  # that count once: what a progressive image usually has
JPEG_START = b"\xff\xd8"
JPEG_SCAN = b"\xff\xda"  # starts a scan; coded pixels hold no such bytes
JPEG_SEGMENTS = 1000  # at most before the first scan: cameras write a few dozen
JPEG_PIXELS_A_BYTE = 512  # at most: 64 pixels have a bit or more in Huffman's code
PNG_START = b"\x89PNG\r\n\x1a\n"
PNG_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # by colour type
# Of Adam7's passes: first column and row, and steps (ISO/IEC 15948, section 8.2).
ADAM7 = (
    *((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4)),
    *((0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)),
)
PNG_PIECE = 1 << 20  # bytes that are inflated at a time
PngImagePlugin.MAX_TEXT_MEMORY = 1 << 22  # bytes of a file's texts, which are inflated too
# That decoding and converting a pixel takes, at most; WebP's decoder keeps two frames.
DECODED_BYTES = {"PNG": 10, "BMP": 10, "JPEG": 14, "MPO": 14, "WEBP": 18}
RESIZED_BYTES = 10  # that each pixel of `resized_pixels` takes
SIDE_BYTES = 64  # that a row or column takes, however short
DECODER_BYTES = 1 << 16  # that a decoder takes, however few the pixels
PNG_CHUNKS = 20_000  # at most: encoders write pieces of 8 kB and more


def image_content(row: Any, field: str) -> bytes:
    """Return an image file's content, of bytes or base64 of them."""
    if isinstance(row, bytes):
        return row
    if not isinstance(row, str):
        raise InvalidInput(field, "base64 of an image file, as the row before it", kind_of(row))
    try:
        return base64.b64decode(row, validate=True)
    except ValueError:  # binascii.Error, or text beyond ASCII
        expected = "base64 of an image file"
        raise InvalidInput(field, expected, f"{kind_of(row)} that is not base64") from None


def open_image(
    content: bytes, field: str, formats: tuple[str, ...] = FORMATS
) -> ImageFile.ImageFile:
    """Read an image's header; its pixels are decoded by `pixels`."""
    expected = f"a {', '.join(formats[:-1])} or {formats[-1]} file"
    scans = 1
    if content.startswith(JPEG_START):
        scans = _jpeg_scans(content) or 0
    if scans == 0 or (content.startswith(PNG_START) and not _has_few_chunks(content)):
        raise InvalidInput(field, expected, "something else")
    if scans > MAX_SCANS:
        raise InvalidInput(field, f"a JPEG file of at most {MAX_SCANS} scans", f"{scans}")
    try:
        image = Image.open(io.BytesIO(content), formats=formats)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise InvalidInput(
            field, f"an image of at most {MAX_PIXELS} pixels", "a larger one"
        ) from None
    except Exception:  # Pillow's readers of headers let many kinds through
        raise InvalidInput(field, expected, "something else") from None
    if image.width * image.height > MAX_PIXELS:
        raise InvalidInput(
            field, f"an image of at most {MAX_PIXELS} pixels", f"{image.width} x {image.height}"
        )
    if max(image.size) > MAX_SIDE:
        expected = f"an image of at most {MAX_SIDE} pixels a side"
        raise InvalidInput(field, expected, f"{image.width} x {image.height}")
    most = JPEG_PIXELS_A_BYTE * len(content)
    if content.startswith(JPEG_START) and image.width * image.height > most:
        raise _broken(image, field)
    if image.format == "BMP" and image.info.get("compression") in BMP_RUN_LENGTHS:
        raise InvalidInput(field, "a BMP file of plain pixels", "one of run lengths")
    if image.mode not in MODES:
        raise InvalidInput(field, "an image of 8 bits a channel", f"one of mode {image.mode}")
    return image


def decoded_pixels(image: ImageFile.ImageFile) -> int:
    """Return how many pixels decoding an image goes over, those of many scans more than once."""
    assert isinstance(image.fp, io.BytesIO)
    content = image.fp.getvalue()
    scans = _jpeg_scans(content) if content.startswith(JPEG_START) else None
    return image.width * image.height * max(1, -(-(scans or 1) // SCANS_AT_ONCE))


def resized_pixels(image: Image.Image, shape: tuple[int, ...], spec: ImageSpec, field: str) -> int:
    """Return how many pixels resizing makes, of rows and then of columns; 0 where there is none."""
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
    """Return how many bytes of memory `pixels` takes, at most, in addition to the file."""
    decoded = DECODED_BYTES[str(image.format)] * image.width * image.height
    of_sides = SIDE_BYTES * (image.width + image.height)
    return decoded + RESIZED_BYTES * resized + of_sides + DECODER_BYTES


def _size(image: Image.Image, shape: tuple[int, ...], spec: ImageSpec) -> tuple[int, int]:
    """Return the size (width, height) that an image is resized to."""
    return (
        (shape[-1], shape[-2]) if spec.shorter is None else in_proportion(image.size, spec.shorter)
    )


def in_proportion(size: tuple[int, int], shorter: int) -> tuple[int, int]:
    """Return the size (width, height) of an image whose shorter side has that many pixels, as
    torchvision rounds it."""
    width, height = size
    longer = int(shorter * max(size) / min(size))
    return (shorter, longer) if width <= height else (longer, shorter)


def pixels(
    image: ImageFile.ImageFile, shape: tuple[int, ...], spec: ImageSpec, field: str
) -> UInt8[np.ndarray, "I"]:
    """Decode an image into a flat row of a model's mode and shape, (H, W) or (3, H, W)."""
    size = (shape[-1], shape[-2])
    if image.size != size and not spec.resize:
        expected = f"an image of {size[0]} x {size[1]} pixels (width x height)"
        raise InvalidInput(field, expected, f"{image.width} x {image.height}")
    resized_pixels(image, shape, spec, field)
    if image.format == "PNG":
        assert isinstance(image.fp, io.BytesIO)
        if not has_all_pixels(image.fp.getvalue()):
            raise _broken(image, field)
    try:
        return as_row(image, shape, spec)
    except Exception:  # so do its decoders
        raise _broken(image, field) from None


def _broken(image: ImageFile.ImageFile, field: str) -> InvalidInput:
    return InvalidInput(field, f"a whole {image.format} image", "missing or broken pixels")


def as_row(image: Image.Image, shape: tuple[int, ...], spec: ImageSpec) -> UInt8[np.ndarray, "I"]:
    """Return an image as a flat row of a model's mode and shape, stretched or cut where it is of
    another size."""
    width, height = shape[-1], shape[-2]
    converted = image.convert(spec.mode)
    size = _size(converted, shape, spec)
    if converted.size != size:
        converted = converted.resize(size, RESAMPLING[spec.interpolation])
    if size != (width, height):
        left, top = (
            round((has - wanted) / 2.0) for has, wanted in zip(size, (width, height), strict=True)
        )
        converted = converted.crop((left, top, left + width, top + height))
    decoded = np.asarray(converted, dtype=np.uint8)
    return (decoded if spec.mode == "L" else decoded.transpose(2, 0, 1)).reshape(-1)


def _jpeg_scans(content: bytes) -> int | None:
    """Return how many scans a JPEG file has at most; None if it is not in order up to the first.

    A progressive image comes in scans (ISO/IEC 10918-1, annex B), each of which may go over all its
    pixels again and takes a few bytes: without a bound a small file keeps a processor busy for
    minutes.
    """
    place = len(JPEG_START)
    for _ in range(JPEG_SEGMENTS):
        marker = content[place : place + 2]
        if marker == JPEG_SCAN:
            return content.count(JPEG_SCAN, place)
        if marker == b"\xff\xff":  # a fill byte
            place += 1
        elif (
            len(marker) == 2
            and marker[0] == 0xFF
            and marker[1] >= 0xC0
            and not 0xD0 <= marker[1] <= 0xD9
        ):
            place += 2 + int.from_bytes(content[place + 2 : place + 4], "big")
        else:
            return None
    return None


def has_all_pixels(content: bytes) -> bool:
    """Return whether a PNG file's compressed data are as long as its pixels need; False if it is
    not in order. Pillow takes a stream that ends early, but properly, for a whole one."""
    missing: int | None = None
    inflate = zlib.decompressobj()
    try:
        for kind, data in _png_chunks(content):
            if kind == b"IHDR" and missing is None:
                missing = _png_size(data)
            while kind == b"IDAT" and data and not inflate.eof and missing is not None:
                missing -= len(inflate.decompress(data, min(PNG_PIECE, missing)))
                if missing <= 0:
                    return True
                data = inflate.unconsumed_tail
    except (zlib.error, struct.error, KeyError):
        return False
    return False


def _has_few_chunks(content: bytes) -> bool:
    return not any(n >= PNG_CHUNKS for n, _ in enumerate(_png_chunks(content)))


def _png_size(header: bytes) -> int:
    """Return the size of the pixels before compression, a byte of the filter for each row too."""
    width, height, bits, colour, _, _, interlace = struct.unpack(">IIBBBBB", header[:13])
    size = 0
    for x, y, step_x, step_y in ADAM7 if interlace else ((0, 0, 1, 1),):
        columns, rows = -(-(width - x) // step_x), -(-(height - y) // step_y)
        if columns > 0 and rows > 0:
            size += rows * (1 + (columns * bits * PNG_CHANNELS[colour] + 7) // 8)
    return size


def _png_chunks(content: bytes) -> Iterator[tuple[bytes, bytes]]:
    place = len(PNG_START)
    while place + 8 <= len(content):
        length, kind = struct.unpack(">I4s", content[place : place + 8])
        yield kind, content[place + 8 : place + 8 + length]
        place += 12 + length
