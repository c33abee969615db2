"""How far a row is from the nearest training rows."""

import torch
from jaxtyping import Float, Num
from torch import Tensor, nn

from training.bayes.layers import matmul
from training.detectors.spectrum import Fold, chunks, principal_components, square_norms

BANK_ROWS = 5000  # of training rows, drawn at random
NEIGHBOUR = 5  # the distance to which counts
COSINE_ROWS = 1000  # of training rows, where directions are compared
FEW_ROWS, FEW_NEIGHBOUR = 1000, 2  # the same of features, which tell as much from a bank of few
# of squared distances of rows of about unit length in float32: nearer is not told apart
ROUNDING = 1e-6
DIRECTIONS = 64
SOFTENING = 0.1  # of the mean length of rows, added to a row's


class Neighbours(nn.Module):
    """Squared distance to the k-th nearest of a bank of training rows, without a unit, 0 or more.

    Rows are divided by their length (Sun et al., "Out-of-distribution detection with deep nearest
    neighbors", 2022, section 3) plus a share of the mean length, so that rows near 0 keep their
    place, and projected on the leading `DIRECTIONS` principal components of the training rows so
    divided.
    """

    def __init__(
        self,
        fold: Fold,
        softening: Tensor,
        mean: Tensor,
        components: Tensor,
        bank: Tensor,
        neighbour: int,
    ) -> None:
        super().__init__()
        self.fold = fold
        self.softening = nn.Buffer(softening)
        self.mean = nn.Buffer(mean)
        self.components = nn.Buffer(components)
        self.bank = nn.Buffer(bank.T.contiguous())
        self.bank_squares = nn.Buffer(square_norms(bank))
        self.neighbour = min(neighbour, len(bank))

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
        divided = rows / (square_norms(rows).sqrt() + softening)[:, None]
        mean, _, directions = principal_components(divided, Fold(torch.ones(divided.shape[1])))
        components = directions[:, :DIRECTIONS].float().contiguous()
        bank = matmul(divided[:bank_rows] - mean.float(), components)
        return cls(fold, softening, mean.float(), components, bank, neighbour)

    def forward(self, rows: Float[Tensor, "N I"]) -> Float[Tensor, "N"]:
        return square_norms(self._from_neighbour(rows)).clamp(min=ROUNDING)

    def deviation(self, rows: Float[Tensor, "N I"]) -> Float[Tensor, "N F"]:
        """Return the vector from the k-th nearest row, both divided and projected, along the axes
        of the rows."""
        return matmul(self._from_neighbour(rows), self.components.T)

    def _from_neighbour(self, rows: Float[Tensor, "N I"]) -> Float[Tensor, "N D"]:
        return from_kth(self._point(rows), self.bank, self.bank_squares, self.neighbour)

    def _point(self, rows: Float[Tensor, "N I"]) -> Float[Tensor, "N D"]:
        rows = self.fold(rows)
        divided = rows / (square_norms(rows).sqrt() + self.softening)[:, None]
        return matmul(divided - self.mean, self.components)


class CosineNeighbours(nn.Module):
    """One less the cosine of a row's angle with the k-th nearest of a bank of training rows: from 0
    to 2.

    Of vectors u, v of length 1 it is |u - v|^2 / 2: the distance of Sun et al. 2022 (section 3) in
    all directions. Where `Neighbours` looks at
    the leading directions of the data, what is unlike them lies in the others: of what an encoder
    that was trained on much says.
    """

    def __init__(
        self, fold: Fold, mean: Float[Tensor, "I"], bank: Float[Tensor, "B I"], neighbour: int
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
        chosen = rows[torch.randperm(len(rows), generator=generator)[:COSINE_ROWS]]
        bank = torch.cat([_unit(fold(part.float())) for part in chunks(chosen)])
        mean = bank.mean(0)
        return cls(fold, mean, bank - mean, NEIGHBOUR)

    def forward(self, rows: Float[Tensor, "N I"]) -> Float[Tensor, "N"]:
        points = _unit(self.fold(rows)) - self.mean
        vectors = from_kth(points, self.bank, self.bank_squares, self.neighbour)
        return (0.5 * square_norms(vectors)).clamp(min=ROUNDING)


def from_kth(
    points: Float[Tensor, "N D"],
    bank: Float[Tensor, "D B"],
    bank_squares: Float[Tensor, "B"],
    neighbour: int,
) -> Float[Tensor, "N D"]:
    """Return the vector to each point from the `neighbour`-th nearest of a bank.

    |b|^2 - 2 b'p loses to float32's rounding what distances far shorter than p differ by: it
    chooses twice as many as are wanted, whose vectors are then made.
    """
    others = bank_squares - 2.0 * matmul(points, bank)
    few = min(2 * neighbour, bank.shape[1])
    nearest = others.topk(few, dim=1, largest=False).indices
    vectors = points[:, None] - bank[:, nearest].permute(1, 2, 0)
    squares = square_norms(vectors.flatten(0, 1)).reshape(-1, few)
    kth = squares.topk(neighbour, dim=1, largest=False).indices[:, -1:, None]
    return vectors.gather(1, kth.expand(-1, -1, vectors.shape[2]))[:, 0]


def _unit(rows: Float[Tensor, "N I"]) -> Float[Tensor, "N I"]:
    """Return rows divided by their length; a row of zeros stays one."""
    return rows / square_norms(rows).sqrt().clamp(min=1e-12)[:, None]
