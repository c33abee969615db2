import io
import json
import shutil
from itertools import pairwise

import numpy as np
import pytest

from model_store.artifacts.manifest import manifest_digest
from model_store.artifacts.store import ModelStore
from model_store.inference.model import NEEDED, Model
from tests.support.serving import open_client


def predict(client, rows, expected_status=200, **fields):
    answer = client.post("/predict", json={"inputs": rows.tolist(), "seed": 7, **fields})
    assert answer.status_code == expected_status, answer.text
    return answer.json()["predictions"] if expected_status == 200 else answer.json()["detail"]


def abstains(predictions):
    return np.array([prediction["abstain"] for prediction in predictions])


@pytest.fixture(scope="module")
def model(digits_store):
    """The published model, loaded in this process."""
    return Model.load(ModelStore(digits_store).open("digits", "1", files=NEEDED), threads=1)


@pytest.fixture(scope="module")
def rows(digits_rows):
    return np.concatenate([digits_rows[:150], np.random.default_rng(0).integers(0, 17, (20, 64))])


def test_abstain_is_null_or_absent_without_risk(client, rows):
    assert abstains(predict(client, rows[:3])).tolist() == [None] * 3
    request = {"inputs": rows[:3].tolist()}
    content = client.post("/predict", json=request, headers={"Accept": "application/x-npz"}).content
    assert "abstain" not in np.load(io.BytesIO(content), allow_pickle=False)


def test_model_abstains_on_flagged_or_uncertain_rows(client, rows, model):
    # At this fpr few rows are flagged, so uncertainty decides.
    risk = model.calibration.rank_tables[100].smallest_risk(0.005)
    predictions = predict(client, rows, risk=risk, fpr=0.005)
    max_uncertainty = model.calibration.rank_tables[100].largest_uncertainty(0.005, risk)
    expected = [p["flag"] or p["variation_ratio"] > max_uncertainty for p in predictions]
    assert abstains(predictions).tolist() == expected
    assert {(p["flag"], p["abstain"]) for p in predictions} == {
        (True, True),
        (False, True),
        (False, False),
    }
    assert [{**p, "abstain": None} for p in predictions] == predict(client, rows, fpr=0.005)


def test_larger_risk_abstains_on_fewer_rows(client, rows, model):
    smallest = model.manifest.abstention.smallest_risk
    actual = [
        abstains(predict(client, rows, risk=risk)) for risk in (smallest, 2 * smallest, 0.3, 0.99)
    ]
    for stricter, looser in pairwise(actual):
        assert np.all(looser <= stricter)
    assert not actual[-1][:150].all()
    assert actual[-1][150:].all()


def test_smallest_risk_is_reported_and_lower_risks_are_refused(client, rows):
    description = client.get("/models/digits").json()
    smallest = description["smallest_risk"]
    assert description["manifest"]["abstention"]["smallest_risk"] == smallest
    assert not abstains(predict(client, rows, risk=smallest)).all()
    assert f"risk: expected at least {smallest:g}" in predict(
        client, rows, 422, risk=smallest - 1e-4
    )
    detail = predict(client, rows, 422, risk=1e-4, fpr=0.5, num_samples=7)  # 5 are calibrated
    assert "with 5 draws" in detail
    supported_risk = float(detail.split("at least ")[1].split(",")[0])
    assert not abstains(predict(client, rows, risk=supported_risk, fpr=0.5, num_samples=7)).all()


def test_risk_is_refused_if_every_row_is_flagged(client, rows):
    assert "risk: expected none" in predict(client, rows[:1], 422, risk=0.5, fpr=0.9999)


@pytest.mark.parametrize("num_samples", [5, 100])
def test_npz_abstain_array_matches_json(client, rows, num_samples):
    request = {"inputs": rows.tolist(), "seed": 7, "risk": 0.2, "num_samples": num_samples}
    content = client.post("/predict", json=request, headers={"Accept": "application/x-npz"}).content
    arrays = np.load(io.BytesIO(content), allow_pickle=False)
    assert np.array_equal(
        arrays["abstain"], abstains(client.post("/predict", json=request).json()["predictions"])
    )


def test_requests_without_risk_use_the_risk_of_the_version(digits_store, rows, tmp_path, model):
    smallest = model.manifest.abstention.smallest_risk
    store = tmp_path / "models"
    shutil.copytree(digits_store, store)
    shutil.copytree(store / "digits", store / "strict")
    for name, risk in (("digits", smallest), ("strict", smallest - 1e-4)):
        path = store / name / "1" / "manifest.json"
        manifest = json.loads(path.read_text())
        manifest["name"] = name
        manifest["abstention"]["risk"] = risk
        digest = manifest["digest"]
        text = json.dumps(manifest).encode()
        path.write_bytes(text.replace(digest.encode(), manifest_digest(text, digest).encode()))
    with open_client(store) as client:
        default_predictions = predict(client, rows, model="digits")
        assert default_predictions == predict(client, rows, model="digits", risk=smallest)
        assert set(abstains(default_predictions)) == {True, False}
        assert abstains(predict(client, rows, model="strict")).all()


def test_label_changed_by_extra_draws_joins_the_set_and_abstains(model):
    probs = np.full((7, 2, 10), 1e-3)
    probs[:5, :, 0], probs[:5, :, 1] = 0.502, 0.49
    probs[5:, :, 1] = 0.991
    probs[5:, 1], probs[5:, 1, 0] = 1e-3, 0.991  # all draws of the second row agree
    centres = [np.exp(by_count[-1].centre[0]) for by_count in model.calibration.standards.values()]
    density = np.float32([centres, centres])
    prediction = model.prediction(
        np.log(probs / probs.sum(axis=2, keepdims=True)).astype(np.float32), density
    )
    assert prediction.scores.probabilities.argmax(axis=1).tolist() == [1, 0]
    prediction_sets = prediction.prediction_sets(0.5)
    assert prediction_sets[0, :2].tolist() == [True, True]
    assert prediction_sets[1, :2].tolist() == [True, False]
    fpr, risk = 0.005, 0.999
    assert (prediction.p_values.p_value > fpr).all()
    assert (
        prediction.calibrated_scores.variation_ratio
        <= model.calibration.rank_tables[5].largest_uncertainty(fpr, risk)
    ).all()
    assert prediction.abstains(fpr, risk).tolist() == [True, False]
