"""Local reparametrisation: layers that sample their outputs instead of Gaussian weights.

If a layer's weights W are Gaussian and multiply one vector h per row, its output is Gaussian:

    h W = mean(h) + (std(h) * eps) R        eps ~ N(0, I), one number per unit

See Kingma et al. 2015, "Variational dropout and the local reparameterization trick", section 2.2.
The distribution of a row's outputs is exact for any number of layers, because the weights of each
layer are independent of its input. Rows share eps but not weights, so joint scores of several rows
need draws of the weights.
"""

import copy
from itertools import accumulate, pairwise

import torch
from jaxtyping import Num
from torch import Tensor, nn

from model_store.inference.noise import ROW_NOISE
from training.bayes.laplace import LaplacePosterior, rotate
from training.bayes.layers import LayerContext, RandomLayer, Slot, WeightLayer, matmul
from training.bayes.matrix_normal import MatrixNormalPosterior
from training.bayes.network import BayesianModel
from training.bayes.posterior import FactorialGaussian, Posterior
from training.bayes.variational_hypernet import HyperLayer, NoisePosterior
from training.networks.networks import TRIAL_DRAWS, TRIAL_ROWS, DrawnNetwork
from training.networks.probes import watch


@torch.no_grad()
def localise(model: BayesianModel, x: Num[Tensor, "N I"]) -> BayesianModel:
    """Convert a model to sample outputs instead of weights, with the same distribution per row.

    The result shares the model's parameters. The model itself is returned if a layer's weights are
    not Gaussian, or if a layer processes several vectors per row, such as a convolution. `x` has
    valid input rows.
    """
    network = model.network
    if not isinstance(network, DrawnNetwork):
        return model
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    local = copy.deepcopy(network, shared)
    modules = local.named_modules()
    layers = [(n, layer) for n, layer in modules if isinstance(layer, WeightLayer | HyperLayer)]
    if len(layers) < len(local.slots) or not _serves_vectors(local, dict(layers), x):
        return model
    ends = list(accumulate((slot.size for slot in local.slots), initial=0))
    numbers = [slice(*part) for part in pairwise(ends)]
    order = [slot.name for slot in local.slots]
    for name, layer in layers:
        index = order.index(layer.context.slot.name)
        moments = output_moments(model.posterior, layer, index, numbers[index])
        if moments is None:
            return model
        units = layer.shape[1] if isinstance(layer, WeightLayer) else layer.sizes[2]
        parent, _, last = name.rpartition(".")
        setattr(local.get_submodule(parent), last, LocalLayer(moments, units, layer.context))
    local.slots = [context.slot for context in local.contexts]
    local.theta_dimension = sum(slot.size for slot in local.slots)
    local.is_paired, local.draws_one_by_one = True, False
    posterior = NoisePosterior(local.theta_dimension, ROW_NOISE)
    return BayesianModel(local, posterior, model.likelihood).eval()


def _serves_vectors(
    network: DrawnNetwork, layers: dict[str, torch.nn.Module], x: Num[Tensor, "N I"]
) -> bool:
    """Check that each layer runs once, on one vector per row or per row and draw."""
    inputs: dict[str, list[torch.Size]] = {name: [] for name in layers}
    rows = x[:TRIAL_ROWS].float().repeat(TRIAL_ROWS, 1)[:TRIAL_ROWS]
    with watch(layers, lambda name, h: inputs[name].append(h.shape)):
        network(rows, torch.zeros(TRIAL_DRAWS, 1, network.theta_dimension))
    folded = (TRIAL_DRAWS * TRIAL_ROWS,)
    batches = [(TRIAL_ROWS,), folded if network.folded else (TRIAL_DRAWS, TRIAL_ROWS)]
    return all(len(shapes) == 1 and tuple(shapes[0][:-1]) in batches for shapes in inputs.values())


class OutputMoments(nn.Module):
    """The distribution of a layer's output given its input."""

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the outputs' mean, and their standard deviation before `rotate` is applied."""
        raise NotImplementedError

    def rotate(self, noise: Tensor) -> Tensor:
        return noise


class FactorialMoments(OutputMoments):
    """The output distribution for independent weights, N(h M, h^2 S^2)."""

    def __init__(self, layer: WeightLayer, posterior: FactorialGaussian, numbers: slice) -> None:
        super().__init__()
        self.layer, self.posterior, self.numbers = layer, posterior, numbers

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        moments = self.posterior.moments()
        mean, std = (self.layer.matrix(part[self.numbers]) for part in moments)
        return affine(h, mean), affine(h.square(), std.square()).sqrt()


class MatrixNormalMoments(OutputMoments):
    """The output distribution for matrix-variate Gaussian weights, N(h M, (h^2 . a) b)."""

    def __init__(self, posterior: MatrixNormalPosterior, index: int) -> None:
        super().__init__()
        self.mean = posterior.means[index]
        self.log_row, self.log_column = posterior.log_rows[index], posterior.log_columns[index]

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        row_variance = affine(h.square(), (2 * self.log_row).exp()[:, None])
        return affine(h, self.mean), row_variance.sqrt() * self.log_column.exp()


class KroneckerMoments(OutputMoments):
    """The output distribution for the weights M + U_A (S . E) U_B' of a Laplace posterior.

    It is N(h M, U_B diag((h U_A)^2 S^2) U_B').
    """

    def __init__(self, posterior: LaplacePosterior) -> None:
        super().__init__()
        self.mean, self.shape, self.spread = posterior.mean, posterior.shape, posterior.spread

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        projection = affine(h, self.spread.input_vectors.T)
        variance = matmul(projection.square(), self.spread.std.square())
        return affine(h, self.mean.view(self.shape)), variance.sqrt()

    def rotate(self, noise: Tensor) -> Tensor:
        return rotate(noise, self.spread.output_vectors)


class HyperMoments(OutputMoments):
    """The output distribution of a variational hypernetwork's layer."""

    def __init__(self, layer: HyperLayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        scale, row, column = self.layer.infer(h)
        # The bits of a sum, unlike those of a product, depend on the number of rows.
        row_variance = matmul(h.square() * row.sigmoid(), h.new_ones(h.shape[-1], 1))
        return self.layer.mean(h, scale), (row_variance * column.sigmoid()).sqrt()


class LocalLayer(RandomLayer):
    """A layer that samples its outputs, with its part of theta as the noise."""

    def __init__(self, moments: OutputMoments, units: int, context: LayerContext) -> None:
        super().__init__()
        self.moments = moments
        self.context = context
        context.slot = Slot(context.slot.name, (units,))

    def forward(self, h: Tensor) -> Tensor:
        mean, std = self.moments(h)
        if self.context.shared:  # one value per row, which the service computes only once
            mean, std = torch.cat([mean, std], dim=-1).chunk(2, dim=-1)
        noise = self.context.by_draw(std) * self.context.theta()
        return self.context.batch(self.context.by_draw(mean) + self.moments.rotate(noise))


def output_moments(
    posterior: Posterior, layer: WeightLayer | HyperLayer, index: int, numbers: slice
) -> OutputMoments | None:
    """Return a layer's output distribution, or None if it is not Gaussian.

    `index` is the layer's position, and `numbers` its part of theta.
    """
    if isinstance(layer, HyperLayer):
        return HyperMoments(layer)
    if isinstance(posterior, MatrixNormalPosterior):
        return MatrixNormalMoments(posterior, index)
    if isinstance(posterior, FactorialGaussian):
        return FactorialMoments(layer, posterior, numbers)
    if type(posterior) is LaplacePosterior:  # not the draws of a chain
        return KroneckerMoments(posterior)
    return None


def affine(h: Tensor, matrix: Tensor) -> Tensor:
    """Compute h W + b, where b is an optional extra row at the end of the matrix."""
    inputs = h.shape[-1]
    value = matmul(h, matrix[:inputs])
    return value + matrix[inputs] if len(matrix) > inputs else value
