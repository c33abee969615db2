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
def test_it_is_the_product_and_the_length_of_each_unit(batch):
    x, direction = inputs(*batch)
    product, norm = product_and_norm(x, direction)
    torch.testing.assert_close(product, x @ direction.T)
    torch.testing.assert_close(norm, direction.square().sum(1).sqrt())


@pytest.mark.parametrize("batch", [(), (1,), (5,), (2, 3)])
def test_its_gradients_are_those_of_finite_differences(batch):
    assert torch.autograd.gradcheck(product_and_norm, inputs(*batch))


def test_a_unit_of_length_0_has_a_finite_gradient():
    x, direction = inputs(5)
    with torch.no_grad():
        direction[1] = 0.0
    product, norm = product_and_norm(x, direction)
    (product.sum() + norm.sum()).backward()
    assert torch.isfinite(direction.grad).all()
    torch.testing.assert_close(direction.grad[1], x.sum(0).detach())
