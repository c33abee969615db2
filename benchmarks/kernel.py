"""Compare the network on 100 draws with float32 matrix products.

    python -m benchmarks.kernel [--store DIR --model NAME] [--rounds N] [--write]

K draws of N rows of the network 784-800-800-10 need at least

    2 (N 784 800 + K N (800 800 + 800 10)) operations,

because the first layer is shared by all draws. A figure is the time for these operations at the
machine's float32 peak, divided by the measured time. The peak is the fastest product of
3200 x 800 x 800 in onnxruntime, numpy and torch, on the same threads. Rounds alternate between the
peak and the graphs. Graphs are measured in float32 and int8 without density detectors, and as
published with detectors.
"""

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx
import onnxruntime as ort
import torch
from onnx import TensorProto, helper, numpy_helper

from benchmarks.common import NAME, open_or_publish, report, size_parser, spread, torch_model
from model_store.artifacts.store import ModelStore
from model_store.inference.model import NEEDED, Model
from model_store.inference.runtime import Runtime
from model_store.processes import processors
from training.export.graphs import export, load_runtime
from training.export.quantise import quantise_network
from training.export.served import served_network

DRAWS = 100
ROWS = (1, 16, 64, 128)
PEAK = (3200, 800, 800)
LAYERS = (784, 800, 800, 10)
SECONDS = 0.3  # per method and round


@dataclass(frozen=True)
class Figures:
    peak: dict[str, list[float]]
    graphs: dict[str, dict[int, list[float]]]
    threads: int
    precision: str  # of the published graph


def least_work(rows: int, draws: int) -> float:
    first, *rest = itertools.pairwise(LAYERS)
    return 2.0 * rows * (first[0] * first[1] + draws * sum(a * b for a, b in rest))


def fastest(work: Callable[[], object], seconds: float) -> float:
    """Return the minimum time of a call, over at least two calls and several seconds."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 2 or time.perf_counter() < end:
        started_at = time.perf_counter()
        work()
        times.append(time.perf_counter() - started_at)
    return min(times)


def products(threads: int) -> dict[str, Callable[[], object]]:
    m, k, n = PEAK
    generator = np.random.default_rng(0)
    a, b = (
        generator.standard_normal((m, k), dtype=np.float32),
        generator.standard_normal((k, n), dtype=np.float32),
    )
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["a", "b"], ["c"])],
        "product",
        [helper.make_tensor_value_info("a", TensorProto.FLOAT, [m, k])],
        [helper.make_tensor_value_info("c", TensorProto.FLOAT, [m, n])],
        [numpy_helper.from_array(b, "b")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    session = ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    torch.set_num_threads(threads)
    torch_a, torch_b = torch.from_numpy(a), torch.from_numpy(b)
    out, torch_out = np.empty((m, n), dtype=np.float32), torch.empty(m, n)
    return {
        "onnxruntime": lambda: session.run(None, {"a": a}),
        "numpy": lambda: np.matmul(a, b, out=out),
        "torch": lambda: torch.matmul(torch_a, torch_b, out=torch_out),
    }


def without_detectors(network: bytes) -> bytes:
    """Remove the density detectors from a graph. Its output `density` becomes empty."""
    model = onnx.load_model_from_string(network)
    graph = model.graph
    required = {output.name for output in graph.output if output.name != "density"}
    nodes = []
    for node in reversed(graph.node):
        if required & set(node.output):
            nodes.append(node)
            required |= set(node.input)
    shape = helper.make_node("Shape", ["x"], ["rows"], start=0, end=1)
    size = helper.make_node("Concat", ["rows", "no_columns"], ["density_shape"], axis=0)
    empty = helper.make_node("ConstantOfShape", ["density_shape"], ["density"])
    del graph.node[:]
    graph.node.extend([*reversed(nodes), shape, size, empty])
    initializers = [tensor for tensor in graph.initializer if tensor.name in required]
    del graph.initializer[:]
    graph.initializer.extend([*initializers, numpy_helper.from_array(np.array([0]), "no_columns")])
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())


def measure(store: ModelStore, name: str, rounds: int) -> Figures:
    threads = processors()
    published = Model.load(store.open(name, store.resolve(name), files=NEEDED), threads)
    reference = torch_model(store, name)
    graphs = export(reference, served_network(reference, torch.rand(64, published.row_size), 0))
    graphs["network.onnx"] = without_detectors(graphs["network.onnx"])
    integers = graphs | {"network.onnx": quantise_network(graphs["network.onnx"])}
    label = f"{published.manifest.precision}, with detectors"
    runtimes: dict[str, Runtime] = {
        "float32": load_runtime(reference, graphs),
        "int8": load_runtime(reference, integers),
        label: published.runtime,
    }
    theta = published.runtime.draw(0, 0, DRAWS)[:, None]
    x = (
        np.random.default_rng(0)
        .integers(0, 256, (max(ROWS), published.row_size))
        .astype(np.float32)
    )
    ways, operations = products(threads), 2.0 * float(np.prod(PEAK))
    figures = Figures(
        {way: [] for way in ways},
        {graph: {n: [] for n in ROWS} for graph in runtimes},
        threads,
        label,
    )
    with torch.inference_mode():
        for turn in range(rounds + 1):
            for way, work in ways.items():
                speed = operations / fastest(work, SECONDS)
                if turn:  # The first round is a warm-up.
                    figures.peak[way].append(speed)
            for n in ROWS:
                for graph, runtime in runtimes.items():
                    speed = least_work(n, DRAWS) / fastest(
                        lambda r=runtime, n=n: r.run(x[:n], theta), SECONDS
                    )
                    if turn:
                        figures.graphs[graph][n].append(speed)
    return figures


def ratios(figures: Figures, graph: str, rows: int) -> list[float]:
    """Divide the ideal time at each round's peak by the round's minimum time."""
    peaks = [max(speeds) for speeds in zip(*figures.peak.values(), strict=True)]
    return [speed / peak for speed, peak in zip(figures.graphs[graph][rows], peaks, strict=True)]


def table(figures: Figures, rounds: int) -> str:
    lines = [
        "# The network on 100 draws, 784-800-800-10, against the float32 peak",
        "",
        f"`python -m benchmarks.kernel --rounds {rounds} --write`; {figures.threads} threads. The "
        "figure 1 is a float32 product without any overhead. Fastest calls of alternating rounds, median (minimum–maximum).",
        "",
        "| graph | "
        + " | ".join(f"{n} row{'s' if n > 1 else ''}" for n in ROWS)
        + f" | rows/s, {ROWS[-1]} rows |",
        "|---|" + "---|" * (len(ROWS) + 1),
    ]
    for graph, by_rows in figures.graphs.items():
        cells = [spread(ratios(figures, graph, n)) for n in ROWS]
        rate = statistics.median(by_rows[ROWS[-1]]) / least_work(1, DRAWS)
        lines.append(f"| {graph} | " + " | ".join(cells) + f" | {rate:.0f} |")
    speeds = ", ".join(f"{way} {max(results) / 1e9:.0f}" for way, results in figures.peak.items())
    lines += [
        "",
        f"Float32 product of {' x '.join(map(str, PEAK))}, fastest of all rounds, in 10^9 "
        f"operations/s: {speeds}.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = size_parser(__doc__, "kernel.md")
    parser.add_argument("--model", default=NAME)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    with open_or_publish(options) as store:
        figures = measure(store, options.model, options.rounds)
    report(options, "kernel", table(figures, options.rounds))


if __name__ == "__main__":
    main()
