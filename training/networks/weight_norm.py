"""The product of weight normalisation (Salimans and Kingma 2016), with a gradient that makes few
passes over V.

A unit computes g x . V / |V| + b. Scaling the product x . V by g / |V| spares the division of V
itself; and since the gradient of |V| is V / |V|, that of V is one matrix product on top of a
multiple of V.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def product_and_norm(x: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
    """Return x . V and |V| of each unit, (*batch, out) and (out,), of x (*batch, in) and V (out,
    in).

    Raises:
        RuntimeError: if x has another number of features, as it may in a user's own module.
    """
    if torch.compiler.is_exporting():
        return functional.linear(x, direction), torch.linalg.vector_norm(direction, dim=1)
    product, norm = _ProductAndNorm.apply(x, direction)  # type: ignore[no-untyped-call]
    return product, norm


class _ProductAndNorm(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
        return functional.linear(x, direction), torch.linalg.vector_norm(direction, dim=1)

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]
    ) -> None:
        ctx.save_for_backward(*inputs, output[1])

    @staticmethod
    def backward(
        ctx: Any, of_product: Tensor, of_norm: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        x, direction, norm = ctx.saved_tensors
        of_x = of_direction = None
        if ctx.needs_input_grad[0]:
            of_x = of_product @ direction
        if ctx.needs_input_grad[1]:
            multiple = direction * (of_norm / norm.clamp(min=1e-12))[:, None]
            of_direction = multiple.addmm_(
                of_product.reshape(-1, len(norm)).T, x.reshape(-1, x.shape[-1])
            )
        return of_x, of_direction
