import io
from dataclasses import replace

import httpx
import numpy as np
import pytest

from model_store.artifacts.store import ModelStore
from model_store.inference.model import NEEDED, Model
from tests.support.files import npy_bytes
from tests.support.serving import serving
from tests.support.tiny import publish
from training.data.arrays import digits

ROWS = digits().test.x[:40].tolist()
CLASSES = [str(digit) for digit in range(10)]
SKEWED = {name: 0.55 if name == "8" else 0.05 for name in CLASSES}


def predict(client, **fields):
    answer = client.post("/predict", json={"inputs": ROWS, "seed": 7, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def get_shares(client):
    output = client.get("/models/digits").json()["manifest"]["output"]
    assert output["classes"] == CLASSES
    return np.array(output["priors"])


def test_priors_reweight_each_draw_by_bayes_rule_and_update_all_scores(client):
    shares = get_shares(client)
    plain, shifted = (
        predict(client, return_samples=True, **request) for request in ({}, {"priors": SKEWED})
    )
    assert (plain["priors"], shifted["priors"]) == (None, SKEWED)
    before, after = (
        np.array([p["samples"] for p in a["predictions"]]) for a in (plain, shifted)
    )  # (N, K, C)
    expected = before * np.array(list(SKEWED.values())) / shares
    expected /= expected.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(after, expected, atol=2e-6)
    for row, draws in zip(shifted["predictions"], after, strict=True):
        mean = draws.mean(axis=0)
        np.testing.assert_allclose(row["probabilities"], mean, atol=1e-6)
        assert row["label"] == CLASSES[int(np.argmax(row["probabilities"]))]
        entropy = -(mean * np.log(np.maximum(mean, 1e-300))).sum()
        assert row["entropy"] == pytest.approx(entropy, abs=1e-5)
        assert row["bald"] >= 0
        assert row["label"] in row["prediction_set"]
        assert row["abstain"] is None
    # Detector scores do not depend on the priors.
    for plain_row, shifted_row in zip(plain["predictions"], shifted["predictions"], strict=True):
        scores = [
            {name: d["score"] for name, d in row["detectors"].items()}
            for row in (plain_row, shifted_row)
        ]
        assert scores[0] == scores[1]


def test_priors_equal_to_training_shares_hardly_change_the_answer(client):
    shares = get_shares(client)
    plain, same = (
        predict(client, **request)
        for request in ({}, {"priors": dict(zip(CLASSES, shares.tolist(), strict=True))})
    )
    for plain_row, same_row in zip(plain["predictions"], same["predictions"], strict=True):
        np.testing.assert_allclose(same_row["probabilities"], plain_row["probabilities"], atol=1e-6)
        # Calibration weights use the class shares of all training rows, not just the fitted rows.
        assert same_row["p_value"] == pytest.approx(plain_row["p_value"], rel=0.1)
    assert (
        sum(
            o["prediction_set"] == p["prediction_set"]
            for o, p in zip(*(a["predictions"] for a in (plain, same)), strict=True)
        )
        >= 38
    )


def test_class_with_zero_prior_is_never_predicted(client):
    priors = {name: 0.0 if name == "3" else 1 / 9 for name in CLASSES}
    for row in predict(client, priors=priors)["predictions"]:
        assert row["probabilities"][3] == 0
        assert "3" not in row["prediction_set"]
        assert np.isfinite([row["entropy"], row["bald"], row["mean_std"]]).all()


def test_npy_queries_accept_priors_and_rows_replay_independently(client):
    headers = {"Content-Type": "application/x-npy", "Accept": "application/x-npz"}
    query = {"seed": 7, "priors": str(SKEWED).replace("'", '"')}
    npz_answer = client.post(
        "/predict", params=query, content=npy_bytes(np.array(ROWS)), headers=headers
    )
    arrays = np.load(io.BytesIO(npz_answer.content), allow_pickle=False)
    answer = predict(client, priors=SKEWED)["predictions"]
    assert arrays["priors"].tolist() == list(SKEWED.values())
    assert arrays["probabilities"].tolist() == [row["probabilities"] for row in answer]
    single = client.post("/predict", json={"inputs": ROWS[5:6], "seed": 7, "priors": SKEWED}).json()
    assert single["predictions"] == answer[5:6]


def test_pool_is_ranked_under_priors(client):
    request = {"pool": ROWS, "seed": 7, "k": 40, "acquisition": "entropy", "priors": SKEWED}
    answer = client.post("/acquire", json=request).json()
    entropies = [row["entropy"] for row in predict(client, priors=SKEWED)["predictions"]]
    assert answer["priors"] == SKEWED
    assert [row["score"] for row in answer["ranking"]] == sorted(entropies, reverse=True)
    assert client.post("/acquire", json={**request, "priors": None}).json()["priors"] is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"priors": {"0": 1.0}}, "priors: expected a share of each of the 10"),
        ({"priors": SKEWED | {"secret": 0.0}}, "classes, got unknown classes too"),
        ({"priors": SKEWED | {"8": 0.56}}, "priors: expected shares that sum to 1, got a sum"),
        ({"priors": SKEWED | {"8": -0.1}}, "priors.8: expected a share from 0 to 1, got -0.1"),
        (
            {"priors": SKEWED | {"8": "much"}},
            "priors.8: expected a share from 0 to 1, got a string",
        ),
        ({"priors": [0.1] * 10}, "priors: expected a valid dictionary"),
        ({"priors": SKEWED, "fdr": 0.1}, "fdr: expected no value with priors"),
        ({"priors": SKEWED, "risk": 0.2}, "risk: expected no value with priors"),
        ({"priors": SKEWED, "confidence": 0.9}, "confidence: expected no value with priors"),
    ],
)
def test_invalid_priors_are_refused_without_showing_unknown_classes(client, fields, message):
    answer = client.post("/predict", json={"inputs": ROWS[:1], **fields})
    assert answer.status_code == 422
    assert message in answer.json()["detail"]
    assert "secret" not in answer.text


def test_version_without_class_shares_is_served_and_refuses_priors(store):
    publish(store)
    with serving(store.root) as (url, _):
        manifest = httpx.get(f"{url}/models/tiny").json()["manifest"]
        request = {"inputs": np.zeros((1, *manifest["input"]["shape"])).tolist()}
        assert httpx.post(f"{url}/predict", json=request).json()["priors"] is None
        classes = manifest["output"]["classes"]
        priors = {name: 1 / len(classes) for name in classes}
        refusal = httpx.post(f"{url}/predict", json={**request, "priors": priors})
        assert refusal.status_code == 422
        assert "has no record of its class shares" in refusal.json()["detail"]


def test_class_without_training_rows_has_no_probability(digits_store):
    model = Model.load(ModelStore(digits_store).open("digits", "1", files=NEEDED))
    reference = (*[1 / 9] * 9, 0.0)
    output = model.manifest.output.model_copy(update={"priors": reference})
    model = replace(model, manifest=model.manifest.model_copy(update={"output": output}))
    outputs = np.log(np.full((2, 3, 10), 0.1, dtype=np.float32))
    shifted = np.exp(model.shifted(outputs, (0.2, *[0.1] * 8, 0.0)))
    np.testing.assert_allclose(shifted[0, 0], [0.2, *[0.1] * 8, 0.0], rtol=1e-6)
