import math

import numpy as np
import pytest
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save
from sklearn.linear_model import LogisticRegression, Ridge

from tests.support.recipes import recipe_with
from training.bayes.posterior import noise
from training.data import load
from training.data.rows import Rows
from training.export.graphs import export, load_runtime
from training.export.served import served_network
from training.fit import fit
from training.fitting.linear import choose_share, fit_linear, fit_logistic, fit_ridge
from training.model import build

MEMBERS = 8
rng = np.random.default_rng(0)


def ensemble(task, **changes):
    posterior = {"members": MEMBERS, "prior_std": 1.0}
    network = {"hidden": [16]}
    recipe = recipe_with(
        method="batch-ensemble", posterior=posterior, network=network, task=task, **changes
    )
    return build(recipe, (3,), 2 if task == "classification" else 0).eval()


def test_predictive_mixes_networks_and_linear_model():
    x = rng.normal(size=(40, 3)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int64)
    model = ensemble("classification")
    fit_linear(model, Rows(x, y))
    rows = torch.from_numpy(x)
    networks = model.predict(rows, noise(model.posterior, 100))
    model.posterior.linear_draws = 4
    mixture = model.predict(rows, noise(model.posterior, 100))
    assert model.posterior.order.tolist() == [0, 8, 1, 2, 8, 3, 4, 8, 5, 6, 8, 7]
    is_linear = model.posterior.order == MEMBERS
    torch.testing.assert_close(mixture[~is_linear], networks)
    expected = LogisticRegression(C=10).fit(x, y).predict_proba(x)
    for draw in mixture[is_linear]:
        np.testing.assert_allclose(draw.exp(), expected, atol=0.01)


def test_saved_model_keeps_its_number_of_linear_draws():
    model = ensemble("regression")
    model.posterior.linear_draws = 5
    loaded_model = ensemble("regression")
    loaded_model.load_state_dict(load_tensors(save(model.state_dict())))
    assert loaded_model.posterior.max_draws == MEMBERS + 5
    assert torch.equal(loaded_model.posterior.order, model.posterior.order)


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_exported_mixture_matches_torch_and_predicts_rows_independently(task):
    x = rng.normal(size=(33, 3)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int64 if task == "classification" else np.float32)
    model = ensemble(task, likelihood={"noise": "heteroscedastic"} if task == "regression" else {})
    fit_linear(model, Rows(x, y))
    model.posterior.linear_draws = MEMBERS
    network = served_network(model, torch.from_numpy(x), 0, names=())
    runtime = load_runtime(model, export(model, network))
    draws = runtime.draw_set(0, 2 * MEMBERS)
    outputs, _ = runtime.run_set(x, draws)
    eps = noise(model.posterior, 2 * MEMBERS, 0)
    expected = model.predict(torch.from_numpy(x), eps).numpy()
    np.testing.assert_allclose(outputs, expected, atol=1e-5)
    for n in (0, 17):
        row_outputs, _ = runtime.run_set(x[n : n + 1], draws)
        np.testing.assert_array_equal(row_outputs[:, 0], outputs[:, n])


@pytest.mark.parametrize("rows", [2, 8, 400])
def test_linear_share_is_its_posterior_mean(rows):
    x = rng.normal(size=(rows, 3)).astype(np.float32)
    y = np.arange(rows) % 2
    model = ensemble("classification")

    def serve(x, theta, _):
        networks = torch.where(torch.from_numpy(y)[:, None] == torch.arange(2), 0.99, 0.01)
        return torch.where(theta == MEMBERS, 0.5, networks).log()

    model.serve = serve
    shares, prior = np.array([0, 0.25, 0.5, 0.75, 0.9]), np.array([1, 1, 20, 1, 1])
    posterior = prior * (0.99 * (1 - shares) + 0.5 * shares) ** rows
    expected = shares @ posterior / posterior.sum()
    share = choose_share(model, Rows(x, y))
    draws = model.posterior.linear_draws
    assert share == draws / model.posterior.max_draws
    assert draws == round(MEMBERS * expected / (1 - expected))
    assert expected > 0.4 if rows == 2 else expected < 0.01 if rows == 400 else True


def test_ridge_variance_matches_leave_one_out_residuals():
    x = rng.normal(size=(30, 4))
    y = x @ [1.0, -2.0, 0.0, 0.5] + rng.normal(size=30)

    def mean_square(penalty):
        residuals = []
        for i in range(30):
            is_train = np.arange(30) != i
            ridge = Ridge(penalty).fit(x[is_train], y[is_train])
            residuals.append(y[i] - ridge.predict(x[i : i + 1])[0])
        return np.square(residuals).mean()

    weight, bias = fit_ridge(x, y)
    assert math.exp(bias[1]) == pytest.approx(
        min(map(mean_square, (0.1, 0.316, 1, 3.16, 10))), 0.01
    )
    assert not weight[:, 1].any()


def test_logistic_regression_supports_absent_classes_and_class_weights():
    x = rng.normal(size=(300, 2))
    y = np.array([0, 2])[(x[:, 0] + rng.normal(size=300) > 0).astype(int)]
    weights = np.array([1.0, 1.0, 3.0])
    weight, bias = fit_logistic(x, y, len(weights), weights[y])
    expected = LogisticRegression(C=10).fit(x, y, weights[y])
    scores = x @ weight + bias
    np.testing.assert_allclose(scores[:, 2] - scores[:, 0], expected.decision_function(x), atol=0.2)
    assert (scores[:, 1] < -5).all()


def test_linear_model_limits_overfitting_to_noise(tmp_path, fits):
    x = np.random.default_rng(0).normal(size=(100, 30))
    lines = [",".join([*(f"{v:.3f}" for v in row), "ab"[i % 2]]) for i, row in enumerate(x)]
    header = ",".join([*(f"x{i}" for i in range(30)), "y"])
    (tmp_path / "noise.csv").write_text("\n".join([header, *lines]))
    recipe = recipe_with(
        method="batch-ensemble",
        posterior={"members": 4, "prior_std": 1.0},
        data={
            "source": "csv:noise.csv",
            "target": "y",
            "test_fraction": 0.3,
            **dict.fromkeys(("validation", "reference", "ranking"), 10),
        },
        network={"hidden": [64]},
        training={"epochs": 60, "learning_rate": 1e-2, "choose": "last"},
        serving={"temperature": False},
    )
    data = load(recipe, tmp_path)
    result = fit(recipe, data, device="cpu", runs=tmp_path, quiet=True)
    mixture = result.log_likelihood(data.test).mean()
    result.model.posterior.linear_draws = 0
    networks = result.log_likelihood(data.test).mean()
    assert networks < -1.1 < -0.95 < mixture
