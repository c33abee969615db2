"""P-values, sets, intervals, false discoveries, abstention, and what they rest on."""

import warnings

import numpy as np

from benchmarks.audit.check import Pairs, check
from benchmarks.audit.inputs import calibrations, labelled, tied
from model_store.conformal.abstention import (
    CANDIDATES,
    CONFIDENCE,
    NOTHING,
    STARTS,
    Abstention,
    binomial_tail,
)
from model_store.conformal.detectors import combined_surprisal
from model_store.conformal.false_discovery import benjamini_hochberg
from model_store.conformal.rank_tables import conformal_p_value
from model_store.conformal.sets import (
    class_nonconformity,
    confident_rank,
    coverage_rank,
    intervals,
    largest_coverage,
    mass_above,
    prediction_sets,
)

COVERAGES = (0.05, 0.1, 0.35, 0.5, 0.55, 0.57, 0.7, 0.9, 0.95, 0.99)
FALSE_DISCOVERY_RATES = (0.01, 0.05, 0.1, 0.2)


@check("p-values", "crepes", "base.p_values_batch(smoothing=False)")
def p_values(generator: np.random.Generator) -> Pairs:
    from crepes.base import p_values_batch

    for calibration, scores in calibrations(generator):
        yield (
            conformal_p_value(scores, calibration),
            p_values_batch(calibration, scores, smoothing=False),
        )


@check(
    "mass above a class",
    "mapie",
    "APSConformityScore.get_true_label_cumsum_proba, less the class's own",
)
def mass(generator: np.random.Generator) -> Pairs:
    from mapie.conformity_scores import APSConformityScore

    for probs, y in labelled(generator):
        if probs.shape[1] > 2:  # theirs binarises labels, and two classes take one column
            up_to, _ = APSConformityScore.get_true_label_cumsum_proba(
                y, probs, np.arange(probs.shape[1])
            )
            yield class_nonconformity(probs, y), up_to[:, 0] - probs[np.arange(len(y)), y]


@check(
    "prediction sets",
    "crepes",
    "ConformalClassifier.predict_set(smoothing=False), of the mass above",
)
def sets(generator: np.random.Generator) -> Pairs:
    from crepes import ConformalClassifier

    for probs, y in (*labelled(generator), *tied(generator)):
        mass_N_C = mass_above(probs)
        half = len(y) // 2
        calibration = np.sort(mass_N_C[np.arange(half), y[:half]])
        theirs = ConformalClassifier()
        theirs.fit(calibration)
        for coverage in COVERAGES:
            given = prediction_sets(mass_N_C[half:], calibration, coverage)
            yield given, theirs.predict_set(mass_N_C[half:], confidence=coverage, smoothing=False)


@check("rank of a coverage", "fractions", "of the decimal number, ceil((n + 1) coverage)")
def ranks(generator: np.random.Generator) -> Pairs:
    import math
    from fractions import Fraction

    for rows in (9, 19, 99, 100, 999, int(generator.integers(1, 5000))):
        for percent in range(1, 100):
            yield coverage_rank(rows, percent / 100), math.ceil((rows + 1) * Fraction(percent, 100))


@check("intervals", "crepes", "ConformalRegressor.predict_int(sigmas)")
def intervals_of_targets(generator: np.random.Generator) -> Pairs:
    from crepes import ConformalRegressor

    for calibration, mean in calibrations(generator):
        nonconformity = np.sort(np.abs(calibration))
        std = np.exp(generator.normal(size=len(mean)))
        theirs = ConformalRegressor()
        theirs.fit(nonconformity, sigmas=np.ones(len(nonconformity)))
        for coverage in COVERAGES:
            if rounds_well(len(nonconformity), coverage):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of too few rows: theirs are infinite too
                    expected = theirs.predict_int(mean, sigmas=std, confidence=coverage)
                yield intervals(mean, std, nonconformity, coverage), expected


def rounds_well(rows: int, coverage: float) -> bool:
    """Whether theirs takes the order statistic that the decimal number asks for: it multiplies 1 -
    coverage."""
    return int((1 - coverage) * (rows + 1)) == rows + 1 - coverage_rank(rows, coverage)


@check(
    "intervals, where (n + 1) coverage is whole",
    "crepes",
    "ConformalRegressor.predict_int(sigmas)",
    why="1 - .9 is a little less than .1 in floating point, and theirs then takes the next larger order statistic",
)
def intervals_at_whole_ranks(generator: np.random.Generator) -> Pairs:
    from crepes import ConformalRegressor

    for calibration, mean in calibrations(generator):
        nonconformity, std = np.sort(np.abs(calibration)), np.ones(len(mean))
        theirs = ConformalRegressor()
        theirs.fit(nonconformity, sigmas=np.ones(len(nonconformity)))
        for coverage in COVERAGES:
            if not rounds_well(len(nonconformity), coverage):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    expected = theirs.predict_int(mean, sigmas=std, confidence=coverage)
                yield intervals(mean, std, nonconformity, coverage), expected


@check("rank of a coverage with confidence", "scipy", "stats.binom.cdf")
def confident_ranks(generator: np.random.Generator) -> Pairs:
    from scipy.stats import binom

    for rows in (19, 99, int(generator.integers(100, 2000))):
        for coverage in COVERAGES[2:]:
            for confidence in (0.5, 0.9, 0.99):
                k = np.arange(1, rows + 1)
                enough = np.flatnonzero(
                    binom.cdf(k - 1, rows, coverage) >= confidence - 1e-12
                )  # .5 is .4999...
                expected = (
                    max(coverage_rank(rows, coverage), enough[0] + 1) if len(enough) else rows + 1
                )
                yield confident_rank(rows, coverage, confidence), expected


@check("largest coverage with confidence", "scipy", "stats.beta.ppf")
def largest(generator: np.random.Generator) -> Pairs:
    from scipy.stats import beta

    for rows in (1, 19, int(generator.integers(20, 2000))):
        for confidence in (0.5, 0.9, 0.99):
            expected = min(beta.ppf(1 - confidence, rows, 1), rows / (rows + 1))
            yield largest_coverage(rows, confidence), expected


@check("harmonic mean p-value of detectors", "scipy", "stats.hmean")
def harmonic(generator: np.random.Generator) -> Pairs:
    from scipy.stats import hmean

    for detectors in (1, 2, 5):
        surprisals = generator.exponential(3.0, size=(detectors, 200))
        yield combined_surprisal(list(surprisals)), -np.log(hmean(np.exp(-surprisals), axis=0))


@check("false discoveries", "scipy", "stats.false_discovery_control(method='bh')")
def false_discoveries(generator: np.random.Generator) -> Pairs:
    from scipy.stats import false_discovery_control

    for p in p_values_of_requests(generator):
        for fdr in FALSE_DISCOVERY_RATES:
            yield benjamini_hochberg(p, fdr), false_discovery_control(p) <= fdr * (1 + 1e-12)


@check("false discoveries", "statsmodels", "stats.multitest.multipletests(method='fdr_bh')")
def false_discoveries_by_statsmodels(generator: np.random.Generator) -> Pairs:
    from statsmodels.stats.multitest import multipletests

    for p in p_values_of_requests(generator):
        for fdr in FALSE_DISCOVERY_RATES:
            yield (
                benjamini_hochberg(p, fdr),
                multipletests(p, alpha=fdr * (1 + 1e-12), method="fdr_bh")[0],
            )


def p_values_of_requests(generator: np.random.Generator):  # noqa: ANN201
    """Return p-values of requests: of few and many rows, with ties, and some that are their
    bound."""
    for rows, calibrated in ((1, 99), (5, 19), (50, 999), (200, 99)):
        ranks = generator.integers(1, calibrated + 2, size=rows)
        strange = generator.uniform(size=rows) < 0.3
        yield np.where(strange, 1, ranks) / (calibrated + 1)
    yield 0.1 * np.arange(1, 11) / 10


@check("binomial tail", "scipy", "stats.binom.cdf")
def tails(generator: np.random.Generator) -> Pairs:
    from scipy.stats import binom

    rows = generator.integers(0, 3000, size=100)
    wrong = (rows * generator.uniform(size=100) ** 3).astype(np.int64)
    for risk in (0.001, 0.05, 0.5, 0.999):
        yield binomial_tail(wrong, rows, risk), binom.cdf(wrong, rows, risk)


@check(
    "abstention's threshold", "mapie", "FWERFixedSequenceTesting from each start, p-values by scipy"
)
def abstention(generator: np.random.Generator) -> Pairs:
    from mapie.risk_control.fwer_control import FWERFixedSequenceTesting
    from scipy.stats import binom

    for rows in (30, 200, 2000):
        candidates = np.append(np.sort(generator.uniform(size=CANDIDATES - 1)), 1.0)
        uncertainty = generator.uniform(size=rows)
        is_wrong = generator.uniform(size=rows) < uncertainty**3
        for flagged in (0, rows // 10):
            unflagged = slice(0, rows - flagged)
            is_answered = uncertainty[unflagged] <= candidates[:, None]
            wrong = (is_answered & is_wrong[unflagged]).sum(axis=1)
            for risk in (0.02, 0.1, 0.3):
                p = binom.cdf(wrong, is_answered.sum(axis=1), risk)
                starts = [int(np.ceil(share * CANDIDATES)) - 1 for share in STARTS]
                level = (1.0 - CONFIDENCE) / len(STARTS)
                rejected = [s + FWERFixedSequenceTesting().run(p[s:], level) for s in starts]
                most = max((int(r.max()) for r in rejected if len(r)), default=-1)
                expected = NOTHING if most < 0 else candidates[most]
                yield (
                    Abstention(candidates, uncertainty, is_wrong).threshold(flagged, risk),
                    expected,
                )


@check("noise, before it is made normal", "randomgen", "Philox(number=4, width=64)")
def philox(generator: np.random.Generator) -> Pairs:
    from randomgen import Philox

    from model_store.inference import noise

    for _ in range(5):
        seed, first, dimension = int(generator.integers(2**53)), int(generator.integers(1000)), 13
        blocks = -(-dimension // 8)
        words = (
            Philox(counter=first * blocks, key=seed, number=4, width=64)
            .random_raw(4 * blocks)
            .view("<u4")
        )
        yield noise.standard_normal(seed, first, 1, dimension)[0], noise.normal(words)[:dimension]


@check("noise, made normal", "scipy", "stats.norm.isf", 1e-6)
def normal(generator: np.random.Generator) -> Pairs:
    from scipy.stats import norm

    from model_store.inference import noise

    words = generator.integers(2**32, size=100_000, dtype=np.uint32)
    words = np.append(words, np.array([0, 1, 2**31 - 1, 2**31, 2**32 - 1], dtype=np.uint32))
    size = norm.isf(((words & np.uint32(2**31 - 1)) + 0.5) / 2**32)
    yield noise.normal(words.copy()), np.where(words >> 31, -size, size)
