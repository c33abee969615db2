import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model_store.scores.classification import SCORE_NAMES, predictive_scores, predictive_sums
from model_store.scores.records import concatenate
from model_store.scores.regression import MIXTURE_SCORE_NAMES, mixture_scores, mixture_sums

CASES = {
    "two classes": (predictive_sums, predictive_scores, 2),
    "ten classes": (predictive_sums, predictive_scores, 10),
    "targets": (mixture_sums, mixture_scores, None),
}
every_case = pytest.mark.parametrize("case", CASES)


def outputs(case, num_draws, rows):
    random, classes = np.random.default_rng([num_draws, rows]), CASES[case][2]
    if classes is None:
        return random.normal(1.0, 2.0, (num_draws, rows, 2)).astype(np.float32)
    probs = random.dirichlet(np.full(classes, 0.3), (num_draws, rows))
    return np.log(probs, out=np.full(probs.shape, -np.inf), where=probs > 0)


def arrays(scores):
    values = {name: value for name, value in vars(scores).items() if isinstance(value, np.ndarray)}
    errors = scores.standard_error or {}
    return values | {f"error of {name}": error for name, error in errors.items()}


def assert_same_bits(actual, expected):
    assert actual.keys() == expected.keys()
    assert [name for name in actual if actual[name].tobytes() != expected[name].tobytes()] == []


@every_case
def test_by_name_returns_the_scores_used_by_detectors(case):
    sums, scores, classes = CASES[case]
    actual = scores(sums(outputs(case, 5, 3)))
    assert tuple(actual.by_name()) == (SCORE_NAMES if classes else MIXTURE_SCORE_NAMES)
    assert all(value is getattr(actual, name) for name, value in actual.by_name().items())


@every_case
@pytest.mark.parametrize("num_draws", [1, 2, 3, 9, 64, 100, 101, 350])
def test_row_scores_are_bit_identical_in_any_batch(case, num_draws):
    sums, scores, _ = CASES[case]
    draws = outputs(case, num_draws, 40)
    full = arrays(scores(sums(draws)))
    for ends in (range(41), [0, 2, 5, 40], [0, 8, 24, 40]):
        parts = [scores(sums(draws[:, a:b])) for a, b in itertools.pairwise(ends)]
        assert_same_bits(arrays(concatenate(parts)), full)


@every_case
@settings(max_examples=60)
@given(
    num_draws=st.integers(1, 40),
    cuts=st.sets(st.integers(1, 39)),
    groups=st.sampled_from([1, 3, 8, 100]),
    data=st.data(),
)
def test_merged_sums_do_not_depend_on_split_or_order(case, num_draws, cuts, groups, data):
    sums, scores, classes = CASES[case]
    draws = outputs(case, num_draws, 3)
    full = sums(draws, 0, groups)
    bounds = [0, *sorted(cut for cut in cuts if cut < num_draws), num_draws]
    parts = [sums(draws[a:b], a, groups) for a, b in itertools.pairwise(bounds)]
    merged, *remaining_parts = data.draw(st.permutations(parts))
    for part in remaining_parts:
        merged = merged.merge(part)
    assert merged.num_draws.tolist() == full.num_draws.tolist()
    assert merged.num_draws.sum() == num_draws
    for name, value in vars(full).items():
        exact = classes and name in ("prediction", "squared_deviations", "uncertainty")
        tolerances = {"rtol": 1e-12, "atol": 1e-14} if exact else {"rtol": 1e-11, "atol": 1e-13}
        np.testing.assert_allclose(vars(merged)[name], value, **tolerances, err_msg=name)
    actual, expected = arrays(scores(merged)), arrays(scores(full))
    assert actual.keys() == expected.keys()  # two draws have fewer standard errors
    for name, value in expected.items():
        is_score = name != "bald_corrected" and not name.startswith("error")
        tolerances = {"rtol": 1e-10, "atol": 1e-13} if is_score else {"rtol": 1e-6, "atol": 1e-9}
        np.testing.assert_allclose(actual[name], value, **tolerances, err_msg=name)


@every_case
def test_merging_empty_sums_changes_nothing(case):
    sums, scores, _ = CASES[case]
    full, empty = sums(outputs(case, 130, 2)), sums(outputs(case, 0, 2))
    for merged in (full.merge(empty), empty.merge(full)):
        assert_same_bits(arrays(scores(merged)), arrays(scores(full)))
