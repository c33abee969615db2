"""The encoder of a version: from a row to what its network takes, once for each row, however many
draws.

It is a graph of its own, `encoder.onnx`, with input `x` (rows, I) and output `encoded` (rows, F).
It may be large, so it is loaded from its file, and versions that have the same one share it.

A lone row is shared by all threads, which meet after every operator. Of many rows each thread
takes its own, by a second session of one thread: meetings would take most of the time where other
work keeps a processor. A large encoder has no second session, so its weights are in memory once.
"""

import mmap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from weakref import WeakValueDictionary

import numpy as np
import onnx
import onnxruntime as ort
from jaxtyping import Float32

from model_store.artifacts.manifest import ENCODER, EncoderSpec, FileSpec
from model_store.inference.graphs import GraphError
from model_store.inference.operators import refusal
from model_store.inference.runtime import run_graph
from model_store.inference.sessions import is_on_gpu, providers, session_options
from model_store.processes import processors

INPUT, OUTPUT = "x", "encoded"
COPIES = 1.5  # of its file, that a session takes in memory while it is loaded
APART_BYTES = 64 << 20  # of a file at most, that has a session for threads apart
TIMES, TIMES_S = 5, 0.1  # that a row is encoded to see how long it takes, and for how long
# Fields of ONNX's messages, by number (onnx.proto).
GRAPH, INITIALIZER = 7, 5  # of a model, of a graph
NUMBERS = {4, 5, 6, 7, 9, 10, 11}  # of a tensor
VARINT, FIXED_64, LENGTH, FIXED_32 = 0, 1, 2, 5  # kinds of fields in protobuf's encoding


class Encoder:
    """What a version's network takes of rows. Any thread may call it."""

    def __init__(self, path: Path, spec: EncoderSpec, row_size: int, threads: int = 0) -> None:
        """Make a session of a graph's file; `threads` 0 means one for each processor this process
        may use.

        Raises:
            GraphError: if the graph is not one that an encoder of such rows can be.
        """
        self.spec = spec
        model = without_weights(path)
        refused = refusal(model)
        if refused is not None:
            raise GraphError(ENCODER, refused)
        named = (
            {value.name for value in model.graph.input},
            {value.name for value in model.graph.output},
        )
        if named != ({INPUT}, {OUTPUT}):
            raise GraphError(ENCODER, f"expected input {INPUT} and output {OUTPUT}")
        del model
        threads = threads or processors()
        self._session = self._apart = _session(path, threads)
        if is_on_gpu(self._session):
            threads = 1
        self._pool: ThreadPoolExecutor | None = None
        if threads > 1 and path.stat().st_size <= APART_BYTES:
            self._apart = _session(path, 1)
            self._pool = ThreadPoolExecutor(threads, "encoder")
        try:
            given = self(np.zeros((1, row_size), dtype=np.float32))
        except Exception:
            raise GraphError(ENCODER, f"it does not run on rows of {row_size} numbers") from None
        if given.shape != (1, spec.outputs) or given.dtype != np.float32:
            raise GraphError(
                ENCODER, f"expected {spec.outputs} float32 numbers for a row, got another output"
            )
        self.row_s = self._least_seconds(np.zeros((1, row_size), dtype=np.float32))

    def __call__(self, x: Float32[np.ndarray, "N I"]) -> Float32[np.ndarray, "N F"]:
        """Return what the network takes of each row, `rows_at_once` together, in their order."""
        at_once = self.spec.rows_at_once
        blocks = [x[n : n + at_once] for n in range(0, len(x), at_once)]
        if len(blocks) == 1:
            return self.run(x)
        each = map if self._pool is None else self._pool.map
        return np.concatenate(list(each(self._run_apart, blocks)))

    def run(self, x: Float32[np.ndarray, "N I"]) -> Float32[np.ndarray, "N F"]:
        """Return the same of rows that are encoded together, whatever `rows_at_once` says."""
        return run_graph(self._session, [OUTPUT], {INPUT: x})[0]

    def _run_apart(self, x: Float32[np.ndarray, "N I"]) -> Float32[np.ndarray, "N F"]:
        return run_graph(self._apart, [OUTPUT], {INPUT: x})[0]

    def _least_seconds(self, x: Float32[np.ndarray, "N I"]) -> float:
        """Return how long rows take where no other work keeps the processors."""
        taken: list[float] = []
        while len(taken) < TIMES and sum(taken) < TIMES_S:
            begun = time.perf_counter()
            self(x)
            taken.append(time.perf_counter() - begun)
        return min(taken)


def encoder_bytes(file: FileSpec) -> int:
    """Return about how many bytes an encoder takes in memory."""
    sessions = 2 if file.size <= APART_BYTES else 1
    return int(sessions * COPIES * file.size)


def _session(path: Path, threads: int) -> ort.InferenceSession:
    try:
        return ort.InferenceSession(str(path), session_options(threads), providers=providers())
    except Exception:
        raise GraphError(ENCODER, "onnxruntime cannot load it") from None


_shared: WeakValueDictionary[tuple[str, str, int, int], Encoder] = WeakValueDictionary()
_sharing = threading.Lock()


def shared_encoder(
    path: Path, file: FileSpec, spec: EncoderSpec, row_size: int, threads: int = 0
) -> Encoder:
    """Return the encoder of a verified file, the one that is in memory if there is one of the same
    content.

    Raises:
        GraphError: as `Encoder` does.
    """
    key = file.sha256, spec.model_dump_json(), row_size, threads
    with _sharing:
        encoder = _shared.get(key)
        if encoder is None:
            encoder = _shared[key] = Encoder(path, spec, row_size, threads)
        return encoder


def without_weights(path: Path) -> onnx.ModelProto:
    """Return a model as its file has it, but for the numbers of its weights, which are passed over.

    Raises:
        GraphError: if the file is not such a model.
    """
    try:
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            return onnx.load_model_from_string(_without(memoryview(content), [GRAPH, INITIALIZER]))
    except OSError as error:
        raise GraphError(ENCODER, error.strerror or "cannot be read") from None
    except Exception:
        raise GraphError(ENCODER, "is not an ONNX model") from None


def _without(message: memoryview, way: list[int]) -> bytes:
    """Return a message without the numbers of the tensors that a way of fields leads to."""
    kept = bytearray()
    for field, kind, whole, content in _fields(message):
        if not way and field in NUMBERS:
            continue
        if way and field == way[0] and kind == LENGTH:
            inner = _without(content, way[1:])
            kept += _varint(field << 3 | LENGTH) + _varint(len(inner)) + inner
        else:
            kept += whole
    return bytes(kept)


def _fields(message: memoryview) -> Iterator[tuple[int, int, memoryview, memoryview]]:
    """Yield each field of a message in protobuf's encoding: its number, its kind, all of it, and
    its content."""
    place = 0
    while place < len(message):
        start = place
        tag, place = _number(message, place)
        field, kind = tag >> 3, tag & 7
        if kind == LENGTH:
            length, place = _number(message, place)
        elif kind == VARINT:
            length = _number(message, place)[1] - place
        elif kind in (FIXED_64, FIXED_32):
            length = 8 if kind == FIXED_64 else 4
        else:
            raise ValueError(f"a field of kind {kind}")
        if place + length > len(message):
            raise ValueError("a field that is longer than its message")
        yield field, kind, message[start : place + length], message[place : place + length]
        place += length


def _number(message: memoryview, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[place]
        value |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if byte < 0x80:
            return value, place


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])
