"""Whether a PNG file holds all the pixels that its header says (ISO/IEC 15948).

Pillow takes a compressed stream that ends early, but properly, for a whole one: the missing rows
    are 0.
"""

import struct
import zlib
from collections.abc import Iterator

SIGNATURE = b"\x89PNG\r\n\x1a\n"
CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # by colour type
# Of Adam7's passes: first column and row, and steps (section 8.2).
ADAM7 = (
    (0, 0, 8, 8),
    (4, 0, 8, 8),
    (0, 4, 4, 8),
    (2, 0, 4, 4),
    (0, 2, 2, 4),
    (1, 0, 2, 2),
    (0, 1, 1, 2),
)
PIECE = 1 << 23  # bytes that are inflated at a time
CHUNKS = 20_000  # at most: encoders write pieces of 8 kB and more


def has_all_pixels(content: bytes) -> bool:
    """Return whether a PNG file's compressed data are as long as its pixels need; False if it is
    not in order."""
    missing: int | None = None
    inflate = zlib.decompressobj()
    try:
        for kind, data in _chunks(content):
            if kind == b"IHDR" and missing is None:
                missing = _size(data)
            while kind == b"IDAT" and data and not inflate.eof and missing is not None:
                missing -= len(inflate.decompress(data, PIECE))
                if missing <= 0:
                    return True
                data = inflate.unconsumed_tail
    except (zlib.error, struct.error, KeyError):
        return False
    return False


def has_few_chunks(content: bytes) -> bool:
    """Return whether a PNG file is not cut into so many chunks that going over them takes long."""
    return not any(n >= CHUNKS for n, _ in enumerate(_chunks(content)))


def _size(header: bytes) -> int:
    """Return how many bytes the pixels have before compression: each row begins with the number of
    its filter."""
    width, height, bits, colour, _, _, interlace = struct.unpack(">IIBBBBB", header[:13])
    size = 0
    for x, y, step_x, step_y in ADAM7 if interlace else ((0, 0, 1, 1),):
        columns, rows = -(-(width - x) // step_x), -(-(height - y) // step_y)
        if columns > 0 and rows > 0:
            size += rows * (1 + (columns * bits * CHANNELS[colour] + 7) // 8)
    return size


def _chunks(content: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield each chunk's kind and data, as far as they go."""
    place = len(SIGNATURE)
    while place + 8 <= len(content):
        length, kind = struct.unpack(">I4s", content[place : place + 8])
        yield kind, content[place + 8 : place + 8 + length]
        place += 12 + length
