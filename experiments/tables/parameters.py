"""Joint posteriors of parameters: Figures 2 and 6 of Krueger et al. 2017."""

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from jaxtyping import Float64
from matplotlib.figure import Figure
from scipy import stats
from torch import nn

from experiments.cells import Column, Measured, Results, Target
from experiments.measures import make_measured
from experiments.tables import toys
from training import recipe as recipes
from training.bayes.diagnostics import bound
from training.bayes.gaussian import GaussianPosterior
from training.bayes.hypernetwork import HypernetworkPosterior
from training.bayes.posterior import noise
from training.fit import Fitted, fit
from training.recipe import Recipe
from training.seeds import Stream

DRAWS = 1000
LEVEL = 0.05
TESTED = 100  # parameters in pairwise tests
SCATTERED = 4  # parameters in a scatter matrix

EDGE, STEP = 5.0, 0.01  # grid over weights
EVALUATIONS = 100  # per bound, with ten draws each
IDENTITIES = {"": (100, 0.3), " few": (30, 1.0)}  # rows, and standard deviation of the noise
PRODUCTS: dict[str, dict[str, Any]] = {
    "bbb-gaussian": {"method": "bbb-gaussian", "posterior": {"initial_log_std": 0.0}},
    **{
        f"bhn-weights-{n}": {
            "method": "bhn-weights",
            "posterior": {"couplings": n, "hidden": 50, "initial_log_std": 0.0},
        }
        for n in (0, 4, 8)
    },
}
CORRELATED = ("bbb-gaussian", "bhn-scales", "bhn-weights")


def product(_: Sequence[int], __: int) -> nn.Module:
    """Build a network with two weights, y = w2 w1 x."""
    return nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))


def draw_theta(result: Fitted) -> Float64[np.ndarray, "K D"]:
    posterior = result.model.cpu().eval().posterior
    with torch.no_grad():
        eps = noise(posterior, DRAWS, result.recipe.seed, Stream.VALIDATION_NOISE)
        return np.asarray(posterior(eps).double().numpy())


def draw_identity(noise_std: float, generator: np.random.Generator, rows: int) -> tuple[Any, Any]:
    x = generator.normal(0.0, 1.0, rows)
    return x, x + generator.normal(0.0, noise_std, rows)


def measure_product(method: str, identity: str, seed: int, runs: Path) -> Measured:
    rows, noise_std = IDENTITIES[identity]
    data = toys.dataset(partial(draw_identity, noise_std), rows, seed)
    changes = {"name": f"product-{method}", "network": {"factory": f"{__name__}:product"}}
    recipe = make_toy_recipe(method, seed, {**PRODUCTS[method], **changes})
    result = fit(recipe, data, runs=runs, quiet=True)
    theta = draw_theta(result)
    positive = float((theta[:, 0] > 0).mean())
    values = {
        "log_likelihood": float(result.log_likelihood(data.test).mean()),
        "kl": divergence_from_exact(result),
        "lesser_mode": 100.0 * min(positive, 1.0 - positive),
        "theta": theta[:200].round(3).tolist(),
    }
    return make_measured(result, values)


def divergence_from_exact(result: Fitted) -> float:
    """Compute KL(q || p) for the exact posterior p under the fitted noise, in nats.

    It is the log evidence, by quadrature over both weights, minus the evidence lower bound.
    """
    model, rows = result.model.double().eval(), result.splits.train
    x, y = torch.from_numpy(rows.x).double(), torch.from_numpy(rows.y).double()
    edge = torch.arange(-EDGE, EDGE, STEP, dtype=torch.float64)
    posterior = model.posterior
    assert isinstance(posterior, GaussianPosterior | HypernetworkPosterior)
    joint = []
    with torch.no_grad():
        for weights in torch.cartesian_prod(edge, edge).split(len(edge)):
            served = model.likelihood(model.network(x, weights[:, None]))
            log_likelihood = model.likelihood.log_likelihood(served, y).sum(1)
            joint.append(log_likelihood + posterior.log_prior(weights))
        bounds = [bound(model.float(), x, y, seed) for seed in range(EVALUATIONS)]
    log_evidence = torch.cat(joint).logsumexp(0).item() + 2 * math.log(STEP)
    return log_evidence + len(x) * float(np.mean([terms["negative_elbo"] for terms in bounds]))


def make_toy_recipe(method: str, seed: int, changes: dict[str, Any]) -> Recipe:
    base = toys.make_recipe("mle", 1, seed).model_dump(exclude_unset=True)
    return recipes.validate({**base, **changes}, method)


def measure_correlations(method: str, seed: int, runs: Path) -> Measured:
    """Measure the correlations between parameters in the fit of `toy-sines`."""
    rows, units = toys.SINES_ROWS, toys.SINES_UNITS
    data = toys.dataset(toys.draw_sines, rows, seed)
    result = fit(toys.make_recipe(method, units, seed), data, runs=runs, quiet=True)
    theta = draw_theta(result)
    theta = theta[:, np.linspace(0, theta.shape[1] - 1, TESTED).astype(int)]
    values = p_values(theta)
    shares, _ = np.histogram(values, bins=20, range=(0.0, 1.0))
    return make_measured(
        result,
        {
            "correlated": 100.0 * float((values < LEVEL).mean()),
            "shares": (shares / len(values)).round(5).tolist(),
            "theta": theta[:200, :SCATTERED].round(4).tolist(),
        },
    )


def p_values(theta: Float64[np.ndarray, "K D"]) -> Float64[np.ndarray, "P"]:
    """Compute the p-value of Pearson's correlation for each pair of columns."""
    draws, size = theta.shape
    first, second = np.triu_indices(size, 1)
    r = np.corrcoef(theta, rowvar=False)[first, second].clip(-1 + 1e-12, 1 - 1e-12)
    t = np.abs(r) * np.sqrt((draws - 2) / (1.0 - r**2))
    return np.asarray(2.0 * stats.t.sf(t, draws - 2))


def each(values: list[float]) -> str:
    return ", ".join(f"{value:.0f}" for value in values)


def _draw_products(target: Target, results: Results) -> Figure:
    """Plot draws of both weights for the seed with the largest minor mode."""
    figure, axes = plt.subplots(
        2, -(-len(results) // 2), figsize=(12, 7), sharex=True, sharey=True, layout="constrained"
    )
    for axis, (row, cells) in zip(axes.flat, results.items(), strict=False):
        for ends in ((-3.0, -1 / 3), (1 / 3, 3.0)):
            w = np.linspace(*ends, 100)
            axis.plot(w, 1.0 / w, "--", color="0.5", linewidth=1)
        if cells:
            best = max((cell.measured.values for cell in cells), key=lambda v: v["lesser_mode"])
            axis.plot(*np.array(best["theta"]).T, ".", markersize=3, alpha=0.5)
        axis.set(title=row, xlabel="w1", xlim=(-3, 3), ylim=(-3, 3), aspect="equal")
    for axis in axes[:, 0]:
        axis.set_ylabel("w2")
    figure.suptitle(f"{target.title}; dashed: w1 w2 = 1")
    return figure


def _draw_correlations(target: Target, results: Results) -> Figure:
    """Plot p-values, and pairs of a few parameters for the first seed."""
    figure = plt.figure(figsize=(4 * len(results), 7.2), layout="constrained")
    parts = figure.subfigures(1, len(results), squeeze=False)[0]
    for part, (row, cells) in zip(parts, results.items(), strict=True):
        above, below = part.subfigures(2, 1, height_ratios=(1, 2))
        axis = above.subplots()
        axis.set(title=row, xlabel="p-value", ylabel="share of pairs")
        axis.axhline(LEVEL, color="0.5", linestyle="--")
        if cells:
            shares = np.mean([cell.measured.values["shares"] for cell in cells], axis=0)
            axis.bar(np.arange(0.0, 1.0, LEVEL), shares, width=LEVEL, align="edge")
            _draw_pairs(below, np.array(cells[0].measured.values["theta"]))
    figure.suptitle(f"{target.title}; dashed: independent parameters")
    return figure


def _draw_pairs(figure: Any, theta: np.ndarray) -> None:
    axes = figure.subplots(SCATTERED, SCATTERED, gridspec_kw={"wspace": 0, "hspace": 0})
    for i in range(SCATTERED):
        for j in range(SCATTERED):
            if i == j:
                axes[i, j].hist(theta[:, i], bins=15)
            else:
                axes[i, j].plot(theta[:, j], theta[:, i], ".", markersize=1.5)
            axes[i, j].set(xticks=(), yticks=())


MODES = Target(
    name="toy-product",
    title="Two modes of y = w1 w2 x (Bayesian Hypernetworks, Figure 2)",
    protocol=(
        "A network of two weights fits the identity, with w1 = w2 = 1 or w1 = w2 = -1. There are "
        "100 training rows with noise of standard deviation 0.3, or 30 rows with 1 (`few`). The "
        f"minor mode is the share of {DRAWS:,} draws with the less frequent sign of w1 (exact: "
        "50 %). The KL divergence is from the exact posterior; for one mode it is at least 0.69. "
        "`bhn-weights-N` has N couplings."
    ),
    rows={
        f"{method}{identity}": partial(measure_product, method, identity)
        for identity in IDENTITIES
        for method in PRODUCTS
    },
    columns={
        "lesser_mode": Column("minor mode, %", summary=each),
        "kl": Column("KL, nats", 2),
        "log_likelihood": Column("log-likelihood", 3),
    },
    draw=_draw_products,
    caption="A posterior with both modes has draws on both dashed curves.",
    remarks=("Only 8 couplings find both modes, and only with some seeds."),
    seeds=5,
)
CORRELATIONS = Target(
    name="toy-correlations",
    title="Correlations of parameters (Bayesian Hypernetworks, Figure 6)",
    protocol=(
        f"Figures are the share of pairs of {TESTED} parameters in the fits of `toy-sines` whose "
        f"correlation over {DRAWS:,} draws has a p-value below {LEVEL}. For independent parameters "
        f"the share is {100 * LEVEL:g} %."
    ),
    rows={row: partial(measure_correlations, row) for row in CORRELATED},
    columns={"correlated": Column("pairs correlated, %", 1)},
    draw=_draw_correlations,
    caption="Bars above the dashed line at small p-values, and slanted clouds, show correlations.",
)

TARGETS = (MODES, CORRELATIONS)
