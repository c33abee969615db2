"""Rows encoded once for all epochs and fits: a file of what an encoder said of each row, found by
the row's digest.

A record is the BLAKE2b digest of the row (16 bytes), the CRC-32 of the numbers, and the numbers.
The file grows at its end alone. A record that a kill cut short is cut off, one that is damaged is
encoded again.
"""

import fcntl
import os
import weakref
import zlib
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

import numpy as np
from jaxtyping import Float32, UInt8
from tqdm import tqdm

from model_store.inference.runtime import Rewriting
from training.messages import log

DIGEST_BYTES = 16
AT_ONCE = 64  # rows between two writes
MOST_BYTES = 20 << 30  # of all encoders' rows together, the least recently used are removed first
SUFFIX, LOCK = ".rows", ".lock"


class CachedEncoder:
    """An encoder that keeps what it says of rows in a file, for this process and later ones."""

    def __init__(
        self, encoder: Rewriting, width: int, path: Path, most_bytes: int = MOST_BYTES
    ) -> None:
        """Open the file of an encoder of so many numbers, or begin one; beyond the bound, older
        ones are removed."""
        self.encoder = encoder
        self.path = path
        self.most_bytes = most_bytes
        self.record = np.dtype(
            [("digest", f"V{DIGEST_BYTES}"), ("crc", "<u4"), ("encoded", "<f4", (width,))]
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        weakref.finalize(self, os.close, _held(path))
        os.utime(path)
        _make_room(path.parent, most_bytes)
        self.known: dict[bytes, int] = {}
        for i, record in enumerate(self._records()):
            if zlib.crc32(record["encoded"].tobytes()) == int(record["crc"]):
                self.known[record["digest"].tobytes()] = i

    def __call__(self, x: Float32[np.ndarray, "N I"]) -> Float32[np.ndarray, "N F"]:
        """Return what the encoder says of rows."""
        return np.array(self.rows(x, quiet=True))

    def rows(
        self, x: Float32[np.ndarray, "N I"] | UInt8[np.ndarray, "N I"], quiet: bool = False
    ) -> Float32[np.ndarray, "N F"]:
        """Return what the encoder says of rows, with a progress bar.

        Rows that lie together in the file are a view of it, which takes no memory. Where the file
        would be larger than it may be, the rest is in memory alone.
        """
        digests = [_digest(row) for row in x]
        new = [n for n, digest in enumerate(digests) if digest not in self.known]
        if not new:
            return self._taken(digests)
        found: dict[int, np.ndarray] = {}
        with tqdm(
            total=len(new), unit="row", desc="encoding", disable=quiet, dynamic_ncols=True
        ) as bar:
            for part in (new[i : i + AT_ONCE] for i in range(0, len(new), AT_ONCE)):
                encoded = self.encoder(x[part].astype(np.float32))
                if not self._append([digests[n] for n in part], encoded):
                    found |= dict(zip(part, encoded, strict=True))
                bar.update(len(part))
        if not found:
            return self._taken(digests)
        if not quiet:
            log.info(
                "%d rows are kept in memory: files of encoded rows have %d bytes",
                len(found),
                self.most_bytes,
            )
        records = self._records()
        return np.stack(
            [
                found[n] if n in found else records["encoded"][self.known[digests[n]]]
                for n in range(len(x))
            ]
        )

    def _taken(self, digests: list[bytes]) -> Float32[np.ndarray, "N F"]:
        index = [self.known[digest] for digest in digests]
        encoded = self._records()["encoded"]
        first = index[0] if index else 0
        if index == list(range(first, first + len(index))):
            return encoded[first : first + len(index)]
        return encoded[index]

    def _records(self) -> np.ndarray:
        """Return the whole records of the file."""
        count = self.path.stat().st_size // self.record.itemsize
        if count == 0:
            return np.empty(0, dtype=self.record)
        return np.memmap(self.path, dtype=self.record, mode="c", shape=(count,))

    def _append(self, digests: list[bytes], encoded: Float32[np.ndarray, "n F"]) -> bool:
        """Write rows at the end of the file; False if there is no room for them."""
        records = np.empty(len(encoded), dtype=self.record)
        records["encoded"] = encoded
        records["crc"] = [zlib.crc32(row.tobytes()) for row in encoded]
        records["digest"] = np.array(digests, dtype=f"V{DIGEST_BYTES}")
        with (self.path.parent / LOCK).open("w") as lock, self.path.open("r+b") as file:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another fit may write too
            count = file.seek(0, 2) // self.record.itemsize
            if (count + len(records)) * self.record.itemsize > self.most_bytes:
                return False
            file.truncate(count * self.record.itemsize)  # of what a kill cut short
            file.seek(count * self.record.itemsize)
            file.write(records.tobytes())
        self.known |= {digest: count + i for i, digest in enumerate(digests)}
        return True


def _digest(row: np.ndarray) -> bytes:
    return blake2b(
        np.ascontiguousarray(row, dtype=np.float32).data, digest_size=DIGEST_BYTES
    ).digest()


def _held(path: Path) -> int:
    """Open a file, made if there is none, so that nobody removes it as long as it is open; return
    its descriptor."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        fcntl.flock(handle, fcntl.LOCK_SH)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), path.stat()):
                return handle
        os.close(handle)  # it was removed before it was held


def _make_room(folder: Path, most_bytes: int) -> None:
    """Remove files of rows that no fit holds, those that were used longest ago first, until all
    have at most so many bytes.
    """
    files = sorted(folder.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime)
    total = sum(path.stat().st_size for path in files)
    for path in files:
        if total <= most_bytes:
            return
        with path.open("rb") as file, suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            total -= path.stat().st_size
            path.unlink()
