import math

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression, Ridge

from tests.support.recipes import recipe_with
from training.bayes.posterior import noise
from training.data import Rows, load
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


def test_the_predictive_is_a_mixture_of_networks_and_the_linear_model():
    x = rng.normal(size=(40, 3)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int64)
    model, eps = ensemble("classification"), torch.arange(MEMBERS).float()[:, None]
    fit_linear(model, Rows(x, y))
    network = model.network
    networks = model.predict(torch.from_numpy(x), eps).exp()
    network.replace_members(MEMBERS)
    linear = model.predict(torch.from_numpy(x), eps).exp()
    expected = LogisticRegression(C=10).fit(x, y).predict_proba(x)
    np.testing.assert_allclose(linear[0], expected, atol=0.01)
    network.replace_members(2)
    mixed = model.predict(torch.from_numpy(x), eps).exp()
    assert network.is_linear.tolist() == [0, 0, 1, 0, 0, 0, 1, 0]
    is_linear = network.is_linear > 0
    torch.testing.assert_close(mixed[is_linear], linear[:2])
    torch.testing.assert_close(mixed[~is_linear], networks[~is_linear])


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_exported_linear_members_predict_each_row_alone(task):
    x = rng.normal(size=(33, 3)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int64 if task == "classification" else np.float32)
    model = ensemble(task, likelihood={"noise": "heteroscedastic"} if task == "regression" else {})
    fit_linear(model, Rows(x, y))
    model.network.replace_members(MEMBERS // 2)
    served = served_network(model, torch.from_numpy(x), 0, names=())
    runtime = load_runtime(model, export(model, served))
    draws = runtime.draw_set(0, MEMBERS)
    outputs, _ = runtime.run_set(x, draws)
    eps = noise(model.posterior, MEMBERS, 0)
    expected = model.predict(torch.from_numpy(x), eps).numpy()
    np.testing.assert_allclose(outputs, expected, atol=1e-5)
    for n in (0, 17):
        alone, _ = runtime.run_set(x[n : n + 1], draws)
        np.testing.assert_array_equal(alone[:, 0], outputs[:, n])


@pytest.mark.parametrize("rows", [2, 8, 400])
def test_the_share_of_linear_members_is_its_posterior_mean(rows):
    x = rng.normal(size=(rows, 3)).astype(np.float32)
    y = np.arange(rows) % 2
    model = ensemble("classification")

    def predict(x, eps):
        networks = torch.where(torch.from_numpy(y)[:, None] == torch.arange(2), 0.99, 0.01)
        is_linear = model.network.is_linear[:, None, None] > 0
        return torch.where(is_linear, torch.full((rows, 2), 0.5), networks).log()

    model.predict = predict
    shares, prior = np.array([0, 0.25, 0.5, 0.75]), np.array([1, 1, 20, 1])
    posterior = prior * (0.99 * (1 - shares) + 0.5 * shares) ** rows
    expected = shares @ posterior / posterior.sum()
    assert choose_share(model, Rows(x, y)) == round(MEMBERS * expected) / MEMBERS
    assert expected > 0.4 if rows == 2 else expected < 0.01 if rows == 400 else True


def test_ridge_has_the_variance_of_leave_one_out_residuals():
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
    weight, bias = fit_logistic(x, y, weights)
    expected = LogisticRegression(C=10).fit(x, y, weights[y])
    scores = x @ weight + bias
    np.testing.assert_allclose(scores[:, 2] - scores[:, 0], expected.decision_function(x), atol=0.2)
    assert (scores[:, 1] < -5).all()


def test_linear_members_limit_the_errors_of_a_fit_to_noise(tmp_path, fits):
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
    fitted = fit(recipe, data, device="cpu", runs=tmp_path, quiet=True)
    mixture = fitted.log_likelihood(data.test).mean()
    fitted.model.network.replace_members(0)
    networks = fitted.log_likelihood(data.test).mean()
    assert networks < -1.1 < -0.95 < mixture
