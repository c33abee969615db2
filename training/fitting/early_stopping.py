"""When a fit that was told no number of epochs has gone on for long enough, and which epoch's
model it keeps.

With `early_stopping` it ends `patience` epochs after the one of the highest held-out likelihood,
and keeps that one (Prechelt 1998), as if one more row were predicted wrongly: a few rows that are
all predicted rightly are likeliest under the surest network. Otherwise it trains at its first
learning rates until what counts has levelled off over the last `patience` epochs, then lets the
rates decay over half as many epochs again, and ends. What counts is the held-out likelihood and, of
a posterior that has a bound to converge to, that bound and the spread of theta as well.
"""

import math

from jaxtyping import Float
from torch import Tensor

from training.fitting.convergence import LEVEL, slope
from training.recipe import TrainingSection

FEWEST_STEPS = 600  # of `patience` epochs, if a recipe does not say how many these are
FEWEST_EPOCHS = 5
STOPPING_STEPS, STOPPING_EPOCHS = 400, 16  # of early stopping
COOLING = 1 / 2  # of the epochs so far
LEVEL_NATS = 0.01  # a row: the held-out likelihood's rise over the window below which it is level


def patience_of(section: TrainingSection, epoch_steps: int) -> int:
    if section.patience is not None:
        return section.patience
    if section.early_stopping:
        return max(STOPPING_EPOCHS, math.ceil(STOPPING_STEPS / epoch_steps))
    return max(FEWEST_EPOCHS, math.ceil(FEWEST_STEPS / epoch_steps))


def with_an_error(
    log_likelihood: Float[Tensor, "N"],
    log_wrong: Float[Tensor, "N"],
    of_wrong: Float[Tensor, "N"],
) -> Float[Tensor, ""]:
    """Return the mean log-likelihood of held-out rows and of one more, whose label is wrong.

    After N rows that were all predicted rightly the next one is wrong with a probability of
    1 / (N + 2), by the rule of succession. The network's own odds say which it is: a row's are
    exp(`log_wrong`), the probability of all labels but its own, and `of_wrong` is their mean
    log-likelihood.
    """
    of_error = (log_wrong.softmax(0) * of_wrong).sum()
    return (log_likelihood.sum() + of_error) / (len(log_likelihood) + 1)


def cooling_epochs(epochs: int, patience: int) -> int:
    return max(patience, math.ceil(COOLING * epochs))


def find_moving(history: list[dict[str, float | int]], patience: int, has_bound: bool) -> list[str]:
    """Return what has not levelled off over the last `patience` epochs, in words."""
    if len(history) < patience + 1:
        return ["too few epochs to tell"]
    window = max(3, patience)

    def rise(key: str, least: float) -> float:
        """Return the rise over the window, 0 where it cannot be told from none."""
        a_step, error = slope([m[key] for m in history[-window:]], share=1.0)
        return a_step * window if abs(a_step) > 2 * error and abs(a_step) * window > least else 0.0

    still = []
    if rise("validation_log_likelihood", LEVEL_NATS) > 0:
        still.append("the held-out likelihood still rose")
    if has_bound:
        size = abs(sum(m["objective"] for m in history[-window:]) / window)
        if rise("objective", max(LEVEL * size, LEVEL_NATS)) < 0:
            still.append("the bound still fell")
        if "log_std" in history[-1] and rise("log_std", 5 * LEVEL) != 0:
            still.append("the spread still moved")
    return still


def is_as_good(scores: Float[Tensor, "N"], lowest: Float[Tensor, "N"], paired: bool) -> bool:
    """Whether the mean of scores, less being better, is within one standard error of the lowest so
    far.

    The error is that of the difference of means: over rows that both are of (paired), or over
    steps, each its own. Among checkpoints that cannot be told apart the latest has the smallest
    step size behind it (Breiman et al. 1984, the one-standard-error rule).
    """
    if len(scores) < 2:  # one has no error: take it
        return True
    difference = scores - lowest
    variance = difference.var() if paired else scores.var() + lowest.var()
    return not difference.mean() > (variance / len(scores)).sqrt()
