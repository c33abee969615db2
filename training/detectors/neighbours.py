"""Density detectors based on distances to the nearest training rows."""

import torch
from jaxtyping import Float, Num
from torch import Tensor, nn

from training.bayes.layers import matmul
from training.detectors.spectrum import Fold, chunks, principal_components, square_norms

BANK_ROWS = 5000  # random training rows
NEIGHBOUR = 5  # k
COSINE_ROWS = 1000  # random training rows for `CosineNeighbours`
EMBEDDING_ROWS, EMBEDDING_NEIGHBOUR = 1000, 2  # for embeddings, which need fewer rows
ROUNDING = 1e-6  # float32 rounding error of squared distances between rows of unit length
DIRECTIONS = 64
SOFTENING = 0.1  # share of the mean length that is added to each length


class CosineNeighbours(nn.Module):
    """The cosine distance to the k-th nearest row in a bank of training rows, from 0 to 2.

    For vectors u and v of length 1, this is |u - v|^2 / 2 (Sun et al. 2022, "Out-of-distribution
    detection with deep nearest neighbors", section 3). In contrast to `Neighbours`, all directions
    count, because unusual rows of a pretrained encoder often differ in directions with little
    variance.
    """

    def __init__(
        self, fold: Fold, mean: Float[Tensor, "F"], bank: Float[Tensor, "B D"], neighbour: int
    ) -> None:
        super().__init__()
        self.fold = fold
        self.mean = nn.Buffer(mean)
        self.bank = nn.Buffer(bank.T.contiguous())
        self.bank_squares = nn.Buffer(square_norms(bank))
        self.neighbour = min(neighbour, len(bank))

    @classmethod
    def fit(cls, rows: Num[Tensor, "N I"], generator: torch.Generator) -> "CosineNeighbours":
        fold = Fold.fit(rows.shape[1], generator)
        sample = rows[torch.randperm(len(rows), generator=generator)[:COSINE_ROWS]]
        bank = torch.cat([_normalise(fold(part.float())) for part in chunks(sample)])
        mean = bank.mean(0)
        return cls(fold, mean, bank - mean, NEIGHBOUR)

    def forward(self, rows: Float[Tensor, "N I"]) -> Float[Tensor, "N"]:
        return (0.5 * square_norms(self.from_neighbour(rows))).clamp(min=ROUNDING)

    def project(self, rows: Float[Tensor, "N I"]) -> Float[Tensor, "N D"]:
        return _normalise(self.fold(rows)) - self.mean

    def from_neighbour(self, rows: Float[Tensor, "N I"]) -> Float[Tensor, "N D"]:
        """Compute each row's offset from its k-th nearest row in the bank.

        In float32, |b|^2 - 2 b'p cannot rank distances far shorter than p. So it only preselects
        2 k rows, which are then ranked by exact distances.
        """
        points = self.project(rows)
        distances = self.bank_squares - 2.0 * matmul(points, self.bank)
        count = min(2 * self.neighbour, self.bank.shape[1])
        nearest = distances.topk(count, dim=1, largest=False).indices
        vectors = points[:, None] - self.bank[:, nearest].permute(1, 2, 0)
        squares = square_norms(vectors.flatten(0, 1)).reshape(-1, count)
        kth = squares.topk(self.neighbour, dim=1, largest=False).indices[:, -1:, None]
        return vectors.gather(1, kth.expand(-1, -1, vectors.shape[2]))[:, 0]


class Neighbours(CosineNeighbours):
    """The squared distance to the k-th nearest row in a bank of training rows.

    Rows are divided by their length and projected on the leading `DIRECTIONS` principal components.
    A share of the mean length is added to each length, because the direction of a row near 0 is
    arbitrary.
    """

    def __init__(
        self,
        fold: Fold,
        softening: Tensor,
        mean: Float[Tensor, "F"],
        components: Float[Tensor, "F D"],
        bank: Float[Tensor, "B D"],
        neighbour: int,
    ) -> None:
        super().__init__(fold, mean, bank, neighbour)
        self.softening = nn.Buffer(softening)
        self.components = nn.Buffer(components)

    @classmethod
    def fit(
        cls,
        rows: Num[Tensor, "N I"],
        generator: torch.Generator,
        bank_rows: int = BANK_ROWS,
        neighbour: int = NEIGHBOUR,
    ) -> "Neighbours":
        fold = Fold.fit(rows.shape[1], generator)
        rows = rows[torch.randperm(len(rows), generator=generator)[: 2 * BANK_ROWS]]
        rows = torch.cat([fold(part.float()) for part in chunks(rows)])
        softening = SOFTENING * square_norms(rows).sqrt().mean().clamp(min=1e-12)
        normalised = rows / (square_norms(rows).sqrt() + softening)[:, None]
        no_fold = Fold(torch.ones(normalised.shape[1]))
        mean, _, directions = principal_components(normalised, no_fold)
        components = directions[:, :DIRECTIONS].float().contiguous()
        bank = matmul(normalised[:bank_rows] - mean.float(), components)
        return cls(fold, softening, mean.float(), components, bank, neighbour)

    def forward(self, rows: Float[Tensor, "N I"]) -> Float[Tensor, "N"]:
        return square_norms(self.from_neighbour(rows)).clamp(min=ROUNDING)

    def project(self, rows: Float[Tensor, "N I"]) -> Float[Tensor, "N D"]:
        rows = self.fold(rows)
        normalised = rows / (square_norms(rows).sqrt() + self.softening)[:, None]
        return matmul(normalised - self.mean, self.components)

    def deviation(self, rows: Float[Tensor, "N I"]) -> Float[Tensor, "N F"]:
        """Return each row's difference from its k-th nearest training row, in input coordinates."""
        return matmul(self.from_neighbour(rows), self.components.T)


def _normalise(rows: Float[Tensor, "N I"]) -> Float[Tensor, "N I"]:
    return rows / square_norms(rows).sqrt().clamp(min=1e-12)[:, None]
