"""The generalised Gauss-Newton matrix, against all derivatives of outputs by weights, one by
one."""

import pytest
import torch
from torch import nn
from torch.autograd import functional as derivatives
from torch.nn import functional

from tests.support.recipes import recipe_with
from training.bayes.layers import initial_weights
from training.fitting import curvature as module_of_it
from training.fitting.curvature import OutputHessian, curvature, output_hessian
from training.model import build, initialise

ROWS, CLASSES = 7, 4


class Places(nn.Module):
    """Layers of every kind, convolutions with groups, of places that share weights, and changes in
    place."""

    def __init__(self, shape, outputs):
        super().__init__()
        self.grouped = nn.Conv2d(shape[0], 4, 3, stride=2, padding=1, groups=2)
        self.norm = nn.BatchNorm2d(4)
        self.depthwise = nn.Conv1d(4, 4, 2, groups=4, bias=False)
        self.steps = nn.Linear(8, 3, bias=False)
        self.last = nn.Linear(12, outputs)

    def forward(self, x):
        h = functional.relu(self.norm(self.grouped(x)), inplace=True)
        h = functional.elu(self.depthwise(h.flatten(2)), inplace=True)
        return self.last(torch.tanh(self.steps(h)).flatten(1))


def places(shape, outputs):
    return Places(shape, outputs)


def rows_like(*shape):
    return torch.randn(ROWS, *shape, generator=torch.Generator().manual_seed(0))


def model_of(structure, network, shape, task="classification", **changes):
    """A model away from its start, with rows and targets."""
    posterior = {"structure": structure}
    recipe = recipe_with(
        method="laplace", task=task, network=network, posterior=posterior, **changes
    )
    model = build(recipe, shape, 0 if task == "regression" else CLASSES)
    x = rows_like(torch.Size(shape).numel())
    y = x[:, 0] * 3 + 5 if task == "regression" else torch.arange(ROWS) % CLASSES
    initialise(model, x)
    model.likelihood.start(y)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.eval(), x, y


def exact(model, x, y):
    """H in float64 by automatic derivatives of each row's outputs and log-density."""
    theta = model.posterior.centre()
    jacobian = derivatives.jacobian(
        lambda t: model.network(x, t[None, None])[0][0], theta
    ).double()  # (N, C, D)
    outputs = model.network(x, theta[None, None])[0][0].detach()
    blocks = torch.stack(
        [row_hessian(model.likelihood, outputs[n : n + 1], y[n : n + 1]) for n in range(len(x))]
    )
    return torch.einsum("nci,ncd,ndj->ij", jacobian, blocks, jacobian)


def row_hessian(likelihood, outputs, y):
    """The expected second derivative of a row: of classes the Hessian itself, which does not depend
    on the label."""
    if likelihood.task == "classification":
        return derivatives.hessian(
            lambda o: -likelihood.weighted_log_likelihood(likelihood(o[None, None]), y).sum(),
            outputs[0],
        ).double()
    mean, log_variance = likelihood(outputs[None])[0, 0].unbind(-1)
    std = (
        0.5 * log_variance
    ).exp()  # of targets this far from the mean the second derivatives have their mean
    return sum(
        derivatives.hessian(
            lambda o, at=at: -likelihood.log_likelihood(likelihood(o[None, None]), at[None]).sum(),
            outputs[0],
        ).double()
        / 2
        for at in (mean + std, mean - std)
    )


def blocks(model, matrix):
    """The part of a matrix that is each drawn layer's."""
    ends = torch.tensor([slot.size for slot in model.network.slots]).cumsum(0).tolist()
    begins = [0, *ends[:-1]]
    return [matrix[b:e, b:e] for b, e in zip(begins, ends, strict=True)]


def rebuilt(model, found):
    """The matrix of each drawn layer, from its eigenvalues and eigenvectors."""
    matrices = []
    for slot, eigen, spread in zip(
        model.network.slots, found.eigens, model.posterior.spreads, strict=True
    ):
        if model.posterior.structure == "full":
            (vectors,) = eigen.vectors
            matrices.append(vectors @ torch.diag(eigen.values) @ vectors.T)
        elif model.posterior.structure == "diagonal":
            matrices.append(torch.diag(eigen.values.flatten()))
        else:
            matrices.append(kronecker_of(slot, eigen, spread.groups))
    return matrices


def kronecker_of(slot, eigen, groups):
    inputs, outputs = slot.shape[0], slot.shape[1] // groups
    whole = torch.zeros(inputs, slot.shape[1], inputs, slot.shape[1], dtype=torch.float64)
    for g in range(groups):
        at = slice(g * outputs, (g + 1) * outputs)
        basis = torch.einsum("ia,ob->ioab", eigen.vectors[0][g], eigen.vectors[1][g])
        whole[:, at, :, at] = torch.einsum("ioab,ab,jpab->iojp", basis, eigen.values[:, at], basis)
    return whole.reshape(slot.size, slot.size)


MLP = {"hidden": [5, 3]}
ALL = {"factory": f"{__name__}:places", "bayesian": ["*"]}
ALL_OF_MLP = {"factory": f"{__name__}:mlp", "bayesian": ["*"]}
IMAGE = (2, 5, 5)


def mlp(shape, outputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, outputs))


TASKS = [
    ("classification", {}),
    ("classification", {"data": {"class_weights": "balanced"}}),
    ("regression", {}),
    ("regression", {"likelihood": {"noise": "heteroscedastic"}}),
]


@pytest.mark.parametrize(("task", "changes"), TASKS)
@pytest.mark.parametrize("structure", ["full", "diagonal"])
def test_of_the_last_layer_it_is_exact(structure, task, changes):
    model, x, y = model_of(structure, MLP, (6,), task, **changes)
    if model.likelihood.task == "classification" and model.likelihood.log_weights is not None:
        model.likelihood.log_weights.copy_(torch.tensor([0.5, 0.1, -0.3, -0.6]))
    found = curvature(model, x, y, 0)
    expected = exact(model, x, y)
    if structure == "diagonal":
        expected = torch.diag(expected.diagonal())
    torch.testing.assert_close(rebuilt(model, found)[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("network", [ALL, ALL_OF_MLP], ids=["places", "mlp"])
def test_the_diagonal_of_any_layers_is_exact(network):
    shape = IMAGE if network is ALL else (6,)
    model, x, y = model_of("diagonal", network, shape)
    assert len(model.network.slots) == (4 if network is ALL else 2)
    matrices = rebuilt(model, curvature(model, x, y, 0))
    for found, expected in zip(matrices, blocks(model, exact(model, x, y)), strict=True):
        torch.testing.assert_close(found.diagonal(), expected.diagonal(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_kronecker_factors_of_a_lone_row_are_exact(task):
    model, x, y = model_of("kronecker", ALL_OF_MLP, (6,), task)
    matrices = rebuilt(model, curvature(model, x[:1], y[:1], 0))
    for found, expected in zip(matrices, blocks(model, exact(model, x[:1], y[:1])), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_kronecker_factors_are_sums_over_rows_columns_and_places():
    model, x, y = model_of("kronecker", ALL, IMAGE)
    matrices = dict(
        zip(
            (s.name for s in model.network.slots),
            rebuilt(model, curvature(model, x, y, 0)),
            strict=True,
        )
    )
    plain = with_weights_of(model)
    seen = {}
    layers = {name: getattr(plain, name) for name in matrices}
    for name, layer in layers.items():
        layer.register_forward_hook(
            lambda _, took, gave, name=name: noted(seen, name, took[0], gave)
        )
    outputs = plain(model.network.scale(x))
    probs = torch.softmax(outputs, 1).detach()
    values = [seen[name][1] for name in layers]
    slopes = []
    for c in range(CLASSES):
        column = probs[:, c : c + 1].sqrt() * (torch.eye(CLASSES)[c] - probs)
        slopes.append(torch.autograd.grad(outputs, values, column, retain_graph=True))
    for i, (name, layer) in enumerate(layers.items()):
        a = layer_inputs(layer, seen[name][0])  # (G, places of all rows, inputs)
        b = torch.stack(
            [layer_values(layer, slope[i]) for slope in slopes]
        )  # (C, G, places, outputs)
        groups, outputs_of = b.shape[1], b.shape[3]
        expected = torch.zeros(a.shape[2], groups * outputs_of, a.shape[2], groups * outputs_of)
        for g in range(groups):
            at = slice(g * outputs_of, (g + 1) * outputs_of)
            of_values = torch.einsum("cto,ctp->op", b[:, g], b[:, g])
            expected[:, at, :, at] = (
                torch.einsum("ij,op->iojp", a[g].T @ a[g], of_values) / a.shape[1]
            )
        size = a.shape[2] * groups * outputs_of
        torch.testing.assert_close(
            matrices[name].float(), expected.reshape(size, size), rtol=1e-3, atol=1e-5
        )


def with_weights_of(model):
    """The user's own module, with the weights that are drawn at their mean."""
    plain = Places(IMAGE, CLASSES).eval()
    state = {
        name: tensor
        for name, tensor in model.network.module.state_dict().items()
        if name.startswith("norm")
    }
    plain.load_state_dict(state, strict=False)
    theta = model.posterior.centre()
    for slot, part in zip(
        model.network.slots, theta.split([s.size for s in model.network.slots]), strict=True
    ):
        layer = getattr(plain, slot.name)
        matrix = part.view(slot.shape)
        with torch.no_grad():
            if layer.bias is not None:
                layer.bias.copy_(matrix[-1])
                matrix = matrix[:-1]
            size = getattr(layer, "kernel_size", ())
            weight = (
                matrix.T if not size else matrix.unflatten(0, (*size, -1)).movedim((-1, -2), (0, 1))
            )
            layer.weight.copy_(weight)
        torch.testing.assert_close(initial_weights(layer), part.view(slot.shape))
    return plain


def noted(seen, name, took, gave):
    seen[name] = took.detach().clone(), gave
    return gave.clone()


def layer_inputs(layer, h):
    if isinstance(layer, nn.Linear):
        a = h.reshape(1, -1, h.shape[-1])
    else:
        if isinstance(layer, nn.Conv1d):
            h, size, rest = h[:, :, None], (1, *layer.kernel_size), {}
        else:
            size, rest = layer.kernel_size, {"stride": layer.stride, "padding": layer.padding}
        taken = functional.unfold(h, size, **rest)  # (N, channels x offsets, places)
        taken = taken.unflatten(
            1, (layer.groups, -1, torch.Size(size).numel())
        )  # (N, G, channels, offsets, places)
        a = taken.permute(1, 0, 4, 3, 2).flatten(3).flatten(1, 2)
    return torch.cat([a, torch.ones(*a.shape[:2], 1)], 2) if layer.bias is not None else a


def layer_values(layer, slope):
    if isinstance(layer, nn.Linear):
        return slope.reshape(1, -1, slope.shape[-1])
    return slope.flatten(2).unflatten(1, (layer.groups, -1)).permute(1, 0, 3, 2).flatten(1, 2)


@pytest.mark.parametrize("structure", ["kronecker", "diagonal"])
@pytest.mark.parametrize(("network", "shape"), [(MLP, (6,)), (ALL, IMAGE)], ids=["last", "all"])
def test_rows_in_chunks_add_up_to_the_same(structure, network, shape, monkeypatch):
    model, x, y = model_of(structure, network, shape)
    whole = rebuilt(model, curvature(model, x, y, 0))
    monkeypatch.setattr(module_of_it, "CHUNK_NUMBERS", 1)
    for part, expected in zip(rebuilt(model, curvature(model, x, y, 0)), whole, strict=True):
        torch.testing.assert_close(part, expected, rtol=1e-4, atol=1e-6)


def test_columns_of_roots_add_up_to_the_output_hessian():
    likelihood = model_of("diagonal", MLP, (6,))[0].likelihood
    hessian = output_hessian(
        likelihood, 3 * rows_like(CLASSES), torch.zeros(ROWS, dtype=torch.int64)
    )
    columns = torch.stack(list(hessian.roots(torch.Generator())), 2)  # (N, C, columns)
    expected = torch.diag_embed(hessian.d) - hessian.u[:, :, None] * hessian.u[:, None]
    torch.testing.assert_close(columns @ columns.mT, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(hessian.total, expected.sum(0), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        hessian.diagonal, expected.diagonal(dim1=1, dim2=2), rtol=1e-5, atol=1e-6
    )


def test_random_columns_of_many_outputs_have_the_hessian_as_their_mean():
    probs = torch.softmax(3 * torch.randn(1, 40, generator=torch.Generator().manual_seed(0)), 1)
    hessian = OutputHessian(probs, probs)
    generator = torch.Generator().manual_seed(0)
    squares = []
    for _ in range(300):
        columns = torch.cat(list(hessian.roots(generator))) * module_of_it.COLUMNS**0.5
        squares.append(columns[:, :, None] * columns[:, None])
    squares = torch.cat(squares)
    expected = torch.diag(probs[0]) - probs.T @ probs
    error = squares.std(0) / len(squares) ** 0.5
    assert ((squares.mean(0) - expected).abs() < 6 * error + 1e-7).all()


def test_a_thousand_classes_take_no_thousand_derivatives():
    recipe = recipe_with(
        method="laplace",
        network={**ALL_OF_MLP, "bayesian": ["*"]},
        posterior={"structure": "kronecker"},
    )
    x = rows_like(6)
    model = build(recipe, (6,), 1000).eval()
    initialise(model, x)
    found = curvature(model, x, torch.arange(ROWS), 0)
    assert found.columns == module_of_it.COLUMNS
    assert all(eigen.values.isfinite().all() for eigen in found.eigens)
    again = curvature(model, x, torch.arange(ROWS), 0)
    assert torch.equal(found.eigens[0].values, again.eigens[0].values)
