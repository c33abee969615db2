"""Measures of predictions and of detection, their intervals, and comparisons of two versions."""

import numpy as np
from jaxtyping import Float64, Int64

from benchmarks.audit.check import SINGLE, Pairs, check
from benchmarks.audit.inputs import groups, labelled, tied
from benchmarks.audit.packages import torch_uncertainty
from training.evaluation.comparison import Pairs as PairedRows
from training.evaluation.intervals import auroc_variance, share_interval, wilson_interval
from training.evaluation.metrics import (
    BINS,
    area_under_risk_coverage,
    auroc,
    average_precision,
    class_figures,
    confusion_matrix,
    false_positive_rate,
    roc_curve,
    values,
)

TIES = "theirs divides rows of equal confidence among bins in the order in which they come, ours keeps them together"


def figures(probs: Float64[np.ndarray, "N C"], y: Int64[np.ndarray, "N"]) -> dict[str, float]:
    """Return our figures."""
    return values(class_figures(probs, y))


def by_torch(metric, probs: np.ndarray, y: np.ndarray) -> float:  # noqa: ANN001
    """Return a torch metric's value."""
    import torch

    metric.update(torch.from_numpy(np.ascontiguousarray(probs)), torch.from_numpy(y))
    return float(metric.compute())


def told_apart(positive: np.ndarray, negative: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return which rows are positive, and all scores."""
    return np.repeat([1, 0], [len(positive), len(negative)]), np.concatenate([positive, negative])


@check("accuracy", "scikit-learn", "metrics.accuracy_score")
def accuracy(generator: np.random.Generator) -> Pairs:
    from sklearn.metrics import accuracy_score

    for probs, y in (*labelled(generator), *tied(generator)):
        yield figures(probs, y)["accuracy"], accuracy_score(y, probs.argmax(axis=1))


@check("log-likelihood", "scikit-learn", "-metrics.log_loss")
def log_likelihood(generator: np.random.Generator) -> Pairs:
    from sklearn.metrics import log_loss

    for probs, y in labelled(generator):
        yield (
            figures(probs, y)["log_likelihood"],
            -log_loss(y, probs, labels=np.arange(probs.shape[1])),
        )


@check("log-likelihood", "torch-uncertainty", "-CategoricalNLL", SINGLE)
def log_likelihood_by_torch_uncertainty(generator: np.random.Generator) -> Pairs:
    metrics = torch_uncertainty()
    for probs, y in labelled(generator):
        yield figures(probs, y)["log_likelihood"], -by_torch(metrics.CategoricalNLL(), probs, y)


@check("Brier score", "scikit-learn", "metrics.brier_score_loss(scale_by_half=False)")
def brier(generator: np.random.Generator) -> Pairs:
    from sklearn.metrics import brier_score_loss

    for probs, y in (*labelled(generator), *tied(generator)):
        theirs = brier_score_loss(np.eye(probs.shape[1])[y], probs, scale_by_half=False)
        yield figures(probs, y)["brier"], theirs


@check("Brier score", "torch-uncertainty", "BrierScore", SINGLE)
def brier_by_torch_uncertainty(generator: np.random.Generator) -> Pairs:
    metrics = torch_uncertainty()
    for probs, y in (*labelled(generator), *tied(generator)):
        theirs = by_torch(metrics.BrierScore(num_classes=probs.shape[1]), probs, y)
        yield figures(probs, y)["brier"], theirs


@check(
    "expected calibration error", "torchmetrics", "MulticlassCalibrationError(n_bins=15)", SINGLE
)
def calibration_error(generator: np.random.Generator) -> Pairs:
    from torchmetrics.classification import MulticlassCalibrationError

    for probs, y in labelled(generator):
        theirs = by_torch(
            MulticlassCalibrationError(probs.shape[1], n_bins=BINS, norm="l1"), probs, y
        )
        yield figures(probs, y)["expected_calibration_error"], theirs


@check(
    "expected calibration error, ties at 0 and 1",
    "torchmetrics",
    "MulticlassCalibrationError(n_bins=15)",
    SINGLE,
)
def calibration_error_of_ties(generator: np.random.Generator) -> Pairs:
    from torchmetrics.classification import MulticlassCalibrationError

    for probs, y in tied(generator):
        theirs = by_torch(
            MulticlassCalibrationError(probs.shape[1], n_bins=BINS, norm="l1"), probs, y
        )
        yield figures(probs, y)["expected_calibration_error"], theirs


@check(
    "adaptive calibration error",
    "torch-uncertainty",
    "AdaptiveCalibrationError, equal bins",
    SINGLE,
)
def adaptive_calibration_error(generator: np.random.Generator) -> Pairs:
    metrics = torch_uncertainty()
    for probs, y in labelled(generator):
        rows = len(y) - len(y) % BINS
        metric = metrics.AdaptiveCalibrationError(
            "multiclass", num_classes=probs.shape[1], num_bins=BINS
        )
        theirs = by_torch(metric, probs[:rows], y[:rows])
        yield figures(probs[:rows], y[:rows])["adaptive_calibration_error"], theirs


@check(
    "adaptive calibration error, ties",
    "torch-uncertainty",
    "AdaptiveCalibrationError",
    SINGLE,
    TIES,
)
def adaptive_calibration_error_of_ties(generator: np.random.Generator) -> Pairs:
    metrics = torch_uncertainty()
    for probs, y in tied(generator):
        metric = metrics.AdaptiveCalibrationError(
            "multiclass", num_classes=probs.shape[1], num_bins=BINS
        )
        yield figures(probs, y)["adaptive_calibration_error"], by_torch(metric, probs, y)


@check(
    "class-wise calibration error",
    "torch-uncertainty",
    "ClasswiseCalibrationError(num_bins=15)",
    SINGLE,
)
def classwise_calibration_error(generator: np.random.Generator) -> Pairs:
    metrics = torch_uncertainty()
    for probs, y in labelled(generator):
        metric = metrics.ClasswiseCalibrationError(num_classes=probs.shape[1], num_bins=BINS)
        yield figures(probs, y)["classwise_calibration_error"], by_torch(metric, probs, y)


@check(
    "class-wise calibration error",
    "torchmetrics",
    "BinaryCalibrationError(n_bins=15), mean of classes",
    SINGLE,
)
def classwise_calibration_error_by_class(generator: np.random.Generator) -> Pairs:
    from torchmetrics.classification import BinaryCalibrationError

    for probs, y in labelled(generator):
        theirs = [
            by_torch(
                BinaryCalibrationError(n_bins=BINS, norm="l1"),
                probs[:, c],
                (y == c).astype(np.int64),
            )
            for c in range(probs.shape[1])
        ]
        yield figures(probs, y)["classwise_calibration_error"], np.mean(theirs)


@check("confusion of classes", "scikit-learn", "metrics.confusion_matrix")
def confusion(generator: np.random.Generator) -> Pairs:
    from sklearn.metrics import confusion_matrix as theirs

    for probs, y in (*labelled(generator), *tied(generator)):
        label, classes = probs.argmax(axis=1), probs.shape[1]
        yield confusion_matrix(label, y, classes), theirs(y, label, labels=np.arange(classes))


@check("AUROC", "scikit-learn", "metrics.roc_auc_score")
def area(generator: np.random.Generator) -> Pairs:
    from sklearn.metrics import roc_auc_score

    for positive, negative in groups(generator):
        yield auroc(positive, negative), roc_auc_score(*told_apart(positive, negative))


@check("ROC curve", "scikit-learn", "metrics.roc_curve(drop_intermediate=False)")
def curve(generator: np.random.Generator) -> Pairs:
    from sklearn.metrics import roc_curve as theirs

    for positive, negative in groups(generator):
        yield (
            roc_curve(positive, negative),
            theirs(*told_apart(positive, negative), drop_intermediate=False)[:2],
        )


@check("average precision", "scikit-learn", "metrics.average_precision_score")
def precision(generator: np.random.Generator) -> Pairs:
    from sklearn.metrics import average_precision_score

    for positive, negative in groups(generator):
        yield (
            average_precision(positive, negative),
            average_precision_score(*told_apart(positive, negative)),
        )


@check("false-positive rate at 95 % detection", "torch-uncertainty", "FPR95", SINGLE)
def false_positives(generator: np.random.Generator) -> Pairs:
    import warnings

    metrics = torch_uncertainty()
    for positive, negative in groups(generator):
        is_positive, scores = told_apart(positive, negative)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the memory that it takes
            metric = metrics.FPR95(pos_label=1)
        yield false_positive_rate(positive, negative), by_torch(metric, scores, is_positive)


@check(
    "area under risk and coverage",
    "torch-uncertainty",
    "mean of AURC.partial_compute, without ties",
    SINGLE,
)
def risk_coverage(generator: np.random.Generator) -> Pairs:
    metrics = torch_uncertainty()
    for probs, y in labelled(generator):
        metric = metrics.AURC()
        by_torch(metric, probs, y)
        error = (probs.argmax(axis=1) != y).astype(np.float64)
        yield (
            area_under_risk_coverage(-probs.max(axis=1), error),
            float(metric.partial_compute().double().mean()),
        )


@check(
    "area under risk and coverage",
    "torch-uncertainty",
    "AURC",
    SINGLE,
    "theirs is the trapezoids' area from coverage 1 / N, divided by 1 - 1 / N; ours the mean over "
    "coverages 1 / N to "
    "1, which their documentation too gives",
)
def risk_coverage_as_computed(generator: np.random.Generator) -> Pairs:
    metrics = torch_uncertainty()
    for probs, y in labelled(generator):
        error = (probs.argmax(axis=1) != y).astype(np.float64)
        yield (
            area_under_risk_coverage(-probs.max(axis=1), error),
            by_torch(metrics.AURC(), probs, y),
        )


@check("interval of a share", "scipy", "stats.binomtest(...).proportion_ci('exact')")
def interval_of_a_share(generator: np.random.Generator) -> Pairs:
    from scipy.stats import binomtest

    for rows in (1, 10, 359, 10_000):
        for hits in {0, rows, int(generator.integers(rows + 1))}:
            theirs = binomtest(hits, rows).proportion_ci(0.95, "exact")
            yield share_interval(hits, rows), (theirs.low, theirs.high)


@check("Wilson's interval", "scipy", "stats.binomtest(...).proportion_ci('wilson')")
def interval_of_wilson(generator: np.random.Generator) -> Pairs:
    from scipy.stats import binomtest

    for rows in (1, 10, 359, 10_000):
        for hits in {0, rows, int(generator.integers(rows + 1))}:
            theirs = binomtest(hits, rows).proportion_ci(0.95, "wilson")
            yield wilson_interval(hits / rows, rows), (theirs.low, theirs.high)


@check("DeLong's variance of an AUROC", "mlstatkit", "Delong_test, from its interval")
def delong(generator: np.random.Generator) -> Pairs:
    from MLstatkit import Delong_test
    from scipy.stats import norm

    for positive, negative in groups(generator):
        is_positive, scores = told_apart(positive, negative)
        low, high = Delong_test(is_positive, scores, generator.normal(size=len(scores)), n_boot=10)[
            2
        ]
        if (
            low > 0.0 and high < 1.0 and not np.allclose(scores, scores[0])
        ):  # else theirs is cut off
            theirs = ((high - low) / 2.0 / norm.ppf(0.975)) ** 2
            yield auroc_variance(positive, negative), theirs


@check("McNemar's test", "statsmodels", "stats.contingency_tables.mcnemar(exact=True)")
def mcnemar(generator: np.random.Generator) -> Pairs:
    from statsmodels.stats.contingency_tables import mcnemar as theirs

    for rows in (20, 1000):
        for share in (0.0, 0.05, 0.3):
            gained, lost = generator.binomial(rows // 2, share, size=2)
            table = [[rows // 2, lost], [gained, rows // 2]]
            if gained + lost:
                yield (
                    PairedRows(int(gained), int(lost), 2 * rows).mcnemar(),
                    theirs(table, exact=True).pvalue,
                )
