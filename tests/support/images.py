"""Create ordinary and unusual image files."""

import io
import struct
import zlib

import numpy as np
from PIL import Image


def png_bytes(pixels: np.ndarray) -> bytes:
    """Encode pixels as a PNG file."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def pixel(colour: str | tuple[int, int, int]) -> bytes:
    """Create a PNG file of one pixel."""
    file = io.BytesIO()
    Image.new("RGB", (1, 1), colour).save(file, "PNG")
    return file.getvalue()


def png_file(header: tuple[int, ...], data: bytes) -> bytes:
    """Create a PNG file from its header fields and filtered rows."""

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


def jpeg_with_scans(picture: bytes, scans: int) -> bytes:
    """Create a progressive JPEG file with many empty scans, which are slow to decode."""
    start = picture.rfind(b"\xff\xda")
    header = picture[start : start + 2 + int.from_bytes(picture[start + 2 : start + 4], "big")]
    return picture[:-2] + header * scans + picture[-2:]


def jpeg_with_segments(picture: bytes, segments: int) -> bytes:
    """Create a JPEG file with empty comments before its pixels."""
    return picture[:2] + b"\xff\xfe\x00\x02" * segments + picture[2:]


def png_with_chunks(picture: bytes, chunks: int) -> bytes:
    """Create a PNG file with empty chunks before its pixels."""
    empty = b"\0\0\0\0" + b"teST" + struct.pack(">I", zlib.crc32(b"teST"))
    offset = 8 + 25  # after the signature and the header
    return picture[:offset] + empty * chunks + picture[offset:]


def bmp_with_runs(width: int, height: int) -> bytes:
    """Create an 8-bit BMP file with run lengths of one pixel."""
    runs = (b"\x01\x07" * width + b"\0\0") * height + b"\0\1"
    palette = bytes(range(256)) * 4
    offset = 14 + 40 + len(palette)
    info = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 8, 1, len(runs), 0, 0, 256, 0)
    return b"BM" + struct.pack("<IHHI", offset + len(runs), 0, 0, offset) + info + palette + runs
