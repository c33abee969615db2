"""The network with its detectors, exported as `network.onnx`."""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Num
from torch import Tensor, nn

from model_store.errors import InvalidInput, one_line
from training.bayes.flows import WeightNormLinear
from training.bayes.layers import ScaledLayer
from training.bayes.likelihoods import Likelihood
from training.bayes.linalg import LinAlgError
from training.bayes.network import BayesianModel, Network
from training.data.rows import Rows
from training.detectors import FOR_ANY_SHAPE, KINDS, Space
from training.detectors.neighbours import Neighbours
from training.detectors.spectrum import CHUNK_NUMBERS, MAX_LENGTH, Mahalanobis, Residual, Spectrum
from training.recipe import DENSITY_NAMES, Recipe
from training.seeds import Stream, hash_key

FITTED_ROWS = 10_000  # random training rows that detectors are fitted to
CHUNK_ROWS = 1000
# The score of these detectors is the squared length of their `deviation`.
VECTOR_DETECTORS = (Residual, Mahalanobis, Neighbours)


class ServedNetwork(nn.Module):
    """A network with density detectors."""

    def __init__(
        self,
        network: Network,
        likelihood: Likelihood,
        density: dict[str, nn.Module],
        spectrum: Spectrum | None,
        centre: Float[Tensor, "D"],
    ) -> None:
        super().__init__()
        self.network = network
        self.likelihood = likelihood
        self.density = nn.ModuleDict(density)
        self.spectrum = spectrum
        self.centre = nn.Buffer(centre[None, None])

    def replace(self, model: BayesianModel) -> "ServedNetwork":
        centre, density = model.posterior.centre(), dict(self.density.items())
        return ServedNetwork(model.network, model.likelihood, density, self.spectrum, centre)

    def rows_in(self, space: Space, x: Float[Tensor, "N I"]) -> Float[Tensor, "N F"]:
        if space == "spectrum":
            assert self.spectrum is not None
            return self.spectrum(x)
        return self.network.embed(x, self.centre) if space == "embedding" else x

    @property
    def two_sided(self) -> tuple[str, ...]:
        return tuple(name for name in self.density if KINDS[name].is_two_sided)

    @property
    def attributed(self) -> tuple[str, ...]:
        """The names of the detectors that can attribute their scores to inputs.

        There are none for folded rows, unless the fold only adds the channels of each pixel.
        """
        shape = self.network.shape
        place = math.prod(shape[-2:]) if len(shape) == 3 else math.prod(shape)
        if math.prod(shape) > MAX_LENGTH and MAX_LENGTH % place:
            return ()
        vectors = [n for n, d in self.density.items() if isinstance(d, VECTOR_DETECTORS)]
        return tuple(name for name in vectors if KINDS[name].space != "embedding")

    def terms(self, x: Float[Tensor, "N I"]) -> Float[Tensor, "N A I"]:
        parts = []
        assert self.spectrum is not None
        for name in self.attributed:
            space = KINDS[name].space
            detector = self.density[name]
            assert isinstance(detector, VECTOR_DETECTORS)
            deviation = detector.deviation(self.rows_in(space, x))
            inputs = self.spectrum.invert(deviation) if space == "spectrum" else deviation
            parts.append(self.spectrum.fold.spread(inputs.square()))
        return torch.stack(parts, dim=1)

    def forward(
        self, x: Float[Tensor, "N I"], theta: Float[Tensor, "K P D"]
    ) -> tuple[Float[Tensor, "K N C"], Float[Tensor, "N M"]]:
        spaces = dict.fromkeys(KINDS[name].space for name in self.density)
        rows = {space: self.rows_in(space, x) for space in spaces}
        density = [detector(rows[KINDS[name].space]) for name, detector in self.density.items()]
        scores = torch.stack(density, dim=1) if density else x[:, :0]
        return self.likelihood(self.network(x, theta)), scores


@torch.no_grad()
def served_network(
    model: BayesianModel,
    x: Num[Tensor, "N I"],
    seed: int,
    names: Sequence[str] = FOR_ANY_SHAPE,
    shape: tuple[int, ...] | None = None,
) -> ServedNetwork:
    """Fit detectors on training rows, and attach them to a model's network."""
    shape = model.network.shape if shape is None else shape
    index = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[:FITTED_ROWS]
    sample = x[index]
    parts = sample.split(max(1, min(CHUNK_ROWS, CHUNK_NUMBERS // x.shape[1])))
    generator = torch.Generator().manual_seed(seed)
    needs_spectrum = any(KINDS[name].space != "embedding" for name in names)
    spectrum = Spectrum.fit(x, generator) if needs_spectrum else None
    network = ServedNetwork(model.network, model.likelihood, {}, spectrum, model.posterior.centre())
    rows: dict[Space, Tensor] = {}
    for name in names:
        kind = KINDS[name]
        if kind.space == "input":
            rows["input"] = sample  # bytes stay bytes
        elif kind.space not in rows:
            converted = [network.rows_in(kind.space, part.float()) for part in parts]
            rows[kind.space] = torch.cat(converted)
        extra = (shape,) if kind.needs_images else ()
        try:
            network.density[name] = kind.fit(rows[kind.space], generator, *extra)
        except LinAlgError as error:
            expected = f"detectors other than {name}, which failed (the trained network is kept)"
            raise InvalidInput("serving.combined", expected, one_line(error)) from error
    return network.eval()


def fit_detectors(
    model: BayesianModel, train: Rows, recipe: Recipe, shape: tuple[int, ...]
) -> ServedNetwork:
    """Fit the density detectors that the flag uses, and attach them to a model's network."""
    densities = [name for name in recipe.combined if name in DENSITY_NAMES]
    seed = hash_key(recipe.seed, Stream.DETECTORS)
    return served_network(model, torch.from_numpy(train.x), seed, densities, shape)


def fold(model: BayesianModel) -> None:
    """Replace weight normalisation with plain weights for faster inference."""
    for module in model.modules():
        if isinstance(module, ScaledLayer | WeightNormLinear):
            module.fold()
