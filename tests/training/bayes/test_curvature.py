import pytest
import torch
from torch.autograd import functional as derivatives

from tests.support.recipes import recipe_with
from training.bayes.laplace import output_hessian
from training.fitting import laplace as fitting
from training.fitting.laplace import curvature
from training.model import build, initialise

ROWS, CLASSES = 7, 4
TASKS = [
    ("classification", {}),
    ("classification", {"data": {"class_weights": "balanced"}}),
    ("regression", {}),
    ("regression", {"likelihood": {"noise": "heteroscedastic"}}),
]


def random_rows(*shape):
    return torch.randn(ROWS, *shape, generator=torch.Generator().manual_seed(0))


def get_model(task="classification", **changes):
    recipe = recipe_with(
        method="laplace",
        task=task,
        network={"hidden": [5, 3]},
        **changes,
    )
    model = build(recipe, (6,), 0 if task == "regression" else CLASSES)
    x = random_rows(6)
    y = x[:, 0] * 3 + 5 if task == "regression" else torch.arange(ROWS) % CLASSES
    initialise(model, x)
    model.likelihood.start(y)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.eval(), x, y


def exact_curvature(model, x, y):
    """Compute the curvature in float64 with autograd."""
    theta = model.posterior.centre()
    jacobian = derivatives.jacobian(
        lambda t: model.network(x, t[None, None])[0], theta
    ).double()  # (N, C, D)
    outputs = model.network(x, theta[None, None])[0].detach()
    blocks = torch.stack(
        [row_hessian(model.likelihood, outputs[n : n + 1], y[n : n + 1]) for n in range(len(x))]
    )
    return torch.einsum("nci,ncd,ndj->ij", jacobian, blocks, jacobian)


def row_hessian(likelihood, outputs, y):
    if likelihood.task == "classification":
        return derivatives.hessian(
            lambda o: -likelihood.weighted_log_likelihood(likelihood(o[None, None]), y).sum(),
            outputs[0],
        ).double()
    mean, log_variance = likelihood(outputs[None])[0, 0].unbind(-1)
    # Averaged over these two targets, the second derivative equals its expectation.
    std = (0.5 * log_variance).exp()
    return sum(
        derivatives.hessian(
            lambda o, t=t: -likelihood.log_likelihood(likelihood(o[None, None]), t[None]).sum(),
            outputs[0],
        ).double()
        / 2
        for t in (mean + std, mean - std)
    )


def reconstruct(eigen):
    """Rebuild the matrix from its eigenvalues and eigenvectors."""
    basis = torch.einsum("ia,ob->ioab", eigen.input_vectors, eigen.output_vectors)
    matrix = torch.einsum("ioab,ab,jpab->iojp", basis, eigen.values, basis)
    return matrix.reshape(eigen.values.numel(), eigen.values.numel())


@pytest.mark.parametrize(("task", "changes"), TASKS)
def test_curvature_is_exact_for_one_row(task, changes):
    model, x, y = get_model(task, **changes)
    x, y = x[:1], y[:1]
    if model.likelihood.task == "classification" and model.likelihood.log_weights is not None:
        model.likelihood.log_weights.copy_(torch.tensor([0.5, 0.1, -0.3, -0.6]))
    matrix = reconstruct(curvature(model, x, y)[0])
    torch.testing.assert_close(matrix, exact_curvature(model, x, y), rtol=1e-4, atol=1e-5)


def test_kronecker_factors_are_sums_over_rows():
    model, x, y = get_model()
    theta = model.posterior.centre()[None, None]
    h = model.network.embed(x, theta)
    a = torch.cat([h, torch.ones(ROWS, 1)], 1)
    total = output_hessian(model.likelihood, model.network(x, theta)[0], y)
    expected = torch.einsum("ij,op->iojp", a.T @ a, total).reshape(16, 16) / ROWS
    matrix = reconstruct(curvature(model, x, y)[0])
    torch.testing.assert_close(matrix.float(), expected, rtol=1e-3, atol=1e-5)


def test_curvature_does_not_depend_on_chunk_size(monkeypatch):
    model, x, y = get_model()
    expected = reconstruct(curvature(model, x, y)[0])
    monkeypatch.setattr(fitting, "CHUNK_ROWS", 2)
    matrix = reconstruct(curvature(model, x, y)[0])
    torch.testing.assert_close(matrix, expected, rtol=1e-4, atol=1e-6)
