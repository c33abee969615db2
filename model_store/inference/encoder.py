"""Encoders: fixed networks that run once per row, before any draws.

An encoder is a separate graph, `encoder.onnx`, with the input `x` (rows, I) and the output
`encoded` (rows, F). Versions with the same encoder share one session, because encoders can be
large.

All threads work on a single row together, and synchronise after each operator. If there are many
rows, each thread encodes different rows in a second session with one thread. That is faster if
other work occupies a processor. Large encoders have no second session, to save memory.
"""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from weakref import WeakValueDictionary

import numpy as np
from jaxtyping import Float32

from model_store.artifacts.disk import read_verified
from model_store.artifacts.manifest import ENCODER, EncoderSpec, FileSpec
from model_store.inference.graphs import GraphError, load_graph
from model_store.inference.runtime import is_on_gpu, load_session, run_graph
from model_store.processes import processors

INPUT, OUTPUT = "x", "encoded"
LOADING_COPIES = 2  # the verified bytes and the parsed graph
MAX_ROW_SESSION_BYTES = 64 << 20  # larger files have no second session
MAX_TIMINGS, MAX_TIMING_S = 5, 0.1  # to measure the time per row


class Encoder:
    def __init__(self, content: bytes, spec: EncoderSpec, row_size: int, threads: int = 0) -> None:
        """Load an encoder graph. With `threads=0`, use one thread per available processor."""
        self.spec = spec
        load_graph(ENCODER, content, {INPUT}, {OUTPUT})
        threads = threads or processors()
        self._session = self._row_session = load_session(ENCODER, content, threads)
        if is_on_gpu(self._session):
            threads = 1
        self._pool: ThreadPoolExecutor | None = None
        if threads > 1 and len(content) <= MAX_ROW_SESSION_BYTES:
            self._row_session = load_session(ENCODER, content)
            self._pool = ThreadPoolExecutor(threads, "encoder")
        row = np.zeros((1, row_size), dtype=np.float32)
        try:
            encoded = self(row)
        except Exception:
            raise GraphError(ENCODER, f"it does not run on rows of {row_size} numbers") from None
        if encoded.shape != (1, spec.outputs) or encoded.dtype != np.float32:
            expected = f"expected {spec.outputs} float32 numbers per row, got another output"
            raise GraphError(ENCODER, expected)
        self.row_s = self._time_row(row)

    def __call__(self, x: Float32[np.ndarray, "N I"]) -> Float32[np.ndarray, "N F"]:
        """Encode rows in blocks of up to `rows_at_once` rows."""
        at_once = self.spec.rows_at_once
        blocks = [x[n : n + at_once] for n in range(0, len(x), at_once)]
        if len(blocks) == 1:
            return self.run(x)
        each = map if self._pool is None else self._pool.map
        return np.concatenate(list(each(self._run_block, blocks)))

    def run(self, x: Float32[np.ndarray, "N I"]) -> Float32[np.ndarray, "N F"]:
        return run_graph(self._session, [OUTPUT], {INPUT: x})[0]

    def _run_block(self, x: Float32[np.ndarray, "N I"]) -> Float32[np.ndarray, "N F"]:
        return run_graph(self._row_session, [OUTPUT], {INPUT: x})[0]

    def _time_row(self, row: Float32[np.ndarray, "1 I"]) -> float:
        times: list[float] = []
        while len(times) < MAX_TIMINGS and sum(times) < MAX_TIMING_S:
            start = time.perf_counter()
            self(row)
            times.append(time.perf_counter() - start)
        return min(times)


def encoder_bytes(file: FileSpec) -> int:
    sessions = 2 if file.size <= MAX_ROW_SESSION_BYTES else 1
    return (LOADING_COPIES + sessions) * file.size


_shared: WeakValueDictionary[tuple[str, str, int, int], Encoder] = WeakValueDictionary()
_sharing = threading.Lock()


def shared_encoder(
    path: Path, file: FileSpec, spec: EncoderSpec, row_size: int, threads: int = 0
) -> Encoder:
    """Load an encoder, or return the one in memory. Raise GraphError if it has changed."""
    key = file.sha256, spec.model_dump_json(), row_size, threads
    with _sharing:
        encoder = _shared.get(key)
        if encoder is None:
            try:
                content = read_verified(path, file)
            except OSError as error:
                raise GraphError(ENCODER, error.strerror or "cannot be read") from None
            except ValueError as error:
                raise GraphError(ENCODER, str(error)) from None
            encoder = _shared[key] = Encoder(content, spec, row_size, threads)
        return encoder
