import io
import shutil

import numpy as np
import pytest
from sklearn.datasets import load_digits

from model_store.artifacts.manifest import FILES, Description
from model_store.artifacts.store import ModelStore
from service.api.explanations import explanation_bytes
from tests.support.models import publish_unfitted
from tests.support.once import once_a_run
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

    return once_a_run(tmp_path_factory, "explained", fit) / "models"


@pytest.fixture(scope="module")
def ask(tables):
    """Ask for an explanation of rows."""
    with open_client(tables, limits={"MAX_EXPLAINED_ROWS": 8}) as client:

        def asked(rows, model="people", **fields):
            answer = client.post(
                "/predict", json={"model": model, "inputs": rows, "explain": True, **SEED, **fields}
            )
            assert answer.status_code == 200, answer.text
            return [row["explanation"] for row in answer.json()["predictions"]]

        asked.client, asked.people = client, (tables.parent / "people.csv").read_text()
        yield asked


def test_a_row_that_is_smoother_than_any_real_one_is_flagged_and_said_to_be_low(ask):
    images, labels = load_digits(return_X_y=True)
    row = images[labels == 3].mean(0).reshape(8, 8).tolist()
    answer = ask.client.post(
        "/predict", json={"model": "digits", "inputs": [row], "explain": True, **SEED}
    ).json()
    prediction = answer["predictions"][0]
    parent = prediction["explanation"]["detectors"]
    assert (prediction["label"], prediction["flag"]) == ("3", True)
    assert [name for name, entry in parent.items() if entry["low"]] == ["residual", "mahalanobis"]
    assert parent["residual"]["share"] + parent["mahalanobis"]["share"] > 0.9
    assert prediction["explanation"]["attributed"] < 0.05


def test_examples_are_training_rows_as_predict_takes_them(ask):
    def examples(model, **query):
        answer = ask.client.get("/predict/examples", params={"model": model, **query})
        assert answer.status_code == 200, answer.text
        return answer.json()["inputs"]

    lines = (row.split(",")[1:6] for row in ask.people.splitlines()[1:])
    reference = {
        (float(a), float(b), float(c), float(d) if d else None, e) for a, b, c, d, e in lines
    }
    rows = examples("people")
    assert len(rows) == 32
    assert {tuple(row.values()) for row in rows} <= reference
    assert len({str(row) for row in rows}) == 32
    answer = ask.client.post("/predict", json={"model": "people", "inputs": rows, **SEED}).json()
    assert sum(row["flag"] for row in answer["predictions"]) < 8
    assert np.shape(examples("digits")) == (32, 8, 8)
    assert examples("hidden") == []


def test_drift_is_described_by_columns_and_unusual_rows(ask):
    rows = [PERSON | {"a": 50.0 + n, "d": 0.0} for n in range(40)]
    for start in range(0, 40, 10):
        body = {"model": "people", "inputs": rows[start : start + 10]}
        assert ask.client.post("/predict", json=body).status_code == 200
    details = ask.client.get("/models/people/drift").json()
    assert details["rows"] == 40 and list(details["columns"]) == sorted(
        details["columns"], key=lambda name: -details["columns"][name]
    )
    assert details["columns"]["a"] > 0.9 > details["limit"]
    assert len(details["unusual"]) == 5
    for row in details["unusual"]:
        assert row["input"]["city"] == PERSON["city"] and row["input"]["a"] >= 50.0
    assert ask.client.get("/models/digits/drift").json()["columns"] == {}


def test_examples_have_labels_and_nearest_rows_can_be_requested_by_id(ask):
    def get(**query):
        return ask.client.get("/predict/examples", params=query).json()

    digits = get(model="digits")
    assert set(digits["labels"]) == {str(label) for label in range(10)}
    images, labels = load_digits(return_X_y=True)
    for row, name, label in zip(digits["inputs"], digits["ids"], digits["labels"], strict=True):
        assert (images[int(name)].reshape(8, 8).tolist(), str(labels[int(name)])) == (row, label)
    chosen = [digits["ids"][20], digits["ids"][3]]
    subset = get(model="digits", id=[*chosen, "unknown"])
    assert subset["ids"] == chosen
    assert subset["inputs"] == [digits["inputs"][20], digits["inputs"][3]]


def test_a_pool_as_a_file_is_ranked_as_its_rows_and_what_the_model_does_not_know_of_it_is_said(ask):
    """A file as pandas writes it: scores of the same rows as objects, unknown categories counted,
    errors by id."""
    cities = ["Rome", "rome", "Atlantis"]
    rows = [PERSON | {"a": 0.1 * n, "d": None if n else 1.5, "city": cities[n]} for n in range(3)]
    lines = [
        f"p{n},{r['a']},{r['b']},{r['c']},{r['d'] or ''},{r['city'] or 'NULL'}"
        for n, r in enumerate(rows)
    ]
    request = {"model": "people", **SEED}
    csv = "\n".join([" id,a, b,c,d,city", *lines]) + "\n"
    headers = {"Content-Type": "text/csv"}
    answer = ask.client.post("/acquire", params=request, content=csv, headers=headers).json()
    assert answer["unknown_categories"] == {"city": 2}
    expected = ask.client.post(
        "/acquire", json={**request, "pool": rows, "ids": ["p0", "p1", "p2"]}
    ).json()
    assert answer == expected
    refused = ask.client.post(
        "/acquire", params=request, content=csv.replace("p1,0.1", "p1,ten"), headers=headers
    )
    expected = "pool.1.a: expected a number, or null, got a string of 3 characters (id 'p1')"
    assert refused.json()["detail"] == expected


def get_fall(explanation):
    return {entry["column"]: entry["fall"] for entry in explanation["columns"]}


@pytest.mark.parametrize(
    ("column", "broken"), [("a", 4.0), ("c", -9.0), ("d", 5e4), ("city", "Atlantis")]
)
def test_the_broken_column_is_named_first(ask, column, broken):
    (explanation,) = ask([PERSON | {column: broken}])
    falls = [entry["fall"] for entry in explanation["columns"]]
    assert falls == sorted(falls, reverse=True)
    assert {*get_fall(explanation)} == {*PERSON}
    # Of two columns that should agree, either may be put right.
    names = explanation["columns"][0]["column"]
    assert names == column
    assert falls[0] > 0


def test_a_fall_is_that_of_the_row_with_its_usual_value(ask, tables):
    columns = ModelStore(tables).manifest("people", "1").input.columns
    usual = {column.name: column.usual for column in columns}
    row = PERSON | {"a": 4.0, "city": "Oslo"}
    before, *after = ask([row, *(row | {name: value} for name, value in usual.items())])
    for name, changed in zip(usual, after, strict=True):
        assert get_fall(before)[name] == pytest.approx(
            before["statistic"] - changed["statistic"], abs=1e-5
        )
        assert abs(get_fall(changed)[name]) < 1e-5


def test_unseen_categories_and_missing_values_are_named(ask):
    odd, plain = ask([PERSON | {"city": "Atlantis" * 40, "d": None}, PERSON])
    assert odd["unseen"] == ["city"]
    assert odd["missing"] == ["d"]
    assert (plain["unseen"], plain["missing"]) == ([], [])
    assert (plain["attributed"], plain["map"]) == (None, None)


def test_the_nearest_training_rows_are_named_by_their_ids(ask, tables):
    lines = (tables.parent / "people.csv").read_text().splitlines()
    values = {line.split(",")[0]: line.split(",")[1:6] for line in lines[1:]}
    (explanation,) = ask([PERSON])
    nearest = explanation["nearest"]
    assert len({entry["id"] for entry in nearest}) == 5
    assert {entry["id"] for entry in nearest} <= {*values}
    distances = [entry["distance"] for entry in nearest]
    assert distances == sorted(distances)
    a, b, c, d, city = values[nearest[0]["id"]]
    itself = dict(zip("abc", map(float, (a, b, c)), strict=True)) | {
        "d": float(d) if d else None,
        "city": city,
    }
    (again,) = ask([itself])
    assert again["nearest"][0] == {"id": nearest[0]["id"], "distance": 0.0}


def test_shares_of_detectors_add_up_and_a_map_to_what_is_attributed(ask, digits_rows):
    x = digits_rows[:3].copy()
    x[0, 27] = 60.0
    for explanation in ask(x.tolist(), "digits"):
        shares = explanation["detectors"].values()
        assert sum(entry["share"] for entry in shares) == pytest.approx(1)
        of_input = ("residual", "mahalanobis", "input_neighbours")
        reference = [explanation["detectors"][name] for name in of_input]
        attributed = sum(entry["share"] for entry in reference if not entry["low"])
        pixels = np.array(explanation["map"])
        assert pixels.shape == (8, 8)
        assert (pixels >= 0).all()
        assert explanation["attributed"] == pytest.approx(attributed)
        assert pixels.sum() == pytest.approx(attributed)
        assert [explanation[name] for name in ("columns", "unseen", "missing")] == [None] * 3
        assert all(0 <= int(entry["id"]) < 1797 for entry in explanation["nearest"])
    (pixels,) = (np.array(explanation["map"]) for explanation in ask(x[:1].tolist(), "digits"))
    assert pixels.ravel().argmax() == 27


@pytest.mark.parametrize("fields", [{}, {"return_samples": True}, {"fdr": 0.2}, {"num_samples": 7}])
def test_nothing_else_changes_and_answers_replay(ask, digits_rows, fields):
    request = {"model": "digits", "inputs": digits_rows[:4].tolist(), **SEED, **fields}
    plain = ask.client.post("/predict", json=request).json()
    first, second = (
        ask.client.post("/predict", json={**request, "explain": True}) for _ in range(2)
    )
    assert first.content == second.content
    explained = first.json()
    for row in explained["predictions"]:
        assert row.pop("explanation")["statistic"] >= 0
    assert explained == plain


def test_an_explanation_does_not_depend_on_the_rows_beside_it(ask):
    rows = [PERSON, PERSON | {"a": 3.0}, PERSON | {"city": "Atlantis"}]
    together = ask(rows)
    assert [ask([row])[0] for row in rows] == together


@pytest.mark.parametrize("model", ["people", "digits"])
def test_arrays_say_the_same(ask, digits_rows, model):
    rows = (
        [PERSON, PERSON | {"city": "Atlantis", "d": None}]
        if model == "people"
        else digits_rows[:2].tolist()
    )
    body = {"model": model, "inputs": rows, "explain": True, **SEED}
    answer = ask.client.post("/predict", json=body, headers={"Accept": "application/x-npz"})
    arrays = np.load(io.BytesIO(answer.content), allow_pickle=False)
    actual = {
        name.removeprefix("explanation."): arrays[name]
        for name in arrays
        if name.startswith("explanation.")
    }
    for n, expected in enumerate(ask(rows, model)):
        assert actual["statistic"][n] == expected["statistic"]
        for name, entry in expected["detectors"].items():
            assert actual[f"detectors.{name}.share"][n] == entry["share"]
            assert actual[f"detectors.{name}.low"][n] == entry["low"]
        assert actual["nearest.id"][n].tolist() == [entry["id"] for entry in expected["nearest"]]
        assert actual["nearest.distance"][n].tolist() == [
            entry["distance"] for entry in expected["nearest"]
        ]
        if model == "people":
            assert dict(zip(PERSON, actual["columns"][n], strict=True)) == get_fall(expected)
        else:
            assert actual["map"][n].tolist() == expected["map"]
            assert actual["attributed"][n] == expected["attributed"]
    if model == "people":
        assert actual["unseen"].tolist() == [[False] * 5, [False, False, False, False, True]]
        assert actual["missing"].tolist() == [[False] * 5, [False, False, False, True, False]]
    else:
        assert not {"unseen", "missing", "columns"} & set(actual)


def test_parts_that_a_version_does_not_support_are_null(ask):
    (hidden,) = ask([PERSON], "hidden")
    assert hidden["nearest"] is None
    assert hidden["columns"] is not None
    (old,) = ask([[0.0, 0.0, 9.0]], "tiny")
    assert [
        old[name] for name in ("columns", "map", "attributed", "unseen", "missing", "nearest")
    ] == [None] * 6
    assert old["detectors"]["distance"]["share"] > 0.5


def test_rows_of_a_file_are_explained_as_others(ask):
    answer = ask.client.post(
        "/predict?model=people&explain=true",
        content=b"a,b,c,d,city\n0.1,0.1,-0.3,500,Rome\n0.1,0.1,-0.3,,Atlantis\n",
        headers={"Content-Type": "text/csv"},
    )
    usual, odd = (row["explanation"] for row in answer.json()["predictions"])
    assert (usual["unseen"], usual["missing"]) == ([], [])
    assert (odd["unseen"], odd["missing"]) == (["city"], ["d"])


@pytest.mark.parametrize("model", ["people", "digits"])
def test_an_explanation_takes_no_more_memory_than_it_reserves(ask, tables, digits_rows, model):
    rows = [PERSON | {"city": "A" * 200}] * 8 if model == "people" else digits_rows[:8].tolist()
    request, sizes = {"model": model, "inputs": rows, **SEED}, []
    for kind in ("application/json", "application/x-npz"):
        for explain in (False, True):
            answer = ask.client.post(
                "/predict", json={**request, "explain": explain}, headers={"Accept": kind}
            )
            sizes.append(len(answer.content))
    manifest = ModelStore(tables).manifest(model, "1")
    assert sizes[1] - sizes[0] < explanation_bytes(manifest, 8, as_arrays=False)
    assert (
        sizes[3] - sizes[2] < explanation_bytes(manifest, 8, as_arrays=True) + 10_000
    )  # names of arrays


def test_many_rows_are_not_explained(ask):
    answer = ask.client.post(
        "/predict", json={"model": "people", "inputs": [PERSON] * 9, "explain": True}
    )
    assert answer.status_code == 413
    assert answer.json()["detail"] == "explain: expected at most 8 rows to explain, got 9"
    assert (
        ask.client.post("/predict", json={"model": "people", "inputs": [PERSON] * 9}).status_code
        == 200
    )
