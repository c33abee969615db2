import io

import numpy as np
import pandas as pd
import pytest

from model_store.artifacts.manifest import Description
from model_store.artifacts.store import ModelStore
from model_store.conformal.mondrian import MIN_CAUTIOUS_ROWS
from model_store.inference.frames import decide_as_served
from model_store.inference.frames import predict as predict_frame
from model_store.inference.model import Model
from model_store.inference.prediction import DecisionOptions, decide
from tests.support import tiny
from tests.support.files import npy_bytes
from tests.support.serving import open_client, wait_until

KINDS = ("class", "group")
GROUPS = ["red", "blue", "green", "red", "violet", "blue"]
X = tiny.rows(np.random.default_rng(8), len(GROUPS))


@pytest.fixture(scope="module")
def models_and_client(tmp_path_factory):
    store = ModelStore(tmp_path_factory.mktemp("categories") / "models")
    for kind in KINDS:
        tiny.publish(store, kind, kind=kind)
    tiny.publish(store, "plain")
    publish_with_group_column(store)
    models = {kind: Model.load(store.open(kind, "1"), threads=1) for kind in (*KINDS, "colours")}
    with open_client(store.root) as client:
        yield models, client


def publish_with_group_column(store):
    """Publish `colours`, whose group is a column of the rows."""
    manifest = store.manifest("group", "1")
    size = {"kind": "numeric", "name": "size", "mean": 0, "std": 1, "indicator": False}
    columns = [size, {"kind": "categorical", "name": "colour", "categories": ["red"]}]
    update = {
        "input": manifest.input.model_validate({**manifest.input.model_dump(), "columns": columns})
    }
    fields = {name: getattr(manifest, name) for name in Description.model_fields}
    store.publish("colours", Description(**fields | update), tiny.files(kind="group"))


def predict(client, model, **fields):
    return client.post("/predict", json={"model": model, "inputs": X.tolist(), "seed": 7, **fields})


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_ranked_within_their_categories(models_and_client, kind):
    models, client = models_and_client
    model = models[kind]
    options = {"groups": GROUPS} if kind == "group" else {}
    answer = predict(client, kind, fpr=0.1, coverage=0.8, **options)
    assert answer.status_code == 200, answer.text
    spec = model.manifest.categories
    tables = model.calibration.rank_tables[tiny.DRAWS]
    for n, row in enumerate(answer.json()["predictions"]):
        name = row["label"] if kind == "class" else GROUPS[n] if GROUPS[n] in spec.names else None
        row_counts = [rows for rows in spec.judged_rows if rows >= MIN_CAUTIOUS_ROWS]
        rows = min(row_counts) if name is None else spec.judged_rows[spec.names.index(name)]
        assert row["category"] == {"name": name, "rows": rows}
        assert row["flag"] == (row["p_value"] <= 0.1)
        if name is not None:
            table = tables.by_category[spec.names.index(name)]
            ranks = row["p_value"] * (len(table.statistic) + 1)
            assert ranks == pytest.approx(round(ranks))
        if kind == "class":
            mass = 1.0
            for c in np.argsort(row["probabilities"]).tolist():
                mass -= row["probabilities"][c]
                q = np.sort(tables.by_category[c].nonconformity)
                rank = int(np.ceil((len(q) + 1) * 0.8 - 1e-9))
                is_inside = rank > len(q) or max(mass, 0.0) <= q[rank - 1] + 1e-9
                assert (spec.names[c] in row["prediction_set"]) == is_inside


def test_unknown_group_is_judged_like_a_missing_group(models_and_client):
    _, client = models_and_client
    with_groups = predict(client, "group", groups=GROUPS, risk=0.97).json()["predictions"]
    without_groups = predict(client, "group", risk=0.97).json()["predictions"]
    assert without_groups[4] == with_groups[4]
    assert without_groups[4]["abstain"] is True
    by_group = [
        predict(client, "group", groups=[name] * len(GROUPS)).json()["predictions"]
        for name in tiny.GROUPS
    ]
    assert tiny.SMALL < MIN_CAUTIOUS_ROWS
    for n, row in enumerate(without_groups):
        assert row["p_value"] == max(predictions[n]["p_value"] for predictions in by_group[:-1])
        union = set().union(*(predictions[n]["prediction_set"] for predictions in by_group[:-1]))
        assert set(row["prediction_set"]) == union
        if GROUPS[n] != "violet":
            expected = by_group[tiny.GROUPS.index(GROUPS[n])][n]
            assert with_groups[n]["p_value"] == expected["p_value"]
            assert with_groups[n]["prediction_set"] == expected["prediction_set"]


def test_answer_matches_decisions_of_the_loaded_model(models_and_client):
    models, client = models_and_client
    model = models["group"]
    group_indices = np.array(
        [model.manifest.categories.names.index(g) if g != "violet" else -1 for g in GROUPS]
    )
    prediction = model.predict(X, model.runtime.draw(7, 0, tiny.DRAWS)).with_groups(group_indices)
    decision = decide(prediction, DecisionOptions(0.2, None, 0.7, None))
    answer = client.post(
        "/predict",
        json={
            "model": "group",
            "inputs": X.tolist(),
            "seed": 7,
            "groups": GROUPS,
            "fpr": 0.2,
            "coverage": 0.7,
        },
        headers={"Accept": "application/x-npz"},
    )
    arrays = np.load(io.BytesIO(answer.content), allow_pickle=False)
    assert arrays["p_value"].tolist() == decision.p_values.p_value.tolist()
    assert arrays["flag"].tolist() == decision.flag.tolist()
    assert arrays["prediction_set"].tolist() == decision.prediction_set.tolist()
    assert arrays["category"].tolist() == ["red", "blue", "green", "red", "", "blue"]


def test_group_is_a_column_of_the_row_unless_groups_are_sent(models_and_client):
    models, client = models_and_client
    colours = ["red", "green", "violet", None, "red"]
    request = {"model": "colours", "seed": 7, "inputs": [{"size": 1, "colour": c} for c in colours]}
    answer = client.post("/predict", json=request).json()
    names = [row["category"]["name"] for row in answer["predictions"]]
    assert names == ["red", None, None, None, "red"]
    sent = client.post("/predict", json={**request, "groups": ["green"] * 5}).json()
    assert {row["category"]["name"] for row in sent["predictions"]} == {"green"}
    same = {**request, "groups": ["red", "", "", "", "red"]}
    assert client.post("/predict", json=same).json() == answer
    job = client.post("/predict/jobs", json=request).json()
    wait_until(lambda: client.get(f"/jobs/{job['id']}").json()["state"] == "done")
    arrays = np.load(io.BytesIO(client.get(f"/jobs/{job['id']}/result").content))
    assert arrays["category"].tolist() == ["red", "", "", "", "red"]
    p_values = [row["p_value"] for row in answer["predictions"]]
    assert arrays["p_value"].tolist() == p_values
    frame = pd.DataFrame({"size": 1, "colour": colours})
    prediction = predict_frame(models["colours"], frame, ["size", "colour"], None, 7)
    assert (
        decide_as_served(models["colours"], prediction, None, 0.95).p_values.p_value.tolist()
        == p_values
    )


def test_groups_can_be_query_parameters_of_an_npy_request(models_and_client):
    _, client = models_and_client
    query = {"model": "group", "seed": 7, "groups": GROUPS}
    headers = {"Content-Type": "application/x-npy"}
    answer = client.post("/predict", params=query, content=npy_bytes(X), headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.json() == predict(client, "group", groups=GROUPS).json()


@pytest.mark.parametrize(
    ("model", "groups", "message"),
    [
        ("group", ["red"], "groups: expected a group for each of the 6 rows, got 1"),
        ("class", GROUPS, "groups: expected none, because class is not calibrated"),
        ("plain", GROUPS, "groups: expected none, because plain is not calibrated"),
        ("group", [1] * 6, "groups.0"),
    ],
)
def test_invalid_groups_are_refused(models_and_client, model, groups, message):
    _, client = models_and_client
    response = predict(client, model, groups=groups)
    assert response.status_code == 422
    assert response.json()["detail"].startswith(message)


def test_categories_are_null_for_models_without_them(models_and_client):
    _, client = models_and_client
    assert {row["category"] for row in predict(client, "plain").json()["predictions"]} == {None}
    items = {model["name"]: model for model in client.get("/models").json()["models"]}
    assert items["plain"]["categories"] is None
    assert items["group"]["categories"]["names"] == list(tiny.GROUPS)


def test_fpr_is_refused_only_if_no_category_supports_it(models_and_client):
    models, client = models_and_client
    spec = models["class"].manifest.categories
    min_rate, max_rate = 1 / (max(spec.judged_rows) + 1), 1 / (min(spec.judged_rows) + 1)
    response = predict(client, "class", fpr=min_rate * 0.9)
    assert response.status_code == 422
    assert response.json()["detail"].startswith("fpr: expected at least")
    assert min_rate < max_rate
    assert predict(client, "class", fpr=(min_rate + max_rate) / 2).status_code == 200
