import math
import shutil
from itertools import pairwise

import httpx
import numpy as np
import pytest
from scipy import stats

from model_store.artifacts.store import ModelStore
from model_store.inference.model import Model
from model_store.scores.regression import MIXTURE_ERROR_NAMES, MIXTURE_SCORE_NAMES
from tests.support.environment import working_in
from tests.support.extremes import assert_extremes_are_answered_or_refused
from tests.support.recipes import write_recipe
from tests.support.serving import serving
from training.__main__ import main
from training.data.rows import Rows
from training.scoring import draw_seed, served_prediction

FITTED = {
    "posterior": {"initial_log_std": -3.0, "couplings": 1, "hidden": 16},
    "network": {"hidden": [30]},
    "likelihood": {"noise": "heteroscedastic"},
    "training": {
        "batch_rows": 50,
        "samples": 4,
        "learning_rate": 1e-2,
        "final_learning_rate": 2e-4,
        "epochs": 150,
    },
}
DATA = {"source": "npz:wavy.npz", "validation": 50, "reference": 50, "ranking": 99}


def true_std(x):
    return 20.0 * np.exp(0.5 * x[:, 0])


def true_mean(x):
    return 1000.0 + 100.0 * np.sin(1.5 * x[:, 0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory, fits):
    """A folder with the data, recipe and store of a fitted model."""
    folder = tmp_path_factory.mktemp("regression")
    generator = np.random.default_rng(0)
    x = generator.uniform(-2.0, 2.0, (199 + 300 + 500, 1))
    y = true_mean(x) + true_std(x) * generator.normal(size=len(x))
    np.savez(folder / "wavy.npz", x_train=x[500:], y_train=y[500:], x_test=x[:500], y_test=y[:500])
    settings = {"name": "wavy", "task": "regression", "data": DATA, "serving": {"draws": 100}}
    with working_in(folder):
        path = write_recipe(folder, **settings, **FITTED)
        assert main(["fit", str(path), "--quiet", "--device", "cpu"]) == 0
    return folder


@pytest.fixture(scope="module")
def url(folder, digits_store):
    """The URL of a service with the regression and `digits`."""
    shutil.copytree(digits_store / "digits", folder / "models" / "digits")
    with serving(folder / "models", DUBITO_STATE=str(folder / "state")) as (url, _):
        yield url


@pytest.fixture
def client(url):
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def wavy(folder):
    """The arrays of `wavy.npz`."""
    with np.load(folder / "wavy.npz") as arrays:
        return dict(arrays)


def predict(client, rows, model="wavy", **fields):
    """Return the predictions for a JSON request."""
    answer = client.post(
        "/predict", json={"model": model, "inputs": np.asarray(rows).tolist(), **fields}
    )
    assert answer.status_code == 200, answer.text
    return answer.json()["predictions"]


def get_column(predictions, name):
    return np.array([prediction[name] for prediction in predictions])


# Known answers


def test_heteroscedastic_noise_is_recovered(client):
    """With 300 rows, the log of the noise is accurate to about 0.1 in each third of the range."""
    x = np.linspace(-1.5, 1.5, 13)[:, None]
    predictions = predict(client, x, num_samples=200)
    assert np.all(np.abs(np.log(get_column(predictions, "aleatoric_std") / true_std(x))) < 0.35)
    assert np.all(np.abs(get_column(predictions, "mean") - true_mean(x)) < 0.7 * true_std(x))


def test_draws_disagree_far_from_the_data(client):
    inside, outside = get_column(predict(client, [[0.0], [10.0]], num_samples=200), "epistemic_std")
    assert outside > 3 * inside


@pytest.mark.parametrize(
    ("coverage", "num_samples"), [(0.5, 100), (0.9, 100), (0.95, 10), (0.9, 1)]
)
def test_intervals_contain_targets_at_nominal_coverage(client, wavy, coverage, num_samples):
    """For fixed ranking rows, coverage is beta-distributed. 500 test rows reveal large errors."""
    y = wavy["y_test"]
    bounds = get_column(
        predict(client, wavy["x_test"], coverage=coverage, num_samples=num_samples), "interval"
    )
    num_covered = int(np.sum((bounds[:, 0] <= y) & (y <= bounds[:, 1])))
    position = math.ceil(100 * coverage)
    distribution = stats.betabinom(len(y), position, 100 - position)
    assert distribution.cdf(num_covered) > 1e-7
    assert distribution.sf(num_covered - 1) > 1e-7


# Fields and options


def test_answer_has_documented_fields(client, wavy):
    request = {"model": "wavy", "inputs": wavy["x_test"][:3].tolist(), "seed": 7}
    answer = client.post("/predict", json=request).json()
    fields = {
        *("mean", "median", "std", "aleatoric_std", "epistemic_std", "interval"),
        *("num_samples", "standard_error", "flag", "p_value", "category", "detectors"),
    }
    for prediction in answer["predictions"]:
        assert set(prediction) == fields
        assert prediction["median"] is None
        assert prediction["num_samples"] == answer["num_samples"] == 100
        assert set(prediction["standard_error"]) == set(MIXTURE_ERROR_NAMES)
        assert all(error > 0 for error in prediction["standard_error"].values())
        assert set(prediction["detectors"]) == {*MIXTURE_SCORE_NAMES, "residual"}
        assert prediction["flag"] == (prediction["p_value"] <= 0.05)
        for name in MIXTURE_SCORE_NAMES:
            assert prediction["detectors"][name]["score"] == prediction[name]


def test_intervals_grow_with_coverage_until_unbounded(client, wavy):
    answers = [predict(client, wavy["x_test"][:9], seed=1, coverage=c) for c in (0.5, 0.9, 0.99)]
    for smaller, larger in pairwise(answers):
        assert np.all(get_column(smaller, "interval")[:, 0] > get_column(larger, "interval")[:, 0])
        assert np.all(get_column(smaller, "interval")[:, 1] < get_column(larger, "interval")[:, 1])
    for p in predict(client, wavy["x_test"][:3], coverage=0.991):  # 99 ranking rows
        assert p["interval"] == [None, None]


def test_risk_is_refused_for_regression(client, wavy):
    answer = client.post(
        "/predict", json={"model": "wavy", "inputs": wavy["x_test"][:1].tolist(), "risk": 0.1}
    )
    assert answer.status_code == 422
    assert "risk: expected none, because wavy is a regression" in answer.json()["detail"]
    assert client.get("/models/wavy").json()["smallest_risk"] is None


def test_model_describes_its_task_and_target(client):
    model = client.get("/models/wavy").json()
    assert (model["task"], model["target"], model["classes"]) == (
        "regression",
        "y",
        None,
    )
    assert model["manifest"]["output"] == {"target": "y", "transform": None}
    assert {"test_rmse", "test_log_likelihood", "test_interval_coverage_at_95"} <= set(
        model["quality"]
    )


def test_measured_likelihood_matches_mixture_over_served_draws(folder, wavy):
    model = Model.load(ModelStore(folder / "models").open("wavy", "1"))
    rows = Rows(*(wavy[part][:20].astype(np.float32) for part in ("x_test", "y_test")))
    _, likelihoods = served_prediction(model, rows, 30, 3, 16)
    for i in range(20):
        outputs, _ = model.runtime.run(
            rows.x[i : i + 1], model.runtime.draw(draw_seed(3, i // 16), 0, 30)[:, None]
        )
        mean, std = outputs[:, 0, 0], np.exp(0.5 * outputs[:, 0, 1])
        assert likelihoods[i] == pytest.approx(
            np.log(stats.norm.pdf(rows.y[i], mean, std).mean()), rel=1e-5
        )


# Acquisition


@pytest.mark.parametrize(
    ("acquisition", "score"), [("variance", "std"), ("epistemic_variance", "epistemic_std")]
)
def test_pool_is_ranked_by_variances(client, wavy, acquisition, score):
    pool = wavy["x_test"][:100].tolist()
    request = {"model": "wavy", "seed": 3, "num_samples": 20}
    answer = client.post(
        "/acquire", json={**request, "pool": pool, "acquisition": acquisition, "k": 100}
    ).json()
    assert answer["acquisition"] == acquisition
    values = (
        get_column(predict(client, pool, **{k: request[k] for k in ("seed", "num_samples")}), score)
        ** 2
    )
    assert [row["score"] for row in answer["ranking"]] == sorted(values.tolist(), reverse=True)
    assert [values[row["index"]] for row in answer["ranking"]] == [
        row["score"] for row in answer["ranking"]
    ]


def test_default_acquisition_depends_on_the_task(client, wavy):
    answer = client.post(
        "/acquire", json={"model": "wavy", "pool": wavy["x_test"][:5].tolist()}
    ).json()
    assert answer["acquisition"] == "epistemic_variance"
    assert (
        client.post("/acquire", json={"model": "digits", "pool": [[0] * 64]}).json()["acquisition"]
        == "bald"
    )


@pytest.mark.parametrize(
    ("model", "size", "acquisition", "message"),
    [
        *(
            ("wavy", 1, name, "regression")
            for name in ("bald", "entropy", "batchbald", "power_bald")
        ),
        *(("digits", 64, name, "classification") for name in ("variance", "epistemic_variance")),
        ("wavy", 1, "std", "random"),
    ],
)
def test_acquisition_for_another_task_is_refused(client, model, size, acquisition, message):
    request = {"model": model, "pool": [[0] * size], "acquisition": acquisition}
    answer = client.post("/acquire", json=request)
    assert answer.status_code == 422
    assert answer.json()["detail"].startswith("acquisition: expected ")
    assert message in answer.json()["detail"]


def test_extreme_rows_are_answered_or_refused_as_documented(client):
    assert_extremes_are_answered_or_refused(client, "wavy", 1)


def test_labelled_targets_are_evaluated_and_used_to_fit_a_candidate(client, folder, tmp_path):
    generator = np.random.default_rng(1)
    x = generator.uniform(-2.0, 2.0, (150, 1)).astype(np.float32)
    y = true_mean(x) + true_std(x) * generator.normal(size=len(x))
    ids = [f"row {i}" for i in range(len(x))]
    request = {
        "model": "wavy",
        "pool": x.tolist(),
        "ids": ids,
        "k": 120,
        "keep": True,
        "control": 0.5,
        "seed": 1,
    }
    ranking = client.post("/acquire", json=request).json()["ranking"]
    control = [row["index"] for row in ranking if row["control"]]
    labels = [{"id": row["id"], "target": y[row["index"]]} for row in ranking]
    refusal = client.post(
        "/labels", json={"model": "wavy", "labels": [{"id": "row 0", "label": "1", "input": [0]}]}
    )
    assert (
        refusal.json()["detail"]
        == "labels.0.label: expected no label for regression (wavy); set `target` to a number, "
        "got one"
    )
    assert (
        client.post("/labels", json={"model": "wavy", "labels": labels}).json()["accepted"] == 120
    )
    live = client.get("/models/wavy/labels").json()["live"][0]
    predictions = predict(client, x[control], seed=1)
    assert live["control_labels"] == len(control)
    error = np.sqrt(np.mean((get_column(predictions, "mean") - y[control]) ** 2))
    assert live["figures"]["rmse"]["value"] == pytest.approx(error, rel=1e-5)
    low, high = live["figures"]["rmse"]["interval"]
    assert low < error < high
    is_covered = [
        p["interval"][0] <= t <= p["interval"][1]
        for p, t in zip(predictions, y[control], strict=True)
    ]
    assert live["figures"]["interval_coverage_at_95"]["value"] == pytest.approx(np.mean(is_covered))

    shutil.copytree(folder, tmp_path / "work")
    with working_in(tmp_path / "work"):
        assert (
            main(
                [
                    "candidate",
                    "wavy",
                    "--state",
                    str(tmp_path / "work" / "state"),
                    "--device",
                    "cpu",
                ]
            )
            == 0
        )
    store = ModelStore(tmp_path / "work" / "models")
    assert store.aliases("wavy") == {
        "latest": "1",
        "candidate": "2",
    }
    assert store.manifest("wavy", "2").training["labels"]["rows"] == 120 - len(control)
