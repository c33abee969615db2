import io
import re
import shutil

import numpy as np
import pytest

from tests.support.environment import working_in
from tests.support.serving import open_client
from training.__main__ import main
from training.data.arrays import digits

RANKING_ROWS = 2  # the smallest rate is 1 / 3, which exceeds 0.333333


@pytest.fixture(scope="module")
def small_calibration(digits_store, tmp_path_factory):
    folder = tmp_path_factory.mktemp("few")
    shutil.copytree(digits_store, folder / "models")
    rows = digits().test
    np.savez(folder / "rows.npz", x=(2 * rows.x).reshape(-1, 8, 8), y=rows.y)
    with working_in(folder), pytest.MonkeyPatch.context() as patch:
        message = io.StringIO()
        patch.setattr("sys.stderr", message)
        sizes = ["--reference-rows", "100", "--ranking-rows", str(RANKING_ROWS)]
        assert main(["calibrate", "digits:1", "--data", "npz:rows.npz", *sizes]) == 0
    with open_client(folder / "models") as client:
        yield message.getvalue(), client


def predict(client, **fields):
    return client.post(
        "/predict", json={"inputs": digits().test.x[:3].tolist(), "seed": 7, **fields}
    )


def test_default_and_explicit_fpr_are_refused_with_too_few_ranking_rows(small_calibration):
    _, client = small_calibration
    refusal = predict(client)
    assert refusal.status_code == 422
    assert refusal.json()["detail"] == (
        "fpr: expected at least 0.333334, the smallest rate that digits supports, got 0.05"
    )
    assert predict(client, fpr=0.05).json() == refusal.json()


@pytest.mark.parametrize("field", ["fpr", "fdr"])
def test_rate_suggested_by_an_error_is_accepted(small_calibration, field):
    _, client = small_calibration
    limit = re.search(r"at least ([\d.]+),", predict(client, **{field: 0.01}).json()["detail"])[1]
    answer = predict(client, **{field: float(limit)})
    assert answer.status_code == 200, answer.text
    assert answer.json()[field] == float(limit)


def test_too_few_rows_are_reported_at_calibration_and_in_the_model_list(small_calibration):
    message, client = small_calibration
    sentence = "with 2 ranking rows the smallest fpr is 0.333334"
    assert sentence in message
    (items,) = client.get("/models").json()["models"]
    assert items["too_few_rows"].startswith(sentence)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {"fpr": 0.05, "fdr": None, "coverage": 0.95, "risk": None}),
        (
            {"fpr": 0.1, "coverage": 0.8, "risk": 0.3},
            {"fpr": 0.1, "fdr": None, "coverage": 0.8, "risk": 0.3},
        ),
        ({"fdr": 0.2}, {"fpr": 0.05, "fdr": 0.2, "coverage": 0.95, "risk": None}),
    ],
)
def test_answer_contains_the_rates_it_used(client, fields, expected):
    answer = predict(client, **fields).json()
    assert {name: answer[name] for name in expected} == expected
    request = {"inputs": digits().test.x[:3].tolist(), **fields}
    content = client.post("/predict", json=request, headers={"Accept": "application/x-npz"}).content
    arrays = np.load(io.BytesIO(content), allow_pickle=False)
    assert {name: arrays[name].item() for name in expected if name in arrays} == {
        name: rate for name, rate in expected.items() if rate is not None
    }


@pytest.mark.parametrize(
    ("fields", "field", "pattern"),
    [
        ({"coverage": 0.9999, "confidence": 0.95}, "coverage", r"at most ([\d.]+),"),
        ({"coverage": 0.9999, "confidence": 0.123}, "coverage", r"at most ([\d.]+),"),
        ({"fpr": 0.005, "confidence": 0.95}, "fpr", r"at least ([\d.]+),"),
        ({"risk": 0.0001}, "risk", r"at least ([\d.]+),"),
        ({"risk": 0.0001, "fpr": 0.2, "num_samples": 7}, "risk", r"at least ([\d.]+),"),
    ],
)
def test_limits_suggested_by_errors_are_accepted(client, fields, field, pattern):
    refusal = predict(client, **fields)
    assert refusal.status_code == 422
    limit = float(re.search(pattern, refusal.json()["detail"])[1])
    answer = predict(client, **{**fields, field: limit})
    assert answer.status_code == 200, answer.text
    assert answer.json()[field] == limit
