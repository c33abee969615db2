import json

import numpy as np
import pytest
from scipy import stats

from model_store.artifacts.store import ModelStore
from model_store.inference.model import Model
from model_store.scores.transforms import LogTransform, RankTransform, to_fitted, to_target
from tests.support.environment import working_in
from tests.support.recipes import write_recipe
from tests.support.serving import open_client
from training.__main__ import main

NUM_TRAIN, NUM_TEST = 500, 200
SCALE = {"tiny": 1e-12, "plain": 1e12}
TRANSFORM = {"tiny": "auto", "plain": "none", "counts": "rank"}
FIT = {
    "method": "dropout-alpha",
    "posterior": {"rate": 0.1, "prior_std": 0.3},
    "network": {"hidden": [20]},
    "likelihood": {"noise": "heteroscedastic"},
    "training": {"epochs": 40, "batch_rows": 50, "samples": 3, "learning_rate": 1e-2},
    "serving": {"draws": 20, "combined": ["epistemic_std"]},
}


def make_rows(name):
    generator = np.random.default_rng(0)
    x = generator.uniform(-2.0, 2.0, (NUM_TRAIN + NUM_TEST, 3))
    if name == "counts":
        return x, generator.poisson(np.exp(1.0 + x[:, 0])).astype(np.float64)
    return x, SCALE[name] * np.exp(2.0 * x[:, 0] + 0.5 * generator.normal(size=len(x)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory, fits):
    """A folder with a store that contains a model for each transform."""
    folder = tmp_path_factory.mktemp("targets")
    with working_in(folder):
        for name, transform in TRANSFORM.items():
            x, y = make_rows(name)
            np.savez(
                folder / f"{name}.npz",
                x_train=x[NUM_TEST:],
                y_train=y[NUM_TEST:],
                x_test=x[:NUM_TEST],
                y_test=y[:NUM_TEST],
            )
            data = {
                "validation": 60,
                "reference": 50,
                "ranking": 99,
                "target_transform": transform,
            }
            path = write_recipe(
                folder,
                name=name,
                task="regression",
                data={"source": f"npz:{name}.npz", **data},
                **FIT,
            )
            assert main(["fit", str(path), "--quiet", "--device", "cpu"]) == 0
    return folder


@pytest.fixture(scope="module")
def client(folder):
    with open_client(folder / "models") as client:
        yield client


def predict(client, name, **fields):
    x, y = make_rows(name)
    request = {"model": name, "seed": 7, "inputs": x[:NUM_TEST].tolist(), **fields}
    answer = client.post("/predict", json=request)
    assert answer.status_code == 200, answer.text
    predictions = answer.json()["predictions"]
    return {key: np.array([p[key] for p in predictions]) for key in predictions[0]}, y[:NUM_TEST]


def get_model(folder, name):
    return Model.load(ModelStore(folder / "models").open(name, "1"))


@pytest.mark.parametrize("name", TRANSFORM)
def test_intervals_have_nominal_coverage_and_contain_the_median(client, name):
    answers, y = predict(client, name, coverage=0.9)
    low, high = answers["interval"].T
    num_covered = int(((low <= y) & (y <= high)).sum())
    # With 99 ranking rows and 200 test rows, the count is beta-binomial. These bounds fail once
    # in a million runs.
    distribution = stats.betabinom(NUM_TEST, 90, 10)
    assert distribution.ppf(5e-7) <= num_covered <= distribution.ppf(1 - 5e-7)
    if name == "plain":
        assert (answers["median"] == None).all()  # noqa: E711
    else:
        assert ((low <= answers["median"]) & (answers["median"] <= high)).all()
        assert (low >= 0).all()
    assert (answers["std"] > 0).all()


def test_auto_selects_transform_with_best_held_out_likelihood(folder):
    manifest = get_model(folder, "tiny").manifest
    selection = manifest.training["target_transform"]
    assert set(selection["log_likelihood"]) == {"none", "log", "rank"}
    assert selection["chosen"] == "log"
    assert selection["log_likelihood"]["log"] > selection["log_likelihood"]["none"]
    # All likelihoods are densities in the target's units, so they are close to the true density.
    x, y = make_rows("tiny")
    reference = stats.lognorm.logpdf(y, 0.5, scale=SCALE["tiny"] * np.exp(2.0 * x[:, 0])).mean()
    assert manifest.quality["test_log_likelihood"] == pytest.approx(reference, abs=0.7)
    assert manifest.training["validation_log_likelihood"] == pytest.approx(reference, abs=0.7)
    assert not list((folder / "runs").glob("*/target-*"))


def test_targets_of_any_scale_are_predicted(client, folder):
    x, _ = make_rows("tiny")
    answers, _ = predict(client, "tiny")
    error = np.log(answers["median"] / (SCALE["tiny"] * np.exp(2.0 * x[:NUM_TEST, 0])))
    assert np.abs(np.median(error)) < 0.15
    assert np.std(error) < 0.4
    answers, y = predict(client, "plain")
    assert np.corrcoef(answers["mean"], y)[0, 1] > 0.5
    assert get_model(folder, "plain").manifest.transform is None


def test_answers_match_back_transformed_draws(client, folder):
    model = get_model(folder, "tiny")
    assert model.manifest.transform == LogTransform(offset=0.0)
    answers, _ = predict(client, "tiny", return_samples=True)
    theta = model.runtime.draw(7, 0, 20)[:, None]
    x, _ = make_rows("tiny")
    outputs = model.runtime.run(x[:NUM_TEST].astype(np.float32), theta)[0].astype(np.float64)
    distribution = stats.lognorm(np.exp(0.5 * outputs[..., 1]), scale=np.exp(outputs[..., 0]))
    np.testing.assert_allclose(answers["mean"], distribution.mean().mean(axis=0), rtol=1e-4)
    aleatoric, epistemic = distribution.var().mean(axis=0), distribution.mean().var(axis=0, ddof=1)
    np.testing.assert_allclose(answers["std"], np.sqrt(aleatoric + epistemic), rtol=1e-3)
    np.testing.assert_allclose(answers["epistemic_std"], np.sqrt(epistemic), rtol=1e-3)
    samples = np.array([[draw["std"] for draw in row] for row in answers["samples"]])
    np.testing.assert_allclose(samples, distribution.std().T, rtol=1e-3)
    cdf = np.mean(
        [stats.norm.cdf(np.log(answers["median"]), m, s) for m, s in _moments(outputs)], axis=0
    )
    np.testing.assert_allclose(cdf, 0.5, atol=1e-5)


def _moments(outputs):
    return zip(outputs[..., 0], np.exp(0.5 * outputs[..., 1]), strict=True)


def test_detectors_use_the_transformed_target(client, folder):
    answers, _ = predict(client, "tiny")
    scores = np.array([d["std"]["score"] for d in answers["detectors"]])
    assert (scores > 0.05).all()  # on the log scale, not about 1e-12
    model = get_model(folder, "tiny")
    x, _ = make_rows("tiny")
    (prediction, _) = (model.predict(x[:3].astype(np.float32), model.runtime.draw(7, 0, 20)), None)
    low, high = to_fitted(model.manifest.transform, prediction.intervals(0.9)).T
    np.testing.assert_allclose(0.5 * (low + high), prediction.calibrated_scores.mean, rtol=1e-6)


def test_pool_is_ranked_in_target_units(client):
    answers, _ = predict(client, "tiny", num_samples=20)
    x, _ = make_rows("tiny")
    request = {
        "model": "tiny",
        "seed": 7,
        "num_samples": 20,
        "pool": x[:NUM_TEST].tolist(),
        "acquisition": "variance",
    }
    ranking = client.post("/acquire", json={**request, "k": 5}).json()["ranking"]
    expected = np.sort(answers["std"] ** 2)[::-1][:5]
    np.testing.assert_allclose([row["score"] for row in ranking], expected, rtol=1e-9)


def test_predicted_counts_are_never_negative(client, folder):
    transform = get_model(folder, "counts").manifest.transform
    assert (transform.kind, transform.least) == ("rank", 0.0)
    answers, y = predict(client, "counts")
    assert (answers["mean"] > 0).all()
    assert (answers["interval"] >= 0).all()
    assert (y == 0).any()
    assert to_target(transform, np.array([-50.0])) == 0.0


def test_model_describes_its_transform(client):
    output = client.get("/models/counts").json()["manifest"]["output"]
    assert output["transform"]["kind"] == "rank"
    assert RankTransform.model_validate(output["transform"]).values[0] == 0


def test_report_uses_target_units(folder):
    with working_in(folder):
        assert main(["evaluate", "tiny", "--rows", "50", "--quiet"]) == 0
    report = json.loads((folder / "models" / "tiny" / "reports" / "1" / "report.json").read_text())
    test = report["test"]
    _, y = make_rows("tiny")
    assert 0 < test["crps"] < np.std(y)
    assert 0 < test["rmse"] < 10 * np.std(y)
    assert test["pit"]["p_value"] > 1e-6


def test_warm_start_refuses_a_different_transform(folder, capsys):
    with working_in(folder):
        recipe = write_recipe(
            folder,
            name="warm",
            task="regression",
            data={
                "source": "npz:tiny.npz",
                "validation": 60,
                "reference": 50,
                "ranking": 99,
                "target_transform": "rank",
            },
            **FIT,
        )
        assert main(["fit", str(recipe), "--warm-start", "tiny", "--quiet"]) == 2
    assert (
        "data.target_transform: expected log, as in tiny version 1, got rank"
        in capsys.readouterr().err
    )


def test_log_transform_is_refused_for_unsuitable_targets(tmp_path, capsys):
    x, y = make_rows("tiny")
    np.savez(tmp_path / "below.npz", x_train=x, y_train=y - 1e-12, x_test=x[:9], y_test=y[:9])
    data = {"source": "npz:below.npz", "target_transform": "log"}
    with working_in(tmp_path):
        path = write_recipe(tmp_path, task="regression", data=data, **FIT)
        assert main(["fit", str(path), "--quiet"]) == 2
        assert "data.target_transform: expected `none` or `rank`" in capsys.readouterr().err
        assert main(["fit", str(write_recipe(tmp_path, data={"target_transform": "log"}))]) == 2
        assert (
            "data.target_transform: expected no value for task classification"
            in capsys.readouterr().err
        )
