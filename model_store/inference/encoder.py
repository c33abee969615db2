"""The encoder of a version: from a row to what its network takes, once for each row, however many
draws.

It is a graph of its own, `encoder.onnx`, with input `x` (rows, I) and output `encoded` (rows, F).
It may be large, so it is loaded from its file, and versions that have the same one share it.

A lone row is shared by all threads, which meet after every operator. Of many rows each thread
takes its own, by a second session of one thread: meetings would take most of the time where other
work keeps a processor. A large encoder has no second session, so its weights are in memory once.
"""

import threading
import time
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
SESSION_COPIES = 1.5  # of its file, that a session takes in memory while it is loaded
CHECK_COPIES = 2.0  # the same while the graph is checked
APART_BYTES = 64 << 20  # of a file at most, that has a session for threads apart
TIMES, TIMES_S = 5, 0.1  # that a row is encoded to see how long it takes, and for how long


class Encoder:
    """What a version's network takes of rows. Any thread may call it."""

    def __init__(self, path: Path, spec: EncoderSpec, row_size: int, threads: int = 0) -> None:
        """Make a session of a graph's file; `threads` 0 means one for each processor this process
        may use.

        Raises:
            GraphError: if the graph is not one that an encoder of such rows can be.
        """
        self.spec = spec
        _check_graph(path)
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


def _check_graph(path: Path) -> None:
    """Raise GraphError unless a file has a graph that an encoder can be."""
    try:
        model = onnx.load(path, load_external_data=False)
    except OSError as error:
        raise GraphError(ENCODER, error.strerror or "cannot be read") from None
    except Exception:
        raise GraphError(ENCODER, "is not an ONNX model") from None
    refused = refusal(model)
    if refused is not None:
        raise GraphError(ENCODER, refused)
    inputs = {value.name for value in model.graph.input}
    outputs = {value.name for value in model.graph.output}
    if (inputs, outputs) != ({INPUT}, {OUTPUT}):
        raise GraphError(ENCODER, f"expected input {INPUT} and output {OUTPUT}")


def encoder_bytes(file: FileSpec) -> int:
    """Return about how many bytes an encoder takes in memory."""
    sessions = 2 if file.size <= APART_BYTES else 1
    return int(max(CHECK_COPIES, sessions * SESSION_COPIES) * file.size)


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
