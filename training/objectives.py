"""What training minimises."""

from jaxtyping import Float, Int64
from torch import Tensor


def negative_elbo(
    log_probs: Float[Tensor, "K N C"], y: Int64[Tensor, "N"], kl: Float[Tensor, "K"], kl_weight: float
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Return the negative evidence lower bound per row, in nats, and its likelihood term alone.

    -ELBO / rows = mean over draws and rows of -log p(y | x, theta) + kl_weight * mean over draws of KL (Krueger et
    al. 2017, equation 2), with kl_weight 1 / (rows of the training set), or less while a ramp lasts.
    """
    nll = -log_probs.gather(2, y.expand(len(log_probs), -1)[:, :, None]).mean()
    return nll + kl_weight * kl.mean(), nll
