"""Image files, the odd ones byte by byte."""

import io
import struct
import zlib

from PIL import Image


def pixel(colour: str | tuple[int, int, int]) -> bytes:
    """A PNG file of one pixel."""
    file = io.BytesIO()
    Image.new("RGB", (1, 1), colour).save(file, "PNG")
    return file.getvalue()


def png_file(header: tuple[int, ...], data: bytes) -> bytes:
    """A PNG file of a header (width, height, bits, colour type, 0, 0, interlace) and rows before
    compression."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content))
            + kind
            + content
            + struct.pack(">I", zlib.crc32(kind + content))
        )

    compressed = zlib.compress(data)
    parts = [
        (b"IHDR", struct.pack(">IIBBBBB", *header)),
        (b"IDAT", compressed[:9]),
        (b"IDAT", compressed[9:]),
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in [*parts, (b"IEND", b"")])


def jpeg_of_scans(picture: bytes, scans: int) -> bytes:
    """A progressive JPEG file with some more scans, of no data: ten bytes each, and all its
    pixels' time."""
    start = picture.rfind(b"\xff\xda")
    header = picture[start : start + 2 + int.from_bytes(picture[start + 2 : start + 4], "big")]
    return picture[:-2] + header * scans + picture[-2:]


def jpeg_of_segments(picture: bytes, segments: int) -> bytes:
    """A JPEG file with some empty comments before its pixels."""
    return picture[:2] + b"\xff\xfe\x00\x02" * segments + picture[2:]


def png_of_chunks(picture: bytes, chunks: int) -> bytes:
    """A PNG file with some empty chunks before its pixels, that readers pass over."""
    empty = b"\0\0\0\0" + b"teST" + struct.pack(">I", zlib.crc32(b"teST"))
    place = 8 + 25  # after the signature and the header
    return picture[:place] + empty * chunks + picture[place:]


def bmp_of_runs(width: int, height: int) -> bytes:
    """A BMP file of 8 bits whose pixels are run lengths, each of one pixel."""
    runs = (b"\x01\x07" * width + b"\0\0") * height + b"\0\1"
    palette = bytes(range(256)) * 4
    offset = 14 + 40 + len(palette)
    info = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 8, 1, len(runs), 0, 0, 256, 0)
    return b"BM" + struct.pack("<IHHI", offset + len(runs), 0, 0, offset) + info + palette + runs
