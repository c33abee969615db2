"""Compare training steps of Bayesian layers with other libraries.

Run `python -m benchmarks.steps [--rounds N] [--write]` in an environment that also has
bayesian-torch, blitz-bayesian-pytorch and torch-uncertainty. Missing libraries are skipped. The
network is 784-800-800-10, with 128 rows and one draw per step, fused Adam and one thread. Each round
takes five steps of each model in turn. Times are processor times. Ratios are relative to the
deterministic network in the same round. The other libraries draw all weights.
"""

import importlib.util
import itertools
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.nn import functional

from benchmarks.common import bare_parser, report, spread
from training.fitting.steps import Steps, adam
from training.model import build, initialise
from training.recipe import Recipe

SIZES, ROWS, TRAINING_ROWS, STEPS = (784, 800, 800, 10), 128, 60_000, 5
METHODS = ("mle", "bhn-realnvp", "bbb-gaussian", "bbb-mixture", "mvn", "variational-hypernet")
MIXTURE = {"prior_pi": 0.5, "prior_sigma_1": 1.0, "prior_sigma_2": 0.0025}
Step = Callable[[int], object]


def method_step(method: str, x: torch.Tensor, y: torch.Tensor) -> Step:
    recipe = Recipe.model_validate(
        {
            "name": method,
            "method": method,
            "data": {"source": "idx:mnist"},
            "network": {"hidden": list(SIZES[1:-1])},
            "training": {"epochs": 1, "samples": 1, "batch_rows": ROWS},
        }
    )
    model = build(recipe, (28, 28), SIZES[-1])
    initialise(model, x)
    steps = Steps(model, recipe, (28, 28), adam(model, recipe), ROWS)
    torch.set_num_threads(1)
    return lambda i: steps.take(x, y, 1 / TRAINING_ROWS, i)


def peer_step(
    layer: type[nn.Module], settings: dict[str, float], x: torch.Tensor, y: torch.Tensor
) -> Step:
    layers = nn.ModuleList(layer(*sizes, **settings) for sizes in itertools.pairwise(SIZES))
    optimizer = torch.optim.Adam(layers.parameters(), fused=True)

    def step(_: int) -> None:
        h, kl = x, 0.0
        for i, module in enumerate(layers):
            h = module(h)
            if isinstance(h, tuple):
                h, part = h
            else:
                part = module.log_variational_posterior - module.log_prior
            h, kl = h.relu() if i + 1 < len(layers) else h, kl + part
        loss = functional.cross_entropy(h, y) + kl / TRAINING_ROWS
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def peers() -> Iterator[tuple[str, type[nn.Module], dict[str, float]]]:
    if importlib.util.find_spec("bayesian_torch"):
        from bayesian_torch.layers import LinearReparameterization

        yield "bayesian-torch, Gaussian", LinearReparameterization, {}
    if importlib.util.find_spec("blitz"):
        from blitz.modules import BayesianLinear

        yield "blitz, mixture", BayesianLinear, MIXTURE
    spec = importlib.util.find_spec("torch_uncertainty")
    if spec is not None:
        (root,) = spec.submodule_search_locations or ()
        for name in ("torch_uncertainty", "torch_uncertainty.layers"):  # without Lightning
            module = types.ModuleType(name)
            module.__path__ = [root + name.removeprefix("torch_uncertainty").replace(".", "/")]
            sys.modules[name] = module
        from torch_uncertainty.layers.bayesian import BayesLinear

        yield "torch-uncertainty, mixture", BayesLinear, MIXTURE


def main() -> None:
    parser = bare_parser(__doc__, "training-steps.md")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.manual_seed(0)
    x, y = torch.rand(ROWS, SIZES[0]), torch.randint(SIZES[-1], (ROWS,))
    steps = {method: method_step(method, x, y) for method in METHODS}
    steps |= {name: peer_step(layer, settings, x, y) for name, layer, settings in peers()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(-1, options.rounds):  # the first round is a warm-up
        for name, step in steps.items():
            start = time.process_time()
            for i in range(STEPS):
                # New noise in each step, as in a fit
                step((number + 1) * STEPS + i)
            if number >= 0:
                times[name].append((time.process_time() - start) / STEPS * 1000)
    intro = "784-800-800-10, 128 rows, one draw, fused Adam, one thread. Ratios: median (range)."
    lines = ["# Training steps", "", f"{intro} Rounds: {options.rounds}.", ""]
    lines += ["| | ms per step | ratio to a deterministic step |", "|---|---|---|"]
    for name, values in times.items():
        ratios = [a / b for a, b in zip(values, times["mle"], strict=True)]
        lines.append(f"| {name} | {statistics.median(values):.1f} | {spread(ratios)} |")
    report(options, "training-steps", "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
