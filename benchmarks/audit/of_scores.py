"""Scores of draws: of classes, and of a regression's mixture of Gaussians."""

import numpy as np
from benchmarks.audit.check import SINGLE, Pairs, check
from benchmarks.audit.inputs import draws_of_classes, gaussians
from benchmarks.audit.packages import torch_uncertainty
from jaxtyping import Float64
from scipy.special import log_softmax

from model_store.scores.classification import Scores, predictive_scores, predictive_sums
from model_store.scores.regression import MixtureScores, log_density, mixture_scores, mixture_sums
from training.evaluation.metrics import distribution_function, mixture_quantile, pinball_loss
from training.fitting.convergence import RATIO_DRAWS as DRAWS
from training.fitting.convergence import pareto_k

LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)


def ours(log_probs: Float64[np.ndarray, "K N C"]) -> Scores:
    half = (len(log_probs) + 1) // 2
    sums = predictive_sums(log_probs[:half])
    if len(log_probs) > half:
        sums = sums.merge(predictive_sums(log_probs[half:], first_draw=half))
    return predictive_scores(sums)


def our_mixture(outputs: Float64[np.ndarray, "K N 2"]) -> MixtureScores:
    return mixture_scores(mixture_sums(outputs))


def jackknife(log_probs: Float64[np.ndarray, "K N C"], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return each row's jackknife bias and standard error of a score that is computed again, by scipy
    and numpy."""
    from resample import jackknife
    from scipy.stats import entropy

    def of_row(row: np.ndarray) -> float:  # draws by classes
        probs = np.exp(row)
        mean = probs.mean(axis=0)
        if name == "bald":
            return float(entropy(mean) - entropy(probs, axis=1).mean())
        if name == "mean_std":
            return float(probs.std(axis=0).mean())
        return float(entropy(mean)) if name == "entropy" else float(1.0 - mean.max())

    rows = [log_probs[:, n] for n in range(log_probs.shape[1])]
    bias = np.array([jackknife.bias(of_row, row) for row in rows])
    return bias, np.sqrt([jackknife.variance(of_row, row) for row in rows])


@check("entropy", "scipy", "stats.entropy")
def entropy_by_scipy(generator: np.random.Generator) -> Pairs:
    from scipy.stats import entropy

    for log_probs in draws_of_classes(generator):
        yield ours(log_probs).entropy, entropy(np.exp(log_probs).mean(axis=0), axis=1)


@check("expected entropy", "scipy", "stats.entropy")
def expected_entropy_by_scipy(generator: np.random.Generator) -> Pairs:
    from scipy.stats import entropy

    for log_probs in draws_of_classes(generator):
        yield ours(log_probs).expected_entropy, entropy(np.exp(log_probs), axis=2).mean(axis=0)


@check("BALD", "baal", "active.heuristics.BALD")
def bald_by_baal(generator: np.random.Generator) -> Pairs:
    from baal.active.heuristics import BALD

    for log_probs in draws_of_classes(generator):
        yield ours(log_probs).bald, BALD().compute_score(np.exp(log_probs).transpose(1, 2, 0))


@check("BALD", "torch-uncertainty", "MutualInformation", SINGLE)
def bald_by_torch_uncertainty(generator: np.random.Generator) -> Pairs:
    import torch

    metrics = torch_uncertainty()
    for log_probs in draws_of_classes(generator):
        theirs = metrics.MutualInformation(reduction="none")
        theirs.update(torch.from_numpy(np.exp(log_probs).transpose(1, 0, 2).copy()))
        yield (
            ours(log_probs).bald,
            theirs.compute().numpy().reshape(-1),
        )  # of one row theirs is a number


@check("variation ratio", "baal", "1 - active.heuristics.Certainty")
def variation_ratio_by_baal(generator: np.random.Generator) -> Pairs:
    from baal.active.heuristics import Certainty

    for log_probs in draws_of_classes(generator):
        yield (
            ours(log_probs).variation_ratio,
            1.0 - Certainty().compute_score(np.exp(log_probs).transpose(1, 2, 0)),
        )


@check("variation ratio", "torch-uncertainty", "VariationRatio(probabilistic=True)", SINGLE)
def variation_ratio_by_torch_uncertainty(generator: np.random.Generator) -> Pairs:
    import torch

    metrics = torch_uncertainty()
    for log_probs in draws_of_classes(generator):
        theirs = metrics.VariationRatio(probabilistic=True, reduction="none")
        theirs.update(
            torch.from_numpy(np.exp(log_probs))
        )  # draws first, whatever their documentation says
        yield ours(log_probs).variation_ratio, theirs.compute().numpy().reshape(-1)


@check("mean std", "torch", "std(correction=0)")
def mean_std_by_torch(generator: np.random.Generator) -> Pairs:
    import torch

    for log_probs in draws_of_classes(generator):
        std = torch.from_numpy(np.exp(log_probs)).std(dim=0, correction=0)
        yield ours(log_probs).mean_std, std.mean(dim=1).numpy()


@check("corrected BALD", "resample", "jackknife.bias of scipy's entropies")
def corrected_bald_by_resample(generator: np.random.Generator) -> Pairs:
    for log_probs in draws_of_classes(generator):
        if 1 < len(log_probs) < 50:
            scores = ours(log_probs)
            yield scores.bald_corrected, scores.bald - jackknife(log_probs, "bald")[0]


@check(
    "standard errors of all scores",
    "resample",
    "jackknife.variance of scipy's and numpy's scores",
    1e-8,
)
def standard_errors_by_resample(generator: np.random.Generator) -> Pairs:
    for log_probs in draws_of_classes(generator):
        if 1 < len(log_probs) < 50:
            for name, error in (ours(log_probs).standard_error or {}).items():
                yield error, jackknife(log_probs, name)[1]


@check("mean of a regression", "torch", "distributions.MixtureSameFamily")
def mean_by_torch(generator: np.random.Generator) -> Pairs:
    for outputs, _ in gaussians(generator):
        yield our_mixture(outputs).mean, mixture(outputs).mean.numpy()


@check("std of a regression", "torch", "distributions.MixtureSameFamily")
def std_by_torch(generator: np.random.Generator) -> Pairs:
    for outputs, _ in gaussians(generator):
        scores = mixture_scores(mixture_sums(outputs), ddof=0)  # the mixture's own
        yield scores.std, mixture(outputs).stddev.numpy()


@check("log density", "torch", "distributions.MixtureSameFamily")
def log_density_by_torch(generator: np.random.Generator) -> Pairs:
    import torch

    for outputs, y in gaussians(generator):
        yield log_density(outputs, y), mixture(outputs).log_prob(torch.from_numpy(y)).numpy()


@check("log density", "scoringrules", "-logs_mixnorm", 1e-8)
def log_density_by_scoringrules(generator: np.random.Generator) -> Pairs:
    import scoringrules

    for outputs, y in gaussians(generator):
        if (
            np.abs(y[:, None] - outputs[..., 0].T).max() < 20.0
        ):  # farther out theirs takes the logarithm of 0
            mean, std = moments(outputs)
            yield log_density(outputs, y), -scoringrules.logs_mixnorm(y, mean, std)


@check("probability integral transform", "torch", "distributions.MixtureSameFamily.cdf")
def pit_by_torch(generator: np.random.Generator) -> Pairs:
    import torch

    for outputs, y in gaussians(generator):
        yield distribution_function(outputs, y), mixture(outputs).cdf(torch.from_numpy(y)).numpy()


@check("CRPS", "scoringrules", "crps_mixnorm")
def crps_by_scoringrules(generator: np.random.Generator) -> Pairs:
    import scoringrules
    import torch

    from training.networks.likelihoods import crps

    for outputs, y in gaussians(generator):
        mean, std = moments(outputs)
        yield (
            crps(torch.from_numpy(outputs), torch.from_numpy(y)).numpy(),
            scoringrules.crps_mixnorm(y, mean, std),
        )


@check(
    "quantiles of a regression", "scipy", "optimize.brentq of torch's distribution function", 1e-8
)
def quantiles_by_scipy(generator: np.random.Generator) -> Pairs:
    import torch
    from scipy.optimize import brentq

    for outputs, _ in gaussians(generator):
        few = outputs[:, :5]
        theirs = mixture(few)

        def missing(
            at: float, row: int, q: float, theirs: torch.distributions.Distribution = theirs
        ) -> float:
            return float(theirs.cdf(torch.full((5,), at, dtype=torch.float64))[row]) - q

        for q in LEVELS:
            yield (
                mixture_quantile(few, q),
                [brentq(missing, -500.0, 500.0, args=(n, q), xtol=1e-12) for n in range(5)],
            )


@check("pinball loss", "scikit-learn", "metrics.mean_pinball_loss")
def pinball_by_scikit_learn(generator: np.random.Generator) -> Pairs:
    from sklearn.metrics import mean_pinball_loss

    for outputs, y in gaussians(generator):
        for q in LEVELS:
            predicted = mixture_quantile(outputs, q)
            yield pinball_loss(predicted, y, q).mean(), mean_pinball_loss(y, predicted, alpha=q)


@check("k-hat of importance ratios", "arviz-stats", "base.array_stats.psislw")
def k_hat_by_arviz(generator: np.random.Generator) -> Pairs:
    from arviz_stats.base import array_stats

    for scale in (0.1, 1.0, 3.0, 30.0):
        # The tail of 1,000 is of 95 by ours and R's loo, which round up, and of 94 by theirs.
        log_ratios = scale * generator.normal(size=DRAWS)
        yield (
            pareto_k(log_ratios),
            array_stats.psislw(-log_ratios)[1],
        )  # they take log-likelihoods left out


@check("temperature", "scipy", "optimize.minimize_scalar", 2e-3)
def temperature_by_scipy(generator: np.random.Generator) -> Pairs:
    import torch
    from scipy.optimize import minimize_scalar
    from scipy.special import logsumexp

    from training.calibration.temperature import PRIOR_STD, fit_temperature
    from training.networks.likelihoods import Categorical

    for scale in (0.5, 1.0, 3.0):
        log_probs = log_softmax(scale * generator.normal(size=(10, 300, 4)), axis=2)
        y = np.array([generator.choice(4, p=p / p.sum()) for p in np.exp(log_probs).mean(axis=0)])

        def loss(log_t: float, log_probs: np.ndarray = log_probs, y: np.ndarray = y) -> float:
            tempered = log_softmax(log_probs / np.exp(log_t), axis=2)[:, np.arange(300), y]
            return float(
                0.5 * (log_t / PRIOR_STD) ** 2 - (logsumexp(tempered, axis=0) - np.log(10)).sum()
            )

        found = fit_temperature(Categorical(4), torch.from_numpy(log_probs), torch.from_numpy(y))
        yield (
            np.log(found),
            minimize_scalar(loss, bounds=(-2.3, 2.3), method="bounded", options={"xatol": 1e-6}).x,
        )


def moments(outputs: Float64[np.ndarray, "K N 2"]) -> tuple[np.ndarray, np.ndarray]:
    return outputs[..., 0].T, np.exp(0.5 * outputs[..., 1]).T


def mixture(outputs: Float64[np.ndarray, "K N 2"]):  # noqa: ANN201
    import torch
    from torch.distributions import Categorical, MixtureSameFamily, Normal

    mean, std = (torch.from_numpy(part.copy()) for part in moments(outputs))
    return MixtureSameFamily(Categorical(torch.ones_like(mean)), Normal(mean, std))
