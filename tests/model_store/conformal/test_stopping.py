"""Stopping when settled: the rule by hand, its replay over the ranking rows, and p-values that stay
exact."""

import re
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from safetensors.numpy import load, save
from scipy import stats

from model_store.artifacts.store import ModelStore
from model_store.conformal.abstention import Answers
from model_store.conformal.calibration import Calibration, DetectorScores
from model_store.conformal.detectors import FittedDetector, Surprisal, flag_statistic
from model_store.conformal.stopping import (
    Spread,
    StageScores,
    StoppingRule,
    look,
    stages_among,
    student_quantile,
)
from model_store.inference.model import NEEDED, Model
from model_store.scores.classification import (
    Scores,
    predictive_scores,
    predictive_sums,
)
from model_store.scores.records import concatenate, take
from model_store.scores.regression import mixture_scores, mixture_sums
from model_store.types import DetectorNames

COUNTS = [1, 2, 5, 10, 20]
STAGES = [5, 10]
CLASSES = 3
NAMES = DetectorNames(combined=("entropy", "distance"), density=("distance",))
RULES = [
    StoppingRule(0.05, 0.1),
    StoppingRule(0.3, 0.02),
    StoppingRule(0.05, 1e9),
    StoppingRule(0.2, 1e-12),
]
REFERENCE, RANKING, NEW, SPLITS = 60, 99, 100, 100
TAIL, GUARD = (
    0.001,
    2.0,
)  # as the guarantees page states them: the module's own would agree with any mistake


@pytest.fixture(scope="module")
def model(digits_store):
    return Model.load(ModelStore(digits_store).open("digits", "1", wanted=NEEDED), threads=1)


# The rule


@pytest.mark.parametrize("degrees", [4, 9, 19, 99, 999])
def test_the_width_is_students_quantile(degrees):
    assert student_quantile(degrees) == pytest.approx(stats.t.ppf(1 - TAIL, degrees), rel=0.01)


@pytest.mark.parametrize("degrees", [9, 24, 99])
@pytest.mark.parametrize("tail", [1e-5, 1e-7, 5e-9])
def test_the_width_of_races_is_students_quantile(degrees, tail):
    assert student_quantile(degrees, tail) == pytest.approx(stats.t.isf(tail, degrees), rel=0.03)


def test_stages_are_the_numbers_of_draws_from_five_on_but_the_last():
    assert stages_among([1, 2, 3, 5, 10, 20]) == [5, 10]
    assert stages_among([1, 2, 3, 4, 6]) == []
    assert stages_among([1]) == []


def test_a_row_stops_where_label_flag_and_scores_are_settled():
    """Each condition by itself, against the rule written out for one row at a time."""
    generator = np.random.default_rng(1)
    reference, ranking, new = (Rows.made(generator, n) for n in (300, 50, 400))
    calibration = calibrated(reference, ranking)
    reasons = set()
    for (place, stage), tolerance in product(enumerate(STAGES), (0.05, 1.0)):
        settled = new.settled(calibration, stage, StoppingRule(0.1, tolerance))
        j = COUNTS.index(stage)
        scores, width = new.scores[j], stats.t.ppf(1 - TAIL, stage - 1)
        usual = {
            name: np.median(
                reference.spreads[place].errors[name] / getattr(reference.scores[j], name)
            )
            for name in scores.standard_error
        }
        detectors = calibration.detectors(stage)
        by_reference = flag_statistic(
            {n: d(reference.by_name[n][j], reference.labels[j]) for n, d in detectors.items()},
            NAMES.combined,
        )
        guard = GUARD * np.sqrt(0.1 * 0.9 / 300)
        below, above = np.quantile(by_reference, [0.9 - guard, 0.9 + guard])
        for n in range(400):
            errors = {
                name: max(error[n], usual[name] * getattr(scores, name)[n])
                for name, error in scores.standard_error.items()
            }
            label = np.array([scores.probabilities[n].argmax()])
            distance = detectors["distance"](new.by_name["distance"][j][n : n + 1], label)[0]
            low, high = (
                np.log(
                    np.mean(
                        np.exp(
                            [
                                detectors["entropy"](scores.entropy[n : n + 1] + e, label)[0],
                                distance,
                            ]
                        )
                    )
                )
                for e in (-width * errors["entropy"], width * errors["entropy"])
            )
            margin = new.spreads[place].label_margin[n] / width
            is_near = abs(margin - 1) < 0.02 or min(abs(low - above), abs(high - below)) < 0.02
            reason = (margin > 1, low >= above or high <= below, max(errors.values()) <= tolerance)
            assert is_near or settled[n] == all(reason)
            reasons.add(reason)
    assert {
        (True, True, True),
        (False, True, True),
        (True, False, True),
        (True, True, False),
    } <= reasons


def test_a_regression_settles_alike_in_whatever_unit_its_target_is():
    """A tolerance is of multiples of a row's predicted standard deviation: metres and millimetres
    stop alike."""
    generator = np.random.default_rng(7)
    metres = np.stack(
        [generator.normal(size=(10, 30)), 0.3 * generator.normal(size=(10, 30))], axis=-1
    )
    millimetres = metres * np.array([1000.0, 1.0]) + np.array([0.0, 2 * np.log(1000.0)])
    errors = []
    for outputs in (metres, millimetres):
        sums = mixture_sums(outputs)
        scores = mixture_scores(sums)
        stage = StageScores(
            scores.by_name(), scores.labels, {"std": np.zeros(30)}, Spread.of(scores, sums)
        )
        detector = FittedDetector(None, Surprisal.fit(np.sort(scores.std)))
        errors.append(look(10, {"std": detector}, ("std",), stage, {}).error)
        largest = np.max(list(scores.standard_error.values()), axis=0)
        np.testing.assert_allclose(errors[-1], largest / scores.std, rtol=1e-12)
    np.testing.assert_allclose(errors[1], errors[0], rtol=1e-9)


# Its replay


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("num_draws", [2, 10, 20])
def test_the_ranking_rows_stop_as_new_rows_would(rule, num_draws):
    """Row by row and stage by stage, as a service goes about it."""
    generator = np.random.default_rng(2)
    reference, ranking = Rows.made(generator, 80), Rows.made(generator, 25)
    calibration = calibrated(reference, ranking)
    stops = [ranking.take(np.array([n])).stop(calibration, num_draws, rule) for n in range(25)]
    rank_tables = calibration.rank_tables(num_draws, rule)
    at = [(COUNTS.index(int(stop[0])), n) for n, stop in enumerate(stops)]
    order = np.argsort([calibration.statistic[place] for place in at], kind="stable")
    assert rank_tables.statistic.tolist() == [calibration.statistic[at[n]] for n in order]
    assert rank_tables.nonconformity.tolist() == sorted(
        calibration.nonconformity[place] for place in at
    )
    assert rank_tables.abstention.uncertainty.tolist() == [
        calibration.answers.uncertainty[at[n]] for n in order
    ]
    assert rank_tables.abstention.is_wrong.tolist() == [
        calibration.answers.is_wrong[at[n]] for n in order
    ]
    for name, surprisals in calibration.surprisals.items():
        assert rank_tables.surprisals[name].tolist() == sorted(surprisals[place] for place in at)


def test_some_rows_stop_early_and_others_never():
    generator = np.random.default_rng(3)
    rows = Rows.made(generator, 300)
    calibration = calibrated(Rows.made(generator, 300), rows)
    assert set(rows.stop(calibration, 20, StoppingRule(0.05, 0.1)).tolist()) == {5, 10, 20}
    assert set(rows.stop(calibration, 20, StoppingRule(0.05, 1e-12)).tolist()) == {20}
    assert (
        calibration.rank_tables(20, StoppingRule(0.05, 1e-12)).statistic.tolist()
        == calibration.rank_tables(20).statistic.tolist()
    )


def test_flags_under_the_rule_are_beta_binomial_over_many_splits():
    """Fresh rows for each split: reference, ranking and new. Given the count's distribution F, the
    randomised F(count - 1) + U P(count) is uniform: the Kolmogorov-Smirnov test fails a right flag
    once in 1e7 runs."""
    rule = StoppingRule(0.3, 0.1)
    generator = np.random.default_rng(6)
    k = int(rule.fpr * (RANKING + 1) + 1e-9)
    law = stats.betabinom(NEW, k, RANKING + 1 - k)
    counts, stops = [], []
    pool = Rows.made(generator, SPLITS * (REFERENCE + RANKING + NEW))
    for split in np.split(np.arange(len(pool.y)), SPLITS):
        reference, ranking, new = (
            pool.take(part) for part in np.split(split, [REFERENCE, REFERENCE + RANKING])
        )
        calibration = calibrated(reference, ranking)
        stop = new.stop(calibration, COUNTS[-1], rule)
        rank_tables = calibration.rank_tables(COUNTS[-1], rule)
        at = np.searchsorted(COUNTS, stop)
        statistic = np.empty(NEW)
        for j in np.unique(at):
            is_here = at == j
            scores = {name: by_count[j][is_here] for name, by_count in new.by_name.items()}
            surprisals = calibration.surprisals_of(scores, new.labels[j][is_here], COUNTS[j])
            statistic[is_here] = flag_statistic(surprisals, NAMES.combined)
        counts.append(int(np.sum(rank_tables.p_values(statistic, {}).p_value <= rule.fpr)))
        stops.append(stop)
    assert set(np.unique(stops)) == {5, 10, 20}
    uniform = law.cdf(np.array(counts) - 1) + generator.uniform(size=SPLITS) * law.pmf(counts)
    assert stats.kstest(uniform, "uniform").pvalue > 1e-7


# Tensors


def test_tensors_round_trip_through_safetensors():
    generator = np.random.default_rng(4)
    calibration = calibrated(Rows.made(generator, 60), Rows.made(generator, 50))
    read = Calibration.from_tensors(load(save(calibration.tensors())), NAMES, CLASSES)
    new = Rows.made(generator, 100)
    for rule in RULES:
        assert (
            read.rank_tables(20, rule).statistic.tolist()
            == calibration.rank_tables(20, rule).statistic.tolist()
        )
        assert new.stop(read, 20, rule).tolist() == new.stop(calibration, 20, rule).tolist()


MALFORMED = {
    "no statistics": ("settling.reference", lambda _: None),
    "statistics not sorted": ("settling.reference", lambda t: t[:, ::-1]),
    "statistics of another stage": ("settling.reference", lambda t: t[:1]),
    "no bounds": ("settling.lowest", lambda _: None),
    "bounds of fewer rows": ("settling.highest", lambda t: t[:, 1:]),
    "bounds that are not numbers": ("settling.lowest", lambda t: t * np.nan),
    "errors of another type": ("settling.error", lambda t: t.astype(np.float32)),
    "labels settled as numbers": ("settling.is_label_settled", lambda t: t.astype(np.float64)),
    "relative errors below 0": ("settling.relative_error.entropy", lambda t: -t),
    "relative errors of fewer stages": ("settling.relative_error.bald", lambda t: t[:1]),
}


@pytest.mark.parametrize("fault", MALFORMED)
def test_malformed_tensors_are_refused_by_name(fault):
    name, change = MALFORMED[fault]
    generator = np.random.default_rng(5)
    tensors = calibrated(Rows.made(generator, 60), Rows.made(generator, 50)).tensors()
    changed = change(tensors.pop(name))
    if changed is not None:
        tensors[name] = changed
    with pytest.raises(ValueError, match=re.escape(name)):
        Calibration.from_tensors(tensors, NAMES, CLASSES)


# A published model


@pytest.mark.parametrize(
    ("num_draws", "judged"), [(100, 100), (60, 50), (130, 100), (5, 5), (3, 3), (1, 1)]
)
def test_a_settled_row_says_what_its_draws_say_and_the_others_take_all(
    model, digits_rows, num_draws, judged
):
    x, draws = digits_rows[:60], model.runtime.draw_set(7, num_draws)
    prediction = settled(model, x, draws, StoppingRule(0.05, 0.03))
    taken = prediction.scores.num_draws
    assert set(taken.tolist()) <= {*model.calibration.stages(judged), num_draws}
    if num_draws > 5:
        assert {5, num_draws} <= set(taken.tolist())
    for count in np.unique(taken):
        fixed = model.predict(x, draws.theta[:count])
        is_here = taken == count
        for name, values in {**fixed.scores.by_name(), "p": fixed.scores.probabilities}.items():
            ours = (
                prediction.scores.probabilities if name == "p" else getattr(prediction.scores, name)
            )
            assert ours[is_here].tobytes() == values[is_here].tobytes()
        for name, values in fixed.detected.items():
            assert prediction.detected[name][is_here].tobytes() == values[is_here].tobytes()


def test_rows_of_a_version_that_other_standard_errors_calibrated_take_all_draws(
    digits_store, digits_rows, caplog
):
    artifact = ModelStore(digits_store).open("digits", "1", wanted=NEEDED)
    detectors = artifact.manifest.detectors.model_copy(update={"scores_version": 1})
    older = replace(
        artifact, manifest=artifact.manifest.model_copy(update={"detectors": detectors})
    )
    model = Model.load(older)
    assert "calibrated with other standard errors" in caplog.text
    x, draws = digits_rows[:60], model.runtime.draw_set(7, 100)
    prediction = settled(model, x, draws, StoppingRule(0.05, 0.03))
    assert set(prediction.scores.num_draws.tolist()) == {100}
    fixed = model.predict(x, draws.theta)
    assert prediction.p_values.p_value.tobytes() == fixed.p_values.p_value.tobytes()


def test_a_regression_that_was_calibrated_with_smaller_disagreement_keeps_it(tables):
    artifact = ModelStore(tables).open("rents", "1", wanted=NEEDED)
    detectors = artifact.manifest.detectors.model_copy(update={"scores_version": 2})
    manifest = artifact.manifest.model_copy(update={"detectors": detectors})
    now, older = Model.load(artifact), Model.load(replace(artifact, manifest=manifest))
    x, draws = np.zeros((3, now.row_size), dtype=np.float32), now.runtime.draw_set(7, 5)
    larger, smaller = (model.predict(x, draws.theta).scores for model in (now, older))
    np.testing.assert_allclose(larger.epistemic_std / smaller.epistemic_std, np.sqrt(5 / 4))
    np.testing.assert_array_equal(larger.aleatoric_std, smaller.aleatoric_std)


def test_a_row_stops_and_answers_with_the_same_bits_alone_and_in_any_batch(model, digits_rows):
    x, draws = digits_rows[:25], model.runtime.draw_set(3, 100)
    for rule in (StoppingRule(0.05, 0.03), StoppingRule(0.2, 0.3)):
        together = settled(model, x, draws, rule)
        for size in (1, 7):
            parts = [
                settled(model, x[start : start + size], draws, rule) for start in range(0, 25, size)
            ]
            for name in (
                "probabilities",
                "num_draws",
                "entropy",
                "expected_entropy",
                "bald",
                "mean_std",
            ):
                ours = np.concatenate([getattr(part.scores, name) for part in parts])
                assert ours.tobytes() == getattr(together.scores, name).tobytes(), (size, name)
            for name, values in together.scores.standard_error.items():
                assert (
                    np.concatenate([p.scores.standard_error[name] for p in parts]).tobytes()
                    == values.tobytes()
                )
            p_values = np.concatenate([part.p_values.p_value for part in parts])
            assert p_values.tobytes() == together.p_values.p_value.tobytes()


def test_a_tolerance_that_nothing_meets_changes_no_bit(model, digits_rows):
    x, draws = digits_rows[:30], model.runtime.draw_set(5, 100)
    fixed, ours = model.predict(x, draws.theta), settled(model, x, draws, StoppingRule(0.05, 1e-15))
    assert ours.p_values.p_value.tobytes() == fixed.p_values.p_value.tobytes()
    assert ours.scores.probabilities.tobytes() == fixed.scores.probabilities.tobytes()
    assert ours.prediction_sets(0.9).tolist() == fixed.prediction_sets(0.9).tolist()


def test_standard_errors_of_rows_that_stopped_are_within_the_tolerance(model, digits_rows):
    prediction = settled(
        model, digits_rows[:100], model.runtime.draw_set(1, 100), StoppingRule(0.05, 0.02)
    )
    errors = np.max(list(prediction.scores.standard_error.values()), axis=0)
    assert (errors[prediction.scores.num_draws < 100] <= 0.02).all()


# Helpers


class Rows:
    """Synthetic rows: what a small classifier says of each, whose draws scatter more where it is
    less sure."""

    def __init__(self, scores, spreads, distance, y):
        self.scores, self.spreads, self.distance, self.y = scores, spreads, distance, y
        self.labels = np.stack([s.probabilities.argmax(axis=1) for s in scores])
        self.by_name = {
            name: np.stack([getattr(s, name) for s in scores]) for name in scores[0].by_name()
        }
        self.by_name["distance"] = np.tile(distance, (len(scores), 1))

    @classmethod
    def made(cls, generator, rows):
        """Rows, all of one distribution."""
        scores, spreads, ys = [], [], []
        for start in range(0, rows, 5000):
            size = min(5000, rows - start)
            centre = generator.normal(size=(size, CLASSES)) * 3
            noise = generator.normal(size=(COUNTS[-1], size, CLASSES)) * np.exp(
                0.5 * generator.normal(size=(size, 1))
            )
            logits = centre + noise
            log_probs = logits - np.logaddexp.reduce(logits, axis=2, keepdims=True)
            by_count = [predictive_sums(log_probs[:count]) for count in COUNTS]
            made = [
                predictive_scores(sums, count > 1)
                for sums, count in zip(by_count, COUNTS, strict=True)
            ]
            scores.append(made)
            spreads.append(
                [Spread.of(made[COUNTS.index(s)], by_count[COUNTS.index(s)]) for s in STAGES]
            )
            ys.append(centre.argmax(axis=1))
        return cls(
            [concatenate(list(parts)) for parts in zip(*scores, strict=True)],
            [concatenate(list(parts)) for parts in zip(*spreads, strict=True)],
            np.exp(generator.normal(size=rows)),
            np.concatenate(ys),
        )

    def take(self, rows):
        """Some of them."""
        scores = [Scores(**{k: some(v, rows) for k, v in vars(s).items()}) for s in self.scores]
        return Rows(
            scores, [take(s, rows) for s in self.spreads], self.distance[rows], self.y[rows]
        )

    def settled(self, calibration, stage, rule):
        """Which of them a rule lets stop at a stage."""
        j = COUNTS.index(stage)
        scores = {name: by_count[j] for name, by_count in self.by_name.items()}
        return calibration.stops(
            scores, self.labels[j], self.spreads[STAGES.index(stage)], stage, rule
        )

    def stop(self, calibration, num_draws, rule):
        """At how many draws each of them stops."""
        stop = np.full(len(self.y), num_draws)
        for stage in reversed([s for s in STAGES if s < num_draws]):
            stop[self.settled(calibration, stage, rule)] = stage
        return stop


def some(values, rows):
    if isinstance(values, dict):
        return {name: v[rows] for name, v in values.items()}
    return None if values is None else values[rows]


def calibrated(reference, ranking):
    """A calibration on synthetic rows."""
    detected = [
        DetectorScores(rows.by_name, rows.labels, rows.spreads) for rows in (reference, ranking)
    ]
    uncertainties = (
        np.stack([s.variation_ratio for s in rows.scores]) for rows in (reference, ranking)
    )
    answers = Answers.of(*uncertainties, ranking.labels != ranking.y)
    nonconformity = np.stack(
        [1 - s.probabilities[np.arange(len(ranking.y)), ranking.y] for s in ranking.scores]
    )
    return Calibration.fit(COUNTS, *detected, nonconformity, NAMES, CLASSES, answers)


def settled(model, x, draws, rule):
    """What a model says of rows under one draw set and a rule."""
    known, density = model.runtime.before_draws(x)
    rows = model.runtime.shared_draws(known, draws)
    return model.prediction_with_stopping(rows, density, draws.num_draws, rule)
