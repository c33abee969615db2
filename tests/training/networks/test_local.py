import pytest
import torch

from tests.support.recipes import recipe_with
from training.bayes.laplace import Eigen
from training.bayes.posterior import standard_noise
from training.methods import METHODS
from training.model import build, initialise
from training.networks.local import localise

ROWS, INPUTS, OUTPUTS = 3, 6, 4
LOCAL = (
    "bbb-gaussian",
    "bbb-mixture",
    "mvn",
    "variational-hypernet",
    "laplace",
)


def build_linear_model(name):
    """Build a single layer whose outputs are linear in the noise."""
    recipe = recipe_with(method=name, network={"hidden": []})
    model = build(recipe, (INPUTS,), OUTPUTS).eval()
    x = 2 * standard_noise(20, INPUTS, 1)
    initialise(model, x)
    if name == "laplace":
        matrix = standard_noise(50, INPUTS + 1, 2).double()
        factor = standard_noise(50, OUTPUTS, 3).double()
        (a, vectors), (b, output_vectors) = (
            torch.linalg.eigh(part.T @ part) for part in (matrix, factor)
        )
        model.posterior.spread.widen(Eigen(a[:, None] * b / 50, vectors, output_vectors), 1.0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.manual_seed(0)))
    return model, x[:ROWS]


@torch.no_grad()
def moments(model, x):
    """Compute the exact mean and covariance of the network's outputs for each row."""
    eps = torch.cat(
        [
            torch.zeros(1, model.posterior.noise_dimension),
            torch.eye(model.posterior.noise_dimension),
        ]
    )
    outputs = model.network(x.double(), model.posterior(eps.double())[:, None])
    deviations = outputs[1:] - outputs[0]
    return outputs[0], torch.einsum("knc,knd->ncd", deviations, deviations)


@pytest.mark.parametrize("name", LOCAL)
def test_local_moments_match_weight_draws(name):
    model, x = build_linear_model(name)
    local = localise(model, x)
    assert local.posterior.noise_dimension == OUTPUTS
    for actual, expected in zip(
        moments(local.double(), x), moments(model.double(), x), strict=True
    ):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("name", [m for m in METHODS if m not in (*LOCAL, "gp-layer")])
def test_localise_returns_other_models_unchanged(name):
    recipe = recipe_with(method=name, network={"hidden": [5]})
    model = build(recipe, (INPUTS,), OUTPUTS).eval()
    assert localise(model, torch.zeros(ROWS, INPUTS)) is model
