"""Stopping when settled, over HTTP: rows say their draws, replay, and do not see the rows next to
them."""

import io

import numpy as np
import pytest

from tests.support.serving import client_of

SETTLE = {"settle": 0.03}


def predict(client, rows, status=200, **request):
    answer = client.post("/predict", json={"inputs": rows.tolist(), **request})
    assert answer.status_code == status, answer.text
    return answer.json()


def draws(answer):
    return [prediction["num_samples"] for prediction in answer["predictions"]]


@pytest.fixture(scope="module")
def rows(digits_rows):
    """Digits, and next to them noise, which is flagged."""
    return np.concatenate([digits_rows[:60], np.random.default_rng(0).integers(0, 17, (10, 64))])


def test_rows_say_how_many_draws_they_took_and_their_errors_are_within_the_tolerance(client, rows):
    answer = predict(client, rows, **SETTLE)
    assert answer["num_samples"] == 100
    assert {5, 100} <= set(draws(answer)) <= {5, 10, 20, 30, 50, 75, 100}
    for prediction in answer["predictions"]:
        assert (
            prediction["num_samples"] == 100
            or max(prediction["standard_error"].values()) <= SETTLE["settle"]
        )


def test_a_seed_replays_the_answer_and_a_row_alone_gets_the_same(client, rows):
    request = {**SETTLE, "fpr": 0.1, "risk": 0.2}
    answer = predict(client, rows, **request)
    assert predict(client, rows, seed=answer["seed"], **request) == answer
    for n in (0, 7, 65):
        alone = predict(client, rows[n : n + 1], seed=answer["seed"], **request)["predictions"]
        assert alone == [answer["predictions"][n]]


def test_a_row_s_scores_are_those_of_a_request_for_as_many_draws(client, rows):
    answer = predict(client, rows, seed=3, **SETTLE)
    for count in set(draws(answer)):
        fixed = predict(client, rows, seed=3, num_samples=count)["predictions"]
        for ours, theirs in zip(answer["predictions"], fixed, strict=True):
            if ours["num_samples"] == count:
                for name in ("probabilities", "label", "entropy", "bald", "standard_error"):
                    assert ours[name] == theirs[name]


def test_without_it_nothing_stops(client, rows):
    assert set(draws(predict(client, rows, seed=1))) == {100}
    assert predict(client, rows, seed=1, settle=None) == predict(client, rows, seed=1)


def test_arrays_say_the_same(client, rows):
    request = {"inputs": rows.tolist(), "seed": 5, **SETTLE}
    packed = client.post("/predict", json=request, headers={"Accept": "application/x-npz"}).content
    arrays = np.load(io.BytesIO(packed), allow_pickle=False)
    answer = predict(client, rows, seed=5, **SETTLE)
    assert arrays["num_samples"].tolist() == draws(answer)
    assert arrays["p_value"].tolist() == [p["p_value"] for p in answer["predictions"]]
    assert arrays["entropy"].tolist() == [p["entropy"] for p in answer["predictions"]]


@pytest.mark.parametrize("settle", [0, -1, "0.1", True, [], {}])
def test_what_is_no_tolerance_is_refused(client, rows, settle):
    assert "settle: expected" in predict(client, rows[:1], 422, settle=settle)["detail"]


def test_samples_are_refused_beside_it(client, rows):
    assert (
        "settle: expected none"
        in predict(client, rows[:1], 422, return_samples=True, **SETTLE)["detail"]
    )


def test_a_pool_knows_nothing_of_it(client, rows):
    answer = client.post("/acquire", json={"pool": rows.tolist(), **SETTLE})
    assert answer.status_code == 422
    assert "settle" in answer.json()["detail"]


def test_a_setting_holds_for_requests_that_name_none(digits_store, rows):
    with client_of(digits_store, DUBITO_SETTLE="0.03") as client:
        by_default = predict(client, rows, seed=2)
        assert by_default == predict(client, rows, seed=2, **SETTLE)
        assert 5 in draws(by_default)
        assert set(draws(predict(client, rows, seed=2, settle=None))) == {100}
        assert set(draws(predict(client, rows, seed=2, return_samples=True))) == {100}
        for i in range(3):  # rows that repeat count once
            predict(client, rows + np.float32(i / 8))
        predict(client, rows, settle=None)  # draws taken in another way are not compared
        assert client.get("/models/digits").json()["drift"]["rows"] == 3 * 16
