import io
import shutil

import numpy as np
import pytest
from sklearn.datasets import load_digits

from model_store.artifacts.manifest import FILES, Description
from model_store.artifacts.store import ModelStore
from service.api.explanations import explanation_bytes
from tests.support.models import publish_unfitted
from tests.support.once import create_once
from tests.support.recipes import recipe_with
from tests.support.serving import open_client
from tests.support.tiny import publish

PERSON = {"a": 0.1, "b": 0.1, "c": -0.3, "d": 500.0, "city": "Rome"}
SEED = {"seed": 3}


@pytest.fixture(scope="module")
def tables(tmp_path_factory, digits_store, fits):
    def fit(root):
        generator = np.random.default_rng(0)
        z, u = generator.normal(size=(2, 900))
        cities = generator.choice(["Rome", "Oslo"], 900, p=[0.7, 0.3])
        lines = ["id,a,b,c,d,city,y"]
        for i in range(900):
            d = "" if i % 30 == 0 else f"{500 + 100 * u[i]:.3f}"
            b, c = z[i] + 0.1 * generator.normal(), generator.normal()
            lines.append(
                f"P{i:04},{z[i]:.4f},{b:.4f},{c:.4f},{d},{cities[i]},{'yes' if z[i] + u[i] > 0 else 'no'}"
            )
        (root / "people.csv").write_text("\n".join(lines) + "\n")
        rows = {"validation": 60, "reference": 120, "ranking": 120}
        data = {"source": "csv:people.csv", "target": "y", "id": "id", **rows}
        store = ModelStore(root / "models")
        recipe = recipe_with(name="people", data=data, serving={"draws": 10, "temperature": False})
        publish_unfitted(store, recipe, root)
        files = store.open("people", "1").files
        description = Description.model_validate(
            store.manifest("people", "1").model_dump(include={*Description.model_fields})
        )
        store.publish("hidden", description, {name: files[name] for name in FILES})
        shutil.copytree(digits_store / "digits", root / "models" / "digits")
        publish(store)

    return create_once(tmp_path_factory, "explained", fit) / "models"


@pytest.fixture(scope="module")
def explain(tables):
    """Return a function that requests explanations of rows."""
    with open_client(tables, limits={"MAX_EXPLAINED_ROWS": 8}) as client:

        def send(rows, model="people", **fields):
            answer = client.post(
                "/predict", json={"model": model, "inputs": rows, "explain": True, **SEED, **fields}
            )
            assert answer.status_code == 200, answer.text
            return [row["explanation"] for row in answer.json()["predictions"]]

        send.client, send.people = client, (tables.parent / "people.csv").read_text()
        yield send


def test_overly_smooth_row_is_flagged_by_low_detector_scores(explain):
    images, labels = load_digits(return_X_y=True)
    row = images[labels == 3].mean(0).reshape(8, 8).tolist()
    answer = explain.client.post(
        "/predict", json={"model": "digits", "inputs": [row], "explain": True, **SEED}
    ).json()
    prediction = answer["predictions"][0]
    scores = prediction["explanation"]["detectors"]
    assert (prediction["label"], prediction["flag"]) == ("3", True)
    assert [name for name, entry in scores.items() if entry["low"]] == ["residual", "mahalanobis"]
    assert scores["residual"]["share"] + scores["mahalanobis"]["share"] > 0.9
    assert prediction["explanation"]["attributed"] < 0.05


def test_examples_are_training_rows_in_the_format_of_predict(explain):
    def examples(model, **query):
        answer = explain.client.get("/predict/examples", params={"model": model, **query})
        assert answer.status_code == 200, answer.text
        return answer.json()["inputs"]

    lines = (row.split(",")[1:6] for row in explain.people.splitlines()[1:])
    training_rows = {
        (float(a), float(b), float(c), float(d) if d else None, e) for a, b, c, d, e in lines
    }
    rows = examples("people")
    assert len(rows) == 32
    assert {tuple(row.values()) for row in rows} <= training_rows
    assert len({str(row) for row in rows}) == 32
    answer = explain.client.post(
        "/predict", json={"model": "people", "inputs": rows, **SEED}
    ).json()
    assert sum(row["flag"] for row in answer["predictions"]) < 8
    assert np.shape(examples("digits")) == (32, 8, 8)
    assert examples("hidden") == []


def test_drift_details_list_columns_and_unusual_rows(explain):
    rows = [PERSON | {"a": 50.0 + n, "d": 0.0} for n in range(40)]
    for start in range(0, 40, 10):
        body = {"model": "people", "inputs": rows[start : start + 10]}
        assert explain.client.post("/predict", json=body).status_code == 200
    details = explain.client.get("/models/people/drift").json()
    assert details["rows"] == 40 and list(details["columns"]) == sorted(
        details["columns"], key=lambda name: -details["columns"][name]
    )
    assert details["columns"]["a"] > 0.9 > details["limit"]
    assert len(details["unusual"]) == 5
    for row in details["unusual"]:
        assert row["input"]["city"] == PERSON["city"] and row["input"]["a"] >= 50.0
    assert explain.client.get("/models/digits/drift").json()["columns"] == {}


def test_examples_have_labels_and_can_be_requested_by_id(explain):
    def get(**query):
        return explain.client.get("/predict/examples", params=query).json()

    digits = get(model="digits")
    assert set(digits["labels"]) == {str(label) for label in range(10)}
    images, labels = load_digits(return_X_y=True)
    for row, name, label in zip(digits["inputs"], digits["ids"], digits["labels"], strict=True):
        assert (images[int(name)].reshape(8, 8).tolist(), str(labels[int(name)])) == (row, label)
    selected_ids = [digits["ids"][20], digits["ids"][3]]
    subset = get(model="digits", id=[*selected_ids, "unknown"])
    assert subset["ids"] == selected_ids
    assert subset["inputs"] == [digits["inputs"][20], digits["inputs"][3]]


def test_csv_pool_ranks_like_json_rows_and_counts_unknown_categories(explain):
    cities = ["Rome", "rome", "Atlantis"]
    rows = [PERSON | {"a": 0.1 * n, "d": None if n else 1.5, "city": cities[n]} for n in range(3)]
    lines = [
        f"p{n},{r['a']},{r['b']},{r['c']},{r['d'] or ''},{r['city'] or 'NULL'}"
        for n, r in enumerate(rows)
    ]
    request = {"model": "people", **SEED}
    csv = "\n".join([" id,a, b,c,d,city", *lines]) + "\n"
    headers = {"Content-Type": "text/csv"}
    answer = explain.client.post("/acquire", params=request, content=csv, headers=headers).json()
    assert answer["unknown_categories"] == {"city": 2}
    expected = explain.client.post(
        "/acquire", json={**request, "pool": rows, "ids": ["p0", "p1", "p2"]}
    ).json()
    assert answer == expected
    response = explain.client.post(
        "/acquire", params=request, content=csv.replace("p1,0.1", "p1,ten"), headers=headers
    )
    expected = "pool.1.a: expected a number, or null, got a string of 3 characters (id 'p1')"
    assert response.json()["detail"] == expected


def get_falls(explanation):
    return {entry["column"]: entry["fall"] for entry in explanation["columns"]}


@pytest.mark.parametrize(
    ("column", "value"), [("a", 4.0), ("c", -9.0), ("d", 5e4), ("city", "Atlantis")]
)
def test_broken_column_is_listed_first(explain, column, value):
    (explanation,) = explain([PERSON | {column: value}])
    falls = [entry["fall"] for entry in explanation["columns"]]
    assert falls == sorted(falls, reverse=True)
    assert {*get_falls(explanation)} == {*PERSON}
    name = explanation["columns"][0]["column"]
    assert name == column
    assert falls[0] > 0


def test_fall_is_the_statistic_drop_with_the_usual_value(explain, tables):
    columns = ModelStore(tables).manifest("people", "1").input.columns
    usual = {column.name: column.usual for column in columns}
    row = PERSON | {"a": 4.0, "city": "Oslo"}
    original, *variants = explain([row, *(row | {name: value} for name, value in usual.items())])
    for name, variant in zip(usual, variants, strict=True):
        assert get_falls(original)[name] == pytest.approx(
            original["statistic"] - variant["statistic"], abs=1e-5
        )
        assert abs(get_falls(variant)[name]) < 1e-5


def test_unseen_categories_and_missing_values_are_listed(explain):
    odd, plain = explain([PERSON | {"city": "Atlantis" * 40, "d": None}, PERSON])
    assert odd["unseen"] == ["city"]
    assert odd["missing"] == ["d"]
    assert (plain["unseen"], plain["missing"]) == ([], [])
    assert (plain["attributed"], plain["map"]) == (None, None)


def test_nearest_training_rows_are_listed_by_id(explain, tables):
    lines = (tables.parent / "people.csv").read_text().splitlines()
    values = {line.split(",")[0]: line.split(",")[1:6] for line in lines[1:]}
    (explanation,) = explain([PERSON])
    nearest = explanation["nearest"]
    assert len({entry["id"] for entry in nearest}) == 5
    assert {entry["id"] for entry in nearest} <= {*values}
    distances = [entry["distance"] for entry in nearest]
    assert distances == sorted(distances)
    a, b, c, d, city = values[nearest[0]["id"]]
    training_row = dict(zip("abc", map(float, (a, b, c)), strict=True)) | {
        "d": float(d) if d else None,
        "city": city,
    }
    (explanation,) = explain([training_row])
    assert explanation["nearest"][0] == {"id": nearest[0]["id"], "distance": 0.0}


def test_detector_shares_sum_to_one_and_map_sums_to_attributed_share(explain, digits_rows):
    x = digits_rows[:3].copy()
    x[0, 27] = 60.0
    for explanation in explain(x.tolist(), "digits"):
        shares = explanation["detectors"].values()
        assert sum(entry["share"] for entry in shares) == pytest.approx(1)
        input_detectors = ("residual", "mahalanobis", "input_neighbours")
        entries = [explanation["detectors"][name] for name in input_detectors]
        attributed = sum(entry["share"] for entry in entries if not entry["low"])
        pixels = np.array(explanation["map"])
        assert pixels.shape == (8, 8)
        assert (pixels >= 0).all()
        assert explanation["attributed"] == pytest.approx(attributed)
        assert pixels.sum() == pytest.approx(attributed)
        assert [explanation[name] for name in ("columns", "unseen", "missing")] == [None] * 3
        assert all(0 <= int(entry["id"]) < 1797 for entry in explanation["nearest"])
    (pixels,) = (np.array(explanation["map"]) for explanation in explain(x[:1].tolist(), "digits"))
    assert pixels.ravel().argmax() == 27


@pytest.mark.parametrize("fields", [{}, {"return_samples": True}, {"fdr": 0.2}, {"num_samples": 7}])
def test_explain_changes_no_other_field_and_is_reproducible(explain, digits_rows, fields):
    request = {"model": "digits", "inputs": digits_rows[:4].tolist(), **SEED, **fields}
    expected = explain.client.post("/predict", json=request).json()
    first, second = (
        explain.client.post("/predict", json={**request, "explain": True}) for _ in range(2)
    )
    assert first.content == second.content
    actual = first.json()
    for row in actual["predictions"]:
        assert row.pop("explanation")["statistic"] >= 0
    assert actual == expected


def test_explanation_does_not_depend_on_other_rows(explain):
    rows = [PERSON, PERSON | {"a": 3.0}, PERSON | {"city": "Atlantis"}]
    explanations = explain(rows)
    assert [explain([row])[0] for row in rows] == explanations


@pytest.mark.parametrize("model", ["people", "digits"])
def test_npz_explanations_match_json(explain, digits_rows, model):
    rows = (
        [PERSON, PERSON | {"city": "Atlantis", "d": None}]
        if model == "people"
        else digits_rows[:2].tolist()
    )
    body = {"model": model, "inputs": rows, "explain": True, **SEED}
    answer = explain.client.post("/predict", json=body, headers={"Accept": "application/x-npz"})
    arrays = np.load(io.BytesIO(answer.content), allow_pickle=False)
    actual = {
        name.removeprefix("explanation."): arrays[name]
        for name in arrays
        if name.startswith("explanation.")
    }
    for n, expected in enumerate(explain(rows, model)):
        assert actual["statistic"][n] == expected["statistic"]
        for name, entry in expected["detectors"].items():
            assert actual[f"detectors.{name}.share"][n] == entry["share"]
            assert actual[f"detectors.{name}.low"][n] == entry["low"]
        assert actual["nearest.id"][n].tolist() == [entry["id"] for entry in expected["nearest"]]
        assert actual["nearest.distance"][n].tolist() == [
            entry["distance"] for entry in expected["nearest"]
        ]
        if model == "people":
            assert dict(zip(PERSON, actual["columns"][n], strict=True)) == get_falls(expected)
        else:
            assert actual["map"][n].tolist() == expected["map"]
            assert actual["attributed"][n] == expected["attributed"]
    if model == "people":
        assert actual["unseen"].tolist() == [[False] * 5, [False, False, False, False, True]]
        assert actual["missing"].tolist() == [[False] * 5, [False, False, False, True, False]]
    else:
        assert not {"unseen", "missing", "columns"} & set(actual)


def test_parts_unsupported_by_the_version_are_null(explain):
    (hidden,) = explain([PERSON], "hidden")
    assert hidden["nearest"] is None
    assert hidden["columns"] is not None
    (tiny,) = explain([[0.0, 0.0, 9.0]], "tiny")
    assert [
        tiny[name] for name in ("columns", "map", "attributed", "unseen", "missing", "nearest")
    ] == [None] * 6
    assert tiny["detectors"]["distance"]["share"] > 0.5


def test_csv_rows_are_explained(explain):
    answer = explain.client.post(
        "/predict?model=people&explain=true",
        content=b"a,b,c,d,city\n0.1,0.1,-0.3,500,Rome\n0.1,0.1,-0.3,,Atlantis\n",
        headers={"Content-Type": "text/csv"},
    )
    usual, odd = (row["explanation"] for row in answer.json()["predictions"])
    assert (usual["unseen"], usual["missing"]) == ([], [])
    assert (odd["unseen"], odd["missing"]) == (["city"], ["d"])


@pytest.mark.parametrize("model", ["people", "digits"])
def test_explanation_size_stays_within_its_memory_reservation(explain, tables, digits_rows, model):
    rows = [PERSON | {"city": "A" * 200}] * 8 if model == "people" else digits_rows[:8].tolist()
    request, sizes = {"model": model, "inputs": rows, **SEED}, []
    for accept in ("application/json", "application/x-npz"):
        for enabled in (False, True):
            answer = explain.client.post(
                "/predict", json={**request, "explain": enabled}, headers={"Accept": accept}
            )
            sizes.append(len(answer.content))
    manifest = ModelStore(tables).manifest(model, "1")
    assert sizes[1] - sizes[0] < explanation_bytes(manifest, 8, as_arrays=False)
    assert (
        sizes[3] - sizes[2] < explanation_bytes(manifest, 8, as_arrays=True) + 10_000
    )  # for the array names


def test_explain_refuses_too_many_rows(explain):
    answer = explain.client.post(
        "/predict", json={"model": "people", "inputs": [PERSON] * 9, "explain": True}
    )
    assert answer.status_code == 413
    assert answer.json()["detail"] == "explain: expected at most 8 rows to explain, got 9"
    assert (
        explain.client.post(
            "/predict", json={"model": "people", "inputs": [PERSON] * 9}
        ).status_code
        == 200
    )
