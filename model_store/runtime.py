"""Running an artifact's two graphs with onnxruntime: the same code for calibration and for the service.

Draws are taken in chunks of bounded size, which does not change a bit of any row's answer: every row of a matrix
product is summed in the same order, however many rows stand beside it, one row included, and however many threads
share the work. That holds because the weights are constants of the graph, which onnxruntime packs for its blocked
kernel when a session is made.
"""

import logging
import os
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from jaxtyping import Float32

from model_store.noise import standard_normal

logger = logging.getLogger("dubito")

CHUNK_ROWS = 1024  # rows x draws in one run of the network: intermediate results stay in the processor's cache
SMALL_ROWS = 128  # rows x draws below which waking other threads takes longer than they save


class GraphError(ValueError):
    """A graph that cannot be a sampler or a network: the file and the reason."""

    def __init__(self, file: str, reason: str) -> None:
        super().__init__(f"{file}: {reason}")
        self.file = file
        self.reason = reason


class Runtime:
    """The sampler (eps -> theta) and the network (x, theta -> log_probs, features, density) of a model."""

    def __init__(self, sampler: bytes, network: bytes, noise_dimension: int, threads: int = 0) -> None:
        """Make sessions of serialised graphs; `threads` 0 means one for each processor this process may use.

        They are the network's: draws are made ahead, on one thread, beside what the network does.

        Raises:
            GraphError: if a graph is not one that a sampler or network can be.
        """
        self.noise_dimension = noise_dimension
        threads = threads or len(os.sched_getaffinity(0))
        self._sampler = _session("sampler.onnx", sampler, 1, {"eps"}, {"theta"})
        inputs, outputs = {"x", "theta"}, {"log_probs", "features", "density"}
        self._network = _session("network.onnx", network, threads, inputs, outputs)
        self._small_network = _session("network.onnx", network, 1, inputs, outputs) if threads > 1 else self._network

    def draw(self, seed: int, first_draw: int, num_draws: int) -> Float32[np.ndarray, "K D"]:
        """Return theta of draws `first_draw` and on of a seed."""
        return self.sample(standard_normal(seed, first_draw, num_draws, self.noise_dimension))

    def sample(self, eps: Float32[np.ndarray, "K E"]) -> Float32[np.ndarray, "K D"]:
        """Return theta of each row of noise."""
        return self._sampler.run(["theta"], {"eps": eps})[0]

    def run(
        self, x: Float32[np.ndarray, "N I"], theta: Float32[np.ndarray, "K P D"]
    ) -> tuple[Float32[np.ndarray, "K N C"], Float32[np.ndarray, "N M"]]:
        """Return log class probabilities of each draw and row, and the density detectors' scores of each row.

        `theta` has one draw for all rows (P = 1) or one for each (P = N).
        """
        draws = max(1, CHUNK_ROWS // len(x))
        network = self._small_network if len(x) * len(theta) <= SMALL_ROWS else self._network
        log_probs, density = network.run(["log_probs", "density"], {"x": x, "theta": theta[:draws]})
        parts = [log_probs]
        for k in range(draws, len(theta), draws):
            parts += network.run(["log_probs"], {"x": x, "theta": theta[k : k + draws]})
        return parts[0] if len(parts) == 1 else np.concatenate(parts), density


def _session(file: str, content: bytes, threads: int, inputs: set[str], outputs: set[str]) -> ort.InferenceSession:
    try:
        model = onnx.load_model_from_string(content)
    except Exception:
        raise GraphError(file, "is not an ONNX model") from None
    graph = model.graph
    if _keeps_data_elsewhere(model):
        raise GraphError(file, "keeps weights in another file, which is refused")
    if {i.name for i in graph.input} != inputs or {o.name for o in graph.output} != outputs:
        raise GraphError(file, f"expected inputs {sorted(inputs)} and outputs {sorted(outputs)}")
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
