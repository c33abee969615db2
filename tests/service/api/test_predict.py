import io
import math
from itertools import pairwise

import numpy as np
import pytest

from model_store.artifacts.store import ModelStore
from model_store.inference.model import NEEDED, Model
from model_store.scores.classification import SCORE_NAMES
from tests.support.files import npy_bytes
from training.detectors import COMBINED

NPY = {"Content-Type": "application/x-npy"}
DIGITS = [str(i) for i in range(10)]


def predict(client, rows, **fields):
    answer = client.post("/predict", json={"inputs": rows, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def load_npz(answer):
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-npz"
    return dict(np.load(io.BytesIO(answer.content), allow_pickle=False))


def entropy(probabilities):
    """Shannon entropy in nats."""
    return -sum(p * math.log(p) for p in probabilities if p > 0)


@pytest.fixture(scope="session")
def model(digits_store):
    """The published model, loaded in this process."""
    return Model.load(ModelStore(digits_store).open("digits", "1", files=NEEDED), threads=1)


HEAD = (
    "model version num_samples seed fpr fdr coverage confidence risk priors unknown_categories "
    "predictions"
)
FIELDS = (
    "label probabilities num_samples entropy expected_entropy bald bald_corrected mean_std "
    "variation_ratio standard_error flag p_value category detectors prediction_set abstain"
)


def test_answer_has_documented_fields(client, digits_rows):
    answer = predict(client, digits_rows[:3].tolist(), seed=7)
    assert set(answer) == set(HEAD.split())
    expected = {"model": "digits", "version": "1", "num_samples": 100, "seed": 7}
    assert expected.items() <= answer.items()
    assert len(answer["predictions"]) == 3
    for prediction in answer["predictions"]:
        assert set(prediction) == set(FIELDS.split())
        assert prediction["num_samples"] == 100
        assert set(prediction["standard_error"]) == set(SCORE_NAMES)
        assert set(prediction["detectors"]) == {*SCORE_NAMES, *COMBINED}
        for detector in prediction["detectors"].values():
            assert set(detector) == {"score", "p_value", "fired"}
            assert detector["fired"] is (detector["p_value"] <= 0.05)


def test_fields_of_a_prediction_are_consistent(client, digits_rows):
    noise = np.random.default_rng(0).uniform(0, 16, (20, 64))  # flagged rows
    rows = np.concatenate([digits_rows[:100], noise]).tolist()
    predictions = predict(client, rows, fpr=0.2)["predictions"]
    for prediction in predictions:
        probabilities = prediction["probabilities"]
        assert prediction["entropy"] == pytest.approx(entropy(probabilities), abs=1e-6)
        assert prediction["bald"] == pytest.approx(
            prediction["entropy"] - prediction["expected_entropy"], abs=1e-9
        )
        assert prediction["variation_ratio"] == pytest.approx(1 - max(probabilities), abs=1e-12)
        assert prediction["label"] == DIGITS[int(np.argmax(probabilities))]
        assert prediction["label"] in prediction["prediction_set"]
        assert prediction["flag"] == (prediction["p_value"] <= 0.2)
        for name in SCORE_NAMES:  # the detectors use all 100 draws
            assert prediction["detectors"][name]["score"] == prediction[name]
    assert {prediction["flag"] for prediction in predictions} == {True, False}


def test_confidence_enlarges_sets_reduces_flags_and_is_returned(client, digits_rows):
    rows = digits_rows.tolist()
    marginal = predict(client, rows, seed=1, coverage=0.97)
    confident = predict(client, rows, seed=1, coverage=0.97, confidence=0.99)
    assert (marginal["confidence"], confident["confidence"]) == (None, 0.99)
    sizes = [
        [len(row["prediction_set"]) for row in answer["predictions"]]
        for answer in (marginal, confident)
    ]
    assert (np.array(sizes[1]) >= sizes[0]).all()
    assert sum(sizes[1]) > sum(sizes[0])
    flags = [[row["flag"] for row in answer["predictions"]] for answer in (marginal, confident)]
    assert (np.array(flags[1]) <= flags[0]).all()
    assert sum(flags[1]) < sum(flags[0])
    masked = {"prediction_set": [], "flag": None, "detectors": {}}
    for row, with_confidence in zip(marginal["predictions"], confident["predictions"], strict=True):
        assert {**row, **masked} == {**with_confidence, **masked}
    arrays = load_npz(
        client.post(
            "/predict",
            json={"inputs": rows[:2], "coverage": 0.97, "confidence": 0.99},
            headers={"Accept": "application/x-npz"},
        )
    )
    assert arrays["confidence"].item() == 0.99


def test_unsupported_coverage_is_refused_with_largest_supported_value(client, digits_rows):
    request = {"inputs": digits_rows[:1].tolist(), "coverage": 0.995, "confidence": 0.99}
    answer = client.post("/predict", json=request)
    assert answer.status_code == 422
    # 220 ranking rows: .01^(1/220) = .97929
    expected = "coverage: expected at most 0.9792, which digits can guarantee with confidence 0.99 (220 rows), got 0.995"
    assert answer.json()["detail"] == expected
    assert client.post("/predict", json={**request, "coverage": 0.9792}).status_code == 200
    for confidence in (0, 1, "0.9", -0.1):
        answer = client.post("/predict", json={**request, "confidence": confidence})
        assert answer.status_code == 422
        assert answer.json()["detail"].startswith("confidence: ")


@pytest.mark.parametrize("num_noise", [0, 40])
def test_fdr_flags_rows_by_benjamini_hochberg(client, digits_rows, num_noise):
    noise = np.random.default_rng(0).uniform(0, 16, (num_noise, 64))
    rows = np.concatenate([digits_rows[:60], noise])
    predictions = predict(client, rows.tolist(), seed=3, fdr=0.2)["predictions"]
    p_values = np.array([p["p_value"] for p in predictions])
    ordered, total = np.sort(p_values), len(rows)
    largest = max((p for k, p in enumerate(ordered, 1) if p <= 0.2 * k / total), default=0.0)
    assert [p["flag"] for p in predictions] == (p_values <= largest).tolist()
    if num_noise:
        assert all(p["flag"] for p in predictions[60:])
    query, headers = {"seed": 3, "fdr": 0.2}, {**NPY, "Accept": "application/x-npz"}
    arrays = load_npz(
        client.post(
            "/predict", params=query, content=npy_bytes(rows.astype(np.float32)), headers=headers
        )
    )
    assert arrays["flag"].tolist() == [p["flag"] for p in predictions]
    by_row = predict(client, rows.tolist(), seed=3)["predictions"]
    assert [p["p_value"] for p in by_row] == p_values.tolist()


def test_prediction_sets_grow_with_coverage(client, digits_rows):
    rows = digits_rows[:100].tolist()
    answers = [
        predict(client, rows, seed=1, coverage=c)["predictions"]
        for c in (0.5, 0.9, 0.95, 0.99, 0.99999)
    ]
    for smaller, larger in pairwise(answers):
        assert all(
            set(a["prediction_set"]) <= set(b["prediction_set"])
            for a, b in zip(smaller, larger, strict=True)
        )
    assert all(prediction["prediction_set"] == DIGITS for prediction in answers[-1])


def test_unseeded_answers_use_different_draws(client, digits_rows):
    answers = [predict(client, digits_rows[:2].tolist(), num_samples=10) for _ in range(20)]
    assert len({answer["seed"] for answer in answers}) == 20
    assert len({answer["predictions"][0]["entropy"] for answer in answers}) == 20


def test_service_and_model_in_process_agree(client, digits_rows, model):
    rows = digits_rows[:6]
    answer = predict(client, rows.tolist(), seed=11, num_samples=50, coverage=0.9)["predictions"]
    expected = model.predict(rows, model.runtime.draw(11, 0, 50))
    sets = expected.prediction_sets(0.9)
    for n, prediction in enumerate(answer):
        assert prediction["probabilities"] == expected.scores.probabilities[n].tolist()
        assert prediction["p_value"] == expected.p_values.p_value[n]
        for name in SCORE_NAMES:
            assert prediction[name] == getattr(expected.scores, name)[n]
            assert prediction["standard_error"][name] == expected.scores.standard_error[name][n]
        assert prediction["detectors"]["residual"]["score"] == expected.detected["residual"][n]
        assert prediction["prediction_set"] == [
            name for name, is_member in zip(DIGITS, sets[n], strict=True) if is_member
        ]


def test_flat_nested_and_integer_rows_agree(client, digits_rows):
    rows = digits_rows[:3]
    answers = [
        client.post("/predict", json={"inputs": form.tolist(), "seed": 1}).content
        for form in (rows, rows.reshape(3, 8, 8), rows.astype(int))
    ]
    assert len(set(answers)) == 1


@pytest.mark.parametrize("dtype", ["<f4", ">f4", "<f8", "<f2", "u1", "i1", "<i8", ">i8", "<u4"])
def test_npy_body_of_any_dtype_is_answered_like_json(client, digits_rows, dtype):
    query = {"seed": 7, "num_samples": 20, "model": "digits", "version": "latest"}
    query |= {"fpr": 0.1, "coverage": 0.9}
    answer = client.post(
        "/predict", params=query, content=npy_bytes(digits_rows[:4].astype(dtype)), headers=NPY
    )
    assert answer.status_code == 200, answer.text
    assert (
        answer.content
        == client.post("/predict", json={"inputs": digits_rows[:4].tolist(), **query}).content
    )


@pytest.mark.parametrize("shape", [(4, 64), (4, 8, 8)])
@pytest.mark.parametrize("order", ["C", "F"])
def test_npy_body_of_any_layout_is_answered_like_json(client, digits_rows, shape, order):
    array = np.asarray(digits_rows[:4].reshape(shape), order=order)
    answer = client.post("/predict", params={"seed": 7}, content=npy_bytes(array), headers=NPY)
    assert (
        answer.content
        == client.post("/predict", json={"inputs": digits_rows[:4].tolist(), "seed": 7}).content
    )


def test_rows_of_a_large_request_are_answered_like_single_rows(client, digits_rows):
    rows = np.concatenate([digits_rows] * 4)[:1300].tolist()
    batch = client.post("/predict", json={"inputs": rows, "seed": 11}).json()["predictions"]
    assert len(batch) == 1300
    for n in (0, 999, 1000, 1299):
        single = client.post("/predict", json={"inputs": [rows[n]], "seed": 11}).json()[
            "predictions"
        ]
        assert batch[n] == single[0]


def test_pool_row_with_non_finite_score_is_ranked_or_refused(client, digits_rows):
    rows = digits_rows[:4].copy()
    rows[2] = 3e38
    answer = client.post("/acquire", json={"pool": rows.tolist(), "k": 4})
    if answer.status_code == 422:
        assert answer.json()["detail"].startswith(
            "pool.2: expected numbers that the model can compute with"
        )
    else:
        assert sorted(row["index"] for row in answer.json()["ranking"]) == [0, 1, 2, 3]
