"""Compare posteriors to Hamiltonian Monte Carlo on two interleaved classes."""

from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64
from matplotlib.figure import Figure
from scipy.spatial import cKDTree
from sklearn.datasets import make_moons
from torch import Tensor

from experiments.cells import Column, Measured, Results, Target
from experiments.certify import hamiltonian as hmc
from experiments.certify.gap import HELD_OUT, UNITS
from experiments.measures import make_measured
from experiments.pages import first_seeds, panels
from training.bayes.hamiltonian import split_r_hat
from training.bayes.network import BayesianModel
from training.data.rows import Dataset, Rows
from training.fit import fit
from training.recipe import Recipe

ROWS, NOISE_STD = 100, 0.15
SIDE = np.linspace(-4.0, 4.0, 41)
GRID = np.stack(np.meshgrid(SIDE, SIDE), axis=-1).reshape(-1, 2).astype(np.float32)
NEAR, FAR = 0.3, 1.5  # distances to the nearest training row


def dataset(seed: int) -> Dataset:
    def rows(count: int, part: int) -> Rows:
        x, y = make_moons(count, noise=NOISE_STD, random_state=10 * seed + part)
        return Rows(((x - [0.5, 0.25]) * 1.5).astype(np.float32), y.astype(np.int64))

    train = rows(ROWS + sum(HELD_OUT.values()), 0)
    low, high = float(train.x.min()), float(train.x.max())
    return Dataset(train, rows(500, 1), (2,), ("0", "1"), low, high)


def make_recipe(method: str, seed: int, **training: Any) -> Recipe:
    return hmc.compared_recipe(
        "moons",
        method,
        seed,
        data={"source": "npz:moons.npz", **HELD_OUT},
        units=UNITS,
        training={"max_epochs": 4000, "batch_rows": 50, **training},
    )


@cache
def exact_probabilities(
    seed: int, runs: Path
) -> tuple[Float64[np.ndarray, "K N"], np.ndarray, float, float]:
    """Sample the posterior by Hamiltonian Monte Carlo.

    Return each draw's probability of the second class on the grid, the training rows, the largest
    split R-hat of the probabilities, and the share of accepted proposals.
    """
    short = make_recipe("bbb-gaussian", seed, epochs=1)
    result = fit(short, dataset(seed), runs=runs, quiet=True)
    chains, draws, accepted = hmc.sample_answers(result, _logits, GRID, seed)
    result.discard_checkpoint()
    r_hat = split_r_hat(probability(chains)).max().item()
    return probability(torch.from_numpy(draws)).numpy(), result.splits.train.x, r_hat, accepted


def _logits(model: BayesianModel, theta: Tensor, x: Tensor) -> Tensor:
    return model.likelihood(model.network(x, theta[:, None]))


def probability(logits: torch.Tensor) -> torch.Tensor:
    return logits.softmax(-1)[..., 1]


def measure(method: str, seed: int, runs: Path) -> Measured:
    exact, rows, r_hat, accepted = exact_probabilities(seed, runs)
    if method == hmc.EXACT:
        values = {**compare(exact, exact, rows), "r_hat": r_hat, "accepted": accepted}
        return Measured(values, dataset(seed).digest()[:16])
    result = fit(make_recipe(method, seed), dataset(seed), runs=runs, quiet=True)
    probs = probability(torch.from_numpy(result.outputs(GRID)).double()).numpy()
    values = compare(probs, exact, rows)
    result.discard_checkpoint()
    return make_measured(result, values)


def bald(p: Float64[np.ndarray, "K N"]) -> Float64[np.ndarray, "N"]:
    return np.asarray(_entropy(p.mean(axis=0)) - _entropy(p).mean(axis=0))


def _entropy(p: np.ndarray) -> np.ndarray:
    parts = np.stack([p, 1.0 - p]).clip(1e-300, 1.0)
    return -np.sum(parts * np.log(parts), axis=0)


def compare(
    probs: Float64[np.ndarray, "K N"], exact: Float64[np.ndarray, "J N"], rows: np.ndarray
) -> dict[str, Any]:
    """Compare predictive distributions and BALD near and far from the training rows."""
    distance = cKDTree(rows).query(GRID)[0]
    scores, exact_scores = bald(probs), bald(exact)
    values: dict[str, Any] = {
        "probability": probs.mean(axis=0).round(4).tolist(),
    }
    for place, mask in {"near": distance <= NEAR, "far": distance >= FAR}.items():
        values[f"bald_{place}"] = float(scores[mask].mean())
        values[f"ratio_{place}"] = float(scores[mask].mean() / exact_scores[mask].mean())
    return values


def _draw(target: Target, results: Results) -> Figure:
    """Plot each method's probability of the second class for the first seed."""
    first = first_seeds(results)
    figure, axes = panels(len(first), 4, 11, 2.6)
    for axis, (row, values) in zip(axes, first.items(), strict=True):
        image = np.array(values["probability"]).reshape(len(SIDE), -1)
        levels = np.linspace(0.0, 1.0, 11)
        shades = axis.contourf(SIDE, SIDE, image, levels=levels, cmap="RdBu")
        axis.set(title=row, xticks=(-4, 0, 4), yticks=(-4, 0, 4))
    figure.suptitle(target.title)
    figure.supxlabel("first column")
    figure.supylabel("second column")
    figure.colorbar(shades, ax=axes, label="probability of the second class", shrink=0.7)
    return figure


MOONS = Target(
    name="moons",
    title="Two classes, near and far from the data, compared with Hamiltonian Monte Carlo",
    protocol=(
        f"scikit-learn's two moons, {ROWS} training rows, noise {NOISE_STD}; one hidden layer of "
        f"{UNITS} ReLU units. Hamiltonian Monte Carlo: {hmc.SAMPLED}. Near points are within "
        f"{NEAR} of a training row, far points at least {FAR} away, in a square of side 8. BALD is "
        "divided by the exact BALD: values below 1 are overconfident."
    ),
    rows={row: partial(measure, row) for row in (hmc.EXACT, *hmc.METHODS)},
    columns={
        **{f"ratio_{place}": Column(f"BALD / exact, {place}") for place in ("near", "far")},
    },
    draw=_draw,
    caption=(
        "White regions are uncertain. They should widen with the distance from the two moons, as "
        "in the first panel."
    ),
)

TARGETS = (MOONS,)
