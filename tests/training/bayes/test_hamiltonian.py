import torch

from training.bayes.hamiltonian import sample, split_r_hat


def test_draws_have_the_moments_of_a_correlated_gaussian():
    generator = torch.Generator().manual_seed(0)
    root = torch.tensor([[2.0, 0.0, 0.0], [0.5, 0.3, 0.0], [0.0, -0.1, 0.02]]).double()
    covariance, mean = root @ root.T, torch.tensor([1.0, -2.0, 0.5]).double()
    precision = torch.linalg.inv(covariance)

    def log_density(theta):
        deviation = theta - mean
        return -0.5 * (deviation @ precision * deviation).sum(1)

    start = mean + torch.randn(40, 3, generator=generator, dtype=torch.float64)
    draws, acceptance_rate = sample(log_density, start, 300, 200, generator)
    assert 0.6 < acceptance_rate < 0.99
    assert split_r_hat(draws).max() < 1.05
    flat = draws.flatten(0, 1)
    # At least a tenth of the 8,000 draws is independent. The bounds are three standard errors.
    assert ((flat.mean(0) - mean).abs() < 0.11 * covariance.diagonal().sqrt()).all()
    actual = torch.cov(flat.T)
    scale = covariance.diagonal().sqrt()
    assert ((actual - covariance) / (scale[:, None] * scale)).abs().max() < 0.15


def test_chains_that_disagree_have_a_large_r_hat():
    chains = torch.randn(200, 4, 1, generator=torch.Generator().manual_seed(0))
    assert split_r_hat(chains) < 1.05
    assert split_r_hat(chains + torch.arange(4.0)[:, None]) > 1.5
