"""Fit on a few labels, from scratch or starting from the last fit.

A fit has a fixed number of epochs and no temperature, so it needs no validation labels.
"""

import copy
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64, Num
from torch import Tensor

from experiments.active.protocol import ActiveStream
from training.bayes.likelihoods import Categorical
from training.bayes.network import BayesianModel
from training.bayes.posterior import noise
from training.data.rows import Dataset, class_weights
from training.fitting.run import Diverged
from training.fitting.steps import KLSchedule, Steps, adam, decay_rates
from training.model import build, initialise, with_knots
from training.recipe import Recipe
from training.seeds import Stream, generator, hash_key

STANDARDISING_ROWS = 1000  # pool rows, which need no labels
CHUNK_ROWS = 128  # rows x draws in one pass
SEEDS = 2**53  # number of recipe seeds


@dataclass(frozen=True)
class Measure:
    metric: float  # accuracy, or RMSE in the target's units
    log_likelihood: float  # of the mixture of draws, nats per row


class Learner:
    def __init__(self, recipe: Recipe, data: Dataset, seed: int, device: torch.device) -> None:
        network = recipe.network.model_copy(update={"max_inputs": None})  # it would use labels
        recipe = recipe.model_copy(update={"network": network})
        self.recipe = with_knots(recipe, data, data.train)  # knots need no labels
        self.data, self.seed, self.device = data, seed, device
        self.x = torch.from_numpy(data.train.x)
        self.y = torch.from_numpy(data.train.y)
        self._model: BayesianModel | None = None
        self.optimizer: torch.optim.Adam | None = None
        self.is_fresh = True  # not fitted yet

    @property
    def model(self) -> BayesianModel:
        assert self._model is not None
        return self._model

    def begin(self, number: int) -> None:
        recipe = self._recipe(number)
        order = generator(self.seed, ActiveStream.STANDARDISING_ROWS).permutation(len(self.x))
        rows = self.x[torch.from_numpy(np.sort(order[:STANDARDISING_ROWS]))]
        largest_id = int(self.data.maximum) if self.data.takes_ids else None
        model = build(recipe, self.data.shape, len(self.data.classes), rows, largest_id=largest_id)
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # halves the time of convolutions
        self._model = model.to(self.device)
        initialise(self.model, rows.float().to(self.device), recipe.is_standardised)
        self.optimizer = adam(self.model, recipe)
        self.is_fresh = True

    def fit(self, index: Int64[np.ndarray, "M"], number: int, epochs: int) -> None:
        recipe, model, optimizer = self._recipe(number), self.model, self.optimizer
        assert optimizer is not None
        rows = torch.from_numpy(index)
        x, y = self.x[rows].to(self.device), self.y[rows].to(self.device)
        if self.is_fresh:
            model.likelihood.start(y)
            self.is_fresh = False
        self._weigh_classes(y)
        parts = math.ceil(len(x) / recipe.training.batch_rows)
        steps = Steps(model, recipe, self.data.shape, optimizer, recipe.training.batch_rows)
        step, kl = 0, KLSchedule.from_recipe(recipe, len(x), parts)
        model.train()
        for epoch in range(epochs):
            order = generator(recipe.seed, Stream.ORDER, epoch).permutation(len(x))
            losses = torch.zeros(3, dtype=torch.float64, device=self.device)
            for part in torch.from_numpy(order).to(self.device).tensor_split(parts):
                decay_rates(optimizer, step / (epochs * parts))
                losses += steps.take(x[part], y[part], kl.weight(step), step)
                step += 1
            if not losses.isfinite().all():
                place = f"in epoch {epoch + 1} on {len(x)} labels"
                raise Diverged(f"training diverged {place}: set a lower learning_rate")
        model.eval()

    def noise(self, draws: int, *key: int) -> Float[Tensor, "K E"]:
        return noise(self.model.posterior, draws, *key, device=self.device)

    def predict(
        self, x: Num[np.ndarray, "N I"], eps: Float[Tensor, "K E"]
    ) -> Float32[np.ndarray, "K N C"]:
        rows = torch.from_numpy(x).to(self.device)
        return self.model.predict(rows, eps, CHUNK_ROWS).cpu().numpy()

    def measure(self, draws: int, number: int) -> Measure:
        likelihood, test = self.model.likelihood, self.data.test
        outputs = self.predict(
            test.x, self.noise(draws, self.seed, ActiveStream.TEST_NOISE, number)
        )
        results = likelihood.validation(torch.from_numpy(outputs), torch.from_numpy(test.y))
        _, log_likelihood, errors, *_ = results.mean(0).tolist()
        return Measure(likelihood.to_metric(errors), log_likelihood)

    def state(self) -> dict[str, Any]:
        assert self.optimizer is not None
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return copy.deepcopy(state)

    def restore(self, state: dict[str, Any], number: int) -> None:
        self.begin(number)
        assert self.optimizer is not None
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.is_fresh = False
        self.model.eval()

    def _recipe(self, number: int) -> Recipe:
        seed = hash_key(self.seed, ActiveStream.FIT, number) % SEEDS
        return self.recipe.model_copy(update={"seed": seed})

    def _weigh_classes(self, y: Tensor) -> None:
        likelihood, option = self.model.likelihood, self.recipe.data.class_weights
        if option is not None:
            assert isinstance(likelihood, Categorical)
            assert likelihood.log_weights is not None
            weights = class_weights(option, self.data.classes, y.cpu().numpy())
            likelihood.log_weights.copy_(torch.from_numpy(np.log(weights)))
