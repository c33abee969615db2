"""Running an artifact's two graphs with onnxruntime: the same code for calibration and for the
service.

Draws are taken in chunks of bounded size, which does not change a bit of any row's answer: every
row of a matrix product is summed in the same order, however many rows come with it, one row
included, and however many threads share the work. That holds because the weights are constants of
the graph, which onnxruntime packs for its blocked kernel when a session is made.
"""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import onnx
import onnxruntime as ort
from jaxtyping import Float32

from model_store.errors import OutOfMemory
from model_store.inference.graphs import (
    GraphError,
    axes_of_row,
    between,
    last_dimension,
    load_graph,
    metadata_number,
)
from model_store.inference.noise import DRAW_INDEX, NOISE_ALGORITHM, noise
from model_store.inference.sessions import CUDA, is_on_gpu, providers, session_options
from model_store.processes import is_out_of_memory, processors
from model_store.scores.tasks import PREDICTIVES
from model_store.types import Task

logger = logging.getLogger("dubito")

T = TypeVar("T")
U = TypeVar("U")
Rewriting = Callable[[Float32[np.ndarray, "N I"]], Float32[np.ndarray, "N F"]]  # of rows

# Of the network
OUTPUTS: dict[Task, str] = {task: predictive.output for task, predictive in PREDICTIVES.items()}
BEFORE_DRAWS = ("features", "density")  # the other outputs
TERMS = (
    "terms"  # an output that networks may have: what each number of a row adds to a density's score
)
CHUNK_ROWS = (
    512  # rows x draws in one run of the network: intermediate results stay in a core's cache
)
SMALL_ROWS = 128  # rows x draws below which waking other threads takes longer than they save
SMALLEST_BLOCK = 8  # rows
# The same where theta is not paired: a convolution whose weights are drawn needs all patches of its
# input.
UNPAIRED_CHUNK_ROWS = 128
GPU_CHUNK_ROWS = 4096  # the same of a GPU, which fewer do not fill
CHUNK_BYTES = 32 << 20  # of theta in one run
RESULT_NUMBERS = 4 << 20  # of an intermediate result of one run, unless it is on a GPU
# In the network's metadata: of one row under one draw, the numbers of the largest such result
LARGEST_RESULT = "largest_result"
WEIGHTS_PER_DRAW = "weights_per_draw"  # where theta holds less than the matrices do
# Of a draw set that is held in memory; a larger one is made chunk by chunk whenever it is used
HELD_BYTES = 64 << 20


@dataclass(frozen=True, eq=False)
class DrawSet:
    """The first K draws of a seed; `theta` is None where it would be too large to hold."""

    seed: int
    num_draws: int
    theta: Float32[np.ndarray, "K D"] | None


class _Deferred:
    """A session that is made when it is first asked for, and its graph let go."""

    def __init__(self, make: Callable[[], ort.InferenceSession]) -> None:
        self._make: Callable[[], ort.InferenceSession] | None = make
        self._session: ort.InferenceSession | None = None
        self._making = threading.Lock()

    def __call__(self) -> ort.InferenceSession:
        with self._making:
            if self._make is not None:
                self._session, self._make = self._make(), None
        return self._session


class Runtime:
    """The sampler (eps -> theta) and the network (x, theta -> outputs, features, density) of a
    model."""

    def __init__(
        self,
        sampler: bytes,
        network: bytes,
        noise_dimension: int,
        threads: int = 0,
        algorithm: str = NOISE_ALGORITHM,
        paired: bool = True,
        encoder: Rewriting | None = None,
        on_processors: bool = False,
    ) -> None:
        """Make sessions of serialised graphs; `threads` 0 means one for each processor this process
        may use. They are on a GPU where there is one, unless they must be `on_processors`.

        They are the network's: draws are made ahead, on one thread, while the network works.
        Noise is made by `algorithm`; `paired` says whether rows may have draws of their own. With
        an `encoder` (`model_store.inference.encoder`), rows are what it takes, and the network's
        are what it gives.

        Raises:
            GraphError: if a graph is not one that a sampler or network can be.
        """
        self.noise_dimension = noise_dimension
        self.algorithm = algorithm
        self.paired = paired
        self.encoder = encoder
        self._on_processors = on_processors
        graph = load_graph("sampler.onnx", sampler, {"eps"}, {"theta"})
        if axes_of_row(graph.graph.input, "eps") != (noise_dimension,):
            raise GraphError(
                "sampler.onnx", f"expected eps of 2 axes, the last of {noise_dimension}"
            )
        self._sampler = self._session("sampler.onnx", graph)
        needed = [{output, *BEFORE_DRAWS} for output in OUTPUTS.values()]
        outputs = [names | terms for names in needed for terms in (set(), {TERMS})]
        whole = load_graph("network.onnx", network, {"x", "theta"}, *outputs)
        given = {output.name for output in whole.graph.output}
        (self.task,) = (task for task, output in OUTPUTS.items() if output in given)
        self.output = OUTPUTS[self.task]
        self._weights_per_draw = metadata_number(whole, WEIGHTS_PER_DRAW)
        self.theta_dimension = last_dimension(whole.graph.input, "theta")
        self.draw_bytes = 4 * self.theta_dimension  # of a draw's theta
        self._outputs = last_dimension(whole.graph.output, self.output)
        # What does not depend on draws is computed once for each row.
        after = between(whole, ("features", "theta"), (self.output,))
        self._rows = "features" if after else "x"  # what the second graph takes besides theta
        self._given = ["features", "density"] if after else ["density"]
        before = between(whole, ("x",), self._given)
        after = after or between(whole, ("x", "theta"), (self.output,))
        if before is None or after is None:
            raise GraphError("network.onnx", "expected a density that does not depend on theta")
        self._before = self._session("network.onnx", before)
        self._after = self._session("network.onnx", after)
        features = between(whole, ("x",), ("features",)) if self._rows == "features" else None
        self._features = None if features is None else self._deferred(features)
        terms = between(whole, ("x",), (TERMS,)) if TERMS in given else None
        if TERMS in given and terms is None:
            raise GraphError("network.onnx", "expected terms that do not depend on theta")
        self.terms_shape = None if terms is None else axes_of_row(whole.graph.output, TERMS)
        self._terms = None if terms is None else self._deferred(terms)
        on_gpu = is_on_gpu(self._after)
        self._fewest_draws = 1 if paired or algorithm == DRAW_INDEX else 2  # a lone one is doubled
        most = RESULT_NUMBERS // max(1, metadata_number(whole, LARGEST_RESULT))
        # rows x draws of a run; a lone row may be doubled too
        self.chunk_rows = max(4, min(CHUNK_ROWS if paired else UNPAIRED_CHUNK_ROWS, most))
        if on_gpu:
            self.chunk_rows = GPU_CHUNK_ROWS
        self.threads = 1 if on_gpu else threads or processors()
        self._pool = ThreadPoolExecutor(self.threads, "network") if self.threads > 1 else None

    def _session(self, file: str, model: onnx.ModelProto) -> ort.InferenceSession:
        content, wanted = model.SerializeToString(), providers(self._on_processors)
        # Threads share work by draws and rows, which takes no meeting after each operator
        try:
            session = ort.InferenceSession(content, session_options(1), providers=wanted)
        except Exception:
            raise GraphError(file, "onnxruntime cannot load it") from None
        if wanted[0][0] == CUDA and not is_on_gpu(session):
            logger.warning("%s does not start; running on the processor", CUDA)
        return session

    def _deferred(self, graph: onnx.ModelProto) -> "_Deferred":
        return _Deferred(partial(self._session, "network.onnx", graph))

    def draw(self, seed: int, first_draw: int, num_draws: int) -> Float32[np.ndarray, "K D"]:
        return self.sample(noise(self.algorithm, seed, first_draw, num_draws, self.noise_dimension))

    def sample(self, eps: Float32[np.ndarray, "K E"]) -> Float32[np.ndarray, "K D"]:
        return run_graph(self._sampler, ["theta"], {"eps": eps})[0]

    def draw_set(self, seed: int, num_draws: int) -> DrawSet:
        held = num_draws * self.draw_bytes <= HELD_BYTES
        return DrawSet(seed, num_draws, self.draw(seed, 0, num_draws) if held else None)

    def run_set(
        self, x: Float32[np.ndarray, "N I"], draws: DrawSet
    ) -> tuple[Float32[np.ndarray, "K N C"], Float32[np.ndarray, "N M"]]:
        """Return what `run` does, all rows under one draw set, in memory bounded whatever the set's
        size."""
        known, density = self.before_draws(x)
        return self.after_draw_set(known, draws), density

    def after_draw_set(
        self, known: Float32[np.ndarray, "N H"], draws: DrawSet
    ) -> Float32[np.ndarray, "K N C"]:
        """Return what `after_draws` does, all rows under one draw set, in bounded memory."""
        if draws.theta is not None:
            return self.after_draws(known, draws.theta[:, None])
        chunk = max(self._fewest_draws, CHUNK_BYTES // self.draw_bytes)
        parts = []
        for k in range(0, draws.num_draws, chunk):
            theta = self.draw(draws.seed, k, min(chunk, draws.num_draws - k))
            parts.append(self.after_draws(known, theta[:, None]))
        return np.concatenate(parts)

    def run(
        self, x: Float32[np.ndarray, "N I"], theta: Float32[np.ndarray, "K P D"]
    ) -> tuple[Float32[np.ndarray, "K N C"], Float32[np.ndarray, "N M"]]:
        """Return the network's outputs for each draw and row, and the density detectors' scores of
        each row.

        Outputs are log class probabilities, or of a regression the target's mean and log variance
        (C = 2).

        `theta` has one draw for all rows (P = 1) or, where it may be paired, one for each (P = N).
        """
        known, density = self.before_draws(x)
        return self.after_draws(known, theta), density

    def before_draws(
        self, x: Float32[np.ndarray, "N I"]
    ) -> tuple[Float32[np.ndarray, "N H"], Float32[np.ndarray, "N M"]]:
        """Return what `after_draws` takes in of rows, and the density detectors' scores: what no
        draw changes."""
        x = self.encoded(x)
        *features, density = self._of_rows(self._before, self._given, x)
        return (features[0] if features else x), density

    def outputs_of(
        self, x: Float32[np.ndarray, "N I"], draws: DrawSet
    ) -> Float32[np.ndarray, "K N C"]:
        """Return the outputs of `run_set` alone: densities, which can take longer than ten draws,
        are not computed."""
        known = self.encoded(x)
        if self._features is not None:
            (known,) = self._of_rows(self._features(), ["features"], known)
        return self.after_draw_set(known, draws)

    def _of_rows(
        self, session: ort.InferenceSession, outputs: list[str], x: Float32[np.ndarray, "N I"]
    ) -> list[np.ndarray]:
        """Return a graph's outputs of rows, over which threads share the work."""

        def compute(block: slice) -> list[np.ndarray]:
            part = x[block]
            # A lone row would be multiplied with weights that are not constants by another kernel,
            # and get other bits.
            rows = np.repeat(part, 2, axis=0) if len(part) == 1 and not self.paired else part
            return [output[: len(part)] for output in run_graph(session, outputs, {"x": rows})]

        # few rows are one thread's, which reads the weights once for all of them
        blocks = self._row_blocks(len(x)) if len(x) > SMALL_ROWS else [slice(None)]
        parts = self._each(compute, blocks, len(x))
        return (
            parts[0] if len(parts) == 1 else [np.concatenate(of) for of in zip(*parts, strict=True)]
        )

    def encoded(self, x: Float32[np.ndarray, "N I"]) -> Float32[np.ndarray, "N F"]:
        return x if self.encoder is None else self.encoder(x)

    @property
    def has_terms(self) -> bool:
        return self.terms_shape is not None

    def terms(self, x: Float32[np.ndarray, "N I"]) -> Float32[np.ndarray, "N A I"]:
        """Return what each number of a row adds to the scores of those densities that are sums over
        them.

        On the caller's thread alone: it is for few rows. The session is made when it is first asked
        for.

        Raises:
            ValueError: if the network does not say it.
            GraphError: if that part of it cannot be loaded.
        """
        if self._terms is None:
            raise ValueError("expected a network with terms, got one without")
        return run_graph(self._terms(), [TERMS], {"x": x})[0]

    def after_draws(
        self, known: Float32[np.ndarray, "N H"], theta: Float32[np.ndarray, "K P D"]
    ) -> Float32[np.ndarray, "K N C"]:
        """Return the network's outputs for each draw and row, given what `before_draws` says of the
        rows."""
        blocks = self._row_blocks(len(known))
        outputs = np.empty((len(theta), len(known), self._outputs), dtype=np.float32)

        def compute(part: tuple[slice, slice]) -> None:
            block, draws = part
            theta_part = theta[draws] if theta.shape[1] == 1 else theta[draws, block]
            outputs[draws, block] = self._after_draws(known[block], theta_part)

        largest = max(block.stop - block.start for block in blocks)
        chunks = self._draw_chunks(largest, len(theta), len(blocks))
        parts = [(block, draws) for draws in chunks for block in blocks]
        self._each(compute, parts, len(known) * len(theta))
        return outputs

    def _row_blocks(self, rows: int) -> list[slice]:
        """Return blocks of rows, as many for each thread, unless they would be small."""
        most = self.chunk_rows // self._fewest_draws
        size = min(most, max(SMALLEST_BLOCK, -(-rows // self.threads)))
        return [slice(n, min(n + size, rows)) for n in range(0, rows, size)]

    def _draw_chunks(self, rows: int, draws: int, blocks: int) -> list[slice]:
        """Return chunks of draws for blocks of rows: bounded, and work for each thread."""
        # The network computes every member, whichever are asked for
        if self.algorithm == DRAW_INDEX:
            return [slice(0, draws)]
        most = self.chunk_rows // rows
        if not self.paired:
            draw_bytes = 4 * max(self.theta_dimension, self._weights_per_draw)
            most = min(most, CHUNK_BYTES // draw_bytes)
        most = max(self._fewest_draws, most)
        chunks = -(-draws // most)
        if rows * draws * blocks > SMALL_ROWS:
            chunks = max(chunks, -(-self.threads // blocks))
        size = -(-draws // chunks)
        return [slice(k, min(k + size, draws)) for k in range(0, draws, size)]

    def _each(self, work: Callable[[T], U], parts: list[T], rows: int) -> list[U]:
        """Return what work makes of each part, on all threads unless the rows x draws of all parts
        are few."""
        if self._pool is None or len(parts) == 1 or rows <= SMALL_ROWS:
            return [work(part) for part in parts]
        return list(self._pool.map(work, parts))

    def _after_draws(
        self, known: Float32[np.ndarray, "N H"], theta: Float32[np.ndarray, "K P D"]
    ) -> Float32[np.ndarray, "K N C"]:
        # As in `_of_rows`; so would a lone draw of weights where rows are few.
        rows = np.repeat(known, 2, axis=0) if len(known) == 1 and not self.paired else known
        lone = len(theta) < self._fewest_draws
        theta_part = np.repeat(theta, 2, axis=0) if lone else theta
        taken = {self._rows: rows, "theta": theta_part}
        outputs = run_graph(self._after, [self.output], taken)[0]
        return outputs[: len(theta), : len(known)]


def run_graph(
    session: ort.InferenceSession, outputs: list[str], values: dict[str, np.ndarray]
) -> list[np.ndarray]:
    """Return the outputs of a graph.

    Raises:
        OutOfMemory: if it takes more than `bound_memory` lets it.
    """
    try:
        return list(session.run(outputs, values))
    except Exception as error:
        if is_out_of_memory(error):
            raise OutOfMemory from None
        raise
