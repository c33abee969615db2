import numpy as np
import pytest

from model_store.scores.tasks import PREDICTIVES

OUTPUTS = np.random.default_rng(0).normal(size=(5, 4, 2)).astype(np.float32)  # K, N, C


def test_samples_of_a_classification_are_probabilities():
    probs = PREDICTIVES["classification"].samples(
        np.log(np.array([[[0.25, 0.75]]], dtype=np.float32))
    )
    np.testing.assert_allclose(probs, [[[0.25, 0.75]]], rtol=1e-6)


def test_samples_of_a_regression_are_mean_and_standard_deviation():
    outputs = np.array(
        [[[3.0, np.log(4.0)], [-1.0, np.log(0.25)]]], dtype=np.float32
    )  # log variances
    np.testing.assert_allclose(
        PREDICTIVES["regression"].samples(outputs), [[[3.0, 2.0], [-1.0, 0.5]]], rtol=1e-6
    )
    assert PREDICTIVES["regression"].samples(OUTPUTS).shape == OUTPUTS.shape


def test_pools_are_ranked_by_the_score_that_is_asked_for():
    log_probs = OUTPUTS - np.logaddexp.reduce(OUTPUTS, axis=2, keepdims=True)
    classes, target = PREDICTIVES["classification"], PREDICTIVES["regression"]
    scores = classes.scores(classes.sums(log_probs))
    for name in ("entropy", "bald", "mean_std", "variation_ratio"):
        assert classes.acquisition(scores, name).tolist() == getattr(scores, name).tolist()
    mixture = target.scores(target.sums(OUTPUTS))
    np.testing.assert_allclose(target.acquisition(mixture, "variance"), mixture.std**2)
    np.testing.assert_allclose(
        target.acquisition(mixture, "epistemic_variance"), mixture.epistemic_std**2
    )
    assert classes.default_acquisition == "bald"
    assert target.default_acquisition == "epistemic_variance"
    for predictive in (classes, target):
        assert predictive.default_acquisition in predictive.acquisition_scores


@pytest.mark.parametrize("task", PREDICTIVES)
def test_scores_without_standard_errors_are_the_same_scores(task):
    predictive = PREDICTIVES[task]
    sums = predictive.sums(OUTPUTS - np.logaddexp.reduce(OUTPUTS, axis=2, keepdims=True))
    without, with_errors = predictive.scores(sums, standard_errors=False), predictive.scores(sums)
    assert without.standard_error is None
    assert with_errors.standard_error is not None
    for name, values in with_errors.by_name().items():
        assert without.by_name()[name].tolist() == values.tolist()
