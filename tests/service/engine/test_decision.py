import math

import numpy as np
import pytest

from model_store.conformal.abstention import Abstention
from model_store.conformal.rank_tables import ConformalPValues, RankTables, mass_above
from model_store.inference.prediction import DecisionOptions, Prediction, decide
from model_store.scores.classification import predictive_scores, predictive_sums
from model_store.scores.regression import mixture_scores, mixture_sums
from service.engine.batching import MicroBatch

P_VALUES = np.array([0.01, 0.02, 0.04, 0.5])
PROBS = np.array([[0.9, 0.1], [0.6, 0.4], [0.55, 0.45], [0.99, 0.01]])


def options(fpr=0.05, fdr=None, coverage=0.5, risk=None):
    return DecisionOptions(fpr, fdr, coverage, risk)


def rank_tables(nonconformity, abstention=None):
    statistic = np.arange(19.0)
    return RankTables(2, statistic, {"a": statistic}, np.array(nonconformity), abstention)


@pytest.fixture
def of_classes():
    scores = predictive_scores(predictive_sums(np.log(np.stack([PROBS, PROBS]))))
    p_values = ConformalPValues(P_VALUES, {"a": np.array([0.2, 0.05, 0.04, 1.0])})
    # Of 19 ranking rows, those with an uncertainty of up to .4 are right and the others wrong.
    uncertainty = np.linspace(0.025, 0.475, 19)
    candidates = np.append(np.linspace(0.0, 0.48, 19), 1.0)
    tables = rank_tables(np.zeros(19), Abstention(candidates, uncertainty, uncertainty > 0.4))
    return Prediction(
        scores, {}, {}, np.zeros(4), scores, p_values, mass_above(scores.probabilities), tables
    )


def test_a_row_is_flagged_by_itself_at_a_rate_of_its_own(of_classes):
    assert decide(of_classes, options(fpr=0.02)).flag.tolist() == [True, True, False, False]


def test_rows_are_flagged_together_at_a_false_discovery_rate(of_classes):
    # Benjamini and Hochberg: the largest k with p_(k) <= k fdr / 4 is 3 at .06 (.04 <= .045), and 0
    # at .03.
    assert decide(of_classes, options(fdr=0.06)).flag.tolist() == [True, True, True, False]
    assert decide(of_classes, options(fdr=0.03)).flag.tolist() == [False] * 4
    small = of_classes.take(np.array([2, 3]))
    assert decide(small, options(fdr=0.06)).flag.tolist() == [False, False]


def test_a_detector_fires_where_its_own_p_value_is_at_most_the_rate(of_classes):
    assert decide(of_classes, options()).fired["a"].tolist() == [False, True, True, False]


def test_a_classification_has_sets_and_a_regression_intervals(of_classes):
    decision = decide(of_classes, options(coverage=0.99))
    assert decision.prediction_set.tolist() == [[True, True]] * 4
    assert decision.interval is None
    outputs = np.tile([3.0, math.log(4.0)], (2, 1, 1))
    scores = mixture_scores(mixture_sums(outputs))
    prediction = Prediction(
        scores,
        {},
        {},
        np.zeros(1),
        scores,
        ConformalPValues(P_VALUES[:1], {}),
        None,
        rank_tables(np.linspace(0.1, 1.9, 19)),
    )
    decision = decide(prediction, options(coverage=0.5))
    np.testing.assert_allclose(
        decision.interval, [[3.0 - 2.0, 3.0 + 2.0]]
    )  # the 10th of 19 nonconformities is 1
    assert decision.prediction_set is None
    assert decision.abstain is None


def test_rows_abstain_only_where_a_risk_is_in_force(of_classes):
    assert decide(of_classes, options()).abstain is None
    undecided = decide(of_classes, options(risk=0.9)).abstain
    assert undecided[:3].all()  # they are flagged


def test_what_is_made_of_a_micro_batch_is_made_once_for_equal_options_from_the_second_request_on(
    of_classes,
):
    batch, calls = MicroBatch(of_classes), []

    def make(prediction):
        calls.append(prediction)
        return decide(prediction, options())

    assert batch.share(options(), make) is None
    assert batch.share(options(fpr=0.1), make) is None
    assert calls == []
    assert batch.share(options(), make) is batch.share(options(), make) is not None
    assert batch.share(options(fpr=0.1), make) is not None
    assert calls == [of_classes, of_classes]
