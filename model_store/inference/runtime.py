"""Run a model's sampler and network with onnxruntime.

Draws are computed in chunks of limited size. Chunks, other rows and the number of threads do not
change the bits of a row's outputs, because each row of a matrix product is summed in the same
order. This requires weights that are constants of the graph, which onnxruntime packs for its
blocked kernel when it loads a session.
"""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import numpy as np
import onnx
import onnxruntime as ort
from jaxtyping import Float32

from model_store.errors import OutOfMemory
from model_store.inference.graphs import (
    GraphError,
    axes_of_row,
    extract_subgraph,
    last_dimension,
    load_graph,
    metadata_number,
)
from model_store.inference.noise import DRAW_INDEX, NOISE_ALGORITHM, ROW_NOISE, RowSigns, noise
from model_store.processes import is_out_of_memory, processors
from model_store.scores.tasks import PREDICTIVES
from model_store.types import Task

logger = logging.getLogger("dubito")

T = TypeVar("T")
U = TypeVar("U")
Rows = Float32[np.ndarray, "N I"]
Features = Float32[np.ndarray, "N H"]
Densities = Float32[np.ndarray, "N M"]
Theta = Float32[np.ndarray, "K P D"]
Outputs = Float32[np.ndarray, "K N C"]
EncodeRows = Callable[[Float32[np.ndarray, "N I"]], Float32[np.ndarray, "N F"]]

CUDA, PROCESSORS = "CUDAExecutionProvider", "CPUExecutionProvider"
# TF32 would round factors to ten bits.
PROVIDERS: dict[str, dict[str, str]] = {CUDA: {"use_tf32": "0"}, PROCESSORS: {}}

# Outputs of the network
OUTPUTS: dict[Task, str] = {task: predictive.output for task, predictive in PREDICTIVES.items()}
TERMS = "terms"  # optional: contribution of each number of a row to a density's score
# Optional input and outputs: draws of weights, which all rows share, for joint scores
WEIGHT_NOISE, WEIGHTS, WEIGHT_OUTPUTS = "weight_noise", "weights", "weight_outputs"
WEIGHT_VALUES = (WEIGHT_NOISE, WEIGHTS, WEIGHT_OUTPUTS)
# Rows x draws per run of the network, whose intermediate results fit in a core's cache
CHUNK_ROWS = 512
# If theta is not paired: convolutions with sampled weights need all patches of their input
UNPAIRED_CHUNK_ROWS = 128
GPU_CHUNK_ROWS = 4096  # to keep a GPU busy
SMALL_ROWS = 128  # rows x draws that are faster on one thread
MIN_BLOCK_ROWS = 8
CHUNK_BYTES = 32 << 20  # of theta per run
RESULT_NUMBERS = 4 << 20  # in an intermediate result of a run, except on a GPU
# Keys of the network's metadata
LARGEST_RESULT = "largest_result"  # numbers in the largest intermediate result, per row and draw
WEIGHTS_PER_DRAW = "weights_per_draw"  # if the weight matrices are larger than theta
MAX_DRAW_SET_BYTES = 64 << 20  # larger draw sets are computed chunk by chunk


@dataclass(frozen=True, eq=False)
class DrawSet:
    """The first K draws for a seed. `theta` is None if it does not fit in memory."""

    seed: int
    num_draws: int
    theta: Float32[np.ndarray, "K D"] | None


class _Deferred(Generic[T]):
    """A session or runtime that is loaded on first use, after which the graph is freed."""

    def __init__(self, load: Callable[[onnx.ModelProto], T], graph: onnx.ModelProto) -> None:
        self._load = load
        self._graph: onnx.ModelProto | None = graph
        self._loaded: list[T] = []
        self._lock = threading.Lock()

    def __call__(self) -> T:
        with self._lock:
            if self._graph is not None:
                self._loaded, self._graph = [self._load(self._graph)], None
        return self._loaded[0]


class Runtime:
    """A model's sampler and network."""

    def __init__(
        self,
        sampler: bytes,
        network: bytes,
        noise_dimension: int,
        threads: int = 0,
        algorithm: str = NOISE_ALGORITHM,
        paired: bool = True,
        encoder: EncodeRows | None = None,
        on_processors: bool = False,
    ) -> None:
        """Load the sampler and network from serialized graphs.

        Args:
            threads: for the network; 0 means one per available processor.
            paired: whether each row can have different draws.
            encoder: applied to rows before the network.
            on_processors: do not use a GPU.

        Raises:
            GraphError: if a graph is not a valid sampler or network.
        """
        self.noise_dimension = noise_dimension
        self.algorithm = algorithm
        self.paired = paired
        self.encoder = encoder
        self._on_processors = on_processors
        graph = load_graph("sampler.onnx", sampler, {"eps"}, {"theta"})
        if axes_of_row(graph.graph.input, "eps") != (noise_dimension,):
            expected = f"expected eps with 2 axes, the last of length {noise_dimension}"
            raise GraphError("sampler.onnx", expected)
        self._sampler = self._session("sampler.onnx", graph)
        self._load_network(network)
        on_gpu = is_on_gpu(self._draw_session)
        self._min_draws = 1 if paired or algorithm == DRAW_INDEX else 2  # single draws are doubled
        # At least 2 rows x 2 draws, since both can be doubled
        chunk_rows = min(CHUNK_ROWS if paired else UNPAIRED_CHUNK_ROWS, self._max_chunk_rows)
        self.chunk_rows = GPU_CHUNK_ROWS if on_gpu else max(4, chunk_rows)
        self.threads = 1 if on_gpu else threads or processors()
        self._pool = ThreadPoolExecutor(self.threads, "network") if self.threads > 1 else None

    def _load_network(self, content: bytes) -> None:
        outputs = [{output, "density"} for output in OUTPUTS.values()]
        optional = frozenset({"features", TERMS, *WEIGHT_VALUES})
        graph = load_graph("network.onnx", content, {"x", "theta"}, *outputs, optional=optional)
        names = {output.name for output in graph.graph.output}
        (self.task,) = (task for task, output in OUTPUTS.items() if output in names)
        self.output = OUTPUTS[self.task]
        self._weights_per_draw = metadata_number(graph, WEIGHTS_PER_DRAW)
        self._max_chunk_rows = RESULT_NUMBERS // max(1, metadata_number(graph, LARGEST_RESULT))
        self.theta_dimension = last_dimension(graph.graph.input, "theta")
        self.draw_bytes = 4 * self.theta_dimension
        self._outputs = last_dimension(graph.graph.output, self.output)
        # Values that do not depend on draws are computed once per row.
        load = partial(self._session, "network.onnx")
        self._draw_input, self._row_outputs = "x", ["density"]
        self._features: _Deferred[ort.InferenceSession] | None = None
        draw_graph = None
        if "features" in names:
            with suppress(GraphError):  # if the output needs x too
                draw_graph = extract_subgraph(graph, ("features", "theta"), (self.output,))
                self._draw_input, self._row_outputs = "features", ["features", "density"]
                self._features = _Deferred(load, extract_subgraph(graph, ("x",), ("features",)))
        self._row_session = load(extract_subgraph(graph, ("x",), self._row_outputs))
        draw_graph = draw_graph or extract_subgraph(graph, ("x", "theta"), (self.output,))
        self._draw_session = load(draw_graph)
        self.terms_shape: tuple[int, ...] | None = None
        self._terms: _Deferred[ort.InferenceSession] | None = None
        if TERMS in names:
            self.terms_shape = axes_of_row(graph.graph.output, TERMS)
            self._terms = _Deferred(load, extract_subgraph(graph, ("x",), (TERMS,)))
        self._joint: _Deferred[Runtime] | None = None
        weight_values = names.union(i.name for i in graph.graph.input).intersection(WEIGHT_VALUES)
        self.has_joint = bool(weight_values)
        if self.has_joint:
            if len(weight_values) < len(WEIGHT_VALUES):
                raise GraphError("network.onnx", f"expected all of {WEIGHT_VALUES} or none")
            values = (WEIGHTS, WEIGHT_OUTPUTS, "density")
            joint = extract_subgraph(graph, ("x", WEIGHT_NOISE), values)
            self._joint = _Deferred(self._load_joint, joint)

    @property
    def joint(self) -> "Runtime":
        """The runtime for joint scores, where all rows share the same weight draws."""
        return self if self._joint is None else self._joint()

    def _load_joint(self, graph: onnx.ModelProto) -> "Runtime":
        names = {WEIGHT_NOISE: "eps", WEIGHTS: "theta", WEIGHT_OUTPUTS: self.output}
        sampler = extract_subgraph(graph, (WEIGHT_NOISE,), (WEIGHTS,), names)
        outputs = (WEIGHT_OUTPUTS, "density")
        # The graph may read the number of draws from the noise.
        network = extract_subgraph(
            graph, ("x", WEIGHT_NOISE, WEIGHTS), outputs, {**names, WEIGHT_NOISE: "theta"}
        )
        (dimension,) = axes_of_row(graph.graph.input, WEIGHT_NOISE)
        return Runtime(
            sampler.SerializeToString(),
            network.SerializeToString(),
            dimension,
            self.threads,
            paired=False,
            encoder=self.encoder,
            on_processors=self._on_processors,
        )

    def _session(self, file: str, graph: onnx.ModelProto) -> ort.InferenceSession:
        # One thread per session: sharing rows and draws needs no synchronisation of operators.
        return load_session(file, graph.SerializeToString(), 1, self._on_processors)

    def draw(self, seed: int, first_draw: int, num_draws: int) -> Float32[np.ndarray, "K D"]:
        return self.sample(noise(self.algorithm, seed, first_draw, num_draws, self.noise_dimension))

    def sample(self, eps: Float32[np.ndarray, "K E"]) -> Float32[np.ndarray, "K D"]:
        theta: np.ndarray = run_graph(self._sampler, ["theta"], {"eps": eps})[0]
        return theta.reshape(len(eps), -1)  # from (K, 1, D) in the runtime of joint scores

    def draw_set(self, seed: int, num_draws: int) -> DrawSet:
        is_small = num_draws * self.draw_bytes <= MAX_DRAW_SET_BYTES
        return DrawSet(seed, num_draws, self.draw(seed, 0, num_draws) if is_small else None)

    def run_set(self, x: Rows, draws: DrawSet) -> tuple[Outputs, Densities]:
        """Run the network with the same draws for all rows, within the memory limit."""
        features, density = self.row_features(x)
        return self._draw_set_outputs(features, draws, self._row_signs(x)), density

    def theta_by_row(self, x: Rows, theta: Theta) -> Theta:
        signs = self._row_signs(x)
        return theta if signs is None else signs.apply(theta, slice(None))

    def _row_signs(self, x: Rows) -> RowSigns | None:
        return RowSigns.from_rows(x, self.theta_dimension) if self.algorithm == ROW_NOISE else None

    def _draw_set_outputs(
        self, features: Features, draws: DrawSet, signs: RowSigns | None
    ) -> Outputs:
        if draws.theta is not None:
            return self.draw_outputs(features, draws.theta[:, None], signs)
        chunk = max(self._min_draws, CHUNK_BYTES // self.draw_bytes)
        parts = []
        for k in range(0, draws.num_draws, chunk):
            theta = self.draw(draws.seed, k, min(chunk, draws.num_draws - k))
            parts.append(self.draw_outputs(features, theta[:, None], signs))
        return np.concatenate(parts)

    def run(self, x: Rows, theta: Theta) -> tuple[Outputs, Densities]:
        """Run the network on rows and draws.

        Args:
            theta: draws for all rows (P = 1), or for each row (P = N) if theta can be paired.

        Returns:
            outputs: log class probabilities, or mean and log variance in a regression (C = 2).
            density: the scores of the density detectors.
        """
        features, density = self.row_features(x)
        return self.draw_outputs(features, theta, self._row_signs(x)), density

    def row_features(self, x: Rows) -> tuple[Features, Densities]:
        """Compute the density scores and the draw-independent inputs for `draw_outputs`."""
        x = self.encoded(x)
        *features, density = self._run_rows(self._row_session, self._row_outputs, x)
        return (features[0] if features else x), density

    def run_outputs(self, x: Rows, draws: DrawSet) -> Outputs:
        """Run the network as in `run_set`, but skip the density scores, which can be slow."""
        features = self.encoded(x)
        if self._features is not None:
            (features,) = self._run_rows(self._features(), ["features"], features)
        return self._draw_set_outputs(features, draws, self._row_signs(x))

    def _run_rows(
        self, session: ort.InferenceSession, outputs: list[str], x: Rows
    ) -> list[np.ndarray]:
        def compute(block: slice) -> list[np.ndarray]:
            part = x[block]
            # If weights are not constants, onnxruntime multiplies a single row with another
            # kernel, whose results have different bits.
            rows = np.repeat(part, 2, axis=0) if len(part) == 1 and not self.paired else part
            return [output[: len(part)] for output in run_graph(session, outputs, {"x": rows})]

        # One thread reads the weights once for a few rows.
        blocks = self._row_blocks(len(x)) if len(x) > SMALL_ROWS else [slice(None)]
        parts = self._each(compute, blocks, len(x))
        if len(parts) == 1:
            return parts[0]
        return [np.concatenate(blocks) for blocks in zip(*parts, strict=True)]

    def encoded(self, x: Rows) -> Float32[np.ndarray, "N F"]:
        return x if self.encoder is None else self.encoder(x)

    def terms(self, x: Rows) -> Float32[np.ndarray, "N A I"]:
        """Compute each number's part of the A attributed density scores, or raise GraphError."""
        assert self._terms is not None
        return run_graph(self._terms(), [TERMS], {"x": x})[0]

    def draw_outputs(self, features: Features, theta: Theta, signs: RowSigns | None) -> Outputs:
        """Compute the outputs for each draw and row from `row_features`."""
        blocks = self._row_blocks(len(features))
        outputs = np.empty((len(theta), len(features), self._outputs), dtype=np.float32)

        def compute(part: tuple[slice, slice]) -> None:
            block, draws = part
            theta_part = theta[draws] if theta.shape[1] == 1 else theta[draws, block]
            if signs is not None:
                theta_part = signs.apply(theta_part, block)
            outputs[draws, block] = self._run_draws(features[block], theta_part)

        largest = max(block.stop - block.start for block in blocks)
        chunks = self._draw_chunks(largest, len(theta), len(blocks))
        parts = [(block, draws) for draws in chunks for block in blocks]
        self._each(compute, parts, len(features) * len(theta))
        return outputs

    def _row_blocks(self, rows: int) -> list[slice]:
        max_rows = self.chunk_rows // self._min_draws
        size = min(max_rows, max(MIN_BLOCK_ROWS, -(-rows // self.threads)))
        return [slice(n, min(n + size, rows)) for n in range(0, rows, size)]

    def _draw_chunks(self, rows: int, draws: int, blocks: int) -> list[slice]:
        """Split draws into chunks of limited size, and into enough chunks for all threads."""
        # The network always computes all members.
        if self.algorithm == DRAW_INDEX:
            return [slice(0, draws)]
        max_draws = self.chunk_rows // rows
        if not self.paired:
            draw_bytes = 4 * max(self.theta_dimension, self._weights_per_draw)
            max_draws = min(max_draws, CHUNK_BYTES // draw_bytes)
        chunks = -(-draws // max(self._min_draws, max_draws))
        if rows * draws * blocks > SMALL_ROWS:
            chunks = max(chunks, -(-self.threads // blocks))
        size = -(-draws // chunks)
        return [slice(k, min(k + size, draws)) for k in range(0, draws, size)]

    def _each(self, work: Callable[[T], U], parts: list[T], rows: int) -> list[U]:
        """Apply `work` to each part. If there is little work, use a single thread."""
        if self._pool is None or len(parts) == 1 or rows <= SMALL_ROWS:
            return [work(part) for part in parts]
        return list(self._pool.map(work, parts))

    def _run_draws(self, features: Features, theta: Theta) -> Outputs:
        # Single rows and draws are doubled for the same reason as in `_run_rows`.
        is_single = len(features) == 1 and not self.paired
        rows = np.repeat(features, 2, axis=0) if is_single else features
        draws = np.repeat(theta, 2, axis=0) if len(theta) < self._min_draws else theta
        values = {self._draw_input: rows, "theta": draws}
        outputs = run_graph(self._draw_session, [self.output], values)[0]
        return outputs[: len(theta), : len(features)]


def run_graph(
    session: ort.InferenceSession, outputs: list[str], values: dict[str, np.ndarray]
) -> list[np.ndarray]:
    """Run a graph. Raise OutOfMemory beyond the limit of `limit_session_memory`."""
    try:
        return list(session.run(outputs, values))
    except Exception as error:
        if is_out_of_memory(error):
            raise OutOfMemory from None
        raise


def limit_session_memory(max_bytes: int) -> None:
    """Limit the memory for running graphs in all sessions that are loaded after this call.

    Preflights are not sufficient, because memory can depend on the number of rows.
    """
    memory = ort.OrtMemoryInfo(
        "Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT
    )
    ort.create_and_register_allocator(memory, ort.OrtArenaCfg({"max_mem": max_bytes}))


def session_options(threads: int) -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "1" if threads > 1 else "0")
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.add_session_config_entry("session.use_env_allocators", "1")  # see above
    return options


def is_on_gpu(session: ort.InferenceSession) -> bool:
    return bool(session.get_providers()[0] == CUDA)


def providers(on_processors: bool = False) -> list[tuple[str, dict[str, str]]]:
    """List onnxruntime's execution providers, with CUDA first if it is available."""
    available = [PROCESSORS] if on_processors else ort.get_available_providers()
    return [(name, options) for name, options in PROVIDERS.items() if name in available]


def load_session(
    file: str, content: bytes, threads: int = 1, on_processors: bool = False
) -> ort.InferenceSession:
    preferred = providers(on_processors)
    try:
        session = ort.InferenceSession(content, session_options(threads), providers=preferred)
    except Exception:
        raise GraphError(file, "onnxruntime cannot load it") from None
    if preferred[0][0] == CUDA and not is_on_gpu(session):
        logger.warning("%s is not available; using the CPU", CUDA)
    return session
