"""What decoding a JPEG file would take (ISO/IEC 10918-1, annex B), known before it is decoded.

A progressive image comes in scans, each of which may go over all its pixels again and takes a few
    bytes: without a
bound a small file keeps a processor busy for minutes.
"""

SIGNATURE = b"\xff\xd8"  # start of image
# start of scan: what comes before in a segment is passed over, and coded pixels have no such bytes
SCAN = b"\xff\xda"
SEGMENTS = 1000  # at most, and bytes between them, before the first scan: cameras write a few dozen
PIXELS_A_BYTE = 512  # at most: 64 pixels have a bit or more in Huffman's code


def scans(content: bytes) -> int | None:
    """Return how many scans a file has at most; None if it is not in order up to the first."""
    place = len(SIGNATURE)
    for _ in range(SEGMENTS):
        marker = content[place : place + 2]
        if marker == SCAN:
            return content.count(SCAN, place)
        if marker == b"\xff\xff":  # a byte that fills
            place += 1
        elif (
            len(marker) == 2
            and marker[0] == 0xFF
            and marker[1] >= 0xC0
            and not 0xD0 <= marker[1] <= 0xD9
        ):
            place += 2 + int.from_bytes(content[place + 2 : place + 4], "big")
        else:
            return None
    return None


def has_bytes_enough(content: bytes, pixels: int) -> bool:
    """Return whether a file is long enough for so many pixels."""
    return pixels <= PIXELS_A_BYTE * len(content)
