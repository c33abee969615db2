"""Images as rows: one decoding for training and for the service.

PNG and JPEG files of 8 bits a channel become rows of pixels from 0 to 255. Grey rows have shape (H, W), colour rows
(3, H, W). An image is converted to the model's mode (colour to grey by ITU-R 601 luma); transparency is dropped, and
notes on orientation are not followed. A PNG file with too few pixels is refused; the end of a JPEG file that misses
pixels, but is marked as an end, is not known to be wrong, and its decoder fills the rest.
"""

import io

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageFile

from model_store.artifacts.manifest import ImageSpec
from model_store.errors import InvalidInput
from model_store.inputs.png import has_all_pixels

FORMATS = ("PNG", "JPEG")
MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr")  # of 8 bits a channel
GREY_MODES = ("1", "L", "LA")
START_OF_SCAN = b"\xff\xda"
MAX_SCANS = 100  # of a JPEG file; progressive ones have about ten, and each goes through all pixels
MAX_SCANNED_PIXELS = 1 << 29
MAX_PIXELS = 1 << 25  # of one image: 33 million, more than cameras' 24


def open_image(content: bytes, field: str) -> ImageFile.ImageFile:
    """Read an image's header; its pixels are decoded by `pixels`.

    Raises:
        InvalidInput: if it is not a PNG or JPEG file of 8 bits a channel, or has more pixels or scans than allowed.
    """
    try:
        image = Image.open(io.BytesIO(content), formats=FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise InvalidInput(field, f"an image of at most {MAX_PIXELS} pixels", "a larger one") from None
    except Exception:  # Pillow's readers of headers let many kinds through
        raise InvalidInput(field, "a PNG or JPEG file", "something else") from None
    if image.width * image.height > MAX_PIXELS:
        raise InvalidInput(field, f"an image of at most {MAX_PIXELS} pixels", f"{image.width} x {image.height}")
    scans = content.count(START_OF_SCAN)  # at most: within a scan the mark cannot be
    if image.format == "JPEG" and (scans > MAX_SCANS or scans * image.width * image.height > MAX_SCANNED_PIXELS):
        expected = f"a JPEG image of at most {MAX_SCANS} scans, and {MAX_SCANNED_PIXELS} pixels in all of them"
        raise InvalidInput(field, expected, f"{scans} scans of {image.width} x {image.height}")
    if image.mode not in MODES:
        raise InvalidInput(field, "an image of 8 bits a channel", f"one of mode {image.mode}")
    return image


def pixels(image: ImageFile.ImageFile, shape: tuple[int, ...], spec: ImageSpec, field: str) -> UInt8[np.ndarray, "I"]:
    """Decode an image into a flat row of a model's mode and shape, (H, W) or (3, H, W).

    Raises:
        InvalidInput: if the image is broken, has too few pixels, or is of another size and the spec does not resize.
    """
    size = (shape[-1], shape[-2])
    if image.size != size and not spec.resize:
        expected = f"an image of {size[0]} x {size[1]} pixels (width x height)"
        raise InvalidInput(field, expected, f"{image.width} x {image.height}")
    if image.format == "PNG":
        assert isinstance(image.fp, io.BytesIO)
        if not has_all_pixels(image.fp.getvalue()):
            raise InvalidInput(field, "a whole PNG or JPEG image", "missing or broken pixels")
    try:
        return as_row(image, shape, spec)
    except Exception:  # so do its decoders
        raise InvalidInput(field, "a whole PNG or JPEG image", "missing or broken pixels") from None


def as_row(image: Image.Image, shape: tuple[int, ...], spec: ImageSpec) -> UInt8[np.ndarray, "I"]:
    """Return an image as a flat row of a model's mode and shape, resized where it is of another size."""
    size = (shape[-1], shape[-2])
    converted = image.convert(spec.mode)
    if converted.size != size:
        converted = converted.resize(size, Image.Resampling.BILINEAR)
    decoded = np.asarray(converted, dtype=np.uint8)
    return (decoded if spec.mode == "L" else decoded.transpose(2, 0, 1)).reshape(-1)
