"""A training step as a CUDA graph: one launch in place of those of its hundreds of kernels, which
take longer than the arithmetic."""

from collections.abc import Callable

import torch
from torch import Tensor

CALLS_BEFORE = 3  # in which libraries and optimiser allocate what they keep


class Captured:
    """Computes a function of tensors on a GPU: its kernels are recorded in the fourth call, and
    replayed from then on.

    The function must do the same whatever the tensors hold, and wait for none of its results. Calls
    with tensors of other shapes than the fourth's run it as it is.
    """

    def __init__(self, compute: Callable[..., Tensor]) -> None:
        self.compute = compute
        self.calls = 0
        self.graph = torch.cuda.CUDAGraph()
        self.inputs: list[Tensor] = []  # where the graph reads
        self.result = torch.empty(0)

    def __call__(self, *given: Tensor) -> Tensor:
        if self.calls < CALLS_BEFORE:
            self.calls += 1
            return self._call_apart(given)
        if not self.inputs:
            self._capture(given)
        pairs = list(zip(self.inputs, given, strict=True))
        if any(own.shape != other.shape for own, other in pairs):
            return self.compute(*given)
        for own, other in pairs:
            own.copy_(other)
        self.graph.replay()
        return self.result.clone()

    def _call_apart(self, given: tuple[Tensor, ...]) -> Tensor:
        """Compute on a stream of its own, as a capture has to."""
        ours, apart = torch.cuda.current_stream(), torch.cuda.Stream()
        apart.wait_stream(ours)
        with torch.cuda.stream(apart):
            result = self.compute(*given)
        ours.wait_stream(apart)
        return result

    def _capture(self, given: tuple[Tensor, ...]) -> None:
        self.inputs = [tensor.clone() for tensor in given]
        with torch.cuda.graph(self.graph):
            self.result = self.compute(*self.inputs)
