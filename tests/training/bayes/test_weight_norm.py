import pytest
import torch

from training.bayes.layers import product_and_norm


def inputs(*batch):
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(*batch, 4, generator=generator, dtype=torch.float64, requires_grad=True),
        torch.randn(3, 4, generator=generator, dtype=torch.float64, requires_grad=True),
    )


@pytest.mark.parametrize("batch", [(), (1,), (5,), (2, 3)])
def test_product_and_norm_match_separate_operations(batch):
    x, direction = inputs(*batch)
    product, norm = product_and_norm(x, direction)
    torch.testing.assert_close(product, x @ direction.T)
    torch.testing.assert_close(norm, direction.square().sum(1).sqrt())


@pytest.mark.parametrize("batch", [(), (1,), (5,), (2, 3)])
def test_gradients_match_finite_differences(batch):
    assert torch.autograd.gradcheck(product_and_norm, inputs(*batch))


def test_gradient_is_finite_for_unit_of_length_0():
    x, direction = inputs(5)
    with torch.no_grad():
        direction[1] = 0.0
    product, norm = product_and_norm(x, direction)
    (product.sum() + norm.sum()).backward()
    assert torch.isfinite(direction.grad).all()
    torch.testing.assert_close(direction.grad[1], x.sum(0).detach())
