import httpx
import pytest

from tests.support.environment import working_in
from tests.support.recipes import SECONDS_LONG, write_recipe
from tests.support.serving import serving
from training.__main__ import main

USERS_MODULE = """
from torch import nn


def attention(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.TransformerEncoderLayer(8, 2), nn.Linear(8, classes))
"""
ENSEMBLE = {
    "name": "ensemble",
    "method": "ensemble",
    "network": {"hidden": [24]},
    "posterior": {"members": 3},
    "training": {**SECONDS_LONG["training"], "epochs": 15},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, fits):
    """A folder with a user's module and a store of a fitted ensemble."""
    folder = tmp_path_factory.mktemp("methods")
    (folder / "users_networks.py").write_text(USERS_MODULE)
    with working_in(folder):
        recipe = write_recipe(folder, **{**SECONDS_LONG, **ENSEMBLE})
        assert main(["fit", str(recipe), "--quiet", "--device", "cpu"]) == 0
    return folder


@pytest.fixture(scope="module")
def url(folder):
    with serving(folder / "models") as (url, _):
        yield url


def predict(url, expected_status=200, **request):
    answer = httpx.post(f"{url}/predict", json=request, timeout=60)
    assert answer.status_code == expected_status, answer.text
    return answer.json()


def test_an_ensemble_has_as_many_draws_as_members(url, digits_rows):
    inputs = digits_rows[:2].tolist()
    assert predict(url, inputs=inputs)["num_samples"] == 3
    refused = predict(url, 422, inputs=inputs, num_samples=4)
    assert "num_samples: expected at most 3" in refused["detail"]
    seeds = [predict(url, inputs=inputs, seed=s)["predictions"] for s in (1, 2)]
    assert seeds[0] == seeds[1]


def test_an_ensemble_has_no_standard_error_because_seeds_do_not_change_it(url, digits_rows):
    for num_samples in (1, 3):
        inputs = digits_rows[:1].tolist()
        (row,) = predict(url, inputs=inputs, num_samples=num_samples)["predictions"]
        assert set(row["standard_error"].values()) == {None}
        assert (row["bald"] == 0) == (num_samples == 1)


def test_a_layer_that_is_not_supported_is_named_before_any_training(folder, capsys):
    network, schedule = {"factory": "users_networks:attention"}, {"epochs": 1000}
    recipe = write_recipe(
        folder, name="refused", method="bbb-gaussian", network=network, training=schedule
    )
    with working_in(folder):
        assert main(["fit", str(recipe), "--quiet", "--device", "cpu"]) == 2
    message = capsys.readouterr().err
    assert "MultiheadAttention" in message
    assert "layer 2.self_attn" in message
    assert message.count("\n") == 1
