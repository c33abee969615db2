"""Density detectors based on the principal components of the training rows."""

import torch
from jaxtyping import Float, Num
from torch import Tensor, nn

from training.bayes.layers import matmul
from training.bayes.linalg import eigh

EXPLAINED = 0.9  # share of the variance that the leading components explain
FLOOR = 1e-4  # share of the mean variance that is added to each variance
MAX_LENGTH = 4096  # longer rows are folded
CHUNK_ROWS, CHUNK_NUMBERS = 4096, 1 << 24  # limits of a chunk
ROUNDING = 1e-9  # float32 rounding error of a residual, relative to the squared length

Folded = Float[Tensor, "N F"]


class Spectrum(nn.Module):
    """The training rows' principal components, sorted by decreasing variance."""

    def __init__(
        self, fold: "Fold", mean: Float[Tensor, "F"], components: Float[Tensor, "F D"]
    ) -> None:
        super().__init__()
        self.fold = fold
        self.mean = nn.Buffer(mean)
        self.components = nn.Buffer(components)

    @classmethod
    def fit(cls, x: Num[Tensor, "N I"], generator: torch.Generator) -> "Spectrum":
        fold = Fold.fit(x.shape[1], generator)
        mean, _, directions = principal_components(x, fold)
        return cls(fold, mean.float(), directions.float().contiguous())

    def forward(self, x: Float[Tensor, "N I"]) -> Folded:
        return matmul(self.fold(x) - self.mean, self.components)

    def invert(self, spectrum: Folded) -> Folded:
        """Map component coordinates back to the axes of the folded inputs."""
        return matmul(spectrum, self.components.T)


class Residual(nn.Module):
    """The squared distance from an input to the span of the leading principal components.

    The leading components explain `EXPLAINED` of the training rows' variance. Noise, perturbations
    and other data have larger residuals than natural data; smoothed or faded images have smaller
    ones.
    """

    def __init__(self, num_components: int) -> None:
        super().__init__()
        self.num_components = num_components

    @classmethod
    def fit(cls, spectrum: Folded, _: torch.Generator) -> "Residual":
        variances = _mean_squares(spectrum)
        share = variances.cumsum(0) / variances.sum()
        return cls(min(int((share < EXPLAINED).sum()) + 1, len(variances) - 1))

    def forward(self, spectrum: Folded) -> Float[Tensor, "N"]:
        residual = square_norms(spectrum[:, self.num_components :])
        return torch.maximum(residual, ROUNDING * square_norms(spectrum))

    def deviation(self, spectrum: Folded) -> Folded:
        residual = spectrum[:, self.num_components :]
        return nn.functional.pad(residual, (self.num_components, 0))


class Mahalanobis(nn.Module):
    """The squared Mahalanobis distance of an input from the training rows.

        sum_i c_i^2 / (lambda_i + FLOOR mean(lambda))

    c are coordinates along the principal components, with variances lambda. Directions with little
    variance count most. Adversarial perturbations and faint noise lie in these directions.
    """

    def __init__(self, weights: Float[Tensor, "F"]) -> None:
        super().__init__()
        self.weights = nn.Buffer(weights[:, None])

    @classmethod
    def fit(cls, spectrum: Folded, _: torch.Generator) -> "Mahalanobis":
        variances = _mean_squares(spectrum)
        floor = FLOOR * variances.mean()
        if floor <= 0:  # constant rows
            floor = torch.ones_like(floor)
        return cls((1.0 / (variances + floor)).float())

    def forward(self, spectrum: Folded) -> Float[Tensor, "N"]:
        return matmul(spectrum.square(), self.weights)[:, 0]

    def deviation(self, spectrum: Folded) -> Folded:
        """Compute the whitened deviation from the mean.

        Along the axes of the input it is S^(-1/2) (x - mean). Its squares attribute the distance to
        inputs (Garthwaite and Koch 2016, "Evaluating the contributions of individual variables to a
        quadratic form").
        """
        return spectrum * self.weights[:, 0].sqrt()


class Fold(nn.Module):
    """Count sketch: a random projection of rows with more than `MAX_LENGTH` numbers.

    It adds numbers `MAX_LENGTH` apart with random signs, which preserves inner products on average
    (Charikar, Chen and Farach-Colton 2002, "Finding frequent items in data streams").
    """

    def __init__(self, signs: Float[Tensor, "F"]) -> None:
        super().__init__()
        self.signs = nn.Buffer(signs)
        self.length = len(signs)

    @classmethod
    def fit(cls, length: int, generator: torch.Generator) -> "Fold":
        if length <= MAX_LENGTH:
            return cls(torch.ones(length))
        return cls(2.0 * torch.randint(0, 2, (length,), generator=generator) - 1.0)

    def forward(self, x: Float[Tensor, "N I"]) -> Folded:
        if self.length <= MAX_LENGTH:
            return x
        parts = (x * self.signs).split(MAX_LENGTH, dim=1)
        folded = parts[0]
        for part in parts[1:-1]:
            folded = folded + part
        missing = MAX_LENGTH - parts[-1].shape[1]
        return folded + nn.functional.pad(parts[-1], (0, missing))

    def spread(self, terms: Folded) -> Float[Tensor, "N I"]:
        """Divide each number in a folded row equally among the inputs that it sums."""
        if self.length <= MAX_LENGTH:
            return terms
        together = torch.bincount(torch.arange(self.length) % MAX_LENGTH, minlength=MAX_LENGTH)
        return (terms / together).repeat(1, -(-self.length // MAX_LENGTH))[:, : self.length]


def principal_components(
    x: Num[Tensor, "N I"], fold: Fold
) -> tuple[Float[Tensor, "F"], Float[Tensor, "F"], Float[Tensor, "F F"]]:
    """Compute the mean, variances (largest first) and components (as columns) in float64."""
    parts = chunks(x)  # bytes take eight times as much memory in float64
    size = min(x.shape[1], MAX_LENGTH)
    zeros = torch.zeros(size, dtype=torch.float64)
    mean = sum((fold(part.double()).sum(0) for part in parts), zeros) / len(x)
    scatter = torch.zeros(size, size, dtype=torch.float64)
    for part in parts:
        centred = fold(part.double()) - mean
        scatter += centred.T @ centred
    variances, directions = eigh(scatter / len(x))
    return mean, variances.flip(0), directions.flip(1)


def chunks(rows: Num[Tensor, "N I"]) -> tuple[Num[Tensor, "M I"], ...]:
    return rows.split(max(1, min(CHUNK_ROWS, CHUNK_NUMBERS // rows.shape[1])))


def _mean_squares(rows: Folded) -> Float[Tensor, "F"]:
    total = sum((part.double().square().sum(0) for part in chunks(rows)), torch.zeros(1))
    return total / len(rows)


def square_norms(rows: Folded) -> Float[Tensor, "N"]:
    """Compute squared norms with a summation order independent of the number of rows."""
    return matmul(rows.square(), torch.ones(rows.shape[1], 1, dtype=rows.dtype))[:, 0]
