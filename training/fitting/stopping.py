"""Stopping rules, which also control the learning rate decay.

* `FixedEpochs`: a fixed number of epochs, over which the rates decay.
* `EarlyStopping`: ends `patience` epochs after the best held-out likelihood (Prechelt 1998). The
  rates are constant.
* `Plateau`: constant rates until the curves have levelled off over `patience` epochs. The rates
  then decay over half as many epochs as before.
"""

import math
from dataclasses import dataclass, field

from jaxtyping import Float
from scipy.stats import linregress
from torch import Tensor

from training.recipe import Recipe, TrainingSection
from training.versions import Parent

Metrics = dict[str, float | int]  # a line of metrics.jsonl

PLATEAU_STEPS, PLATEAU_EPOCHS = 600, 5  # lower limits of the default `patience`
STOPPING_STEPS, STOPPING_EPOCHS = 400, 16  # the same for early stopping
COOLING = 1 / 2  # decay epochs, as a share of the epochs before
LEVEL = 0.01  # maximum change of a level curve over the window, relative to its value
LEVEL_NATS = 0.01  # the same, in nats per row
LEVELLED_OFF = "levelled off"  # part of the reason if a plateau ended the fit
AS_CONFIGURED = "as configured"
AT_LIMIT = "the limit of training.max_epochs"


@dataclass
class Progress:
    """A run's state in a checkpoint, except its tensors."""

    step: int
    best_epoch: int
    history: list[Metrics]
    seconds: float
    levelled: int = 0  # epoch after which the rates began to decay; 0 before the decay
    still_moving: list[str] = field(default_factory=list)  # curves that were not level


@dataclass(frozen=True)
class FixedEpochs:
    number: int

    def epochs(self, _: Progress) -> int:
        """Estimate the total number of epochs."""
        return self.number

    def decay(self, progress: Progress, epoch_steps: int) -> float:
        """Compute how far the learning rates have decayed, from 0 (initial) to 1 (final)."""
        return progress.step / (self.number * epoch_steps)

    def update(self, progress: Progress) -> None:
        """Update the progress at the end of an epoch."""

    def reason(self, _: Progress) -> str:
        """Describe why the fit ended, for the log."""
        if self.number == 0:
            return "before the first epoch: the network was already trained"
        return f"after {self.number} epochs, {AS_CONFIGURED}"


@dataclass(frozen=True)
class EarlyStopping:
    patience: int
    max_epochs: int

    def epochs(self, progress: Progress) -> int:
        return min(max(0, progress.best_epoch) + self.patience, self.max_epochs)

    def decay(self, _: Progress, __: int) -> float:
        return 0.0

    def update(self, progress: Progress) -> None:
        pass

    def reason(self, progress: Progress) -> str:
        epochs = self.epochs(progress)
        limit = "" if epochs - progress.best_epoch == self.patience else f", {AT_LIMIT}"
        best = progress.best_epoch
        return f"after {epochs} epochs{limit}: the held-out likelihood was best after {best}"


@dataclass(frozen=True)
class Plateau:
    patience: int
    max_epochs: int
    ramp_epochs: float  # until the KL weight reaches its full value
    has_bound: bool  # a variational bound must level off too

    def epochs(self, progress: Progress) -> int:
        if progress.levelled == 0:
            return self.max_epochs
        cooling = cooling_epochs(progress.levelled, self.patience)
        return min(progress.levelled + cooling, self.max_epochs)

    def decay(self, progress: Progress, epoch_steps: int) -> float:
        if progress.levelled == 0:
            return 0.0
        start, end = progress.levelled * epoch_steps, self.epochs(progress) * epoch_steps
        return (progress.step - start) / max(1, end - start)

    def update(self, progress: Progress) -> None:
        """Start the decay if the curves are level or `max_epochs` is near."""
        epochs = len(progress.history)
        must_end = epochs + cooling_epochs(epochs, self.patience) >= self.max_epochs
        if progress.levelled or (not must_end and epochs < self.ramp_epochs + self.patience):
            return
        moving = find_moving(progress.history, self.patience, self.has_bound)
        if not moving or must_end:
            progress.levelled, progress.still_moving = epochs, moving

    def reason(self, progress: Progress) -> str:
        epochs = self.epochs(progress)
        if progress.still_moving or not progress.levelled:
            moving = "; ".join(progress.still_moving or ["too few epochs to tell"])
            return f"after {epochs} epochs, {AT_LIMIT}: {moving}"
        return f"after {epochs} epochs: {LEVELLED_OFF} after {progress.levelled}"


StoppingRule = FixedEpochs | EarlyStopping | Plateau


def stopping_rule(
    recipe: Recipe, parent: Parent | None, epoch_steps: int, ramp_epochs: float
) -> StoppingRule:
    settings, fixed = recipe.training, fixed_epochs(recipe, parent)
    if fixed is not None:
        return FixedEpochs(fixed)
    patience = get_patience(settings, epoch_steps)
    if settings.early_stopping:
        return EarlyStopping(patience, settings.max_epochs)
    return Plateau(patience, settings.max_epochs, ramp_epochs, recipe.posterior.is_variational)


def fixed_epochs(recipe: Recipe, parent: Parent | None) -> int | None:
    """Return `training.epochs`, which defaults to 0 for post-hoc methods on trained networks."""
    is_trained = recipe.network.is_trained or parent is not None
    skips_training = recipe.posterior.is_post_hoc and is_trained
    return 0 if skips_training and recipe.training.epochs is None else recipe.training.epochs


def get_patience(section: TrainingSection, epoch_steps: int) -> int:
    if section.patience is not None:
        return section.patience
    if section.early_stopping:
        return max(STOPPING_EPOCHS, math.ceil(STOPPING_STEPS / epoch_steps))
    return max(PLATEAU_EPOCHS, math.ceil(PLATEAU_STEPS / epoch_steps))


def cooling_epochs(epochs: int, patience: int) -> int:
    return max(patience, math.ceil(COOLING * epochs))


def find_moving(history: list[Metrics], patience: int, has_bound: bool) -> list[str]:
    """List the curves that have not levelled off over the last `patience` epochs.

    The curves are the held-out likelihood and, for methods with a bound, the bound and the spread
    of theta.
    """
    if len(history) < patience + 1:
        return ["too few epochs to tell"]
    window = max(3, patience)

    def rise(key: str, min_rise: float) -> float:
        per_epoch, error = slope([m[key] for m in history[-window:]])
        is_rise = abs(per_epoch) > 2 * error and abs(per_epoch) * window > min_rise
        return per_epoch * window if is_rise else 0.0

    moving = []
    if rise("validation_log_likelihood", LEVEL_NATS) > 0:
        moving.append("the held-out likelihood still rose")
    if has_bound:
        size = abs(sum(m["objective"] for m in history[-window:]) / window)
        if rise("objective", max(LEVEL * size, LEVEL_NATS)) < 0:
            moving.append("the bound still fell")
        if "log_std" in history[-1] and rise("log_std", 5 * LEVEL) != 0:
            moving.append("the spread still moved")
    return moving


def slope(values: list[float | int]) -> tuple[float, float]:
    """Fit a line to values by epoch, and return its slope with a standard error."""
    if len(values) < 3:
        return math.nan, math.nan
    line = linregress(range(len(values)), values)
    return float(line.slope), float(line.stderr)


def add_wrong_row(
    log_likelihood: Float[Tensor, "N"],
    log_wrong: Float[Tensor, "N"],
    wrong_log_likelihood: Float[Tensor, "N"],
) -> Float[Tensor, ""]:
    """Compute the mean held-out log-likelihood with an additional, mislabelled row.

    Without the additional row, a few correctly predicted rows would favour the most confident
    network. As a pseudo-observation, it has the weight of one row: among constant probabilities of
    N correct labels, the best is N / (N + 1). The log-likelihood of the additional row is the
    average of `wrong_log_likelihood` over rows, weighted by the probability exp(`log_wrong`) of a
    wrong label.
    """
    error = (log_wrong.softmax(0) * wrong_log_likelihood).sum()
    return (log_likelihood.sum() + error) / (len(log_likelihood) + 1)


def is_as_good(scores: Float[Tensor, "N"], lowest: Float[Tensor, "N"], paired: bool) -> bool:
    """Check whether the mean score is within a standard error of the lowest (best) mean.

    This is the one-standard-error rule (Breiman et al. 1984) for the difference of means, over the
    same rows (paired) or over different steps.
    """
    if len(scores) < 2:  # a standard error needs two scores
        return True
    difference = scores - lowest
    variance = difference.var() if paired else scores.var() + lowest.var()
    return not difference.mean() > (variance / len(scores)).sqrt()
