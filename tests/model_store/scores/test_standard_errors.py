import numpy as np
import pytest
from scipy.special import digamma

from model_store.scores.classification import SCORE_NAMES, predictive_scores, predictive_sums
from model_store.scores.regression import MIXTURE_ERROR_NAMES, mixture_scores, mixture_sums
from model_store.scores.sums import MIN_SPREAD_GROUPS, DrawSums
from model_store.scores.tasks import PREDICTIVES

FEW_DRAWS = {
    "classification": {"entropy", "variation_ratio"},
    "regression": {"mean", "aleatoric_std"},
}
NAMES = {"classification": set(SCORE_NAMES), "regression": set(MIXTURE_ERROR_NAMES)}
BANDS = {5: 0.1, 20: 0.1, 100: 0.1}
SEEDS = 1000
CLASSES = (  # Dirichlet parameters per row
    *([5, 1, 0.2, 0.2, 0.1], [10, 3, 1, 1, 1], [2, 1, 0.5, 0.25, 0.1], [4, 3, 0.3, 0.1, 0.1]),
    *([30, 20, 10, 5, 1], [1, 0.5, 0.2, 0.1, 0.1], [8, 1, 1, 1, 1]),
)
TARGETS = (  # distribution of m_k and standard deviation of log s_k per row
    *(
        ("normal", 0.15),
        ("normal", 0.3),
        ("laplace", 0.15),
        ("laplace", 0.3),
        ("gumbel", 0.15),
        ("logistic", 0.0),
    ),
    *(("exponential", 0.3),),
)


# Comparison with references


@pytest.mark.parametrize("task", NAMES)
@pytest.mark.parametrize(
    ("num_draws", "groups"), [(2, 100), (3, 100), (5, 100), (40, 100), (17, 7), (30, 10), (9, 4)]
)
def test_standard_errors_match_jackknife(task, num_draws, groups):
    generator = np.random.default_rng([num_draws, groups])
    draws = {
        "classification": lambda: generator.dirichlet([3.0, 1.0, 0.3, 0.3], (num_draws, 50)),
        "regression": lambda: generator.normal(size=(num_draws, 50, 2)),
    }[task]()
    actual = score(task, draws, groups).standard_error
    expected = jackknife(task, draws, groups)
    assert actual.keys() == (
        NAMES[task] if min(num_draws, groups) >= MIN_SPREAD_GROUPS else FEW_DRAWS[task]
    )
    for name, error in actual.items():
        np.testing.assert_allclose(error, expected[name], rtol=1e-12, atol=1e-12, err_msg=name)


@pytest.mark.parametrize(("num_draws", "groups"), [(2, 100), (3, 100), (40, 100), (17, 7), (9, 3)])
def test_corrected_bald_matches_jackknife(num_draws, groups):
    generator = np.random.default_rng([num_draws, groups])
    draws = generator.dirichlet([3.0, 1.0, 0.3, 0.3], (num_draws, 50))
    actual = score("classification", draws, groups)
    expected = np.zeros(50)
    num_groups = min(groups, num_draws)
    for j in range(num_groups):
        in_group = np.arange(num_draws) % groups == j
        reduced_bald = score("classification", draws[~in_group], groups).bald
        expected += actual.bald - (1 - in_group.mean()) * reduced_bald
    np.testing.assert_allclose(actual.bald_corrected, expected, rtol=1e-9, atol=1e-12)
    assert (actual.bald_corrected >= actual.bald).all()
    if num_draws == 2:
        np.testing.assert_allclose(actual.bald_corrected, 2 * actual.bald, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("num_draws", [3, 5, 20])
def test_correction_reduces_bias_of_bald(num_draws):
    """Compare with the exact BALD of log-concave and spiky Dirichlet distributions."""
    generator = np.random.default_rng(num_draws)
    seeds = 2000
    for alpha in map(np.array, CLASSES):
        p = alpha / alpha.sum()
        expected_entropy = digamma(alpha.sum() + 1) - (p * digamma(alpha + 1)).sum()
        truth = -(p * np.log(p)).sum() - expected_entropy
        actual = score("classification", generator.dirichlet(alpha, (num_draws, seeds)), 100)
        bias, residual = actual.bald.mean() / truth - 1, actual.bald_corrected.mean() / truth - 1
        error = actual.bald_corrected.std() / truth / np.sqrt(seeds)
        assert bias < -0.5 / num_draws
        assert abs(residual) < abs(bias) / 2 + 4 * error
        if alpha.min() >= 1:
            assert abs(residual) < 0.5 / num_draws**2 + 4 * error


def test_corrected_bald_is_none_for_one_draw_and_zero_for_equal_draws():
    draw = np.random.default_rng(0).dirichlet(np.ones(4), (1, 20))
    assert score("classification", draw, 100).bald_corrected is None
    scores = score("classification", np.repeat(draw, 6, axis=0), 100)
    np.testing.assert_allclose(scores.bald_corrected, 0.0, atol=1e-12)


@pytest.mark.parametrize("num_draws", BANDS)
@pytest.mark.parametrize("task", NAMES)
def test_standard_errors_match_standard_deviation_across_seeds(task, num_draws):
    generator = np.random.default_rng(num_draws)
    if task == "classification":
        rows = [generator.dirichlet(alpha, (num_draws, SEEDS)) for alpha in CLASSES]
    else:
        shape = (num_draws, SEEDS)
        rows = [
            np.stack(
                [getattr(generator, kind)(size=shape), 2.0 * log_s * generator.normal(size=shape)],
                axis=-1,
            )
            for kind, log_s in TARGETS
        ]
    scores = [score(task, draws) for draws in rows]
    for name in NAMES[task]:
        errors = np.array([case.standard_error[name] for case in scores])
        actual = np.array([getattr(case, name).std() for case in scores])
        is_varying = actual > 1e-9  # excludes noise on which all draws agree
        mean = np.median(errors.mean(axis=1)[is_varying] / actual[is_varying])
        root_mean_square = np.median(
            np.sqrt(np.square(errors).mean(axis=1))[is_varying] / actual[is_varying]
        )
        band = BANDS[num_draws]
        assert mean < 1.0 + band, name
        assert 1.0 - band < root_mean_square < 1.2, name


@pytest.mark.parametrize("task", NAMES)
@pytest.mark.parametrize("num_draws", [101, 150, 300])
def test_grouping_many_draws_preserves_standard_errors(task, num_draws):
    generator = np.random.default_rng(num_draws)
    draws = (
        generator.dirichlet([3.0, 1.0, 0.3, 0.3], (num_draws, 300))
        if task == "classification"
        else generator.normal(size=(num_draws, 300, 2))
    )
    grouped, exact = score(task, draws).standard_error, score(task, draws, num_draws).standard_error
    for name in NAMES[task]:
        assert np.mean(grouped[name] ** 2) == pytest.approx(np.mean(exact[name] ** 2), rel=0.05), (
            name
        )


# Missing standard errors


@pytest.mark.parametrize("task", NAMES)
def test_few_draws_omit_standard_errors_of_disagreement(task):
    rows = np.random.default_rng(0).dirichlet([2.0, 1.0], (MIN_SPREAD_GROUPS, 4))
    assert score(task, rows).standard_error.keys() == NAMES[task]
    for num_draws in range(2, MIN_SPREAD_GROUPS):
        assert score(task, rows[:num_draws]).standard_error.keys() == FEW_DRAWS[task]
    assert score(task, rows[:1]).standard_error is None


# Helpers


def score(task, draws, groups=100):
    if task == "classification":
        with np.errstate(divide="ignore"):
            return predictive_scores(predictive_sums(np.log(draws), groups=groups))
    return mixture_scores(mixture_sums(draws, groups=groups))


def compute_by_definition(task, draws):
    if task == "classification":
        p = draws.mean(axis=0)
        bald = np.mean(np.sum(draws * np.log(np.where(draws > 0, draws, 1.0) / p), axis=2), axis=0)
        scores = (
            -np.sum(p * np.log(p), axis=1),
            bald,
            draws.std(axis=0).mean(axis=1),
            1.0 - p.max(axis=1),
        )
        return dict(zip(SCORE_NAMES, scores, strict=True))
    aleatoric = np.exp(draws[..., 1]).mean(axis=0)
    epistemic = draws[..., 0].var(axis=0, ddof=min(1, len(draws) - 1))
    values = (
        draws[..., 0].mean(axis=0),
        *map(np.sqrt, (aleatoric + epistemic, aleatoric, epistemic)),
    )
    return dict(zip(MIXTURE_ERROR_NAMES, values, strict=True))


def jackknife(task, draws, groups):
    num_draws = len(draws)
    members = [np.arange(j, num_draws, groups) for j in range(min(groups, num_draws))]
    full, reduced = (
        compute_by_definition(task, draws),
        [compute_by_definition(task, np.delete(draws, group, axis=0)) for group in members],
    )
    h = np.array([num_draws / len(group) for group in members])[:, None]
    errors = {}
    for name, value in full.items():
        reduced_values = np.array([scores[name] for scores in reduced])
        pseudo = h * value - (h - 1) * reduced_values
        estimate = len(members) * value - np.sum((1 - 1 / h) * reduced_values, axis=0)
        errors[name] = np.sqrt(np.mean((pseudo - estimate) ** 2 / (h - 1), axis=0))
    return errors


@pytest.mark.parametrize("task", PREDICTIVES)
def test_draw_offset_defaults_to_zero(task):
    outputs = np.random.default_rng(8).normal(size=(7, 4, 2)).astype(np.float32)
    predictive, task_sums = (
        PREDICTIVES[task],
        mixture_sums if task == "regression" else predictive_sums,
    )
    expected = [1, 1, 1, 1, 1, 1, 1]
    for sums in (predictive.sums, task_sums):
        assert sums(outputs[:3]).merge(sums(outputs[3:], 3)).num_draws.tolist() == expected
    draws = outputs[..., 0].T.astype(np.float64)
    assert (
        DrawSums.from_draws(draws[:, :3], draws[:, :3])
        .merge(DrawSums.from_draws(draws[:, 3:], draws[:, 3:], 3))
        .num_draws.tolist()
        == expected
    )
