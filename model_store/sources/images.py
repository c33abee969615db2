"""Images as rows: one decoding for training and for the service.

PNG, JPEG, WebP and BMP files of 8 bits a channel become rows of pixels from 0 to 255. Grey rows
have shape (H, W), colour rows (3, H, W). An image is converted to the model's mode (colour to grey
by ITU-R 601 luma); transparency is dropped, and notes on orientation are not followed. One of
another size is stretched, or resized in proportion and cut as torchvision's `Resize` and
`CenterCrop` do with Pillow's images. A PNG file with too few pixels is refused; the end of a JPEG
file that misses pixels, but is marked as an end, is not known to be wrong unless it is far too
short: its decoder fills the rest.
"""

import io
import math

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageFile

from model_store.artifacts.manifest import ImageSpec
from model_store.errors import InvalidInput
from model_store.sources import jpeg, png

FORMATS = ("PNG", "JPEG", "WEBP", "BMP")  # of requests; training reads others too
MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr")  # of 8 bits a channel
GREY_MODES = ("1", "L", "LA")
MAX_PIXELS = 1 << 25  # of one image: 33 million, more than cameras' 24
MAX_SCANS = 100  # of a JPEG file: encoders write up to a dozen
BMP_RUN_LENGTHS = (1, 2)  # kinds of compression that are decoded a run at a time, in Python
RESAMPLING = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
SCANS_AT_ONCE = 10  # that count once: what a progressive image usually has


def open_image(
    content: bytes, field: str, formats: tuple[str, ...] = FORMATS
) -> ImageFile.ImageFile:
    """Read an image's header; its pixels are decoded by `pixels`.

    Raises:
        InvalidInput: if it is not a file of one of the formats, of 8 bits a channel, has more than
            `MAX_PIXELS`, or is cut into so many parts that it would take long to read.
    """
    expected = f"a {', '.join(formats[:-1])} or {formats[-1]} file"
    scans = 1
    if content.startswith(jpeg.SIGNATURE):
        scans = jpeg.scans(content) or 0
    if scans == 0 or (content.startswith(png.SIGNATURE) and not png.has_few_chunks(content)):
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
    if image.format == "JPEG" and not jpeg.has_bytes_enough(content, image.width * image.height):
        raise _broken(image, field)
    if image.format == "BMP" and image.info.get("compression") in BMP_RUN_LENGTHS:
        raise InvalidInput(field, "a BMP file of plain pixels", "one of run lengths")
    if image.mode not in MODES:
        raise InvalidInput(field, "an image of 8 bits a channel", f"one of mode {image.mode}")
    return image


def decoded_pixels(image: ImageFile.ImageFile) -> int:
    """Return how many pixels decoding an image goes over, those of many scans more than once."""
    assert isinstance(image.fp, io.BytesIO)
    scans = jpeg.scans(image.fp.getvalue()) if image.format == "JPEG" else None
    return image.width * image.height * max(1, -(-(scans or 1) // SCANS_AT_ONCE))


def resized_pixels(image: Image.Image, spec: ImageSpec, field: str) -> int:
    """Return how many pixels an image has once it is resized in proportion; 0 where it is not.

    Raises:
        InvalidInput: if it is so long and narrow that these are more than `MAX_PIXELS`.
    """
    if spec.shorter is None:
        return 0
    found = math.prod(in_proportion(image.size, spec.shorter))
    if found > MAX_PIXELS:
        expected = (
            f"an image of at most {MAX_PIXELS} pixels once its shorter side has {spec.shorter}"
        )
        raise InvalidInput(field, expected, f"one of {image.width} x {image.height}")
    return found


def in_proportion(size: tuple[int, int], shorter: int) -> tuple[int, int]:
    """Return the size (width, height) of an image whose shorter side has so many pixels, as
    torchvision rounds it."""
    width, height = size
    longer = int(shorter * max(size) / min(size))
    return (shorter, longer) if width <= height else (longer, shorter)


def pixels(
    image: ImageFile.ImageFile, shape: tuple[int, ...], spec: ImageSpec, field: str
) -> UInt8[np.ndarray, "I"]:
    """Decode an image into a flat row of a model's mode and shape, (H, W) or (3, H, W).

    Raises:
        InvalidInput: if the image is broken, has too few pixels, is of another size and the spec
            does not resize, or is so long and narrow that it would have more than `MAX_PIXELS` once
            resized.
    """
    size = (shape[-1], shape[-2])
    if image.size != size and not spec.resize:
        expected = f"an image of {size[0]} x {size[1]} pixels (width x height)"
        raise InvalidInput(field, expected, f"{image.width} x {image.height}")
    resized_pixels(image, spec, field)
    if image.format == "PNG":
        assert isinstance(image.fp, io.BytesIO)
        if not png.has_all_pixels(image.fp.getvalue()):
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
    size = (width, height) if spec.shorter is None else in_proportion(converted.size, spec.shorter)
    if converted.size != size:
        converted = converted.resize(size, RESAMPLING[spec.interpolation])
    if size != (width, height):
        left, top = (
            round((has - wanted) / 2.0) for has, wanted in zip(size, (width, height), strict=True)
        )
        converted = converted.crop((left, top, left + width, top + height))
    decoded = np.asarray(converted, dtype=np.uint8)
    return (decoded if spec.mode == "L" else decoded.transpose(2, 0, 1)).reshape(-1)
