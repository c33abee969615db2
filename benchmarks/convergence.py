"""Do posteriors depend on where their spread starts, or on how long they are fitted?

    python -m benchmarks.convergence [RECIPE ...] [--starts -7 -2] [--longer 2 10] [--seeds N]
    [--set KEY NUMBER]

fits each recipe from each start, and from its own start with the epochs multiplied, and tabulates
the bound, the test rows, and the mean BALD of uniform noise over the data's range and of notMNIST's
letters (DUBITO_DATA/notmnist). The bound is the one that is minimised, with the recipe's
`kl_weight`: it is the negative ELBO where that is 1 / rows. Then it says how far each bound lies
above that of the longest fit, and by how much BALD moves. Nothing is published.
"""

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.figure import Figure

from benchmarks.common import RESULTS, ROOT, bare_parser, data_root
from training import recipe as recipes
from training.data import Dataset, load
from training.evaluation.outliers import OutlierSource, uniform
from training.fit import fit
from training.fitting.steps import full_kl_weight
from training.model import BayesianModel
from training.posteriors.base import standard_noise
from training.recipe import Recipe

DRAWS, OUTLIERS = 100, 300
HEAD = (
    "recipe",
    "seed",
    "start",
    "epochs",
    "bound",
    "KL",
    "validation log-likelihood",
    "test accuracy",
    "test log-likelihood",
    "BALD, noise",
    "BALD, letters",
    "s",
    "said",
)


@dataclass(frozen=True)
class Measured:
    """What is tabulated of a fit; of a bound, in nats a row, less is better."""

    start: float | None  # None of a method whose spread has none
    epochs: int
    bound: float
    kl: float
    validation: float  # log-likelihood, of which a temper may be chosen
    accuracy: float
    log_likelihood: float
    bald: dict[str, float]  # by what the rows are
    seconds: float
    says: str


def variant(
    recipe: Recipe, start: float | None, longer: float, seed: int, training: dict[str, float]
) -> Recipe:
    posterior = (
        recipe.posterior
        if start is None
        else recipe.posterior.model_copy(update={"initial_log_std": start})
    )
    section = recipe.training.model_copy(update=training)
    epochs = round(longer * (section.epochs or section.max_epochs))
    section = section.model_copy(update={"epochs": epochs})
    return recipe.model_copy(update={"posterior": posterior, "training": section, "seed": seed})


def measure(recipe: Recipe, data: Dataset) -> Measured:
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        fitted = fit(recipe, data, device="cpu", runs=Path(folder), quiet=True)
        seconds = time.perf_counter() - begun
    model, splits, found = fitted.model, fitted.splits, fitted.provenance.convergence or {}
    x, y = torch.from_numpy(splits.test.x).float(), torch.from_numpy(splits.test.y)
    model.eval()
    eps = standard_noise(DRAWS, model.posterior.noise_dimension, 5)
    log_probs = model.predict(x, eps)
    others = {"noise": uniform(data.input, OUTLIERS, 0)}
    if (data_root() / "notmnist").is_dir():
        others["letters"] = OutlierSource("letters", "idx", data_root() / "notmnist").rows(
            data.input, OUTLIERS, 0
        )
    return Measured(
        start=getattr(recipe.posterior, "initial_log_std", None),
        epochs=fitted.provenance.epochs,
        bound=found["nll"] + full_kl_weight(recipe.training, len(splits.train)) * found["kl"],
        kl=found["kl"],
        validation=fitted.provenance.validation_log_likelihood or 0.0,
        accuracy=(log_probs.exp().mean(0).argmax(1) == y).double().mean().item(),
        log_likelihood=model.likelihood.mixture_log_likelihood(log_probs, y).mean().item(),
        bald={name: mean_bald(model, torch.from_numpy(rows), eps) for name, rows in others.items()},
        seconds=seconds,
        says=found["says"],
    )


def mean_bald(model: BayesianModel, x: torch.Tensor, eps: torch.Tensor) -> float:
    """Return the mean over rows of the entropy of the mean less the mean entropy, in nats."""
    log_probs = model.predict(x, eps).double()
    probs = log_probs.exp()
    mean = probs.mean(0)
    entropy = -(mean * mean.clamp(min=1e-300).log()).sum(1)
    return (entropy + (probs * log_probs).sum(2).mean(0)).mean().item()


def row(name: str, seed: int, got: Measured) -> str:
    bald = [f"{got.bald[kind]:.3f}" if kind in got.bald else "" for kind in ("noise", "letters")]
    cells = [
        name,
        str(seed),
        "" if got.start is None else f"{got.start:g}",
        str(got.epochs),
        f"{got.bound:.4g}",
    ]
    cells += [
        f"{got.kl:.4g}",
        f"{got.validation:.4f}",
        f"{got.accuracy:.4f}",
        f"{got.log_likelihood:.4f}",
        *bald,
        f"{got.seconds:.0f}",
    ]
    return f"| {' | '.join([*cells, got.says])} |"


def summary(name: str, of_starts: list[Measured], of_epochs: list[Measured]) -> str:
    longest = max(of_epochs, key=lambda got: got.epochs)
    parts = [
        f"bound after {got.epochs} epochs {got.bound / longest.bound - 1.0:+.1%}"
        for got in of_epochs[:-1]
    ]
    for kind in longest.bald:
        by_start = [got.bald[kind] for got in of_starts]
        if len(by_start) > 1:
            parts.append(
                f"BALD on {kind}: {max(by_start) / min(by_start) - 1.0:.1%} between starts"
            )
        own = of_epochs[0].bald[kind]
        parts += [
            f"BALD on {kind}: {got.bald[kind] / own - 1.0:+.1%} with {got.epochs} epochs"
            for got in of_epochs[1:]
        ]
    return f"{name}: {'; '.join(parts)}"


def main() -> None:
    parser = bare_parser(__doc__, "convergence.png")
    parser.add_argument(
        "recipes", nargs="*", type=Path, default=[ROOT / "recipes" / "digits-bhn-realnvp.toml"]
    )
    parser.add_argument("--starts", nargs="*", type=float, default=[-7.0, -5.0, -3.0, -2.0])
    parser.add_argument("--longer", nargs="*", type=float, default=[2.0])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument(
        "--set",
        nargs=2,
        action="append",
        default=[],
        metavar=("KEY", "NUMBER"),
        help="of [training]",
    )
    options = parser.parse_args()
    print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}")
    found: dict[str, list[Measured]] = {}
    said = []
    for path in options.recipes:
        recipe = recipes.load(path)
        data = load(recipe, data_root(), ())
        training = {
            key: int(value) if value.isdigit() else float(value) for key, value in options.set
        }
        for seed in range(options.seeds):

            def fitted(start: float | None, longer: float, seed: int = seed) -> Measured:
                got = measure(variant(recipe, start, longer, seed, training), data)  # noqa: B023
                print(row(recipe.name, seed, got), flush=True)  # noqa: B023
                return got

            of_epochs = [fitted(None, longer) for longer in (1.0, *options.longer)]
            of_starts = [of_epochs[0], *(fitted(start, 1.0) for start in options.starts)]
            found.setdefault(recipe.name, []).extend([*of_starts, *of_epochs[1:]])
            said.append(summary(f"{recipe.name}, seed {seed}", of_starts, of_epochs))
    print("\n" + "\n".join(f"* {line}" for line in said))
    if options.write:
        plot(found).savefig(RESULTS / "convergence.png", dpi=100)


def plot(found: dict[str, list[Measured]]) -> Figure:
    figure, axis = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for i, (name, fits) in enumerate(found.items()):
        shortest = min(got.epochs for got in fits)
        for mark, longer in (("o", False), ("x", True)):
            points = [
                (got.start, got.bald["noise"])
                for got in fits
                if got.start is not None and (got.epochs > shortest) == longer
            ]
            if points:
                axis.plot(*np.array(points).T, mark, color=f"C{i}", label=None if longer else name)
    axis.set(
        xlabel="log standard deviation at the start",
        ylabel="mean BALD on noise, nats",
        ylim=(0, None),
    )
    axis.grid(alpha=0.3)
    axis.legend(title="x: fitted for longer")
    return figure


if __name__ == "__main__":
    main()
