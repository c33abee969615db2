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


def test_without_a_level_nothing_is_said(client, rows):
    assert abstains(predict(client, rows[:3])).tolist() == [None] * 3
    request = {"inputs": rows[:3].tolist()}
    packed = client.post("/predict", json=request, headers={"Accept": "application/x-npz"}).content
    assert "abstain" not in np.load(io.BytesIO(packed), allow_pickle=False)


def test_rows_are_undecided_where_they_are_flagged_or_doubtful(client, rows, model):
    risk = model.calibration.rank_tables[100].smallest_risk(
        0.005
    )  # few rows are flagged, so that uncertainty decides
    predictions = predict(client, rows, risk=risk, fpr=0.005)
    largest = model.calibration.rank_tables[100].largest_uncertainty(0.005, risk)
    expected = [p["flag"] or p["variation_ratio"] > largest for p in predictions]
    assert abstains(predictions).tolist() == expected
    assert {(p["flag"], p["abstain"]) for p in predictions} == {
        (True, True),
        (False, True),
        (False, False),
    }
    assert [{**p, "abstain": None} for p in predictions] == predict(client, rows, fpr=0.005)


def test_a_larger_risk_abstains_less(client, rows, model):
    smallest = model.manifest.abstention.smallest_risk
    actual = [
        abstains(predict(client, rows, risk=risk)) for risk in (smallest, 2 * smallest, 0.3, 0.99)
    ]
    for extra, fewer in pairwise(actual):
        assert np.all(fewer <= extra)
    assert not actual[-1][:150].all()
    assert actual[-1][150:].all()


def test_the_smallest_risk_is_stated_and_a_smaller_one_is_refused_with_it(client, rows):
    described = client.get("/models/digits").json()
    smallest = described["smallest_risk"]
    assert described["manifest"]["abstention"]["smallest_risk"] == smallest
    assert not abstains(predict(client, rows, risk=smallest)).all()
    assert f"risk: expected at least {smallest:g}" in predict(
        client, rows, 422, risk=smallest - 1e-4
    )
    detail = predict(client, rows, 422, risk=1e-4, fpr=0.5, num_samples=7)  # judged by the first 5
    assert "with 5 draws" in detail
    stated = float(detail.split("at least ")[1].split(",")[0])
    assert not abstains(predict(client, rows, risk=stated, fpr=0.5, num_samples=7)).all()


def test_no_risk_can_be_certified_where_the_flag_fires_on_all(client, rows):
    assert "risk: expected none" in predict(client, rows[:1], 422, risk=0.5, fpr=0.9999)


@pytest.mark.parametrize("num_samples", [5, 100])
def test_arrays_say_the_same(client, rows, num_samples):
    request = {"inputs": rows.tolist(), "seed": 7, "risk": 0.2, "num_samples": num_samples}
    packed = client.post("/predict", json=request, headers={"Accept": "application/x-npz"}).content
    arrays = np.load(io.BytesIO(packed), allow_pickle=False)
    assert np.array_equal(
        arrays["abstain"], abstains(client.post("/predict", json=request).json()["predictions"])
    )


def test_the_level_of_a_version_holds_for_requests_that_name_none(
    digits_store, rows, tmp_path, model
):
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
        by_default = predict(client, rows, model="digits")
        assert by_default == predict(client, rows, model="digits", risk=smallest)
        assert set(abstains(by_default)) == {True, False}
        assert abstains(predict(client, rows, model="strict")).all()


def test_a_label_that_the_judged_draws_do_not_give_is_in_the_set_and_undecided(model):
    probs = np.full((7, 2, 10), 1e-3)
    probs[:5, :, 0], probs[:5, :, 1] = 0.502, 0.49
    probs[5:, :, 1] = 0.991
    probs[5:, 1], probs[5:, 1, 0] = 1e-3, 0.991  # the second row's draws agree
    usual = [np.exp(by_count[-1].centre[0]) for by_count in model.calibration.standards.values()]
    density = np.float32([usual, usual])
    prediction = model.prediction(
        np.log(probs / probs.sum(axis=2, keepdims=True)).astype(np.float32), density
    )
    assert prediction.scores.probabilities.argmax(axis=1).tolist() == [1, 0]
    inside = prediction.prediction_sets(0.5)
    assert inside[0, :2].tolist() == [True, True]
    assert inside[1, :2].tolist() == [True, False]
    fpr, risk = 0.005, 0.999
    assert (prediction.p_values.p_value > fpr).all()
    assert (
        prediction.calibrated_scores.variation_ratio
        <= model.calibration.rank_tables[5].largest_uncertainty(fpr, risk)
    ).all()
    assert prediction.abstains(fpr, risk).tolist() == [True, False]
