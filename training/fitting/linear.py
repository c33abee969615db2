"""The linear model that is mixed into batch ensembles for tabular data.

The predictive distribution is (1 - w) mean_k p_k + w q, where p_k are networks, q is a logistic or
ridge regression, and w is the linear model's share of the draws. Networks are often overconfident
if there are few rows, and the mixture limits the cost of their errors. w is its posterior mean,
given the validation rows. The prior favours 1/2, because the same rows choose the networks' epoch.
"""

import math
import warnings

import numpy as np
import torch
from jaxtyping import Float64, Int64

from training.bayes.likelihoods import Categorical, Gaussian
from training.bayes.members import MixturePosterior
from training.bayes.network import CHUNK_ROWS, BayesianModel
from training.calibration.temperature import max_rows_for
from training.data.rows import Rows
from training.networks.batch_ensemble import BatchEnsemble

PRIOR = {0.0: 1, 0.25: 1, 0.5: 20, 0.75: 1, 0.9: 1}  # of the share, up to a constant
RIDGE_PENALTIES = np.logspace(-3, 4, 15)
LOGISTIC_STRENGTHS = np.logspace(-4, 1, 6)  # inverse penalties
FOLDS, MAX_FOLD_ROWS = 5, 2000  # of the cross-validation that selects the penalty
MAX_NUMBERS = 20_000_000  # rows * inputs * outputs of a fit
MISSING_LOGIT = -8.0  # of classes without training rows
MIN_VARIANCE = 1e-6  # relative to the targets'


def fit_linear(model: BayesianModel, rows: Rows) -> None:
    network, likelihood = model.network, model.likelihood
    assert isinstance(network, BatchEnsemble)
    step = math.ceil(rows.x.size * likelihood.outputs / MAX_NUMBERS)
    device = network.linear_bias.device
    standard = network.scale(torch.from_numpy(rows.x[::step]).to(device).float())
    x, y = standard.flatten(1).double().cpu().numpy(), rows.y[::step]
    row_weights = None if rows.weights is None else rows.weights[::step]
    if row_weights is not None:
        row_weights = row_weights / row_weights.mean()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Unconverged fits are acceptable.
        if isinstance(likelihood, Gaussian):
            mean, std = likelihood.target_mean.item(), likelihood.target_std.item()
            weight, bias = fit_ridge(x, (y.astype(np.float64) - mean) / std, row_weights)
            weight, bias = weight[:, : likelihood.outputs], bias[: likelihood.outputs]
        else:
            assert isinstance(likelihood, Categorical)
            class_weights = np.ones(likelihood.outputs)
            if likelihood.log_weights is not None:
                class_weights = likelihood.log_weights.double().exp().cpu().numpy()
            sample_weights = class_weights[y]
            if row_weights is not None:
                sample_weights *= row_weights
            weight, bias = fit_logistic(x, y, len(class_weights), sample_weights)
    network.linear_weight.copy_(torch.from_numpy(weight))
    network.linear_bias.copy_(torch.from_numpy(bias))


@torch.no_grad()
def choose_share(model: BayesianModel, validation: Rows) -> float:
    """Set the linear model's number of draws, and return their share of all draws."""
    likelihood, posterior = model.likelihood, model.posterior
    assert isinstance(posterior, MixturePosterior)
    device = likelihood.temperature.device
    rows = max_rows_for(likelihood, posterior.members + 1)
    x, y = (torch.from_numpy(part[:rows]).to(device) for part in (validation.x, validation.y))
    theta = torch.arange(posterior.members + 1, device=device).float()[:, None, None]
    predictions = model.eval().serve(x, theta, CHUNK_ROWS)
    networks = likelihood.mixture_log_likelihood(predictions[:-1], y)
    linear = likelihood.mixture_log_likelihood(predictions[-1:], y)
    shares = torch.tensor(list(PRIOR), dtype=torch.float64, device=device)[:, None]
    mixture = torch.logaddexp((1 - shares).log() + networks, shares.log() + linear)
    log_prior = torch.tensor(list(PRIOR.values()), dtype=torch.float64, device=device).log()
    weights = (mixture.sum(1) + log_prior).softmax(0)
    mean = (weights @ shares[:, 0]).item()
    posterior.linear_draws = round(posterior.members * mean / (1 - mean))
    return posterior.linear_draws / (posterior.members + posterior.linear_draws)


def fit_ridge(
    x: Float64[np.ndarray, "N I"],
    y: Float64[np.ndarray, "N"],
    weights: Float64[np.ndarray, "N"] | None = None,
) -> tuple[Float64[np.ndarray, "I 2"], Float64[np.ndarray, "2"]]:
    """Fit the mean by ridge regression, and the log variance to leave-one-out residuals."""
    from sklearn.linear_model import RidgeCV

    ridge = RidgeCV(RIDGE_PENALTIES).fit(x, y, weights)
    variance = max(-ridge.best_score_, MIN_VARIANCE)
    weight = np.stack([ridge.coef_, np.zeros(x.shape[1])], axis=1)
    return weight, np.array([ridge.intercept_, math.log(variance)])


def fit_logistic(
    x: Float64[np.ndarray, "N I"],
    y: Int64[np.ndarray, "N"],
    num_classes: int,
    weights: Float64[np.ndarray, "N"],
) -> tuple[Float64[np.ndarray, "I C"], Float64[np.ndarray, "C"]]:
    """Fit a logistic regression whose penalty is selected by cross-validation."""
    from scipy.special import log_softmax
    from sklearn.linear_model import LogisticRegression

    def fit(
        index: Int64[np.ndarray, "M"], strength: float
    ) -> tuple[Float64[np.ndarray, "I C"], Float64[np.ndarray, "C"]]:
        weight = np.zeros((x.shape[1], num_classes))
        bias = np.full(num_classes, MISSING_LOGIT)
        classes = np.unique(y[index])
        if len(classes) == 1:
            bias[classes] = 0.0
            return weight, bias
        regression = LogisticRegression(C=strength)
        regression.fit(x[index], y[index], weights[index])
        if len(classes) == 2:  # scikit-learn fits only the second class's logit
            bias[classes[0]] = 0.0
            classes = classes[1:]
        weight[:, classes], bias[classes] = regression.coef_.T, regression.intercept_
        return weight, bias

    index = np.random.default_rng(0).permutation(len(y))
    folds = np.array_split(index[:MAX_FOLD_ROWS], FOLDS)
    scores = np.zeros(len(LOGISTIC_STRENGTHS))
    for fold in folds:
        train = np.setdiff1d(index[:MAX_FOLD_ROWS], fold)
        for i, strength in enumerate(LOGISTIC_STRENGTHS):
            weight, bias = fit(train, strength)
            log_probs = log_softmax(x[fold] @ weight + bias, axis=1)
            scores[i] += (weights[fold] * log_probs[np.arange(len(fold)), y[fold]]).sum()
    return fit(index, LOGISTIC_STRENGTHS[int(np.argmax(scores))])
