"""The input's spectrum: where a row lies along the principal components of the training rows."""

import torch
from jaxtyping import Float, Num
from torch import Tensor, nn

from training.bayes.layers import matmul

EXPLAINED = 0.9  # share of the training rows' variance inside the leading components
FLOOR = 1e-4  # of the mean variance, added to each component's
LARGEST = 4096  # numbers of a row; longer ones are folded
# that are computed with at a time: of images of 224 pixels a side 111
CHUNK_ROWS, CHUNK_NUMBERS = 4096, 1 << 24
ROUNDING = 1e-9  # of an input's square: a smaller residual would be float32's rounding

Folded = Float[Tensor, "N F"]


class Spectrum(nn.Module):
    """Coordinates of inputs along the principal components of the training rows, those of most
    variance first."""

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

    def back(self, spectrum: Folded) -> Folded:
        """Return vectors of the same lengths along the axes of the (folded) inputs."""
        return matmul(spectrum, self.components.T)


class Residual(nn.Module):
    """Squared distance of an input from the span of the training rows' leading principal
    components.

    Natural data lie near few directions; noise, other data and perturbations have energy in all of
    them; what is smoothed, faded or averaged has less than natural data. As many components are
    kept as explain `EXPLAINED` of the variance. In squared units of the data, 0 or more.
    """

    def __init__(self, kept: int) -> None:
        super().__init__()
        self.kept = kept

    @classmethod
    def fit(cls, spectrum: Folded, _: torch.Generator) -> "Residual":
        variances = _mean_squares(spectrum)
        share = variances.cumsum(0) / variances.sum()
        return cls(min(int((share < EXPLAINED).sum()) + 1, len(variances) - 1))

    def forward(self, spectrum: Folded) -> Float[Tensor, "N"]:
        rest = square_norms(spectrum[:, self.kept :])
        return torch.maximum(rest, ROUNDING * square_norms(spectrum))

    def deviation(self, spectrum: Folded) -> Folded:
        return nn.functional.pad(spectrum[:, self.kept :], (self.kept, 0))


class Mahalanobis(nn.Module):
    """Squared Mahalanobis distance of an input from the training rows, sum_i c_i^2 / (lambda_i +
    floor).

    c are coordinates along the principal components and lambda their variances; the floor is
    `FLOOR` of the mean variance. Directions in which the training rows hardly vary count most:
    adversarial perturbations and noise that nobody sees lie in them. Without a unit, 0 or more.
    """

    def __init__(self, weights: Float[Tensor, "F"]) -> None:
        super().__init__()
        self.weights = nn.Buffer(weights[:, None])

    @classmethod
    def fit(cls, spectrum: Folded, _: torch.Generator) -> "Mahalanobis":
        variances = _mean_squares(spectrum)
        floor = FLOOR * variances.mean()
        if floor <= 0:  # constant rows: any unit will do
            floor = torch.ones_like(floor)
        return cls((1.0 / (variances + floor)).float())

    def forward(self, spectrum: Folded) -> Float[Tensor, "N"]:
        return matmul(spectrum.square(), self.weights)[:, 0]

    def deviation(self, spectrum: Folded) -> Folded:
        """Return the whitened vector from the mean.

        Turned back to the axes of inputs it is S^(-1/2) (x - mean), whose squares divide the
        distance among inputs (Garthwaite and Koch, "Evaluating the contributions of individual
        variables to a quadratic form", 2016).
        """
        return spectrum * self.weights[:, 0].sqrt()


class Fold(nn.Module):
    """Rows of more than `LARGEST` numbers, sketched: numbers `LARGEST` apart are added up with
    random signs.

    Inner products are kept on average (Charikar, Chen and Farach-Colton, "Finding frequent items in
    data streams", 2002). Shorter rows stay as they are.
    """

    def __init__(self, signs: Float[Tensor, "F"]) -> None:
        super().__init__()
        self.signs = nn.Buffer(signs)
        self.length = len(signs)

    @classmethod
    def fit(cls, length: int, generator: torch.Generator) -> "Fold":
        if length <= LARGEST:
            return cls(torch.ones(length))
        return cls(2.0 * torch.randint(0, 2, (length,), generator=generator) - 1.0)

    def forward(self, x: Float[Tensor, "N I"]) -> Folded:
        if self.length <= LARGEST:
            return x
        parts = (x * self.signs).split(LARGEST, dim=1)
        folded = parts[0]
        for part in parts[1:-1]:
            folded = folded + part
        missing = LARGEST - parts[-1].shape[1]
        return folded + nn.functional.pad(parts[-1], (0, missing))

    def spread(self, terms: Folded) -> Float[Tensor, "N I"]:
        """Return terms of folded rows as terms of rows: the numbers that were added up have equal
        parts of theirs."""
        if self.length <= LARGEST:
            return terms
        together = torch.bincount(torch.arange(self.length) % LARGEST, minlength=LARGEST)
        return (terms / together).repeat(1, -(-self.length // LARGEST))[:, : self.length]


def principal_components(
    x: Num[Tensor, "N I"], fold: Fold
) -> tuple[Float[Tensor, "F"], Float[Tensor, "F"], Float[Tensor, "F F"]]:
    """Return mean, variances along principal components, largest first, and the components as
    columns, in float64."""
    parts = chunks(x)  # rows may be bytes, and eight times as large in float64
    size = min(x.shape[1], LARGEST)
    zeros = torch.zeros(size, dtype=torch.float64)
    mean = sum((fold(part.double()).sum(0) for part in parts), zeros) / len(x)
    scatter = torch.zeros(size, size, dtype=torch.float64)
    for part in parts:
        centred = fold(part.double()) - mean
        scatter += centred.T @ centred
    variances, directions = torch.linalg.eigh(scatter / len(x))
    return mean, variances.flip(0).clamp(min=0), directions.flip(1)


def chunks(rows: Num[Tensor, "N I"]) -> tuple[Num[Tensor, "M I"], ...]:
    return rows.split(max(1, min(CHUNK_ROWS, CHUNK_NUMBERS // rows.shape[1])))


def _mean_squares(rows: Folded) -> Float[Tensor, "F"]:
    total = sum((part.double().square().sum(0) for part in chunks(rows)), torch.zeros(1))
    return total / len(rows)


def square_norms(rows: Folded) -> Float[Tensor, "N"]:
    """Return each row's squared length, summed in an order that does not depend on other
    rows."""
    return matmul(rows.square(), torch.ones(rows.shape[1], 1, dtype=rows.dtype))[:, 0]
