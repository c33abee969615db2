"""Do posteriors depend on where their spread starts, or on how long they are fitted?

    python -m benchmarks.convergence [RECIPE ...] [--starts -7 -5 -3 -2] [--longer 2] [--write]

fits each recipe from each start,
and from the first of them with the epochs multiplied, and tabulates the bound, the spread, the test rows and the mean
BALD on uniform noise over the data's range. Nothing is published.
"""

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch

from benchmarks.model import ROOT
from training import recipe as recipes
from training.data import Dataset, load, split, split_sizes
from training.fitting.run import Run, training_facts
from training.nn.model import BayesianModel
from training.nn.posteriors.normal import standard_noise
from training.recipe import Recipe

DRAWS, NOISE_ROWS = 100, 300


def restarted(recipe: Recipe, start: float, longer: int) -> Recipe:
    """Return a recipe whose spread starts elsewhere, and which takes longer."""
    posterior = recipe.posterior.model_copy(update={"initial_log_std": start})
    training = recipe.training.model_copy(
        update={"epochs": longer * (recipe.training.epochs or recipe.training.max_epochs)}
    )
    return recipe.model_copy(update={"posterior": posterior, "training": training})


def measure(recipe: Recipe, data: Dataset) -> dict[str, Any]:
    """Fit, and return what is tabulated."""
    splits = split(data, split_sizes(recipe))
    with tempfile.TemporaryDirectory() as folder:
        run = Run(recipe, splits, data.shape, len(data.classes), Path(folder), torch.device("cpu"))
        model = run.fit(quiet=True)
        facts = training_facts(run, splits)
    x, y = torch.from_numpy(splits.test.x), torch.from_numpy(splits.test.y)
    model.eval()
    eps = standard_noise(DRAWS, model.posterior.noise_dimension, 5)
    log_probs = model.predict(x, eps)
    noise = np.random.default_rng(0).uniform(data.minimum, data.maximum, (NOISE_ROWS, x.shape[1]))
    return {
        **(facts.convergence or {}),
        "epoch": facts.best_epoch,
        "epochs": facts.epochs,
        "accuracy": (log_probs.exp().mean(0).argmax(1) == y).double().mean().item(),
        "log_likelihood": model.likelihood.mixture_log_likelihood(log_probs, y).mean().item(),
        "bald": mean_bald(model, torch.from_numpy(noise.astype(np.float32)), eps),
    }


def mean_bald(model: BayesianModel, x: torch.Tensor, eps: torch.Tensor) -> float:
    """Return the mean over rows of the entropy of the mean less the mean entropy, in nats."""
    log_probs = model.predict(x, eps).double()
    probs = log_probs.exp()
    mean = probs.mean(0)
    entropy = -(mean * mean.clamp(min=1e-300).log()).sum(1)
    return (entropy + (probs * log_probs).sum(2).mean(0)).mean().item()


def main() -> None:
    """Fit, print the table, and with `--write` draw it beside docs/results/convergence.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", type=Path, default=[ROOT / "recipes" / "digits-bhn-realnvp.toml"])
    parser.add_argument("--starts", nargs="+", type=float, default=[-7.0, -5.0, -3.0, -2.0])
    parser.add_argument("--longer", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="write docs/results/convergence.png")
    options = parser.parse_args()
    print("| recipe | start | epochs | kept | -ELBO | KL | test accuracy | log-likelihood | BALD on noise | |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    found: dict[str, list[tuple[float, float]]] = {}
    for path in options.recipes:
        recipe = recipes.load(path)
        data = load(recipe, Path(os.environ.get("DUBITO_DATA", "data")), ())
        for start, longer in [*((start, 1) for start in options.starts), (options.starts[0], options.longer)]:
            got = measure(restarted(recipe, start, longer), data)
            found.setdefault(recipe.name, []).append((start, got["bald"]))
            print(
                f"| {recipe.name} | {start:g} | {got['epochs']} | {got['epoch']} | {got['negative_elbo']:.4g} "
                f"| {got['kl']:.4g} | {got['accuracy']:.4f} | {got['log_likelihood']:.4f} | {got['bald']:.4g} "
                f"| {got['says']} |",
                flush=True,
            )
    if options.write:
        plot(found, ROOT / "docs" / "results" / "convergence.png")


def plot(found: dict[str, list[tuple[float, float]]], path: Path) -> None:
    """Draw mean BALD on noise against the start; the last point of each, the longer fit, as a cross."""
    plt.switch_backend("Agg")
    figure, axis = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for i, (name, points) in enumerate(found.items()):
        starts, balds = zip(*sorted(points[:-1]), strict=True)
        axis.plot(starts, balds, "o-", color=f"C{i}", label=name)
        axis.plot(*points[-1], "x", color=f"C{i}", markersize=9)
    axis.set(xlabel="log standard deviation at the start", ylabel="mean BALD on noise, nats", ylim=(0, None))
    axis.grid(alpha=0.3)
    axis.legend(title="x: fitted for longer")
    figure.savefig(path, dpi=100)
    plt.close(figure)


if __name__ == "__main__":
    main()
