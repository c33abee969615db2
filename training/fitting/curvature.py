"""The generalised Gauss-Newton matrix of drawn layers, in one pass over the rows, in bounded
memory.

H = sum_n J_n' L_n J_n, with J_n the Jacobian of row n's outputs by theta, at its centre, and L_n
the expected second derivative of -log p(y | outputs): of classes diag(p) - p p', of a Gaussian's
mean and log variance diag(1/s^2, 1/2). It is the Fisher information too (Martens 2020, "New
insights and perspectives on the natural gradient method").

A layer's part of J_n is made of its inputs and of the derivatives of outputs by its values. Where
the values are the outputs these derivatives are 1, and H is exact for any number of classes. To
layers before that one each column of a root of L_n is propagated back; of more than `COLUMNS`
outputs, as many random combinations of the columns, with signs for weights, whose squares have the
same mean (Hutchinson 1990, "A stochastic estimator of the trace").

The same weights may make values at T places of a row: a convolution's patches, a sequence's steps.
A Kronecker product is then of sums over places, divided by T (Grosse and Martens 2016, "A
Kronecker-factored approximate Fisher matrix for convolution layers"); a diagonal's derivatives are
added up over a row's places before they are squared.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from training.bayes.laplace import Eigen, LaplacePosterior, Structure
from training.bayes.layers import WeightLayer, patches
from training.bayes.likelihoods import LOG_VARIANCE_LIMIT, Categorical, Gaussian, Likelihood
from training.model import BayesianModel
from training.networks.networks import DrawnNetwork
from training.networks.probes import watch

COLUMNS = 32  # outputs up to which layers before the last are exact
CHUNK_ROWS = 512
# of inputs and values of drawn layers, and of weights' derivatives, of rows at a time
CHUNK_NUMBERS = 8_000_000


@dataclass(frozen=True)
class Curvature:
    """H by layer, in its eigenbasis, and what else one pass over the rows says of them."""

    eigens: tuple[Eigen, ...]
    log_likelihood: float  # of all rows, in nats, weighted as training weights them
    square_error: float  # of a regression, the sum over rows, in the target's units
    columns: int  # random ones, of rows of too many outputs; 0 where H's derivatives are exact


@dataclass(frozen=True, eq=False)
class OutputHessian:
    """L of each row: diag(d) - u u', u = 0 of a regression."""

    d: Float[Tensor, "N C"]
    u: Float[Tensor, "N C"]

    @property
    def diagonal(self) -> Float[Tensor, "N C"]:
        return (self.d - self.u.square()).clamp(min=0.0)

    @property
    def total(self) -> Float[Tensor, "C C"]:
        return torch.diag(self.d.sum(0)) - self.u.T @ self.u

    def roots(self, generator: torch.Generator) -> Iterator[Float[Tensor, "N C"]]:
        """Yield columns r of roots R of L, the sum over whose r r' is L; of many outputs, on
        average.

        Of classes, R = diag(sqrt d) - u q' with q = sqrt p: R R' = diag(d) - u u', since q q' = 1
        and sqrt(d) q = u.
        """
        root, total = self.d.sqrt(), self.d.sum(1, keepdim=True).clamp(min=1e-30)
        q = root / total.sqrt()
        classes = self.d.shape[1]
        if classes <= COLUMNS:
            for c in range(classes):
                column = -self.u * q[:, c : c + 1]
                column[:, c] += root[:, c]
                yield column
            return
        for _ in range(COLUMNS):
            signs = torch.randint(0, 2, self.d.shape, generator=generator).to(self.d) * 2.0 - 1.0
            mixed = root * signs - self.u * (q * signs).sum(1, keepdim=True)
            yield mixed / COLUMNS**0.5


def output_hessian(
    likelihood: Likelihood, outputs: Float[Tensor, "N C"], y: Tensor
) -> OutputHessian:
    """Return the expected second derivative of -log p(y | outputs) of each row, weighted as
    training weights rows."""
    if isinstance(likelihood, Categorical):
        probs = torch.softmax(outputs, dim=1)
        if likelihood.log_weights is None:
            return OutputHessian(probs, probs)
        weights = likelihood.log_weights.exp()[y][:, None].to(probs)
        return OutputHessian(weights * probs, weights.sqrt() * probs)
    assert isinstance(likelihood, Gaussian)
    log_variance = likelihood(outputs[None])[0, :, 1:]
    scale = 1.0 if likelihood.is_in_units else likelihood.target_std
    d = scale**2 * (-log_variance).exp()
    if outputs.shape[1] == 2:
        standardised = log_variance - 2.0 * likelihood.target_std.log()
        d = torch.cat([d, torch.where(standardised.abs() < LOG_VARIANCE_LIMIT, 0.5, 0.0)], dim=1)
    return OutputHessian(d, torch.zeros_like(d))


class LayerSum:
    """The part of H that is a layer's, being added up; of G groups, of i inputs and o outputs
    each."""

    def __init__(self, groups: int, inputs: int, outputs: int, device: torch.device) -> None:
        raise NotImplementedError

    def add_inputs(self, a: Float[Tensor, "N T G i"]) -> None:
        """Add what the layer takes in, a bias's 1 the last."""

    def add_values(self, a: Float[Tensor, "N T G i"], g: Float[Tensor, "N T G o"]) -> None:
        """Add derivatives of one column of L's root by the layer's values."""
        raise NotImplementedError

    def add_last(self, a: Float[Tensor, "N 1 1 i"], hessian: OutputHessian) -> None:
        """Add rows of a layer whose values are the outputs."""
        raise NotImplementedError

    def eigen(self) -> Eigen:
        """Return the sum in its eigenbasis."""
        raise NotImplementedError


class DiagonalSum(LayerSum):
    """The diagonal of H."""

    def __init__(self, groups: int, inputs: int, outputs: int, device: torch.device) -> None:
        self.sum = torch.zeros(groups, inputs, outputs, dtype=torch.float64, device=device)

    def add_values(self, a: Float[Tensor, "N T G i"], g: Float[Tensor, "N T G o"]) -> None:
        if a.shape[1] == 1:
            self.sum += torch.einsum("ngi,ngo->gio", a[:, 0].square(), g[:, 0].square())
            return
        rows = max(1, CHUNK_NUMBERS // self.sum.numel())
        for part, of_values in zip(a.split(rows), g.split(rows), strict=True):
            self.sum += torch.einsum("ntgi,ntgo->ngio", part, of_values).square().sum(0)

    def add_last(self, a: Float[Tensor, "N 1 1 i"], hessian: OutputHessian) -> None:
        self.sum[0] += a[:, 0, 0].square().T @ hessian.diagonal.to(a)

    def eigen(self) -> Eigen:
        return Eigen(_by_slot(self.sum))


class KroneckerSum(LayerSum):
    """A, the sum of a a', and B, that of g g' over places, rows and columns: H is A x B / (rows
    T)."""

    def __init__(self, groups: int, inputs: int, outputs: int, device: torch.device) -> None:
        self.of_inputs = torch.zeros(groups, inputs, inputs, dtype=torch.float64, device=device)
        self.of_outputs = torch.zeros(groups, outputs, outputs, dtype=torch.float64, device=device)
        self.places = 0  # of all rows

    def add_inputs(self, a: Float[Tensor, "N T G i"]) -> None:
        by_group = a.flatten(0, 1).transpose(0, 1)
        self.of_inputs += by_group.mT @ by_group
        self.places += a.shape[0] * a.shape[1]

    def add_values(self, a: Float[Tensor, "N T G i"], g: Float[Tensor, "N T G o"]) -> None:  # noqa: ARG002
        by_group = g.flatten(0, 1).transpose(0, 1)
        self.of_outputs += by_group.mT @ by_group

    def add_last(self, a: Float[Tensor, "N 1 1 i"], hessian: OutputHessian) -> None:  # noqa: ARG002
        self.of_outputs[0] += hessian.total

    def eigen(self) -> Eigen:
        a, of_inputs = torch.linalg.eigh(self.of_inputs.cpu())
        b, of_outputs = torch.linalg.eigh(self.of_outputs.cpu())
        products = a.clamp(min=0.0)[:, :, None] * b.clamp(min=0.0)[:, None, :] / max(self.places, 1)
        return Eigen(_by_slot(products), (of_inputs, of_outputs))


class FullSum(LayerSum):
    """All of H, of a layer whose values are the outputs: `bayes.laplace` lets no other have
    it."""

    def __init__(self, groups: int, inputs: int, outputs: int, device: torch.device) -> None:
        assert groups == 1
        self.sum = torch.zeros(outputs, outputs, inputs, inputs, dtype=torch.float64, device=device)

    def add_last(self, a: Float[Tensor, "N 1 1 i"], hessian: OutputHessian) -> None:
        """Add L's entries for two outputs times a a'; those above the diagonal are the same as
        those below."""
        rows = a[:, 0, 0]
        for c in range(len(self.sum)):
            for d in range(c + 1):
                weights = -hessian.u[:, c] * hessian.u[:, d] + (hessian.d[:, c] if c == d else 0.0)
                self.sum[c, d] += rows.T @ (weights[:, None].to(rows) * rows)

    def eigen(self) -> Eigen:
        outputs, _, inputs, _ = self.sum.shape
        for c in range(outputs):
            for d in range(c):
                self.sum[d, c] = self.sum[c, d]
        whole = self.sum.permute(2, 0, 3, 1).reshape(inputs * outputs, inputs * outputs).cpu()
        del self.sum
        values, vectors = torch.linalg.eigh(whole)
        return Eigen(values.clamp(min=0.0), (vectors,))


SUMS: dict[Structure, type[LayerSum]] = {
    "full": FullSum,
    "kronecker": KroneckerSum,
    "diagonal": DiagonalSum,
}


def curvature(model: BayesianModel, x: Tensor, y: Tensor, seed: int) -> Curvature:
    """Return H of rows at a model's centre, as its posterior's structure has it, with their
    log-likelihood.

    `seed` is of the random columns, where there are any.
    """
    network, posterior = model.network, model.posterior
    assert isinstance(network, DrawnNetwork)
    assert isinstance(posterior, LaplacePosterior)
    layers = network.layers_of(WeightLayer)
    sums = [
        SUMS[posterior.structure](
            layer.groups, slot.shape[0], slot.shape[1] // layer.groups, x.device
        )
        for layer, slot in zip(layers, network.slots, strict=True)
    ]
    generator = torch.Generator().manual_seed(seed)
    was_training = model.training
    log_likelihood = square_error = 0.0
    inner = False
    with _constants(model.eval()):
        for part, targets in _chunks(network, posterior, layers, x, y):
            outputs, seen, is_last = _run(network, posterior, layers, part)
            # p - p^2 and log p of a certain network are lost in float32
            exact = outputs.detach().double()
            hessian = output_hessian(model.likelihood, exact, targets)
            served = model.likelihood(exact[None])
            weighted = model.likelihood.weighted_log_likelihood(served, targets)
            log_likelihood += weighted.double().sum().item()
            if isinstance(model.likelihood, Gaussian):
                square_error += model.likelihood.errors(served[0], targets).sum().item()
            for layer_sum, (a, _), last in zip(sums, seen, is_last, strict=True):
                layer_sum.add_inputs(a)
                if last:
                    layer_sum.add_last(a, hessian)
            before = [i for i, last in enumerate(is_last) if not last]
            inner = inner or bool(before)
            for column in hessian.roots(generator) if before else ():
                values = [seen[i][1] for i in before]
                slopes = torch.autograd.grad(
                    outputs,
                    values,
                    column.to(outputs),
                    retain_graph=True,
                    allow_unused=True,
                    materialize_grads=True,
                )
                for i, slope in zip(before, slopes, strict=True):
                    sums[i].add_values(seen[i][0], _values(layers[i], slope, len(part)))
    model.train(was_training)
    columns = COLUMNS if inner and model.likelihood.outputs > COLUMNS else 0
    eigens = tuple(layer_sum.eigen() for layer_sum in sums)
    return Curvature(eigens, log_likelihood, square_error, columns)


def _chunks(
    network: DrawnNetwork,
    posterior: LaplacePosterior,
    layers: list[WeightLayer],
    x: Tensor,
    y: Tensor,
) -> Iterator[tuple[Tensor, Tensor]]:
    _, seen, is_last = _run(network, posterior, layers, x[:1])
    numbers = [a.numel() + value.numel() for a, value in seen]
    # what is kept for derivatives is of all layers behind the first: about as much again
    if not all(is_last):
        numbers.append(2 * sum(numbers))
    rows = max(1, min(CHUNK_ROWS, CHUNK_NUMBERS // max(1, sum(numbers))))
    yield from zip(x.split(rows), y.split(rows), strict=True)


def _run(
    network: DrawnNetwork, posterior: LaplacePosterior, layers: list[WeightLayer], x: Tensor
) -> tuple[Float[Tensor, "N C"], list[tuple[Tensor, Tensor]], list[bool]]:
    """Run the network at the posterior's centre.

    Return its outputs, what each drawn layer took in (`_inputs`) and its values, and whether these
    are the outputs.
    """
    seen: dict[nn.Module, tuple[Tensor, Tensor, Tensor]] = {}
    whole: list[Tensor] = []

    def note(layer: nn.Module, took: tuple[Tensor], value: Tensor) -> Tensor:
        assert isinstance(layer, WeightLayer)
        handed_on = value.clone()  # which a nonlinearity may change in place
        seen[layer] = (_inputs(layer, took[0].detach()), value, handed_on)
        return handed_on

    theta = posterior.centre().requires_grad_()
    with (
        ExitStack() as stack,
        watch({"": network.module}, lambda _, gave: whole.append(gave), True),
    ):
        for layer in layers:
            stack.enter_context(layer.register_forward_hook(note))
        outputs, _ = network(x.float(), theta[None, None])
    found = [seen[layer] for layer in layers]
    is_last = [
        at.convolution is None and end is whole[0]
        for at, (_, _, end) in zip(layers, found, strict=True)
    ]
    return outputs[0], [(a, value) for a, value, _ in found], is_last


def _inputs(layer: WeightLayer, h: Tensor) -> Float[Tensor, "N T G i"]:
    """Return what a layer takes in at each place, as its weights are laid out, with a bias's 1."""
    if layer.convolution is None:
        rows = h.shape[1] if not layer.place.folded and not layer.place.shared else h.shape[0]
        a = h.reshape(rows, -1, 1, h.shape[-1])
    else:
        taken, _ = patches(h, layer.convolution)
        offsets = taken.shape[2] // layer.convolution.in_channels
        a = taken.unflatten(2, (offsets, layer.groups, -1)).transpose(2, 3).flatten(3)
    return torch.cat([a, a.new_ones(*a.shape[:3], 1)], dim=3) if layer.has_bias else a.clone()


def _values(layer: WeightLayer, slope: Tensor, rows: int) -> Float[Tensor, "N T G o"]:
    is_linear = layer.convolution is None
    by_place = slope.reshape(rows, -1, slope.shape[-1]) if is_linear else slope.flatten(2).mT
    return by_place.unflatten(2, (layer.groups, -1))


def _by_slot(by_group: Float[Tensor, "G i o"]) -> Float[Tensor, "i O"]:
    """Lay numbers of groups out as a slot: outputs of groups side by side."""
    return by_group.transpose(0, 1).flatten(1).cpu()


@contextmanager
def _constants(model: BayesianModel) -> Iterator[None]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)
