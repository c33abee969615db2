import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch import nn

from experiments.certify.exact import linear
from training.bayes.likelihoods import SPEED
from training.data.rows import Rows, Splits
from training.fitting import run as fitting
from training.fitting.run import Run
from training.recipe import Recipe

METHODS = {
    "bbb-gaussian": {},
    "bbb-mixture": {"std_1": 1.0, "std_2": 1.0},  # equal parts, so the prior is N(0, 1)
    "mvn": {},
    "bhn-weights": {"couplings": 0},
}
ROWS, INPUTS, SIMULATIONS, DRAWS, BINS = 128, 2, 30, 99, 10
NOISE_STD = 0.5


class LogOdds(nn.Module):
    def __init__(self, inputs):
        super().__init__()
        self.odds = nn.Linear(inputs, 1)

    def forward(self, h):
        odds = self.odds(h)
        return torch.cat([torch.zeros_like(odds), odds], dim=-1)


def log_odds(shape, outputs):
    return LogOdds(shape[0])


def recipe(method, task, seed):
    network = f"{__name__}:log_odds" if task == "classification" else f"{linear.__module__}:linear"
    return Recipe.model_validate(
        {
            "name": "simulated",
            "method": method,
            "task": task,
            "seed": seed,
            "data": {
                "source": "digits",
                "validation": 1,
                "reference": 1,
                "ranking": 1,
            },
            "network": {"factory": network},
            "posterior": {"initial_log_std": -3.0, **METHODS[method]},
            "training": {
                "epochs": 60,
                "batch_rows": 16,
                "learning_rate": 5e-2,
                "final_learning_rate": 1e-3,
            },
        }
    )


def rank_parameters(method, task, seed, folder):
    """Fit simulated data and rank the true w and b, from 0 to DRAWS, among posterior draws."""
    rng = np.random.default_rng((seed, 7))
    x = rng.normal(size=(ROWS, INPUTS))
    x = np.linalg.qr(x - x.mean(0))[0] * np.sqrt(ROWS)  # standardised and orthogonal columns
    theta = rng.normal(size=INPUTS + 1)
    mean = x @ theta[:INPUTS] + theta[INPUTS]
    if task == "regression":
        y = (mean + NOISE_STD * rng.normal(size=ROWS)).astype(np.float32)
    else:
        y = (rng.uniform(size=ROWS) < 1 / (1 + np.exp(-mean))).astype(np.int64)
    rows = Rows(x.astype(np.float32), y)
    small_splits = [rows.take(np.arange(8)) for _ in range(4)]
    splits = Splits(rows, *small_splits)
    classes = 2 if task == "classification" else 0
    folder.mkdir()
    run = Run(recipe(method, task, seed), splits, (INPUTS,), classes, folder, torch.device("cpu"))
    if task == "regression":
        likelihood = run.model.likelihood
        likelihood.target_mean.zero_()
        likelihood.target_std.fill_(1.0)
        likelihood.log_variance.data.fill_(2 * np.log(NOISE_STD) / SPEED)
        likelihood.log_variance.requires_grad_(False)
    model = run.fit(quiet=True).eval()
    eps = torch.randn(
        DRAWS, model.posterior.noise_dimension, generator=torch.Generator().manual_seed(seed)
    )
    with torch.no_grad():
        draws = model.posterior(eps)[:, : INPUTS + 1].numpy()
    return (draws < theta).sum(0)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["regression", "classification"])
@pytest.mark.parametrize("method", METHODS)
def test_true_parameters_rank_uniformly_among_posterior_draws(method, task, tmp_path, monkeypatch):
    monkeypatch.setattr(fitting, "check_exports", lambda *_: None)  # slower than the fit
    ranks = np.concatenate(
        [rank_parameters(method, task, seed, tmp_path / str(seed)) for seed in range(SIMULATIONS)]
    )
    counts = np.histogram(ranks, bins=BINS, range=(0, DRAWS + 1))[0]
    print(method, task, counts)
    assert chisquare(counts).pvalue > 0.001, counts
