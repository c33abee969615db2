import io
import re
import shutil

import numpy as np
import pytest

from tests.support.environment import working_in
from tests.support.serving import open_client
from training.__main__ import main
from training.data.arrays import digits

FEW = 2  # ranking rows: no rate below 1 / 3, whose six digits are less than it


@pytest.fixture(scope="module")
def few(digits_store, tmp_path_factory):
    folder = tmp_path_factory.mktemp("few")
    shutil.copytree(digits_store, folder / "models")
    rows = digits().test
    np.savez(folder / "rows.npz", x=(2 * rows.x).reshape(-1, 8, 8), y=rows.y)
    with working_in(folder), pytest.MonkeyPatch.context() as patch:
        message = io.StringIO()
        patch.setattr("sys.stderr", message)
        sizes = ["--reference-rows", "100", "--ranking-rows", str(FEW)]
        assert main(["calibrate", "digits:1", "--data", "npz:rows.npz", *sizes]) == 0
    with open_client(folder / "models") as client:
        yield message.getvalue(), client


def predict(client, **fields):
    return client.post(
        "/predict", json={"inputs": digits().test.x[:3].tolist(), "seed": 7, **fields}
    )


def test_without_fpr_a_model_of_few_rows_refuses_as_it_refuses_an_explicit_05(few):
    _, client = few
    refused = predict(client)
    assert refused.status_code == 422
    assert refused.json()["detail"] == (
        "fpr: expected at least 0.333334, the smallest rate that digits supports, got 0.05"
    )
    assert predict(client, fpr=0.05).json() == refused.json()


@pytest.mark.parametrize("field", ["fpr", "fdr"])
def test_the_rate_that_an_error_advises_is_accepted(few, field):
    _, client = few
    advised = re.search(r"at least ([\d.]+),", predict(client, **{field: 0.01}).json()["detail"])[1]
    accepted = predict(client, **{field: float(advised)})
    assert accepted.status_code == 200, accepted.text
    assert accepted.json()[field] == float(advised)


def test_too_few_rows_are_said_at_publication_and_in_the_list(few):
    message, client = few
    sentence = "with 2 ranking rows the smallest fpr is 0.333334"
    assert sentence in message
    (items,) = client.get("/models").json()["models"]
    assert items["too_few_rows"].startswith(sentence)


@pytest.mark.parametrize(
    ("asked", "stated"),
    [
        ({}, {"fpr": 0.05, "fdr": None, "coverage": 0.95, "risk": None}),
        (
            {"fpr": 0.1, "coverage": 0.8, "risk": 0.3},
            {"fpr": 0.1, "fdr": None, "coverage": 0.8, "risk": 0.3},
        ),
        ({"fdr": 0.2}, {"fpr": 0.05, "fdr": 0.2, "coverage": 0.95, "risk": None}),
    ],
)
def test_an_answer_states_what_it_was_judged_by(client, asked, stated):
    answer = predict(client, **asked).json()
    assert {name: answer[name] for name in stated} == stated
    request = {"inputs": digits().test.x[:3].tolist(), **asked}
    packed = client.post("/predict", json=request, headers={"Accept": "application/x-npz"}).content
    arrays = np.load(io.BytesIO(packed), allow_pickle=False)
    assert {name: arrays[name].item() for name in stated if name in arrays} == {
        name: rate for name, rate in stated.items() if rate is not None
    }


@pytest.mark.parametrize(
    ("asked", "field", "advice"),
    [
        ({"coverage": 0.9999, "confidence": 0.95}, "coverage", r"at most ([\d.]+),"),
        ({"coverage": 0.9999, "confidence": 0.123}, "coverage", r"at most ([\d.]+),"),
        ({"fpr": 0.005, "confidence": 0.95}, "fpr", r"at least ([\d.]+),"),
        ({"risk": 0.0001}, "risk", r"at least ([\d.]+),"),
        ({"risk": 0.0001, "fpr": 0.2, "num_samples": 7}, "risk", r"at least ([\d.]+),"),
    ],
)
def test_the_coverage_and_the_risk_that_an_error_advises_are_accepted(client, asked, field, advice):
    refused = predict(client, **asked)
    assert refused.status_code == 422
    advised = float(re.search(advice, refused.json()["detail"])[1])
    accepted = predict(client, **{**asked, field: advised})
    assert accepted.status_code == 200, accepted.text
    assert accepted.json()[field] == advised
