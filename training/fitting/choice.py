"""Which epoch's model a run keeps (docs/decisions/0005-checkpoint.md)."""

from jaxtyping import Float
from torch import Tensor


def is_as_good(scores: Float[Tensor, "N"], lowest: Float[Tensor, "N"], paired: bool) -> bool:
    """Whether the mean of scores, less being better, is within one standard error of the lowest so
    far.

    The error is that of the difference of means: over rows that both are of (paired), or over
        steps, each its own.
    Among checkpoints that cannot be told apart the latest has the smallest step size behind it
    (Breiman et al. 1984, the one-standard-error rule).
    """
    difference = scores - lowest
    variance = difference.var() if paired else scores.var() + lowest.var()
    return not difference.mean() > (variance / len(scores)).sqrt()  # one row has no error: take it
