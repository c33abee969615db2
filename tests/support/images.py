"""Image files, byte by byte."""

import struct
import zlib


def png_file(header: tuple[int, ...], data: bytes) -> bytes:
    """A PNG file of a header (width, height, bits, colour type, 0, 0, interlace) and rows before compression."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    compressed = zlib.compress(data)
    parts = [(b"IHDR", struct.pack(">IIBBBBB", *header)), (b"IDAT", compressed[:9]), (b"IDAT", compressed[9:])]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in [*parts, (b"IEND", b"")])
