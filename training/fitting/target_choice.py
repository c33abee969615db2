"""Which transform of a regression's target a fit takes: told by the recipe, or chosen by held-out
likelihood.

A chosen one is that of the highest log-likelihood of the validation rows, of a density in the
target's own units (with log g'(y), or a transform that shrinks the target would always win), each
after a short fit of the recipe.
"""

import math
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float64

from model_store.scores.regression import log_density
from model_store.scores.transforms import Transform
from training.data import Dataset, Splits
from training.data.targets import fit_transform, kinds_for, transformed
from training.facts import TargetFacts
from training.fitting.run import Run
from training.messages import log
from training.posteriors import noise
from training.recipe import Recipe
from training.seeds import Stream
from training.versions import Parent

SHORT_FIT = 0.2  # of the epochs that a fit may have
FOLDER = "target-"


@dataclass(frozen=True)
class TargetChoice:
    """A transform, and what the manifest says of the choice; None where there was none to make."""

    transform: Transform | None
    facts: TargetFacts | None = None


def target_choice(
    recipe: Recipe,
    data: Dataset,
    splits: Splits,
    folder: Path,
    device: torch.device,
    parent: Parent | None,
    encoded: int | None = None,
) -> TargetChoice:
    """Return the transform that a recipe's fit takes; of a warm start the parent's.

    Short fits are kept in folders of the run's until `forget`, so that a run that was killed does
    not repeat them.

    Raises:
        InvalidInput: if the targets do not bear the transform that the recipe names.
    """
    if recipe.task != "regression":
        return TargetChoice(None)
    if parent is not None:
        return TargetChoice(parent.manifest.transform)
    kind = recipe.data.target_transform
    if kind != "auto":
        return TargetChoice(fit_transform(kind, splits, data))
    transforms = {name: fit_transform(name, splits, data) for name in kinds_for(data)}
    log.info(
        "trying the target as it is and transformed (%s), a short fit each", ", ".join(transforms)
    )
    found = {
        name: _held_out(
            recipe, data, splits, transform, folder / f"{FOLDER}{name}", device, encoded
        )
        for name, transform in transforms.items()
    }
    chosen = best(found)
    means = {name: round(float(likelihoods.mean()), 4) for name, likelihoods in found.items()}
    shown = ", ".join(f"{name} {mean:.4g}" for name, mean in means.items())
    log.info(
        "target transform: %s (held-out log-likelihood in the target's units: %s)", chosen, shown
    )
    return TargetChoice(transforms[chosen], TargetFacts(chosen=chosen, log_likelihood=means))


def forget(folder: Path) -> None:
    """Remove what short fits left in a run's folder."""
    for path in folder.glob(f"{FOLDER}*"):
        shutil.rmtree(path)


def best(likelihoods: dict[str, Float64[np.ndarray, "N"]]) -> str:
    """Return the name of the best; a later one must be better than those before it by more than
    chance, the standard error of the mean difference.
    """
    names = iter(likelihoods)
    chosen = next(names)
    for name in names:
        gain = likelihoods[name] - likelihoods[chosen]
        if gain.mean() > gain.std() / math.sqrt(len(gain)):
            chosen = name
    return chosen


def _held_out(
    recipe: Recipe,
    data: Dataset,
    splits: Splits,
    transform: Transform | None,
    folder: Path,
    device: torch.device,
    encoded: int | None,
) -> Float64[np.ndarray, "N"]:
    """Return the log-likelihood of each validation row after a short fit, in nats, in the target's
    units."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = recipe.training
    epochs = (
        {"epochs": settings.epochs}
        if settings.epochs is not None
        else {"max_epochs": settings.max_epochs}
    )
    short = {name: max(1, math.ceil(SHORT_FIT * number)) for name, number in epochs.items()}
    quick = recipe.model_copy(update={"training": settings.model_copy(update=short)})
    run = Run(quick, transformed(splits, transform), data.shape, 0, folder, device, encoded=encoded)
    model = run.fit(quiet=True).eval()
    draws = min(settings.validation_draws, model.posterior.max_draws or settings.validation_draws)
    eps = noise(model.posterior, draws, recipe.seed, Stream.VALIDATION_NOISE).to(device)
    served = model.predict(run.validation[0], eps).cpu().numpy()
    return log_density(served, splits.validation.y.astype(np.float64), transform)
