import io

import numpy as np
import pytest

from tests.support.serving import open_client

MODELS = ["digits", "people", "pictures", "texts", "groups", "rents"]
REGRESSIONS = {"rents"}
DISAGREEMENT = {"bald", "mean_std", "std", "epistemic_std"}  # scores that compare draws


@pytest.fixture(scope="module")
def client(kinds):
    with open_client(kinds) as client:
        yield client


@pytest.fixture(scope="module")
def rows(digits_rows):
    generator = np.random.default_rng(0)
    people = [{"age": 20 + 3 * i, "city": ["Rome", "Oslo"][i % 2]} for i in range(20)]
    return {
        "digits": digits_rows[:20].tolist(),
        "people": people,
        "rents": people,
        "pictures": generator.integers(0, 256, (20, 3, 1, 1)).tolist(),
        "texts": [" ".join(["good", "bad", "film"][: 1 + i % 3]) for i in range(20)],
        "groups": generator.normal(size=(20, 3)).tolist(),
    }


@pytest.fixture(params=MODELS)
def predict(request, client, rows):
    """Return a function that sends rows of one model and returns the response."""
    name = request.param

    def send(selected=slice(None), accept="application/json", **options):
        body = {"model": name, "inputs": rows[name][selected], **options}
        answer = client.post("/predict", json=body, headers={"Accept": accept})
        assert answer.status_code == 200, answer.text
        return answer

    send.is_regression = name in REGRESSIONS
    return send


@pytest.mark.parametrize("num_samples", [1, 7, 64, 150])
def test_returned_seed_reproduces_the_answer_byte_for_byte(predict, num_samples):
    answer = predict(num_samples=num_samples, return_samples=True)
    seed = answer.json()["seed"]
    replay = predict(num_samples=num_samples, return_samples=True, seed=seed)
    assert replay.content == answer.content


@pytest.mark.parametrize("num_samples", [1, 7, 100])
def test_predictions_do_not_depend_on_other_rows_in_the_request(predict, num_samples):
    options = {"seed": 5, "num_samples": num_samples}
    predictions = predict(**options).json()["predictions"]
    for size in (1, 2, 3, 7, 13):
        part = slice(20 - size - 3, 17)  # also at another position in the request
        assert predict(part, **options).json()["predictions"] == predictions[part]


def test_fewer_draws_are_a_prefix_of_more_draws_with_the_same_seed(predict):
    small, large = (
        predict(seed=3, num_samples=count, return_samples=True).json()["predictions"]
        for count in (10, 20)
    )
    for a, b in zip(small, large, strict=True):
        assert a["samples"] == b["samples"][:10]


def test_scores_match_the_returned_samples(predict):
    for prediction in predict(num_samples=30, return_samples=True).json()["predictions"]:
        samples = prediction["samples"]
        assert len(samples) == 30
        if predict.is_regression:
            mean, std = (np.array([s[name] for s in samples]) for name in ("mean", "std"))
            total = np.hypot(prediction["aleatoric_std"], prediction["epistemic_std"])
            assert prediction["mean"] == pytest.approx(mean.mean(), rel=1e-6)
            assert prediction["epistemic_std"] == pytest.approx(mean.std(ddof=1), rel=1e-4)
            assert prediction["aleatoric_std"] == pytest.approx(np.sqrt(np.mean(std**2)), rel=1e-6)
            assert prediction["std"] == pytest.approx(total, rel=1e-12)
        else:
            p = np.array(samples)
            entropies = -np.sum(p * np.log(np.maximum(p, 1e-300)), axis=1)
            assert prediction["probabilities"] == pytest.approx(p.mean(axis=0), abs=1e-6)
            assert prediction["expected_entropy"] == pytest.approx(entropies.mean(), abs=1e-5)
            assert prediction["mean_std"] == pytest.approx(p.std(axis=0).mean(), abs=1e-6)


@pytest.mark.parametrize("num_samples", [1, 2])
def test_standard_errors_are_null_with_too_few_draws(predict, num_samples):
    for prediction in predict(num_samples=num_samples).json()["predictions"]:
        errors = prediction["standard_error"]
        null = {name for name, error in errors.items() if error is None}
        assert null == ({*errors} if num_samples == 1 else {*errors} & DISAGREEMENT)
        if not predict.is_regression:
            assert (prediction["bald_corrected"] is None) == (num_samples == 1)


@pytest.mark.parametrize("num_samples", [1, 2, 64])
def test_npz_answer_matches_json_answer(predict, num_samples):
    options = {"seed": 7, "num_samples": num_samples, "coverage": 0.9, "return_samples": True}
    answer = predict(**options).json()
    npz_answer = predict(accept="application/x-npz", **options)
    arrays = dict(np.load(io.BytesIO(npz_answer.content), allow_pickle=False))
    predictions = answer.pop("predictions")
    classes = arrays.pop("classes", None)
    columns = arrays.pop("columns", None)
    arrays.pop("unknown_categories", None)  # counts per column, not per name
    for name in ("model", "version", "seed", "fpr", "coverage"):
        assert arrays.pop(name).item() == answer[name]
    missing = {name for name, value in predictions[0].items() if value is None}
    missing |= {"standard_error", "detectors", "samples"}
    samples = [prediction["samples"] for prediction in predictions]
    if predict.is_regression:
        for name in ("mean", "std"):
            values = [[np.float32(draw[name]) for draw in draws] for draws in samples]
            assert arrays.pop(f"samples.{name}").tolist() == values
        bounds = np.array([p["interval"] for p in predictions], dtype=float)
        unbounded = np.where(np.isnan(bounds), [-np.inf, np.inf], bounds)
        assert arrays.pop("interval").tolist() == unbounded.tolist()
        missing.add("interval")
    else:
        assert arrays.pop("samples").tolist() == np.array(samples, np.float32).tolist()
        for mask, prediction in zip(arrays.pop("prediction_set"), predictions, strict=True):
            assert classes[mask].tolist() == prediction["prediction_set"]
        missing.add("prediction_set")
    if columns is not None:
        for is_missing, prediction in zip(arrays.pop("missing"), predictions, strict=True):
            assert columns[is_missing].tolist() == prediction["missing"]
        missing.add("missing")
    if "category" in arrays:
        names = [prediction["category"]["name"] or "" for prediction in predictions]
        assert arrays.pop("category").tolist() == names
        missing.add("category")
    for name, values in arrays.items():
        column = predictions
        for key in name.split("."):
            column = [value[key] for value in column]
        assert values.tolist() == column, name
    assert {name.partition(".")[0] for name in arrays} - {"standard_error", "detectors"} == {
        *predictions[0]
    } - missing


@pytest.mark.parametrize("num_samples", [7, 64, 150])
def test_decisions_use_the_largest_calibrated_draw_count(predict, client, num_samples):
    answer = predict(seed=9, num_samples=num_samples).json()
    counts = client.get(f"/models/{answer['model']}").json()["manifest"]["detectors"]["draw_counts"]
    calibrated_count = max(count for count in counts if count <= num_samples)
    expected = predict(seed=9, num_samples=calibrated_count).json()["predictions"]
    for a, b in zip(answer["predictions"], expected, strict=True):
        names = ["p_value", "flag", "detectors", *(["interval"] if predict.is_regression else [])]
        assert all(a[name] == b[name] for name in names)
        assert a["num_samples"] == num_samples
        if not predict.is_regression:
            assert {*a["prediction_set"]} == {*b["prediction_set"], a["label"]}
