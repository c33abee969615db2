import torch

from tests.support.recipes import recipe_with
from training.fitting.laplace import fit_laplace
from training.model import build
from training.networks.networks import noise_rows


@torch.no_grad()
def test_variance_matches_gaussian_process():
    posterior = {"features": 1024}
    settings = recipe_with(
        method="gp-layer", task="regression", network={"hidden": []}, posterior=posterior
    )
    model = build(settings, (2,), 0).eval()
    random = torch.Generator().manual_seed(0)
    x, y = 2.0 * torch.randn(40, 2, generator=random), torch.randn(40, generator=random)
    fit_laplace(model, settings.posterior, (x, y), (x, y), 0, 20)
    length = torch.pdist(noise_rows((2,))).median()

    def kernel(a, b):  # the bias adds 1
        return 1.0 + (-0.5 * (torch.cdist(a, b) / length).square()).exp()

    rows = torch.tensor([[0.0, 0.0], [3.0, 3.0], [30.0, 0.0]])
    gram, cross = kernel(x, x) + torch.eye(40), kernel(rows, x)
    expected = kernel(rows, rows).diagonal() - (cross @ gram.inverse() * cross).sum(1)
    theta = model.posterior(torch.eye(model.posterior.noise_dimension)) - model.posterior.mean
    (phi,) = model.network.embed(rows, model.posterior.centre()[None, None])[None]
    deviations = theta @ torch.cat([phi, torch.ones(3, 1)], dim=1).T
    torch.testing.assert_close(deviations.square().sum(0), expected, rtol=0.1, atol=0.02)
    assert expected[2] > 1.0 > 5.0 * expected[0]
