"""Eigendecomposition that tolerates equal and tiny eigenvalues."""

import torch
from jaxtyping import Float64
from torch import Tensor

LinAlgError = torch.linalg.LinAlgError  # type: ignore[attr-defined]


def eigh(matrix: Float64[Tensor, "D D"]) -> tuple[Float64[Tensor, "D"], Float64[Tensor, "D D"]]:
    """Compute the eigenvalues (ascending) and eigenvectors of a positive semi-definite matrix.

    LAPACK's divide and conquer can fail if many eigenvalues are equal or tiny. The matrix is
    therefore scaled, with a singular value decomposition as the fallback.
    """
    if not matrix.isfinite().all():
        raise LinAlgError("the matrix contains infinity or NaN")
    largest = matrix.diagonal().max()
    scale = largest if largest > 0 else torch.ones_like(largest)
    try:
        values, vectors = torch.linalg.eigh(matrix / scale)
    except LinAlgError:
        vectors, values, _ = torch.linalg.svd(matrix / scale)
        values, vectors = values.flip(0), vectors.flip(1)
    return scale * values.clamp(min=0), vectors
