"""JPEG files of many scans: each goes through all pixels, and takes few bytes."""

import io

import numpy as np
import pytest
from PIL import Image

from model_store.errors import InvalidInput
from model_store.inputs import images
from model_store.inputs.images import START_OF_SCAN, open_image


def jpeg(size, **options):
    """A JPEG file."""
    file = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, "JPEG", **options)
    return file.getvalue()


def of_scans(content, scans):
    """A file whose last scan is repeated, so that it has so many."""
    last = content.rindex(START_OF_SCAN)
    scan = content[last:-2]
    return content[:-2] + scan * (scans - content.count(START_OF_SCAN)) + content[-2:]


def test_a_jpeg_of_very_many_scans_is_refused_before_it_is_decoded():
    progressive = jpeg((40, 40), progressive=True)
    assert progressive.count(START_OF_SCAN) > 5
    for content in (progressive, jpeg((40, 40)), of_scans(progressive, 100)):
        open_image(content, "inputs.0")
    with pytest.raises(InvalidInput, match=r"inputs\.0: expected a JPEG image of at most 100 scans.* got 101 scans"):
        open_image(of_scans(progressive, 101), "inputs.0")


def test_scans_of_many_pixels_count_together(monkeypatch):
    content = jpeg((40, 40), progressive=True)
    monkeypatch.setattr(images, "MAX_SCANNED_PIXELS", content.count(START_OF_SCAN) * 40 * 40 - 1)
    with pytest.raises(InvalidInput, match="pixels in all of them"):
        open_image(content, "inputs.0")
    open_image(jpeg((40, 40)), "inputs.0")
