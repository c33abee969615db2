import numpy as np
import pytest

from model_store.scores.tasks import PREDICTIVES

OUTPUTS = np.random.default_rng(0).normal(size=(5, 4, 2)).astype(np.float32)  # K, N, C


def test_classification_samples_are_probabilities():
    probs = PREDICTIVES["classification"].samples(
        np.log(np.array([[[0.25, 0.75]]], dtype=np.float32))
    )
    np.testing.assert_allclose(probs, [[[0.25, 0.75]]], rtol=1e-6)


def test_regression_samples_are_means_and_standard_deviations():
    outputs = np.array(
        [[[3.0, np.log(4.0)], [-1.0, np.log(0.25)]]], dtype=np.float32
    )  # log variances
    np.testing.assert_allclose(
        PREDICTIVES["regression"].samples(outputs), [[[3.0, 2.0], [-1.0, 0.5]]], rtol=1e-6
    )
    assert PREDICTIVES["regression"].samples(OUTPUTS).shape == OUTPUTS.shape


def test_acquisition_returns_the_requested_score():
    log_probs = OUTPUTS - np.logaddexp.reduce(OUTPUTS, axis=2, keepdims=True)
    classification, regression = PREDICTIVES["classification"], PREDICTIVES["regression"]
    scores = classification.scores(classification.sums(log_probs))
    for name in ("entropy", "bald", "mean_std", "variation_ratio"):
        assert classification.acquisition(scores, name).tolist() == getattr(scores, name).tolist()
    mixture = regression.scores(regression.sums(OUTPUTS))
    np.testing.assert_allclose(regression.acquisition(mixture, "variance"), mixture.std**2)
    np.testing.assert_allclose(
        regression.acquisition(mixture, "epistemic_variance"), mixture.epistemic_std**2
    )
    assert classification.default_acquisition == "bald"
    assert regression.default_acquisition == "epistemic_variance"
    for predictive in (classification, regression):
        assert predictive.default_acquisition in predictive.acquisition_scores


@pytest.mark.parametrize("task", PREDICTIVES)
def test_scores_do_not_depend_on_standard_errors(task):
    predictive = PREDICTIVES[task]
    sums = predictive.sums(OUTPUTS - np.logaddexp.reduce(OUTPUTS, axis=2, keepdims=True))
    scores, with_errors = predictive.scores(sums, standard_errors=False), predictive.scores(sums)
    assert scores.standard_error is None
    assert with_errors.standard_error is not None
    for name, values in with_errors.by_name().items():
        assert scores.by_name()[name].tolist() == values.tolist()
