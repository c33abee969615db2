"""Matrix-variate Gaussian posteriors over weights."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from training.bayes.layers import Slot
from training.bayes.posterior import FactorialGaussian


class MatrixNormalPosterior(FactorialGaussian):
    """A matrix-variate Gaussian for each layer, W = M + A^1/2 E B^1/2 with diagonal A and B.

    See Louizos and Welling 2016, section 3.1. The biases are the last row of W. The prior is
    MVN(0, prior_std^2 I, I).
    """

    trains_without_noise = True
    prior_std: float

    def __init__(self, slots: Sequence[Slot], initial_log_std: float, prior_std: float) -> None:
        super().__init__()
        shapes = [slot.shape for slot in slots]
        self.noise_dimension = self.theta_dimension = sum(slot.size for slot in slots)
        self.prior_std = prior_std
        self.means = nn.ParameterList(torch.zeros(shape) for shape in shapes)
        # Logarithms of standard deviations, (log A) / 2 and (log B) / 2.
        rows = (torch.full((rows,), initial_log_std) for rows, _ in shapes)
        self.log_rows = nn.ParameterList(rows)
        self.log_columns = nn.ParameterList(torch.zeros(columns) for _, columns in shapes)

    def moments(self) -> tuple[Float[Tensor, "D"], Float[Tensor, "D"]]:
        stds = [
            torch.exp(log_row)[:, None] * torch.exp(log_column)
            for log_row, log_column in zip(self.log_rows, self.log_columns, strict=True)
        ]
        mean, std = (torch.cat([part.flatten() for part in parts]) for parts in (self.means, stds))
        return mean, std

    def layer_moments(
        self, eps: Float[Tensor, "K E"], _: Sequence[int]
    ) -> tuple[Sequence[Tensor], Sequence[Tensor], Float[Tensor, "K"]]:
        variances = [
            (torch.exp(2 * log_row)[:, None] * torch.exp(2 * log_column)).flatten()
            for log_row, log_column in zip(self.log_rows, self.log_columns, strict=True)
        ]
        means = [mean.flatten() for mean in self.means]
        return means, variances, self.kl(eps)

    def spread_parameters(self) -> list[nn.Parameter]:
        return [*self.log_rows, *self.log_columns]

    def kl(self, eps: Float[Tensor, "K E"], *_: Float[Tensor, "D"]) -> Float[Tensor, "K"]:
        """Compute KL(q || p), where layer l has i inputs and o outputs, and s is the prior's std.

        1/2 sum_l (tr A tr B + |M|^2) / s^2 - i o - o log |A| - i log |B| + i o log s^2
        """
        total = self.means[0].new_zeros(())
        variance = self.prior_std**2
        for mean, log_row, log_column in zip(
            self.means, self.log_rows, self.log_columns, strict=True
        ):
            rows, columns = mean.shape
            trace = torch.exp(2 * log_row).sum() * torch.exp(2 * log_column).sum()
            log_det = 2 * columns * log_row.sum() + 2 * rows * log_column.sum()
            constant = mean.numel() * (torch.log(torch.tensor(variance)) - 1.0)
            total = total + 0.5 * ((trace + mean.square().sum()) / variance - log_det + constant)
        return total.expand(len(eps))

    @torch.no_grad()
    def start_at(self, theta: Float[Tensor, "D"]) -> None:
        parts = theta.split([mean.numel() for mean in self.means])
        for mean, part in zip(self.means, parts, strict=True):
            mean.copy_(part.view_as(mean))
