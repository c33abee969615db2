"""A Gaussian density detector with one mean per class."""

import torch
from jaxtyping import Float, Int, Num
from torch import Tensor, nn

from training.bayes.layers import matmul
from training.bayes.linalg import eigh
from training.detectors.spectrum import Fold, square_norms

SHRINKAGE = 1e-2  # share of the mean variance that is added to each variance


class ClassGaussian(nn.Module):
    """The squared Mahalanobis distance to the nearest class mean.

    All classes share the within-class covariance (Lee et al. 2018, "A simple unified framework for
    detecting out-of-distribution samples and adversarial attacks", equation 2).
    """

    def __init__(
        self,
        fold: Fold,
        centre: Float[Tensor, "F"],
        whitening: Float[Tensor, "F F"],
        means: Float[Tensor, "C F"],
    ) -> None:
        super().__init__()
        self.fold = fold
        self.centre = nn.Buffer(centre)
        self.whitening = nn.Buffer(whitening)
        self.means = nn.Buffer(means.T.contiguous())
        self.mean_squares = nn.Buffer(square_norms(means))

    @classmethod
    def fit(
        cls,
        rows: Num[Tensor, "N I"],
        generator: torch.Generator,
        labels: Int[Tensor, "N"] | None = None,
    ) -> "ClassGaussian":
        fold = Fold.fit(rows.shape[1], generator)
        folded = fold(rows.double())
        centre = folded.mean(0)
        folded = folded - centre  # far from 0, float32 would lose small distances
        index = (
            torch.zeros(len(rows), dtype=torch.long)
            if labels is None
            else labels.unique(return_inverse=True)[1]
        )
        means = torch.stack([folded[index == c].mean(0) for c in range(int(index.max()) + 1)])
        centred = folded - means[index]
        variances, directions = eigh(centred.T @ centred / len(rows))
        floor = SHRINKAGE * variances.mean()
        if floor <= 0:  # constant rows
            floor = torch.ones_like(floor)
        whitening = directions / (variances + floor).sqrt()
        return cls(fold, centre.float(), whitening.float(), (means @ whitening).float())

    def forward(self, rows: Float[Tensor, "N I"]) -> Float[Tensor, "N"]:
        z = matmul(self.fold(rows) - self.centre, self.whitening)
        nearest = (self.mean_squares - 2.0 * matmul(z, self.means)).min(dim=1).values
        return (nearest + square_norms(z)).clamp(min=1e-6)
