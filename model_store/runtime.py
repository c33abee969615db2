"""Running an artifact's two graphs with onnxruntime: the same code for calibration and for the service.

Draws are taken in chunks of bounded size, which does not change a bit of any row's answer: every row of a matrix
product is summed in the same order, however many rows stand beside it, one row included, and however many threads
share the work. That holds because the weights are constants of the graph, which onnxruntime packs for its blocked
kernel when a session is made.
"""

import logging
import os
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from jaxtyping import Float32

from model_store.manifest import Task
from model_store.noise import DRAW_INDEX, NOISE_ALGORITHM, noise

logger = logging.getLogger("dubito")

OUTPUTS: dict[Task, str] = {"classification": "log_probs", "regression": "mean_log_variance"}  # of the network
CHUNK_ROWS = 1024  # rows x draws in one run of the network: intermediate results stay in the processor's cache
SMALL_ROWS = 128  # rows x draws below which waking other threads takes longer than they save
# The same where theta is not paired: a convolution whose weights are drawn needs all patches of its input.
UNPAIRED_CHUNK_ROWS = 128
CHUNK_BYTES = 32 << 20  # of theta in one run
WEIGHTS_PER_DRAW = "weights_per_draw"  # in the network's metadata, where theta holds less than its matrices do
HELD_BYTES = 64 << 20  # of a draw set that is held in memory; a larger one is made chunk by chunk whenever it is used


class GraphError(ValueError):
    """A graph that cannot be a sampler or a network: the file and the reason."""

    def __init__(self, file: str, reason: str) -> None:
        super().__init__(f"{file}: {reason}")
        self.file = file
        self.reason = reason


@dataclass(frozen=True)
class DrawSet:
    """The first K draws of a seed; `theta` is None where it would be too large to hold."""

    seed: int
    num_draws: int
    theta: Float32[np.ndarray, "K D"] | None


class Runtime:
    """The sampler (eps -> theta) and the network (x, theta -> outputs, features, density) of a model."""

    def __init__(
        self,
        sampler: bytes,
        network: bytes,
        noise_dimension: int,
        threads: int = 0,
        algorithm: str = NOISE_ALGORITHM,
        paired: bool = True,
    ) -> None:
        """Make sessions of serialised graphs; `threads` 0 means one for each processor this process may use.

        They are the network's: draws are made ahead, on one thread, beside what the network does.
        Noise is made by `algorithm`; `paired` says whether rows may have draws of their own.

        Raises:
            GraphError: if a graph is not one that a sampler or network can be.
        """
        self.noise_dimension = noise_dimension
        self.algorithm = algorithm
        self.paired = paired
        threads = threads or len(os.sched_getaffinity(0))
        self._sampler = _session("sampler.onnx", sampler, 1, {"eps"}, {"theta"})
        inputs, outputs = {"x", "theta"}, [{output, "features", "density"} for output in OUTPUTS.values()]
        self._network = _session("network.onnx", network, threads, inputs, *outputs)
        self._small_network = self._network  # draws of every weight are much work, however few the rows
        if paired and threads > 1:
            self._small_network = _session("network.onnx", network, 1, inputs, *outputs)
        given = {output.name for output in self._network.get_outputs()}
        (self.task,) = (task for task, output in OUTPUTS.items() if output in given)
        self.output = OUTPUTS[self.task]
        weights = self._network.get_modelmeta().custom_metadata_map.get(WEIGHTS_PER_DRAW, "0")
        if not weights.isdecimal():
            raise GraphError("network.onnx", f"expected a number as {WEIGHTS_PER_DRAW}")
        self._weights_per_draw = int(weights)

    def draw(self, seed: int, first_draw: int, num_draws: int) -> Float32[np.ndarray, "K D"]:
        """Return theta of draws `first_draw` and on of a seed."""
        return self.sample(noise(self.algorithm, seed, first_draw, num_draws, self.noise_dimension))

    def sample(self, eps: Float32[np.ndarray, "K E"]) -> Float32[np.ndarray, "K D"]:
        """Return theta of each row of noise."""
        return self._sampler.run(["theta"], {"eps": eps})[0]

    @cached_property
    def theta_dimension(self) -> int:
        """D, how many numbers a draw of theta has."""
        (theta,) = (i for i in self._network.get_inputs() if i.name == "theta")
        return int(theta.shape[2])

    def set_bytes(self, num_draws: int) -> int:
        """Return the size of a draw set's theta."""
        return num_draws * self.theta_dimension * 4

    def draw_set(self, seed: int, num_draws: int) -> DrawSet:
        """Return the first draws of a seed."""
        held = self.set_bytes(num_draws) <= HELD_BYTES
        return DrawSet(seed, num_draws, self.draw(seed, 0, num_draws) if held else None)

    def run_set(
        self, x: Float32[np.ndarray, "N I"], draws: DrawSet
    ) -> tuple[Float32[np.ndarray, "K N C"], Float32[np.ndarray, "N M"]]:
        """Return what `run` does, all rows under one draw set, in memory bounded whatever the set's size."""
        if draws.theta is not None:
            return self.run(x, draws.theta[:, None])
        chunk = max(1, CHUNK_BYTES // self.set_bytes(1))
        parts = []
        density = None
        for first in range(0, draws.num_draws, chunk):
            theta = self.draw(draws.seed, first, min(chunk, draws.num_draws - first))
            outputs, density = self.run(x, theta[:, None])
            parts.append(outputs)
        assert density is not None
        return np.concatenate(parts), density

    def run(
        self, x: Float32[np.ndarray, "N I"], theta: Float32[np.ndarray, "K P D"]
    ) -> tuple[Float32[np.ndarray, "K N C"], Float32[np.ndarray, "N M"]]:
        """Return the network's outputs for each draw and row, and the density detectors' scores of each row.

        Outputs are log class probabilities, or of a regression the target's mean and log variance (C = 2).

        `theta` has one draw for all rows (P = 1) or, where it may be paired, one for each (P = N).
        """
        if self.paired:
            return self._run(x, theta, max(1, CHUNK_ROWS // len(x)))
        draw_bytes = 4 * max(self.theta_dimension, self._weights_per_draw)
        draws = min(max(1, UNPAIRED_CHUNK_ROWS // len(x)), max(1, CHUNK_BYTES // draw_bytes))
        if self.algorithm == DRAW_INDEX:  # the network computes every member, whichever are asked for
            draws = len(theta)
        parts = [
            self._run_unpaired(x[n : n + UNPAIRED_CHUNK_ROWS], theta, draws)
            for n in range(0, len(x), UNPAIRED_CHUNK_ROWS)
        ]
        if len(parts) == 1:
            return parts[0]
        return np.concatenate([p[0] for p in parts], axis=1), np.concatenate([p[1] for p in parts])

    def _run_unpaired(
        self, x: Float32[np.ndarray, "N I"], theta: Float32[np.ndarray, "K 1 D"], draws: int
    ) -> tuple[Float32[np.ndarray, "K N C"], Float32[np.ndarray, "N M"]]:
        if len(x) > 1:
            return self._run(x, theta, draws)
        # A lone row would be multiplied with weights that are not constants by another kernel, and get other bits.
        outputs, density = self._run(np.repeat(x, 2, axis=0), theta, draws)
        return outputs[:, :1], density[:1]

    def _run(
        self, x: Float32[np.ndarray, "N I"], theta: Float32[np.ndarray, "K P D"], draws: int
    ) -> tuple[Float32[np.ndarray, "K N C"], Float32[np.ndarray, "N M"]]:
        """Run the network on some draws at a time."""
        network = self._small_network if len(x) * len(theta) <= SMALL_ROWS else self._network
        wanted = [self.output, "density"]
        parts = []
        for k in range(0, len(theta), draws):
            part = theta[k : k + draws]
            # A lone draw of weights would be multiplied by another kernel where rows are few, and give other bits.
            lone = len(part) == 1 and not self.paired and self.algorithm != DRAW_INDEX
            outputs, *densities = network.run(
                wanted[: 1 + (k == 0)], {"x": x, "theta": np.repeat(part, 2, 0) if lone else part}
            )
            parts.append(outputs[:1] if lone else outputs)
            if densities:
                (density,) = densities
        return parts[0] if len(parts) == 1 else np.concatenate(parts), density


def _session(file: str, content: bytes, threads: int, inputs: set[str], *outputs: set[str]) -> ort.InferenceSession:
    try:
        model = onnx.load_model_from_string(content)
    except Exception:
        raise GraphError(file, "is not an ONNX model") from None
    graph = model.graph
    if _keeps_data_elsewhere(model):
        raise GraphError(file, "keeps weights in another file, which is refused")
    if {i.name for i in graph.input} != inputs or {o.name for o in graph.output} not in outputs:
        expected = " or ".join(str(sorted(names)) for names in outputs)
        raise GraphError(file, f"expected inputs {sorted(inputs)} and outputs {expected}")
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # spinning burns an idle core
    try:
        session = ort.InferenceSession(content, options, providers=providers())
    except Exception:
        raise GraphError(file, "onnxruntime cannot load it") from None
    if session.get_providers()[0] != providers()[0]:  # this build has it, but its libraries do not load
        logger.warning("%s does not start; running on the processor", providers()[0])
    return session


def _keeps_data_elsewhere(message: Any) -> bool:
    """Whether any tensor of a model is in another file: initialisers, constants, subgraphs and functions alike."""
    if isinstance(message, onnx.TensorProto):
        return message.data_location == onnx.TensorProto.EXTERNAL
    parts = [part for _, value in message.ListFields() for part in (value if _is_repeated(value) else [value])]
    return any(_keeps_data_elsewhere(part) for part in parts if hasattr(part, "ListFields"))


def _is_repeated(value: Any) -> bool:
    return hasattr(value, "extend")


def providers() -> list[str]:
    """Return onnxruntime's providers to use: CUDA where this build of it has it, else the processor."""
    wanted = ("CUDAExecutionProvider", "CPUExecutionProvider")  # the second is what the first falls back to
    return [name for name in wanted if name in ort.get_available_providers()]
