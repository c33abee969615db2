"""How many bytes a PNG's pixels take: against a count by the pattern of Adam7 that the standard
prints."""

import struct

import numpy as np
import pytest

from model_store.sources import png

PATTERN = np.array(  # ISO/IEC 15948, section 8.2: which pass each pixel of eight by eight comes in
    [
        [1, 6, 4, 6, 2, 6, 4, 6],
        [7, 7, 7, 7, 7, 7, 7, 7],
        [5, 6, 5, 6, 5, 6, 5, 6],
        [7, 7, 7, 7, 7, 7, 7, 7],
        [3, 6, 4, 6, 3, 6, 4, 6],
        [7, 7, 7, 7, 7, 7, 7, 7],
        [5, 6, 5, 6, 5, 6, 5, 6],
        [7, 7, 7, 7, 7, 7, 7, 7],
    ]
)
SAMPLES = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # of a pixel, by colour type: table 11.1


@pytest.mark.parametrize("colour", SAMPLES)
@pytest.mark.parametrize("interlaced", [False, True])
def test_the_pixels_of_every_size_take_the_bytes_of_their_rows_and_filters(colour, interlaced):
    for width in range(1, 18):
        for height in range(1, 18):
            passes = (
                np.tile(PATTERN, (3, 3))[:height, :width]
                if interlaced
                else np.ones((height, width))
            )
            rows = [row for n in np.unique(passes) for row in (passes == n).sum(axis=1) if row > 0]
            for bits in (1, 8):
                expected = sum(1 + -(-int(row) * bits * SAMPLES[colour] // 8) for row in rows)
                header = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, int(interlaced))
                assert png._size(header) == expected


def test_a_file_of_as_many_chunks_as_may_be_is_read_and_of_one_more_is_not():
    empty = struct.pack(">I4sI", 0, b"tEXt", 0)
    assert png.has_few_chunks(png.SIGNATURE + 20_000 * empty)
    assert not png.has_few_chunks(png.SIGNATURE + 20_001 * empty)
