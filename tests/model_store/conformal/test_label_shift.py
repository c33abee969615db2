import numpy as np
import pytest
from scipy import stats

from model_store.conformal.label_shift import (
    LabelShift,
    WeightedRows,
    shift_log_probs,
    weighted_p_value,
)
from model_store.conformal.rank_tables import (
    class_nonconformity,
    conformal_p_value,
    mass_above,
    quantile,
)

MEANS = np.array([0.0, 1.0, 2.5])
PRIORS, SHIFTED = np.array([0.7, 0.25, 0.05]), np.array([0.1, 0.3, 0.6])


def posterior(x, priors):
    """Compute p(y | x) for three Gaussians."""
    joint = priors * stats.norm.pdf(x[:, None], MEANS, 1.0)
    return joint / joint.sum(axis=1, keepdims=True)


def sample_rows(generator, rows, priors):
    y = generator.choice(3, size=rows, p=priors)
    return MEANS[y] + generator.normal(size=rows), y


def sample_weighted_rows(generator, rows):
    """Sample ranking rows with the training data's shares, weighted for `SHIFTED`."""
    x, y = sample_rows(generator, rows, PRIORS)
    weights = SHIFTED / PRIORS
    nonconformity = class_nonconformity(posterior(x, PRIORS), y)
    return WeightedRows(1, x, {}, nonconformity, weights[y], weights), nonconformity


def test_shifted_probabilities_follow_bayes_rule():
    x = np.linspace(-2, 4, 7)
    actual = shift_log_probs(np.log(posterior(x, PRIORS))[None], PRIORS, SHIFTED)
    np.testing.assert_allclose(np.exp(actual[0]), posterior(x, SHIFTED), rtol=1e-12)
    without_class_0 = shift_log_probs(np.log(posterior(x, PRIORS))[None], PRIORS, (0.0, 0.5, 0.5))
    assert (np.exp(without_class_0[0, :, 0]) == 0).all()
    np.testing.assert_allclose(np.exp(without_class_0).sum(-1), 1.0, rtol=1e-12)


def test_equal_weights_give_unweighted_p_values_and_sets():
    generator = np.random.default_rng(0)
    scores, new_scores = (
        np.round(generator.normal(size=50), 1),
        np.round(generator.normal(size=40), 1),
    )
    np.testing.assert_allclose(
        weighted_p_value(new_scores, scores, np.ones(50), 1.0),
        conformal_p_value(new_scores, np.sort(scores)),
    )
    probs = posterior(generator.normal(size=60) + 1, PRIORS)
    rows = WeightedRows(1, scores, {}, np.abs(scores) / 4, np.full(50, 2.0), np.full(3, 2.0))
    for coverage in (0.03, 0.31, 0.9, 0.977, 0.99):
        expected = mass_above(probs) <= quantile(np.sort(np.abs(scores) / 4), coverage)
        np.testing.assert_array_equal(rows.prediction_sets(mass_above(probs), coverage), expected)


def test_only_weighted_sets_cover_labels_under_shifted_shares():
    generator = np.random.default_rng(1)
    weighted_coverage, plain_coverage = [], []
    for _ in range(300):
        rows, nonconformity = sample_weighted_rows(generator, 150)
        x, y = sample_rows(generator, 100, SHIFTED)
        mass = mass_above(posterior(x, PRIORS))
        sets = rows.prediction_sets(mass, 0.9)
        weighted_coverage.append(sets[np.arange(100), y].mean())
        plain_coverage.append(
            (mass <= quantile(np.sort(nonconformity), 0.9))[np.arange(100), y].mean()
        )
    error = np.std(weighted_coverage) / np.sqrt(300)
    assert np.mean(weighted_coverage) > 0.9 - 5 * error
    assert np.mean(plain_coverage) < 0.8


def test_weighted_flag_rate_is_valid_under_shift_without_labels():
    generator = np.random.default_rng(2)
    weighted_rates, plain_rates = [], []
    for _ in range(300):
        rows, _ = sample_weighted_rows(generator, 300)
        x, _ = sample_rows(generator, 100, SHIFTED)
        weighted_rates.append((rows.p_values(x, {}).p_value <= 0.1).mean())
        plain_rates.append((conformal_p_value(x, np.sort(rows.statistic)) <= 0.1).mean())
    assert np.mean(weighted_rates) < 0.1 + 5 * np.std(weighted_rates) / np.sqrt(300)
    assert np.mean(plain_rates) > 0.3


def test_absent_class_is_in_no_set_and_uncalibrated_class_is_unknown():
    rows = WeightedRows(1, np.zeros(4), {}, np.zeros(4), np.ones(4), np.array([1.0, 0.0]))
    assert rows.prediction_sets(np.zeros((2, 2)), 0.9).tolist() == [[True, False], [True, False]]
    shift = LabelShift(np.array([0, 0]), np.array([1.0, 0.0]))
    assert shift.unknown_classes(np.array([0.5, 0.5])).tolist() == [1]
    assert shift.unknown_classes(np.array([1.0, 0.0])).tolist() == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": np.array([0.0, 1.0])}, "label_shift.labels: expected int64 numbers"),
        ({"labels": np.array([0, 2])}, "label_shift.labels: expected finite numbers from 0 to 1"),
        ({"shares": np.array([0.5])}, "label_shift.shares: expected float64 numbers"),
        ({"shares": np.array([0.5, 0.6])}, "label_shift.shares: expected shares that sum to 1"),
        ({"shares": np.array([1.0, 0.0])}, "positive for classes of ranking rows"),
        ({"shares": None}, "label_shift.shares"),
    ],
)
def test_tensors_round_trip_and_invalid_ones_are_refused(changes, message):
    shift = LabelShift(np.array([0, 1]), np.array([0.25, 0.75]))
    restored = LabelShift.from_tensors(shift.tensors(), 2, 2)
    assert restored.labels.tolist() == [0, 1]
    assert restored.shares.tolist() == [0.25, 0.75]
    assert LabelShift.from_tensors({}, 2, 2) is None
    tensors = {
        f"label_shift.{name}": array
        for name, array in {**vars(shift), **changes}.items()
        if array is not None
    }
    with pytest.raises(ValueError, match=message):
        LabelShift.from_tensors(tensors, 2, 2)
