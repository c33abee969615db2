import numpy as np
import pytest

from model_store.artifacts.manifest import DetectorNames
from model_store.artifacts.store import ModelStore
from model_store.conformal.rank_tables import class_nonconformity
from model_store.inference.model import detector_scores
from model_store.inference.runtime import Runtime
from model_store.scores.classification import predictive_scores, predictive_sums
from training.calibration.calibrate import by_detector, calibrate
from training.data.arrays import digits
from training.detectors import COMBINED
from training.scoring import draw_counts, draw_seed, served_scores
from training.seeds import hash_key

COUNTS = [1, 2, 3, 5, 10]
NAMES = DetectorNames(combined=("bald", "residual"), density=COMBINED, two_sided=("residual",))
ROWS = 45  # more than one chunk of rows


@pytest.fixture(scope="module")
def runtime(digits_store):
    artifact = ModelStore(digits_store).open("digits", "1")
    dimension = artifact.manifest.noise.dimension
    return Runtime(artifact.files["sampler.onnx"], artifact.files["network.onnx"], dimension)


@pytest.fixture(scope="module")
def rows():
    return digits().test.take(np.arange(ROWS))


def score_request(runtime, row, seed, num_draws):
    """Score one row as a separate request."""
    log_probs, density = runtime.run(row[None], runtime.draw(seed, 0, num_draws)[:, None])
    return predictive_scores(predictive_sums(log_probs), standard_errors=False), density


@pytest.mark.parametrize("share", [1, 5, 16, 40])
def test_scores_match_requests_with_the_same_seeds(runtime, rows, share):
    scores, densities = served_scores(runtime, rows, COUNTS, seed=3, share=share)
    for i in range(ROWS):
        for j, count in enumerate(COUNTS):
            # Scores for n draws use only the first n draws.
            expected, density = score_request(runtime, rows.x[i], draw_seed(3, i // share), count)
            assert (scores[j].num_draws == count).all()
            assert np.allclose(
                scores[j].probabilities[i], expected.probabilities[0], rtol=1e-12, atol=0
            )
            for name, values in scores[j].by_name().items():
                assert np.allclose(values[i], expected.by_name()[name][0], rtol=1e-9, atol=1e-12), (
                    name
                )
            assert np.array_equal(densities[i], density[0])


def test_requests_use_different_draws_unless_they_share_a_seed(runtime, rows):
    identical_rows = rows.take(np.zeros(10, dtype=np.int64))
    separate, _ = served_scores(runtime, identical_rows, [10], seed=3)
    shared, _ = served_scores(runtime, identical_rows, [10], seed=3, share=10)
    assert len(np.unique(separate[0].entropy)) == 10
    assert len(np.unique(shared[0].entropy)) == 1
    assert len({draw_seed(seed, i) for seed in range(10) for i in range(100)}) == 1000
    assert all(0 <= draw_seed(2**63 - 1, i) < 2**53 for i in range(100))


@pytest.mark.parametrize(
    ("default", "counts"),
    [(2, [1, 2]), (4, [1, 2, 3, 4]), (100, [1, 2, 3, 5, 10, 20, 30, 50, 75, 100]), (1000, None)],
)
def test_draw_counts_increase_from_1_to_the_default(default, counts):
    actual = draw_counts(default)
    assert actual == (counts or actual)
    assert actual[0] == 1
    assert actual[-1] == default
    assert actual == sorted(set(actual))


def test_calibration_scores_reference_and_ranking_rows_separately(runtime, rows):
    reference, ranking = rows.take(np.arange(20)), rows.take(np.arange(20, 45))
    calibration = calibrate(runtime, reference, ranking, COUNTS, NAMES, 10, seed=1)
    assert calibration.draw_counts.tolist() == COUNTS
    assert calibration.names.combined == ("bald", "residual")
    assert calibration.smallest_fpr == 1 / 26
    assert set(calibration.reference) == {
        "entropy",
        "bald",
        "mean_std",
        "variation_ratio",
        *COMBINED,
    }
    assert all(scores.shape == (5, 20) for scores in calibration.reference.values())
    # Sets and abstention use the labels of the ranking rows, scored with separate draws.
    assert calibration.nonconformity.shape == calibration.statistic.shape == (5, 25)
    ranking_scores, _ = served_scores(runtime, ranking, COUNTS, hash_key(1, 1))
    for j, scores in enumerate(ranking_scores):
        expected = class_nonconformity(scores.probabilities, ranking.y)
        assert calibration.nonconformity[j].tolist() == expected.tolist()
        assert calibration.answers.uncertainty[j].tolist() == scores.variation_ratio.tolist()
        is_wrong = scores.probabilities.argmax(axis=1) != ranking.y
        assert calibration.answers.is_wrong[j].tolist() == is_wrong.tolist()


def test_by_detector_returns_named_scores_and_predicted_labels(runtime, rows):
    scores, density = served_scores(runtime, rows, COUNTS, seed=3)
    actual = by_detector(scores, density, COMBINED)
    for j in range(len(COUNTS)):
        expected = detector_scores(scores[j], density, COMBINED)
        assert actual.by_name.keys() == expected.keys()
        for name, values in expected.items():
            assert np.array_equal(actual.by_name[name][j], values)
        assert np.array_equal(actual.labels[j], scores[j].probabilities.argmax(axis=1))
