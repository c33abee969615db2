"""Training steps: augmentation, loss, optimiser and learning rates."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64, Num
from torch import Tensor, nn
from torch.nn import functional

from model_store.errors import InvalidInput
from model_store.processes import processors
from training.bayes.layers import seed_layers
from training.bayes.network import BayesianModel
from training.bayes.posterior import step_noise
from training.recipe import AugmentationSection, Recipe
from training.seeds import Stream, hash_key

Inputs = Float[Tensor, "N I"]
Targets = Num[Tensor, "N"]
Sums = Float64[Tensor, "3"]
GRADIENT_NORM = 5.0  # maximum
ROW_GROUPS = 8  # groups of rows with separate draws, for methods that group rows
VALIDATION_DRAWS = 20
SPREAD_RATE = 0.1  # learning rate of log standard deviations
FINAL_SPREAD_RATE = 3.0  # times the final learning rate
SMALL_STEP = 50_000_000  # multiplications per step below which one thread is faster
WARMUP_CALLS = 3  # before a capture, to allocate memory
NEGLIGIBLE_MEAN = 1e-30  # moments of Adam below this do not change parameters
FLUSH_STEPS = 100  # interval of `flush_moments`
RAMP_STEPS, RAMP_SHARE = 2000, 0.1  # maximum length of the KL ramp, in steps and as a share


class Steps:
    """The optimiser steps of a fit."""

    def __init__(
        self,
        model: BayesianModel,
        recipe: Recipe,
        shape: Sequence[int],
        optimizer: torch.optim.Optimizer,
        batch_rows: int,
    ) -> None:
        self.model = model
        self.recipe = recipe
        self.shape = shape
        self.optimizer = optimizer
        self.samples = model.posterior.max_draws or recipe.samples
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.compute: Callable[..., Tensor] = self._compute
        # CUDA graphs do not support networks that read values, as a user's network may do.
        if self.parameters[0].is_cuda and not recipe.network.is_custom:
            self.compute = GraphedFunction(self._compute)
        spare_threads(model, batch_rows, self.samples)

    def take(self, x: Num[Tensor, "N I"], y: Targets, kl_weight: float, step: int) -> Sums:
        """Take one optimiser step on a batch.

        `step` counts from 0. Returns the likelihood term in nats per row, the mean KL of draws in
        nats, and the mean of `Likelihood.row_metric` under the first draw.
        """
        device = x.device
        x, eps = self.inputs(x, step)
        seed_layers(hash_key(self.recipe.seed, Stream.LAYER_NOISE, step), device)
        on_gpu = device.type == "cuda"
        weight = torch.full((), kl_weight, device=device) if on_gpu else kl_weight
        result = self.compute(x, y, eps, weight)
        if step % FLUSH_STEPS == 0:
            flush_moments(self.optimizer)
        return result

    def inputs(self, x: Num[Tensor, "N I"], step: int) -> tuple[Inputs, Float[Tensor, "S E"]]:
        """Augment rows, and generate noise for the draws of each group of rows."""
        x, recipe = x.float(), self.recipe
        if recipe.augmentation is not None:
            seed = hash_key(recipe.seed, Stream.AUGMENTATION, step)
            x = augment(x, self.shape, recipe.augmentation, seed)
        draws = self.samples * self.groups(len(x))
        key = (recipe.seed, Stream.STEP_NOISE, step)
        is_paired = recipe.posterior.is_variational
        return x, step_noise(self.model.posterior, draws, *key, in_pairs=is_paired, device=x.device)

    def groups(self, rows: int) -> int:
        """Return the number of groups of rows that have separate draws."""
        return min(ROW_GROUPS if self.recipe.posterior.groups_rows else 1, rows)

    def _compute(self, x: Inputs, y: Targets, eps: Tensor, kl_weight: float | Tensor) -> Sums:
        likelihood = self.model.likelihood
        predictions, kl = self.model.sample(x, eps, self.groups(len(x)))
        log_likelihood = likelihood.weighted_log_likelihood(predictions, y)
        loss, nll = alpha_objective(log_likelihood, kl, kl_weight, self.recipe.alpha)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        if norm.is_cuda or norm > GRADIENT_NORM:
            nn.utils.clip_grads_with_norm_(self.parameters, GRADIENT_NORM, norm)
        self.optimizer.step()
        error = likelihood.row_metric(predictions[0].detach(), y).mean()
        return torch.stack([nll.detach().double(), kl.detach().mean().double(), error])


@dataclass(frozen=True, eq=False)
class Graph:
    """A training step captured as a CUDA graph, which reduces kernel launches."""

    cuda_graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]  # memory that the graph reads
    result: Tensor


class GraphedFunction:
    """A function of GPU tensors, captured as one CUDA graph per combination of shapes.

    The first `WARMUP_CALLS` calls run eagerly. The function must run the same kernels for all input
    values, and must not synchronise with the GPU.
    """

    def __init__(self, compute: Callable[..., Tensor]) -> None:
        self.compute = compute
        self.calls = 0
        self.graphs: dict[tuple[torch.Size, ...], Graph] = {}
        self.pool = torch.cuda.graph_pool_handle()  # shared, since graphs never run concurrently

    def __call__(self, *arguments: Tensor) -> Tensor:
        if self.calls < WARMUP_CALLS:
            self.calls += 1
            return self._call_on_side_stream(arguments)
        shapes = tuple(tensor.shape for tensor in arguments)
        if shapes not in self.graphs:
            self.graphs[shapes] = self._capture(arguments)
        graph = self.graphs[shapes]
        for target, source in zip(graph.inputs, arguments, strict=True):
            target.copy_(source)
        graph.cuda_graph.replay()
        return graph.result.clone()

    def _call_on_side_stream(self, arguments: tuple[Tensor, ...]) -> Tensor:
        """Run a function on a side stream, as CUDA requires before a capture."""
        main, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            result = self.compute(*arguments)
        main.wait_stream(side)
        return result

    def _capture(self, arguments: tuple[Tensor, ...]) -> Graph:
        inputs = [tensor.clone() for tensor in arguments]
        cuda_graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(cuda_graph, pool=self.pool):
            result = self.compute(*inputs)
        return Graph(cuda_graph, inputs, result)


def alpha_objective(
    log_likelihood: Float[Tensor, "K N"],
    kl: Float[Tensor, "K"],
    kl_weight: float | Tensor,
    alpha: float = 0.0,
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Compute the alpha-divergence loss per row in nats, and its likelihood term.

        mean_n -1/alpha log mean_k p(y_n | x_n, theta_k)^alpha + kl_weight mean_k KL_k

    This is the reparametrised objective of Li and Gal 2017, "Dropout inference in Bayesian neural
    networks with alpha-divergences". For alpha = 0, the likelihood term is the mean of -log p over
    draws. With `kl_weight` = 1 / (training rows), the loss is then the negative evidence lower
    bound.
    """
    if alpha == 0:
        nll = -log_likelihood.mean()
    else:
        num_draws = len(log_likelihood)
        nll = -(torch.logsumexp(alpha * log_likelihood, dim=0) - math.log(num_draws)).mean() / alpha
    return nll + kl_weight * kl.mean(), nll


def flush_moments(optimizer: torch.optim.Optimizer) -> None:
    """Set Adam's negligible moments to zero.

    Otherwise the moments of inactive units decay to denormal numbers, which slow down arithmetic.
    """
    for state in optimizer.state.values():
        for mean in (state["exp_avg"], state["exp_avg_sq"]):
            if mean.device.type == "cpu":
                mean.masked_fill_(mean.abs() < NEGLIGIBLE_MEAN, 0.0)


@contextmanager
def restoring_torch(device: torch.device) -> Iterator[None]:
    """Limit torch's threads, and restore the thread count and random state on exit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(min(threads, processors()))
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def spare_threads(model: BayesianModel, rows: int, samples: int) -> None:
    """Limit torch to one thread if the training steps are small."""
    convolves = any(isinstance(layer, nn.Conv2d) for layer in model.modules())
    numbers = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if not convolves and numbers * rows * samples < SMALL_STEP:
        torch.set_num_threads(1)


@dataclass(frozen=True)
class KLSchedule:
    """The weight of the KL in the loss per row, which rises linearly to its full value."""

    full: float
    ramp_epochs: float
    epoch_steps: int

    @classmethod
    def from_recipe(
        cls, recipe: Recipe, rows: int, epoch_steps: int, is_continued: bool = False
    ) -> "KLSchedule":
        """Return a recipe's schedule, by default without a ramp if a posterior is continued."""
        settings = recipe.training
        full = 1.0 / rows if settings.kl_weight is None else settings.kl_weight
        if settings.kl_ramp_epochs is not None:
            return cls(full, settings.kl_ramp_epochs, epoch_steps)
        if is_continued or recipe.task != "regression" or not recipe.posterior.ramps_kl:
            return cls(full, 0.0, epoch_steps)
        epochs = settings.epochs or settings.max_epochs
        return cls(full, min(RAMP_STEPS / epoch_steps, RAMP_SHARE * epochs), epoch_steps)

    def weight(self, step: int) -> float:
        ramp = self.ramp_epochs * self.epoch_steps
        return min(1.0, (step + 1) / ramp if ramp else 1.0) * self.full


def adam(model: BayesianModel, recipe: Recipe) -> torch.optim.Adam:
    """Create an Adam optimiser with a higher learning rate for log standard deviations."""
    spread = model.posterior.spread_parameters()
    means = [p for p in model.parameters() if p.requires_grad and not any(p is q for q in spread)]
    final = recipe.training.final_learning_rate
    rates = (
        (means, recipe.learning_rate, final),
        (spread, SPREAD_RATE, FINAL_SPREAD_RATE * final),
    )
    on_gpu = next(model.parameters()).is_cuda
    groups = [
        {
            "params": p,
            "lr": torch.tensor(first, device="cuda") if on_gpu else first,
            "first_lr": first,
            "final_lr": last,
        }
        for p, first, last in rates
        if p
    ]
    return torch.optim.Adam(groups, fused=True, capturable=on_gpu)


def decay_rates(optimizer: torch.optim.Optimizer, decay: float) -> None:
    """Interpolate the learning rates geometrically, from initial (`decay` = 0) to final (1)."""
    for group in optimizer.param_groups:
        rate = group["first_lr"] * (group["final_lr"] / group["first_lr"]) ** decay
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def check_augmentation(section: AugmentationSection | None, shape: Sequence[int]) -> None:
    """Check that rows are images larger than the maximum shift."""
    if section is None:
        return
    if len(shape) not in (2, 3):
        expected = "none, since rows are not images"
        raise InvalidInput("augmentation", expected, f"rows of shape {tuple(shape)}")
    side = min(shape[-2:])
    if section.shift >= side:
        raise InvalidInput("augmentation.shift", f"less than {side} pixels", str(section.shift))


def augment(x: Inputs, shape: Sequence[int], section: AugmentationSection, seed: int) -> Inputs:
    """Apply random augmentations to images.

    Each image is flipped with probability 1/2 along each axis in `flip`, shifted by up to `shift`
    pixels along both axes, and cropped to at least 1 - `crop` of its height and width at a random
    position. The interpolation is bilinear, and edge pixels are repeated outside the image.
    """
    height, width = shape[-2:]
    generator = torch.Generator().manual_seed(seed)
    # Uniform numbers for the flip, size and position of each row along both axes.
    uniform = torch.rand(3, len(x), 2, generator=generator)
    can_flip = torch.tensor([axis in section.flip for axis in ("horizontal", "vertical")])
    sign = torch.where(can_flip & (uniform[0] < 0.5), -1.0, 1.0)
    size = 1.0 - section.crop * uniform[1]
    pixels = torch.randint(-section.shift, section.shift + 1, (len(x), 2), generator=generator)
    position = (1.0 - size) * (2.0 * uniform[2] - 1.0)
    position = position + 2.0 * pixels / torch.tensor([width, height])
    maps = torch.cat([torch.diag_embed(sign * size), position[:, :, None]], dim=2)
    images = x.reshape(len(x), -1, height, width)
    grid = functional.affine_grid(maps, list(images.shape), align_corners=False).to(x.device)
    samples = functional.grid_sample(images, grid, padding_mode="border", align_corners=False)
    return samples.reshape(x.shape)
