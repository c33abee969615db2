import io

import pytest
from PIL import Image, ImageFile, PngImagePlugin

from model_store.artifacts.manifest import ImageSpec
from model_store.errors import InvalidInput
from model_store.sources.images import decoded_pixels, decoding_bytes, open_image, pixels
from model_store.sources.images import resized_pixels as resized
from tests.support.process import HEAP_BYTES, fresh_process, peak_growth_bytes

PROGRESSIVE = {"progressive": True, "subsampling": 0}
FILES = [
    *(("PNG", mode, {}) for mode in ("1", "L", "LA", "P", "RGB", "RGBA")),
    *(("JPEG", mode, options) for mode in ("L", "RGB", "CMYK") for options in ({}, PROGRESSIVE)),
    *(("WEBP", mode, {"lossless": flag}) for mode in ("RGB", "RGBA") for flag in (False, True)),
    *(("BMP", mode, {}) for mode in ("1", "L", "P", "RGB", "RGBA")),
]
SIZES = [(1100, 1000), (1, 65_500), (65_500, 1), (30, 28)]
SPECS = [
    (ImageSpec(mode="RGB", resize=True), (3, 28, 28)),
    (ImageSpec(mode="L", resize=True), (300, 300)),
    (ImageSpec(mode="RGB", resize=True, fit="crop", shorter=1000), (3, 64, 64)),
]


def get_file(kind, mode, options, size):
    file = io.BytesIO()
    with pytest.MonkeyPatch.context() as changes:
        changes.setattr(ImageFile, "MAXBLOCK", 1 << 20)  # the encoder's buffer size
        Image.new(mode, size).save(file, kind, **options)
    return file.getvalue()


@pytest.fixture(scope="module")
def call():
    with fresh_process() as call:
        yield call


@pytest.mark.parametrize(("kind", "mode", "options"), FILES, ids=str)
def test_decoding_memory_stays_within_the_estimate(call, kind, mode, options):
    for size in SIZES:
        if max(size) > 9999 and (kind == "WEBP" or options):
            continue
        content = get_file(kind, mode, options, size)
        for spec, shape in SPECS[: 2 if min(size) == 1 else 3]:
            used, estimate = call(decode_memory, content, spec, shape)
            assert used <= estimate + HEAP_BYTES, (size, spec)


def decode_memory(content, spec, shape):
    image = open_image(content, "inputs.0")
    estimate = decoding_bytes(image, resized(image, shape, spec, "inputs.0"))
    return peak_growth_bytes(lambda: pixels(image, shape, spec, "inputs.0")), estimate


def test_image_text_chunks_are_limited_before_inflation():
    texts, file = PngImagePlugin.PngInfo(), io.BytesIO()
    for n in range(40):
        texts.add_text(f"k{n}", "a" * 1_000_000, zip=True)
    Image.new("L", (8, 8)).save(file, "PNG", pnginfo=texts)

    def refuse():
        with pytest.raises(InvalidInput, match=r"inputs\.0: expected a PNG, JPEG"):
            open_image(file.getvalue(), "inputs.0")

    assert peak_growth_bytes(refuse) < 16 << 20  # the text has 40 million bytes


def test_scans_of_a_multi_picture_jpeg_count_as_pixels():
    file, picture = io.BytesIO(), Image.new("RGB", (64, 64))
    picture.save(file, "MPO", save_all=True, append_images=[picture] * 30)
    image = open_image(file.getvalue(), "inputs.0")
    assert image.format == "MPO"
    assert decoded_pixels(image) == 4 * 64 * 64
