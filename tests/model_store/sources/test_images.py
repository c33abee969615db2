import io
import time

import numpy as np
import pytest
from PIL import Image

from model_store.artifacts.manifest import ImageSpec
from model_store.errors import InvalidInput
from model_store.sources.images import (
    MAX_SCANS,
    decoded_pixels,
    open_image,
    pixels,
    proportional_size,
)
from tests.support.images import (
    bmp_with_runs,
    jpeg_with_scans,
    jpeg_with_segments,
    png_file,
    png_with_chunks,
)

GREY = ImageSpec(mode="L")
COLOUR = ImageSpec(mode="RGB")
PIXELS = np.random.default_rng(0).integers(0, 256, (4, 5, 3)).astype(np.uint8)


def get_file(array, form="PNG", mode=None):
    """Encode an array of pixels as an image file."""
    image = Image.fromarray(array)
    file = io.BytesIO()
    (image.convert(mode) if mode else image).save(file, form)
    return file.getvalue()


def decode(content, shape, spec):
    return pixels(open_image(content, "inputs.2"), shape, spec, "inputs.2")


def png_of_size(width, height):
    return png_file((width, height, 8, 0, 0, 0, 0), bytes(min(width, 10_000) + 1))


def test_colour_is_channels_first_and_grey_has_no_channel_axis():
    colour = decode(get_file(PIXELS), (3, 4, 5), COLOUR)
    assert np.array_equal(colour.reshape(3, 4, 5), PIXELS.transpose(2, 0, 1))
    grey = decode(get_file(PIXELS[:, :, 0]), (4, 5), GREY)
    assert np.array_equal(grey.reshape(4, 5), PIXELS[:, :, 0])


@pytest.mark.parametrize(("form", "options"), [("BMP", {}), ("WEBP", {"lossless": True})])
def test_bmp_and_webp_are_read_exactly_and_refused_if_truncated(form, options):
    file = io.BytesIO()
    Image.fromarray(PIXELS).save(file, form, **options)
    assert np.array_equal(
        decode(file.getvalue(), (3, 4, 5), COLOUR).reshape(3, 4, 5), PIXELS.transpose(2, 0, 1)
    )
    with pytest.raises(InvalidInput, match=r"^inputs\.2: expected a"):
        decode(file.getvalue()[:-20], (3, 4, 5), COLOUR)


def test_tiff_is_refused_unless_allowed():
    content = get_file(PIXELS, "TIFF")
    assert open_image(content, "a", ("PNG", "TIFF")).size == (5, 4)
    with pytest.raises(InvalidInput, match="a PNG, JPEG, WEBP or BMP file, got something else"):
        open_image(content, "a")


def test_image_is_converted_to_the_mode_of_the_model():
    luma = PIXELS @ np.array([0.299, 0.587, 0.114])  # ITU-R 601
    grey = decode(get_file(PIXELS), (4, 5), GREY).reshape(4, 5)
    assert np.abs(grey - luma).max() <= 1
    colour = decode(get_file(PIXELS[:, :, 0]), (3, 4, 5), COLOUR).reshape(3, 4, 5)
    assert np.array_equal(colour, np.broadcast_to(PIXELS[:, :, 0], (3, 4, 5)))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA"])
def test_every_8_bit_mode_is_read(mode):
    assert decode(get_file(PIXELS, mode=mode), (3, 4, 5), COLOUR).shape == (60,)


def test_wrong_size_is_refused_unless_the_model_resizes():
    with pytest.raises(
        InvalidInput, match=r"^inputs\.2: expected an image of 4 x 5 pixels .*, got 5 x 4$"
    ):
        decode(get_file(PIXELS), (3, 5, 4), COLOUR)
    flat = np.full((40, 60, 3), 77, dtype=np.uint8)
    assert set(decode(get_file(flat), (3, 5, 4), ImageSpec(mode="RGB", resize=True)).tolist()) == {
        77
    }


def test_resizing_interpolates_linearly():
    """Each new pixel is a quarter of the way between two old pixels, or beyond the last."""
    narrow = np.array([[0, 100], [0, 100]], dtype=np.uint8)
    wide = decode(get_file(narrow), (2, 4), ImageSpec(mode="L", resize=True))
    assert wide.reshape(2, 4).tolist() == [[0, 25, 75, 100]] * 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "a PNG, JPEG, WEBP or BMP file, got something else"),
        (b"\x89PNG\r\n\x1a\n", "a PNG, JPEG, WEBP or BMP file, got something else"),
        (b"GIF89a" + bytes(100), "a PNG, JPEG, WEBP or BMP file, got something else"),
        (get_file(PIXELS, "GIF"), "a PNG, JPEG, WEBP or BMP file, got something else"),
        (get_file(PIXELS)[:60], "a whole PNG image, got missing or broken pixels"),
        (
            get_file(PIXELS).replace(b"IDAT", b"iDAT"),
            "a PNG, JPEG, WEBP or BMP file, got something else",
        ),
        (get_file(PIXELS, "JPEG")[:-300], "a"),
        (png_of_size(6000, 6000), "an image of at most"),
        (png_of_size(100_000, 100_000), "an image of at most"),
        (png_of_size(2**31 - 1, 2**31 - 1), "a"),
        (png_of_size(0, 0), "a"),
        (
            get_file(PIXELS[:, :, 0].astype(np.uint16) * 200),
            "an image of 8 bits a channel, got one of mode I;16",
        ),
    ],
    ids=[
        "empty",
        "signature",
        "gif",
        "complete gif",
        "truncated png",
        "png without data",
        "truncated jpeg",
        "36 Mpx",
        "10 Gpx",
        "max size",
        "zero size",
        "16 bit",
    ],
)
def test_invalid_image_file_is_refused(content, message):
    with pytest.raises(InvalidInput) as raised:
        decode(content, (4, 5), GREY)
    assert str(raised.value).startswith(f"inputs.2: expected {message}")
    assert "\n" not in str(raised.value)


# Sizes


@pytest.mark.parametrize(
    ("size", "shorter", "expected"),
    [
        ((640, 480), 256, (341, 256)),
        ((480, 640), 256, (256, 341)),
        ((100, 37), 50, (135, 50)),
        ((9, 9), 4, (4, 4)),
    ],
)
def test_longer_side_is_scaled_in_proportion_and_rounded_down(size, shorter, expected):
    assert proportional_size(size, shorter) == expected


def crop_spec(shorter):
    return ImageSpec(mode="L", resize=True, fit="crop", shorter=shorter)


@pytest.mark.parametrize(
    ("size", "top", "left"), [((5, 8), 0, 2), ((8, 5), 2, 0), ((5, 6), 0, 0), ((9, 5), 2, 0)]
)
def test_centre_crop_rounds_half_offsets_to_even(size, top, left):
    array = np.random.default_rng(0).integers(0, 256, size).astype(np.uint8)
    actual = decode(get_file(array), (5, 5), crop_spec(5)).reshape(5, 5)
    assert np.array_equal(actual, array[top : top + 5, left : left + 5])


def test_image_too_narrow_to_resize_is_refused():
    content = png_of_size(1, 600)
    with pytest.raises(
        InvalidInput,
        match=r"^inputs\.2: expected an image of at most 33554432 pixels once its shorter",
    ):
        decode(content, (256, 256), crop_spec(256))


# Files that are slow to decode


def progressive(size=(40, 50), **options):
    """Return a progressive JPEG file of noise."""
    file = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (*size, 3)).astype(np.uint8)
    Image.fromarray(noise).save(file, "JPEG", progressive=True, **options)
    return file.getvalue()


def test_jpeg_with_many_scans_is_refused_before_decoding():
    jpeg = progressive()
    assert decode(jpeg, (3, 40, 50), COLOUR).shape == (6000,)
    scans = jpeg.count(b"\xff\xda")
    with pytest.raises(
        InvalidInput, match=r"inputs.2: expected a JPEG file of at most 100 scans, got 10010"
    ):
        open_image(jpeg_with_scans(jpeg, 10_010 - scans), "inputs.2")
    assert open_image(jpeg_with_scans(jpeg, MAX_SCANS - scans), "inputs.2").size == (50, 40)


def test_jpeg_scans_count_as_pixels():
    jpeg = progressive()
    scans = jpeg.count(b"\xff\xda")
    for extra, factor in ((0, 1), (11 - scans, 2), (95 - scans, 10)):
        assert decoded_pixels(open_image(jpeg_with_scans(jpeg, extra), "inputs.2")) == 2000 * factor
    assert decoded_pixels(open_image(get_file(PIXELS), "inputs.2")) == 20
    assert decoded_pixels(open_image(get_file(PIXELS, "JPEG"), "inputs.2")) == 20


def test_scan_markers_in_exif_and_comments_are_ignored():
    note = b"\xff\xda" * 1000
    content = progressive(exif=b"Exif\0\0" + note, comment=note)
    assert content.count(b"\xff\xda") > 2000
    assert decoded_pixels(open_image(content, "inputs.2")) == 2000


@pytest.mark.parametrize(
    "content",
    [
        jpeg_with_segments(progressive(), 1_000_000),
        b"\xff\xd8" + b"\xff" * 5_000_000,
        b"\xff\xd8",
        b"\xff\xd8\xff",
        b"\xff\xd8\xff\xe0\xff\xff",
        png_with_chunks(get_file(PIXELS), 1_000_000),
    ],
    ids=range(6),
)
def test_file_with_too_many_or_no_segments_is_refused_quickly(content):
    start = time.process_time()
    with pytest.raises(
        InvalidInput, match=r"inputs.2: expected a PNG, JPEG, WEBP or BMP file, got something else"
    ):
        open_image(content, "inputs.2")
    assert time.process_time() - start < 5.0  # up to 0.4 when idle


def test_run_length_encoded_bmp_is_refused():
    content = bmp_with_runs(50, 40)
    assert np.asarray(Image.open(io.BytesIO(content))).shape == (40, 50)
    with pytest.raises(
        InvalidInput, match=r"inputs.2: expected a BMP file of plain pixels, got one of run lengths"
    ):
        open_image(content, "inputs.2")


def test_files_with_a_moderate_number_of_segments_are_read():
    full = decode(progressive(), (3, 40, 50), COLOUR)
    assert np.array_equal(decode(jpeg_with_segments(progressive(), 100), (3, 40, 50), COLOUR), full)
    assert decode(png_with_chunks(get_file(PIXELS), 1000), (3, 4, 5), COLOUR).shape == (60,)


def test_jpeg_too_short_for_its_size_is_refused_unless_plain():
    plain = io.BytesIO()
    Image.new("L", (4000, 4000), 255).save(
        plain, "JPEG", quality=1, optimize=True, progressive=True
    )
    assert decode(plain.getvalue(), (4000, 4000), GREY).min() >= 250
    content = bytearray(progressive())
    offset = content.index(bytes([0, 40, 0, 50]))
    content[offset : offset + 4] = bytes([0x16, 0, 0x16, 0])  # 5632 x 5632
    with pytest.raises(InvalidInput, match="a whole JPEG image"):
        open_image(bytes(content), "inputs.2")


def test_png_too_short_for_its_size_is_refused_before_decoding():
    with pytest.raises(InvalidInput, match="a whole PNG image"):
        open_image(png_file((5000, 5000, 8, 0, 0, 0, 0), bytes(5001)), "inputs.2")


@pytest.mark.parametrize("size", [(1, 65_536), (65_536, 1)])
def test_image_with_a_very_long_side_is_refused(size):
    file = io.BytesIO()
    Image.new("L", size).save(file, "PNG")
    with pytest.raises(InvalidInput, match="expected an image of at most 65535 pixels a side"):
        open_image(file.getvalue(), "inputs.0")
