"""A training step of each method against a deterministic network's with the same optimiser, in one
run.

    python -m benchmarks.steps [--repeats 7] [--steps 10] [--device cpu]

784-800-800-10, 128 rows, two threads at most, Adam (fused), gradients clipped; each figure is the
median over repeats of a method's time divided by the deterministic network's right after it. Prints
a Markdown table.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from training.fitting.run import keep_freed_memory
from training.fitting.steps import Steps, adam, clip_gradient
from training.methods import METHODS
from training.model import build, initialise
from training.networks.architectures import mlp
from training.recipe import Recipe

ROWS, HIDDEN = 128, [800, 800]
WARM_UP = 5  # steps: on a GPU the fourth is captured
SETTINGS: dict[str, dict[str, Any]] = {
    "bhn-realnvp": {"couplings": 4},
    "bhn-iaf": {"couplings": 4},
    "bhn-weights": {
        "couplings": 0
    },  # a coupling over 1.28 million weights would have half a billion parameters
}


def deterministic(x: torch.Tensor, y: torch.Tensor) -> Callable[[int], object]:
    network = mlp(784, HIDDEN, 10).to(x.device)
    optimizer = torch.optim.Adam(network.parameters(), fused=True)

    def step(_: int) -> None:
        loss = torch.nn.functional.cross_entropy(network(x), y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        clip_gradient(list(network.parameters()), 5.0)
        optimizer.step()

    return step


def bayesian(method: str, x: torch.Tensor, y: torch.Tensor) -> tuple[int, Callable[[int], object]]:
    """Return how many draws a step has, and the step."""
    data = {"source": "digits", "validation_rows": 1, "reference_rows": 1, "ranking_rows": 1}
    recipe = Recipe.model_validate(
        {
            "name": "a",
            "method": method,
            "data": data,
            "network": {"hidden": HIDDEN},
            "posterior": SETTINGS.get(method, {}),
            "training": {"epochs": 1},
        }
    )
    model = build(recipe, (784,), 10).to(x.device)
    initialise(model, x)
    steps = Steps(model, recipe, (784,), adam(model, recipe.training), ROWS)
    return steps.samples, lambda i: steps.take(x, y, 1e-5, i)


def seconds(step: Callable[[int], object], steps: int) -> float:
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    synchronize()
    begun = time.perf_counter()
    for i in range(steps):
        step(i)
    synchronize()
    return (time.perf_counter() - begun) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(min(2, torch.get_num_threads()))
    keep_freed_memory()  # as training does
    torch.manual_seed(0)
    x = torch.rand(ROWS, 784).to(options.device)
    y = torch.randint(10, (ROWS,)).to(options.device)
    plain = deterministic(x, y)
    print(
        "| method | draws a step | ms a step | ratio to a deterministic network's "
        "|\n|---|---|---|---|"
    )
    for method in METHODS:
        draws, step = bayesian(method, x, y)
        for i in range(WARM_UP):
            step(i)
        pairs = [
            (seconds(step, options.steps), seconds(plain, options.steps))
            for _ in range(options.repeats)
        ]
        took = statistics.median(a for a, _ in pairs)
        print(
            f"| {method} | {draws} | {1000 * took:.1f} | "
            f"{statistics.median(a / b for a, b in pairs):.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
