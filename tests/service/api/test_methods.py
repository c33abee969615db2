import pytest

from model_store.artifacts.store import ModelStore
from tests.support.environment import working_in
from tests.support.models import publish_unfitted
from tests.support.recipes import recipe_with, write_recipe
from tests.support.serving import open_client
from training.__main__ import main

USER_MODULE = """
from torch import nn


def attention(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.TransformerEncoderLayer(8, 2), nn.Linear(8, classes))
"""


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    """A client for a service with an ensemble."""
    folder = tmp_path_factory.mktemp("methods")
    recipe = recipe_with(method="ensemble", posterior={"members": 3}, serving={"draws": 3})
    publish_unfitted(ModelStore(folder / "models"), recipe, folder)
    with open_client(folder / "models") as client:
        yield client


def predict(client, expected_status=200, **request):
    answer = client.post("/predict", json=request)
    assert answer.status_code == expected_status, answer.text
    return answer.json()


def test_ensemble_has_one_draw_per_member(client, digits_rows):
    inputs = digits_rows[:2].tolist()
    assert predict(client, inputs=inputs)["num_samples"] == 3
    problem = predict(client, 422, inputs=inputs, num_samples=4)
    assert "num_samples: expected at most 3" in problem["detail"]
    seeds = [predict(client, inputs=inputs, seed=s)["predictions"] for s in (1, 2)]
    assert seeds[0] == seeds[1]


def test_ensemble_has_no_standard_errors(client, digits_rows):
    for num_samples in (1, 3):
        inputs = digits_rows[:1].tolist()
        (row,) = predict(client, inputs=inputs, num_samples=num_samples)["predictions"]
        assert set(row["standard_error"].values()) == {None}
        assert (row["bald"] == 0) == (num_samples == 1)


def test_fit_names_unsupported_layer_before_training(tmp_path, capsys):
    (tmp_path / "users_networks.py").write_text(USER_MODULE)
    network, schedule = {"factory": "users_networks:attention"}, {"epochs": 1000}
    recipe = write_recipe(
        tmp_path, name="refused", method="bbb-gaussian", network=network, training=schedule
    )
    with working_in(tmp_path):
        assert main(["fit", str(recipe), "--quiet", "--device", "cpu"]) == 2
    message = capsys.readouterr().err
    assert "MultiheadAttention" in message
    assert "layer 2.self_attn" in message
    assert message.count("\n") == 1
