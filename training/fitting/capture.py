"""A training step as CUDA graphs: one launch in place of those of its hundreds of kernels, which
take longer than the arithmetic."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

CALLS_BEFORE = 3  # in which libraries and optimiser allocate what they keep


@dataclass(frozen=True, eq=False)
class Graph:
    recorded: torch.cuda.CUDAGraph
    inputs: list[Tensor]  # where it reads
    result: Tensor


class Captured:
    """Computes a function of tensors on a GPU: from the fourth call on, the first with tensors of
    some shapes is recorded, and all others of these shapes replay its kernels.

    The function must do the same whatever the tensors hold, and wait for none of its results.
    """

    def __init__(self, compute: Callable[..., Tensor]) -> None:
        self.compute = compute
        self.calls = 0
        self.graphs: dict[tuple[torch.Size, ...], Graph] = {}
        self.pool = torch.cuda.graph_pool_handle()  # of memory: no two graphs run at a time

    def __call__(self, *given: Tensor) -> Tensor:
        if self.calls < CALLS_BEFORE:
            self.calls += 1
            return self._call_apart(given)
        shapes = tuple(tensor.shape for tensor in given)
        if shapes not in self.graphs:
            self.graphs[shapes] = self._capture(given)
        graph = self.graphs[shapes]
        for own, other in zip(graph.inputs, given, strict=True):
            own.copy_(other)
        graph.recorded.replay()
        return graph.result.clone()

    def _call_apart(self, given: tuple[Tensor, ...]) -> Tensor:
        """Compute on a stream of its own, as a capture has to."""
        ours, apart = torch.cuda.current_stream(), torch.cuda.Stream()
        apart.wait_stream(ours)
        with torch.cuda.stream(apart):
            result = self.compute(*given)
        ours.wait_stream(apart)
        return result

    def _capture(self, given: tuple[Tensor, ...]) -> Graph:
        inputs = [tensor.clone() for tensor in given]
        recorded = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recorded, pool=self.pool):
            result = self.compute(*inputs)
        return Graph(recorded, inputs, result)
