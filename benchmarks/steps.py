"""A training step of each method against a deterministic network's with the same optimiser, in one
run.

    python -m benchmarks.steps [--repeats 7] [--steps 10]

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
from training.fitting.steps import adam, alpha_objective, clip_gradient
from training.model import build, initialise
from training.networks.architectures import mlp
from training.posteriors import METHODS, step_noise
from training.recipe import Recipe

ROWS, HIDDEN = 128, [800, 800]
SETTINGS: dict[str, dict[str, Any]] = {
    "bhn-realnvp": {"couplings": 4},
    "bhn-iaf": {"couplings": 4},
    "bhn-weights": {
        "couplings": 0
    },  # a coupling over 1.28 million weights would have half a billion parameters
}


def deterministic(x: torch.Tensor, y: torch.Tensor) -> Callable[[int], None]:
    network = mlp(784, HIDDEN, 10)
    optimizer = torch.optim.Adam(network.parameters(), fused=True)

    def step(_: int) -> None:
        loss = torch.nn.functional.cross_entropy(network(x), y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        clip_gradient(list(network.parameters()), 5.0)
        optimizer.step()

    return step


def bayesian(method: str, x: torch.Tensor, y: torch.Tensor) -> Callable[[int], None]:
    data = {"source": "digits", "validation_rows": 1, "reference_rows": 1, "ranking_rows": 1}
    posterior = SETTINGS.get(method, {})
    recipe = Recipe.model_validate(
        {
            "name": "a",
            "method": method,
            "data": data,
            "network": {"hidden": HIDDEN},
            "posterior": posterior,
            "training": {"epochs": 1},
        }
    )
    model = build(recipe, (784,), 10)
    initialise(model, x)
    parameters = list(model.parameters())
    optimizer = adam(model, recipe.training)
    samples = model.posterior.max_draws or recipe.samples

    def step(i: int) -> None:
        eps = step_noise(model.posterior, samples * recipe.row_groups, 0, i)
        log_probs, kl = model.sample(x, eps, recipe.row_groups)
        loss, _ = alpha_objective(
            model.likelihood.log_likelihood(log_probs, y), kl, 1e-5, recipe.alpha
        )
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        clip_gradient(parameters, 5.0)
        optimizer.step()

    return step


def seconds(step: Callable[[int], None], steps: int) -> float:
    begun = time.perf_counter()
    for i in range(steps):
        step(i)
    return (time.perf_counter() - begun) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(min(2, torch.get_num_threads()))
    keep_freed_memory()  # as training does
    torch.manual_seed(0)
    x, y = torch.rand(ROWS, 784), torch.randint(10, (ROWS,))
    plain = deterministic(x, y)
    print(
        "| method | draws a step | ms a step | ratio to a deterministic network's "
        "|\n|---|---|---|---|"
    )
    for method in METHODS:
        step = bayesian(method, x, y)
        step(0)
        pairs = [
            (seconds(step, options.steps), seconds(plain, options.steps))
            for _ in range(options.repeats)
        ]
        draws = 10 if method == "dropout-alpha" else 5 if method == "ensemble" else 1
        took = statistics.median(a for a, _ in pairs)
        print(
            f"| {method} | {draws} | {1000 * took:.1f} | "
            f"{statistics.median(a / b for a, b in pairs):.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
