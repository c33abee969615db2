"""A step of a fit: its rows as they might also have been, its loss, its optimiser and its rates.
What is random in it is of the seed and the step."""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64, Num
from torch import Tensor, nn
from torch.nn import functional

from model_store.errors import InvalidInput
from training.bayes.layers import seed_layers
from training.bayes.network import BayesianModel
from training.bayes.objectives import alpha_objective
from training.bayes.posterior import step_noise
from training.fitting.capture import Captured
from training.recipe import AugmentationSection, Recipe, TrainingSection
from training.seeds import Stream, hash_key

GRADIENT_NORM = 5.0  # the largest, of all parameters
ROW_GROUPS = 8  # of a step, each with draws of its own, if the method groups rows
VALIDATION_DRAWS = 20
# of log standard deviations: .1 changes a deviation by 10 % a step, whatever its size
SPREAD_RATE = 0.1
FINAL_SPREAD_RATE = 3.0  # times the final learning rate
SMALL_STEP = 50_000_000  # multiplications of a step below which threads cost more than they gain
FADED = 1e-30  # of Adam's means, below which they move no parameter
RAMP_STEPS, RAMP_SHARE = 2000, 0.1  # of the KL's weight, at most: steps, and of all epochs
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
CACHED_BYTES = 1 << 30
FADES_OVER = 100  # steps, in which what is not faded yet does not become denormal


@dataclass(frozen=True, eq=False)
class Loss:
    """What a step minimises, in nats a row, and what it is made of."""

    total: Float[Tensor, ""]
    nll: Float[Tensor, ""]  # the likelihood's term
    kl: Float[Tensor, "K"]  # of each draw, in nats
    served: Float[Tensor, "K N C"]  # what is served of each draw and row


class Steps:
    """Takes the steps of a fit, of batches of rows of a `shape`."""

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
        # a user's network may wait for its results
        if self.parameters[0].is_cuda and not recipe.network.is_custom:
            self.compute = Captured(self._compute)
        spare_threads(model, batch_rows, self.samples)

    def take(
        self, x: Num[Tensor, "N I"], y: Num[Tensor, "N"], kl_weight: float, step: int
    ) -> Float64[Tensor, "3"]:
        """Change parameters by the gradient of a batch's loss under fresh draws; steps count from
        0.

        Return the likelihood's term in nats a row and the KL in nats, means over draws, and the
        mean of the rows' `errors` under the first draw.
        """
        device = x.device
        x, eps = step_inputs(self.model, self.recipe, self.shape, x, self.samples, step)
        seed_layers(hash_key(self.recipe.seed, Stream.LAYER_NOISE, step), device)
        on_gpu = device.type == "cuda"
        weight = torch.full((), kl_weight, device=device) if on_gpu else kl_weight
        result = self.compute(x, y, eps, weight)
        if step % FADES_OVER == 0:
            drop_faded(self.optimizer)
        return result

    def _compute(
        self, x: Float[Tensor, "N I"], y: Num[Tensor, "N"], eps: Tensor, kl_weight: float | Tensor
    ) -> Float64[Tensor, "3"]:
        loss = step_loss(self.model, self.recipe, x, y, eps, kl_weight)
        self.optimizer.zero_grad(set_to_none=True)
        loss.total.backward()
        clip_gradient(self.parameters, GRADIENT_NORM)
        self.optimizer.step()
        error = self.model.likelihood.errors(loss.served[0].detach(), y).mean()
        return torch.stack([loss.nll.detach().double(), loss.kl.detach().mean().double(), error])


def step_inputs(
    model: BayesianModel,
    recipe: Recipe,
    shape: Sequence[int],
    x: Num[Tensor, "N I"],
    samples: int,
    step: int,
) -> tuple[Float[Tensor, "N I"], Float[Tensor, "S E"]]:
    """Return rows of a `shape` as they might also have been, and the noise of `samples` draws of
    each group of rows."""
    x = x.float()
    if recipe.augmentation is not None:
        seed = hash_key(recipe.seed, Stream.AUGMENTATION, step)
        x = augment(x, shape, recipe.augmentation, seed)
    draws = samples * row_groups(recipe, len(x))
    key = (recipe.seed, Stream.STEP_NOISE, step)
    eps = step_noise(model.posterior, draws, *key, in_pairs=recipe.is_variational, device=x.device)
    return x, eps


def row_groups(recipe: Recipe, rows: int) -> int:
    """Return the number of groups of rows of a step that have draws of their own."""
    return min(ROW_GROUPS if recipe.posterior.groups_rows else 1, rows)


def step_loss(
    model: BayesianModel,
    recipe: Recipe,
    x: Float[Tensor, "N I"],
    y: Num[Tensor, "N"],
    eps: Float[Tensor, "S E"],
    kl_weight: float | Tensor,
) -> Loss:
    served, kl = model.sample(x, eps, row_groups(recipe, len(x)))
    log_likelihood = model.likelihood.weighted_log_likelihood(served, y)
    total, nll = alpha_objective(log_likelihood, kl, kl_weight, recipe.alpha)
    return Loss(total, nll, kl, served)


def clip_gradient(parameters: list[nn.Parameter], norm: float) -> None:
    """Scale gradients down to a global norm, where theirs is larger: elsewhere they are read and
    not written, but for a GPU's, of which nobody waits to know."""
    found = torch.nn.utils.get_total_norm(p.grad for p in parameters if p.grad is not None)
    if found.is_cuda or not found <= norm:
        torch.nn.utils.clip_grads_with_norm_(parameters, norm, found)


def drop_faded(optimizer: torch.optim.Optimizer) -> None:
    """Set to zero what has faded of Adam's means of gradients that are zero by now, as those of
    units that are off.

    They would become denormal numbers, over which a processor takes many times as long, and stay
    denormal.
    """
    for state in optimizer.state.values():
        for mean in (state["exp_avg"], state["exp_avg_sq"]):
            if mean.device.type == "cpu":
                mean.masked_fill_(mean.abs() < FADED, 0.0)


@contextmanager
def restoring_torch(device: torch.device) -> Iterator[None]:
    """Leave torch's threads and its random numbers as they were: they are the caller's."""
    threads = torch.get_num_threads()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def spare_threads(model: BayesianModel, rows: int, samples: int) -> None:
    """Have torch compute with one thread where steps are small."""
    convolves = any(isinstance(layer, nn.Conv2d) for layer in model.modules())
    numbers = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if not convolves and numbers * rows * samples < SMALL_STEP:
        torch.set_num_threads(1)


def keep_freed_memory() -> None:
    """Have glibc keep large freed blocks and reuse them.

    It returns blocks of more than 32 MB to the system at once. A convolution's activations are as
    large, and each step would map all their pages again, a quarter of its time. Other C libraries
    are left alone.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, CACHED_BYTES)
        mallopt(M_TRIM_THRESHOLD, CACHED_BYTES)


def full_kl_weight(settings: TrainingSection, rows: int) -> float:
    return 1.0 / rows if settings.kl_weight is None else settings.kl_weight


def kl_ramp(recipe: Recipe, epoch_steps: int) -> float:
    """Return over how many epochs the KL's weight rises to its full value."""
    told = recipe.training.kl_ramp_epochs
    if told is not None:
        return told
    if not (recipe.posterior.ramps_kl and recipe.task == "regression"):
        return 0.0
    epochs = recipe.training.epochs or recipe.training.max_epochs
    return min(RAMP_STEPS / epoch_steps, RAMP_SHARE * epochs)


def kl_weight(
    settings: TrainingSection, rows: int, epoch_steps: int, step: int, ramp_epochs: float
) -> float:
    ramp = ramp_epochs * epoch_steps
    weight = full_kl_weight(settings, rows)
    return min(1.0, (step + 1) / ramp if ramp else 1.0) * weight


def adam(model: BayesianModel, settings: TrainingSection) -> torch.optim.Adam:
    """Return the optimiser: log standard deviations take longer steps, since they have further to
    go than means."""
    spread = model.posterior.spread_parameters()
    others = [p for p in model.parameters() if p.requires_grad and not any(p is q for q in spread)]
    final = settings.final_learning_rate
    rates = (
        (others, settings.learning_rate, final),
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
    """Set learning rates to where they are when `decay` of their way is gone, from the first (0) to
    the last (1)."""
    for group in optimizer.param_groups:
        rate = group["first_lr"] * (group["final_lr"] / group["first_lr"]) ** decay
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def check_augmentation(section: AugmentationSection | None, shape: Sequence[int]) -> None:
    """Raise InvalidInput if rows of a shape are no images, or smaller than they may be shifted."""
    if section is None:
        return
    if len(shape) not in (2, 3):
        expected = "none, since rows are no images"
        raise InvalidInput("augmentation", expected, f"rows of shape {tuple(shape)}")
    side = min(shape[-2:])
    if section.shift >= side:
        raise InvalidInput("augmentation.shift", f"less than {side} pixels", str(section.shift))


def augment(
    x: Float[Tensor, "N I"], shape: Sequence[int], section: AugmentationSection, seed: int
) -> Float[Tensor, "N I"]:
    """Return images as a function of themselves and a seed: each flipped with probability 1/2 along
    each axis that is named, shifted by up to `shift` whole pixels in both directions, and cropped
    to at least 1 - `crop` of height and width, at a place within.

    Every row has one affine map of its own, by which its pixels are interpolated (bilinear; outside
    the image the nearest pixel counts). A map that takes pixels to pixels, a flip or a shift, keeps
    their values but for rounding.
    """
    height, width = shape[-2:]
    generator = torch.Generator().manual_seed(seed)
    # Of each row and axis (across, down): sign, share of the side that is kept, and place, from -1
    # to 1.
    uniform = torch.rand(3, len(x), 2, generator=generator)
    may_flip = torch.tensor([axis in section.flip for axis in ("horizontal", "vertical")])
    sign = torch.where(may_flip & (uniform[0] < 0.5), -1.0, 1.0)
    kept = 1.0 - section.crop * uniform[1]
    pixels = torch.randint(-section.shift, section.shift + 1, (len(x), 2), generator=generator)
    place = (1.0 - kept) * (2.0 * uniform[2] - 1.0)
    place = place + 2.0 * pixels / torch.tensor([width, height])
    maps = torch.cat([torch.diag_embed(sign * kept), place[:, :, None]], dim=2)
    images = x.reshape(len(x), -1, height, width)
    grid = functional.affine_grid(maps, list(images.shape), align_corners=False).to(x.device)
    moved = functional.grid_sample(images, grid, padding_mode="border", align_corners=False)
    return moved.reshape(x.shape)
