"""What comes before a recipe's network, made and examined before the fit: see `[network] encoder`
of a recipe."""

import fcntl
import math
import os
import tempfile
import weakref
import zlib
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import file_digest
from pathlib import Path

import numpy as np
import onnx
import torch
from jaxtyping import Float32, UInt8

from model_store.artifacts.manifest import ENCODER, EncoderSpec
from model_store.errors import InvalidInput, one_line
from model_store.inference.encoder import Encoder
from model_store.inference.runtime import Rewriting
from training import log
from training.data import Dataset, Rows, Splits
from training.data.rows import DIGEST_BYTES, row_digest
from training.detectors.spectrum import LARGEST
from training.export.encoders import RowsTaken, examine, of_file, of_module, write_model
from training.model import require_split, split_network, standardisation
from training.networks.architectures import channels_first
from training.networks.split import NotSplit
from training.progress import Bar
from training.recipe import Recipe
from training.seeds import Stream, hash_key
from training.versions import Parent

FOLDER = "encoders"  # among the runs
EXAMPLES = 16  # training rows that an encoder is tried on
AT_ONCE = 64  # rows between two writes
MOST_BYTES = 20 << 30  # of all encoders' rows together, the least recently used are removed first
SUFFIX, LOCK = ".rows", ".lock"


@dataclass(frozen=True, eq=False)
class Encoding:
    """An encoder that was examined: its file, what a manifest says of it, and itself, which keeps
    what it says."""

    path: Path
    spec: EncoderSpec
    encoder: "CachedEncoder"

    @property
    def digest(self) -> str:
        return self.path.stem

    def of(self, splits: Splits, quiet: bool = False) -> Splits:
        """Return splits whose training and validation rows are encoded, as the network is fitted on
        them.

        The others are judged as they are served: raw.
        """
        train, validation = (
            replace(rows, x=self.encoder.rows(rows.x, quiet))
            for rows in (splits.train, splits.validation)
        )
        return replace(splits, train=train, validation=validation)


def with_encoder(
    recipe: Recipe, data: Dataset, train: Rows, runs: Path, parent: Parent | None = None
) -> tuple[Recipe, Encoding | None]:
    """Return a recipe that says whether its network has an encoder, and the encoder.

    A recipe that does not say has one where rows are long, layers are frozen, and rows are the same
    in all epochs. `train` are raw; a `parent`, whose weights a fit goes on from, has the same
    encoder, or none.

    Raises:
        InvalidInput: if the recipe's encoder cannot be one.
    """
    network, width = recipe.network, math.prod(data.shape)
    is_told = network.encoder is not None
    like = None
    if parent is not None and parent.manifest.encoder is not None:
        like = parent.manifest.files[ENCODER].sha256
    if not is_told:
        has_frozen = network.factory is not None and network.trained is not None
        may_have = has_frozen and recipe.augmentation is None and width > LARGEST
        if not may_have or (parent is not None and like is None):
            return recipe, None
    if network.encoder == "none":
        return recipe, None
    if recipe.augmentation is not None:
        expected = "none with an encoder, which says once what it says of a row"
        raise InvalidInput("augmentation", expected, "one")
    model = _encoder_model(recipe, data, is_told)
    if model is None:
        return recipe, None
    folder = runs / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=folder) as making:
        draft = Path(making) / ENCODER
        write_model(model, draft)
        del model
        examples = train.x[:EXAMPLES].astype(np.float32)
        spec = examine(draft, width, examples, network.rows_at_once)
        with draft.open("rb") as file:
            digest = file_digest(file, "sha256").hexdigest()
        path = draft.rename(folder / f"{digest}.onnx")
    if like is not None and like != digest:
        expected = f"that of the version to go on from, {like[:12]}..."
        raise InvalidInput("network.encoder", expected, f"{digest[:12]}...")
    encoder = Encoder(path, spec, width)
    if data.takes_ids:
        _check_largest_id(encoder, data)
    figures = f"{width} numbers of a row to {spec.outputs}, {1000 * encoder.row_s:.3g} ms a row"
    is_alone = spec.rows_at_once == 1 and network.rows_at_once is None
    why = "; a row at a time, since rows among others get other bits" if is_alone else ""
    log.info("encoder: %s%s", figures, why)
    # rows in other company may get other bits
    rows_file = folder / f"{digest}-{spec.rows_at_once}{SUFFIX}"
    if not is_told:
        network = network.model_copy(update={"encoder": "frozen"})
        recipe = recipe.model_copy(update={"network": network})
    return recipe, Encoding(path, spec, CachedEncoder(encoder, spec.outputs, rows_file))


def _encoder_model(recipe: Recipe, data: Dataset, is_told: bool) -> onnx.ModelProto | None:
    """Return the ONNX model of a recipe's encoder; None where frozen layers, of a recipe that does
    not name them one, cannot be."""
    network = recipe.network
    is_picture = network.encoder_file is None and not data.takes_ids
    shape = channels_first(data.shape) if is_picture else data.shape
    pad_id = 0 if data.text is None else data.text.pad_id
    rows = RowsTaken(shape, takes_ids=data.takes_ids, pad_id=pad_id)
    if not data.takes_ids and network.pixel_mean is not None:
        mean, std = (of.numpy() for of in standardisation(network, channels_first(data.shape)))
        if network.encoder_file is not None and mean.ndim and len(shape) == 2:
            mean, std = mean[0], std[0]
        rows = RowsTaken(shape, mean, std)
    if network.encoder_file is not None:
        return of_file(Path(network.encoder_file), rows, network.output)
    cut = require_split if is_told else split_network
    try:
        # what is random in a factory is what it will be in the model
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(hash_key(recipe.seed, Stream.INITIALISATION))
            parts = cut(recipe, data.shape, len(data.classes), with_weights=True)
    except NotSplit as error:
        log.info("frozen layers are computed again in every epoch: %s", error)
        return None
    if parts is None:
        return None
    try:
        return of_module(parts.encoder, rows)
    except Exception as error:  # torch's exporter lets any kind through
        reason = f"{type(error).__name__}: {one_line(error)}"[:300]
        if is_told:
            expected = "frozen layers that can be exported"
            raise InvalidInput("network.encoder", expected, reason) from error
        # the whole network is tried before the fit, which says which layer it is
        log.info("frozen layers are computed again in every epoch: %s", reason)
        return None


def _check_largest_id(encoder: Encoder, data: Dataset) -> None:
    try:
        encoder.run(np.full((1, math.prod(data.shape)), data.maximum, dtype=np.float32))
    except Exception as error:
        expected = f"one that takes ids from 0 to {data.maximum:.0f}"
        raise InvalidInput("network.encoder", expected, one_line(error)) from None


class CachedEncoder:
    """An encoder that keeps what it says of rows in a file, for this process and later ones."""

    def __init__(
        self, encoder: Rewriting, width: int, path: Path, most_bytes: int = MOST_BYTES
    ) -> None:
        """Open the file of an encoder of `width` numbers, or begin one; beyond the bound, older
        ones are removed."""
        self.encoder = encoder
        self.path = path
        self.most_bytes = most_bytes
        self.record = np.dtype(
            [("digest", f"V{DIGEST_BYTES}"), ("crc", "<u4"), ("encoded", "<f4", (width,))]
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        weakref.finalize(self, os.close, _open_held(path))
        os.utime(path)
        _make_room(path.parent, most_bytes)
        self.known: dict[bytes, int] = {}
        for i, record in enumerate(self._records()):
            if zlib.crc32(record["encoded"].tobytes()) == int(record["crc"]):
                self.known[record["digest"].tobytes()] = i

    def __call__(self, x: Float32[np.ndarray, "N I"]) -> Float32[np.ndarray, "N F"]:
        return np.array(self.rows(x, quiet=True))

    def rows(
        self, x: Float32[np.ndarray, "N I"] | UInt8[np.ndarray, "N I"], quiet: bool = False
    ) -> Float32[np.ndarray, "N F"]:
        """Return what the encoder says of rows, with a progress bar.

        Rows that lie together in the file are a view of it, which takes no memory. Where the file
        would be larger than it may be, the rest is in memory alone.
        """
        digests = [row_digest(row) for row in x]
        new = [n for n, digest in enumerate(digests) if digest not in self.known]
        if not new:
            return self._read(digests)
        found: dict[int, np.ndarray] = {}
        with Bar(len(new), "row", quiet, desc="encoding") as bar:
            for i in range(0, len(new), AT_ONCE):
                part = new[i : i + AT_ONCE]
                encoded = self.encoder(x[part].astype(np.float32))
                if not self._append([digests[n] for n in part], encoded):
                    found |= dict(zip(part, encoded, strict=True))
                bar.update(len(part))
                bar.say(f"encoded {i + len(part)} of {len(new)} rows")
        if not found:
            return self._read(digests)
        if not quiet:
            why = f"files of encoded rows have {self.most_bytes} bytes"
            log.info("%d rows are kept in memory: %s", len(found), why)
        records = self._records()
        kept = records["encoded"]
        return np.stack(
            [found[n] if n in found else kept[self.known[digests[n]]] for n in range(len(x))]
        )

    def _read(self, digests: list[bytes]) -> Float32[np.ndarray, "N F"]:
        index = [self.known[digest] for digest in digests]
        encoded = self._records()["encoded"]
        first = index[0] if index else 0
        if index == list(range(first, first + len(index))):
            return encoded[first : first + len(index)]
        return encoded[index]

    def _records(self) -> np.ndarray:
        count = self.path.stat().st_size // self.record.itemsize
        if count == 0:
            return np.empty(0, dtype=self.record)
        return np.memmap(self.path, dtype=self.record, mode="c", shape=(count,))

    def _append(self, digests: list[bytes], encoded: Float32[np.ndarray, "n F"]) -> bool:
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


def _open_held(path: Path) -> int:
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
    have at most `most_bytes`.
    """
    with (folder / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another fit may make room too
        files = sorted(folder.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime)
        total = sum(path.stat().st_size for path in files)
        for path in files:
            if total <= most_bytes:
                return
            with path.open("rb") as file, suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                total -= path.stat().st_size
                path.unlink()
