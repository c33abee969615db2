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
    bmp_of_runs,
    jpeg_of_scans,
    jpeg_of_segments,
    png_file,
    png_of_chunks,
)

GREY = ImageSpec(mode="L")
COLOUR = ImageSpec(mode="RGB")
PIXELS = np.random.default_rng(0).integers(0, 256, (4, 5, 3)).astype(np.uint8)


def get_file(array, form="PNG", mode=None):
    """An array of pixels as the bytes of an image file."""
    image = Image.fromarray(array)
    file = io.BytesIO()
    (image.convert(mode) if mode else image).save(file, form)
    return file.getvalue()


def decoded(content, shape, spec):
    return pixels(open_image(content, "inputs.2"), shape, spec, "inputs.2")


def png_that_says(width, height):
    return png_file((width, height, 8, 0, 0, 0, 0), bytes(min(width, 10_000) + 1))


def test_colour_has_its_channels_first_and_grey_has_none():
    colour = decoded(get_file(PIXELS), (3, 4, 5), COLOUR)
    assert np.array_equal(colour.reshape(3, 4, 5), PIXELS.transpose(2, 0, 1))
    grey = decoded(get_file(PIXELS[:, :, 0]), (4, 5), GREY)
    assert np.array_equal(grey.reshape(4, 5), PIXELS[:, :, 0])


@pytest.mark.parametrize(("form", "options"), [("BMP", {}), ("WEBP", {"lossless": True})])
def test_bmp_and_webp_are_read_to_the_last_pixel_and_refused_if_cut(form, options):
    file = io.BytesIO()
    Image.fromarray(PIXELS).save(file, form, **options)
    assert np.array_equal(
        decoded(file.getvalue(), (3, 4, 5), COLOUR).reshape(3, 4, 5), PIXELS.transpose(2, 0, 1)
    )
    with pytest.raises(InvalidInput, match=r"^inputs\.2: expected a"):
        decoded(file.getvalue()[:-20], (3, 4, 5), COLOUR)


def test_tiff_is_for_training_alone():
    content = get_file(PIXELS, "TIFF")
    assert open_image(content, "a", ("PNG", "TIFF")).size == (5, 4)
    with pytest.raises(InvalidInput, match="a PNG, JPEG, WEBP or BMP file, got something else"):
        open_image(content, "a")


def test_an_image_is_converted_to_the_model_s_mode():
    luma = PIXELS @ np.array([0.299, 0.587, 0.114])  # ITU-R 601
    grey = decoded(get_file(PIXELS), (4, 5), GREY).reshape(4, 5)
    assert np.abs(grey - luma).max() <= 1
    colour = decoded(get_file(PIXELS[:, :, 0]), (3, 4, 5), COLOUR).reshape(3, 4, 5)
    assert np.array_equal(colour, np.broadcast_to(PIXELS[:, :, 0], (3, 4, 5)))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA"])
def test_every_mode_of_8_bits_is_read(mode):
    assert decoded(get_file(PIXELS, mode=mode), (3, 4, 5), COLOUR).shape == (60,)


def test_another_size_is_refused_unless_the_model_resizes():
    with pytest.raises(
        InvalidInput, match=r"^inputs\.2: expected an image of 4 x 5 pixels .*, got 5 x 4$"
    ):
        decoded(get_file(PIXELS), (3, 5, 4), COLOUR)
    flat = np.full((40, 60, 3), 77, dtype=np.uint8)
    assert set(decoded(get_file(flat), (3, 5, 4), ImageSpec(mode="RGB", resize=True)).tolist()) == {
        77
    }


def test_resized_pixels_are_linear_between_those_around_them():
    """Each new pixel's centre lies a quarter of the way between two old ones, or beyond the
    last."""
    two = np.array([[0, 100], [0, 100]], dtype=np.uint8)
    wide = decoded(get_file(two), (2, 4), ImageSpec(mode="L", resize=True))
    assert wide.reshape(2, 4).tolist() == [[0, 25, 75, 100]] * 2


@pytest.mark.parametrize(
    ("content", "says"),
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
        (png_that_says(6000, 6000), "an image of at most"),
        (png_that_says(100_000, 100_000), "an image of at most"),
        (png_that_says(2**31 - 1, 2**31 - 1), "a"),
        (png_that_says(0, 0), "a"),
        (
            get_file(PIXELS[:, :, 0].astype(np.uint16) * 200),
            "an image of 8 bits a channel, got one of mode I;16",
        ),
    ],
    ids=[
        "empty",
        "signature",
        "gif",
        "whole gif",
        "cut png",
        "png without data",
        "cut jpeg",
        "36 Mpx",
        "10 Gpx",
        "max",
        "none",
        "16",
    ],
)
def test_a_file_that_is_no_such_image_is_refused(content, says):
    with pytest.raises(InvalidInput) as refused:
        decoded(content, (4, 5), GREY)
    assert str(refused.value).startswith(f"inputs.2: expected {says}")
    assert "\n" not in str(refused.value)


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
def test_the_longer_side_is_in_proportion_rounded_down(size, shorter, expected):
    assert proportional_size(size, shorter) == expected


def cut(shorter):
    return ImageSpec(mode="L", resize=True, fit="crop", shorter=shorter)


@pytest.mark.parametrize(
    ("size", "top", "left"), [((5, 8), 0, 2), ((8, 5), 2, 0), ((5, 6), 0, 0), ((9, 5), 2, 0)]
)
def test_the_centre_is_cut_out_and_halves_are_rounded_to_even_numbers(size, top, left):
    array = np.random.default_rng(0).integers(0, 256, size).astype(np.uint8)
    received = decoded(get_file(array), (5, 5), cut(5)).reshape(5, 5)
    assert np.array_equal(received, array[top : top + 5, left : left + 5])


def test_an_image_that_is_too_long_and_narrow_to_be_resized_is_refused():
    content = png_that_says(1, 600)
    with pytest.raises(
        InvalidInput,
        match=r"^inputs\.2: expected an image of at most 33554432 pixels once its shorter",
    ):
        decoded(content, (256, 256), cut(256))


# Files that take long


def progressive(size=(40, 50), **options):
    """A progressive JPEG file of noise."""
    file = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (*size, 3)).astype(np.uint8)
    Image.fromarray(noise).save(file, "JPEG", progressive=True, **options)
    return file.getvalue()


def test_a_jpeg_of_many_scans_is_refused_before_it_is_decoded():
    usual = progressive()
    assert decoded(usual, (3, 40, 50), COLOUR).shape == (6000,)
    scans = usual.count(b"\xff\xda")
    with pytest.raises(
        InvalidInput, match=r"inputs.2: expected a JPEG file of at most 100 scans, got 10010"
    ):
        open_image(jpeg_of_scans(usual, 10_010 - scans), "inputs.2")
    assert open_image(jpeg_of_scans(usual, MAX_SCANS - scans), "inputs.2").size == (50, 40)


def test_scans_count_as_pixels():
    usual = progressive()
    scans = usual.count(b"\xff\xda")
    for extra, times in ((0, 1), (11 - scans, 2), (95 - scans, 10)):
        assert decoded_pixels(open_image(jpeg_of_scans(usual, extra), "inputs.2")) == 2000 * times
    assert decoded_pixels(open_image(get_file(PIXELS), "inputs.2")) == 20
    assert decoded_pixels(open_image(get_file(PIXELS, "JPEG"), "inputs.2")) == 20


def test_what_looks_like_a_scan_in_a_camera_s_notes_is_none():
    note = b"\xff\xda" * 1000
    content = progressive(exif=b"Exif\0\0" + note, comment=note)
    assert content.count(b"\xff\xda") > 2000
    assert decoded_pixels(open_image(content, "inputs.2")) == 2000


@pytest.mark.parametrize(
    "content",
    [
        jpeg_of_segments(progressive(), 1_000_000),
        b"\xff\xd8" + b"\xff" * 5_000_000,
        b"\xff\xd8",
        b"\xff\xd8\xff",
        b"\xff\xd8\xff\xe0\xff\xff",
        png_of_chunks(get_file(PIXELS), 1_000_000),
    ],
    ids=range(6),
)
def test_a_file_of_many_parts_or_none_is_refused_before_its_reader_goes_over_them(content):
    start = time.process_time()
    with pytest.raises(
        InvalidInput, match=r"inputs.2: expected a PNG, JPEG, WEBP or BMP file, got something else"
    ):
        open_image(content, "inputs.2")
    assert time.process_time() - start < 0.5


def test_a_bmp_of_run_lengths_is_refused_before_they_are_decoded_one_by_one():
    content = bmp_of_runs(50, 40)
    assert np.asarray(Image.open(io.BytesIO(content))).shape == (40, 50)
    with pytest.raises(
        InvalidInput, match=r"inputs.2: expected a BMP file of plain pixels, got one of run lengths"
    ):
        open_image(content, "inputs.2")


def test_files_of_some_parts_are_read():
    full = decoded(progressive(), (3, 40, 50), COLOUR)
    assert np.array_equal(decoded(jpeg_of_segments(progressive(), 100), (3, 40, 50), COLOUR), full)
    assert decoded(png_of_chunks(get_file(PIXELS), 1000), (3, 4, 5), COLOUR).shape == (60,)


def test_a_jpeg_far_too_short_for_its_pixels_is_refused_and_one_of_a_single_colour_is_read():
    plain = io.BytesIO()
    Image.new("L", (4000, 4000), 255).save(
        plain, "JPEG", quality=1, optimize=True, progressive=True
    )
    assert decoded(plain.getvalue(), (4000, 4000), GREY).min() >= 250
    message = bytearray(progressive())
    size = message.index(bytes([0, 40, 0, 50]))
    message[size : size + 4] = bytes([0x16, 0, 0x16, 0])  # 5632 x 5632
    with pytest.raises(InvalidInput, match="a whole JPEG image"):
        open_image(bytes(message), "inputs.2")


def test_a_png_far_too_short_for_its_pixels_is_refused_before_it_is_decoded():
    with pytest.raises(InvalidInput, match="a whole PNG image"):
        open_image(png_file((5000, 5000, 8, 0, 0, 0, 0), bytes(5001)), "inputs.2")


@pytest.mark.parametrize("size", [(1, 65_536), (65_536, 1)])
def test_an_image_that_is_a_long_line_is_refused(size):
    file = io.BytesIO()
    Image.new("L", size).save(file, "PNG")
    with pytest.raises(InvalidInput, match="expected an image of at most 65535 pixels a side"):
        open_image(file.getvalue(), "inputs.0")
