"""The negative evidence lower bound."""

import pytest
import torch

from training.objectives import negative_elbo


@pytest.mark.parametrize("kl_weight", [0.0, 0.01, 1.0])
def test_negative_elbo_is_its_equation(kl_weight):
    generator = torch.Generator().manual_seed(0)
    log_probs = torch.randn(3, 4, 5, generator=generator, dtype=torch.float64).log_softmax(2)
    y, kl = torch.tensor([4, 0, 2, 2]), torch.tensor([7.0, 1.0, 4.0], dtype=torch.float64)
    loss, nll = negative_elbo(log_probs, y, kl, kl_weight)
    expected = -sum(log_probs[k, n, y[n]].item() for k in range(3) for n in range(4)) / 12
    assert nll.item() == pytest.approx(expected)
    assert loss.item() == pytest.approx(expected + kl_weight * 4.0)


def test_rows_times_the_loss_is_the_bound_of_the_whole_data_set():
    log_probs = torch.log(torch.tensor([[[0.25, 0.75], [0.5, 0.5]]]))
    loss, _ = negative_elbo(log_probs, torch.tensor([0, 1]), torch.tensor([3.0]), 1 / 2)
    assert 2 * loss.item() == pytest.approx(-torch.log(torch.tensor(0.25 * 0.5)).item() + 3.0)
