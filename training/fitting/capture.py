"""Training steps as CUDA graphs, which save kernel launches."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

WARMUP_CALLS = 3  # before capture, to let libraries and the optimiser allocate memory


@dataclass(frozen=True, eq=False)
class Graph:
    cuda_graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]  # memory that the graph reads
    result: Tensor


class GraphedFunction:
    """A function of GPU tensors that runs as a CUDA graph for each combination of shapes.

    The first `WARMUP_CALLS` calls run eagerly. The function must run the same kernels for all input
    values, and must not synchronise with the GPU.
    """

    def __init__(self, compute: Callable[..., Tensor]) -> None:
        self.compute = compute
        self.calls = 0
        self.graphs: dict[tuple[torch.Size, ...], Graph] = {}
        self.pool = torch.cuda.graph_pool_handle()  # shared, since graphs never run concurrently

    def __call__(self, *arguments: Tensor) -> Tensor:
        if self.calls < WARMUP_CALLS:
            self.calls += 1
            return self._call_on_side_stream(arguments)
        shapes = tuple(tensor.shape for tensor in arguments)
        if shapes not in self.graphs:
            self.graphs[shapes] = self._capture(arguments)
        graph = self.graphs[shapes]
        for target, source in zip(graph.inputs, arguments, strict=True):
            target.copy_(source)
        graph.cuda_graph.replay()
        return graph.result.clone()

    def _call_on_side_stream(self, arguments: tuple[Tensor, ...]) -> Tensor:
        """Run a function on a side stream, as CUDA requires before a capture."""
        main, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            result = self.compute(*arguments)
        main.wait_stream(side)
        return result

    def _capture(self, arguments: tuple[Tensor, ...]) -> Graph:
        inputs = [tensor.clone() for tensor in arguments]
        cuda_graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(cuda_graph, pool=self.pool):
            result = self.compute(*inputs)
        return Graph(cuda_graph, inputs, result)
