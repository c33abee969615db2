from datetime import UTC, datetime

import httpx
import numpy as np
import pytest


@pytest.fixture
def client_and_state(open_client, digits_store, tmp_path):
    with open_client(digits_store, DUBITO_STATE=str(tmp_path / "state")) as client:
        yield client, tmp_path / "state"


def post(client, labels, **fields):
    return client.post("/labels", json={"labels": labels, **fields})


def make_label(name, label, row):
    return {"id": name, "label": label, "input": row}


def test_acquired_rows_are_labelled_by_id_and_not_acquired_again(client_and_state, digits_rows):
    client, state = client_and_state
    pool = {
        "pool": digits_rows[:100].tolist(),
        "ids": [f"r{i}" for i in range(100)],
        "k": 5,
        "seed": 1,
    }
    without_keep = client.post("/acquire", json=pool).json()
    assert not state.exists()
    assert post(client, [{"id": "r0", "label": "3"}]).status_code == 422
    with_keep = client.post("/acquire", json={**pool, "keep": True}).json()
    assert with_keep == without_keep
    names = [row["id"] for row in with_keep["ranking"]]
    answer = post(client, [{"id": name, "label": "3"} for name in names])
    assert answer.json() == {
        "model": "digits",
        "accepted": 5,
        "known": 0,
        "replaced": 0,
        "labels": 5,
    }
    again = client.post("/acquire", json=pool).json()
    assert again["excluded"] == 5 and again["pool_size"] == 100
    longer = client.post("/acquire", json={**pool, "k": 10, "exclude_labelled": False}).json()[
        "ranking"
    ]
    assert [(row["index"], row["id"]) for row in again["ranking"]] == [
        (r["index"], r["id"]) for r in longer[5:]
    ]
    overflowing_pool = [*pool["pool"][:-1], [3e38] * 64]  # the model cannot compute the last row
    refusal = client.post("/acquire", json={**pool, "pool": overflowing_pool})
    assert refusal.json()["detail"].startswith(
        "pool.99: expected numbers that the model can compute with"
    )
    page = client.get("/models/digits/labels").json()
    assert (page["acquired"], page["waiting"], page["labels"], page["control_labels"]) == (
        5,
        0,
        5,
        0,
    )
    assert page["live"][0]["figures"] is None
    fully_labelled = client.post(
        "/acquire", json={**pool, "pool": pool["pool"][:1], "ids": names[:1]}
    ).json()
    assert (fully_labelled["ranking"], fully_labelled["excluded"]) == ([], 1)


def test_labels_are_listed_in_pages_and_deleted(client_and_state, digits_rows):
    client, state = client_and_state
    assert client.get("/labels").json() == {"model": "digits", "labels": [], "next": None}
    assert client.post("/labels/delete", json={"ids": ["a"]}).json()["deleted"] == 0
    assert not state.exists()
    rows = digits_rows[:3].tolist()
    post(client, [make_label(name, "3", row) for name, row in zip("abc", rows, strict=True)])
    first = client.get("/labels", params={"model": "digits", "limit": 2}).json()
    assert [label["id"] for label in first["labels"]] == ["a", "b"]
    (rest,) = client.get("/labels", params={"after": first["next"]}).json()["labels"]
    assert datetime.fromisoformat(rest.pop("time")) <= datetime.now(UTC)
    unset = {"target": None, "annotator": None, "control": False, "comment": None}
    assert rest == {"id": "c", "label": "3", **unset}
    post(client, [{"id": "b", "label": "3", "comment": "blurred"}])
    post(client, [{"id": "b", "label": "3"}])  # an omitted comment keeps the stored one
    labels = client.get("/labels").json()["labels"]
    assert [label["comment"] for label in labels] == [None, "blurred", None]
    assert client.get("/labels", params={"annotator": "anna"}).json()["labels"] == []
    deletion = {"model": "digits", "ids": ["a", "c", "other"]}
    for expected_count in (2, 0):
        answer = client.post("/labels/delete", json=deletion).json()
        assert answer == {"model": "digits", "deleted": expected_count, "labels": 1}
    for query in ({"limit": 0}, {"limit": "many"}, {"page": 2}, {"model": "other"}):
        assert client.get("/labels", params=query).status_code in (404, 422)
    assert client.post("/labels/delete", json={"ids": []}).status_code == 422


def test_labels_are_accepted_atomically_and_idempotently(client_and_state, digits_rows):
    client, _ = client_and_state
    row = digits_rows[0].tolist()
    first = [make_label("a", "3", row), make_label("b", "4", row)]
    assert post(client, first).json()["accepted"] == 2
    duplicates = [make_label("a", "3.0", row), first[1]]  # equal numbers are the same class
    again = post(client, [*duplicates, make_label("c", "5", row)]).json()
    assert (again["accepted"], again["known"], again["labels"]) == (1, 2, 3)
    conflicts = (
        ({"id": "a", "label": "9"}, "labels.1: expected the same label as before"),
        (make_label("a", "3", [0.0] * 64), "labels.1.input: expected the same row"),
    )
    faults = (
        ({"id": "nobody", "label": "9"}, "labels.1.id: expected the id of an acquired row"),
        (make_label("e", "eleven", row), "labels.1.label: expected one of the classes ['0'"),
        (make_label("d", "3", row), "labels.1.id: expected a unique id"),
        (make_label("e", "3", [*row[:-1], None]), "labels.1.input.63: expected"),
        ({"id": "e", "target": 1.5, "input": row}, "labels.1.target: expected no target"),
        ({"id": "e", "input": row}, "labels.1.label: expected a value"),
        (make_label("", "3", row), "labels.1.id: expected 1 to 256"),
        ({"id": "e", "label": 3}, "labels.1.label: expected a valid string"),
    )
    for status, cases in ((409, conflicts), (422, faults)):
        for bad, detail in cases:
            answer = post(client, [make_label("d", "3", row), bad])
            assert (answer.status_code, answer.json()["detail"][: len(detail)]) == (status, detail)
    assert post(client, []).status_code == 422
    replacement = post(client, [{"id": "a", "label": "9"}], replace=True).json()
    assert (replacement["replaced"], replacement["labels"]) == (1, 3)
    assert post(client, [{"id": "a", "label": "9"}]).json()["known"] == 1


def test_control_rows_depend_only_on_ids_and_evaluate_their_version(client_and_state, digits_rows):
    from training.data.arrays import digits

    client, _ = client_and_state
    truth = digits().test.y
    ids = [str(i) for i in range(359)]
    request = {
        "pool": digits_rows.tolist(),
        "ids": ids,
        "k": 200,
        "seed": 5,
        "keep": True,
        "control": 0.5,
    }
    answer = client.post("/acquire", json=request).json()
    control = [row for row in answer["ranking"] if row["control"]]
    assert len(control) == 100 and len(answer["ranking"]) == 200
    assert all(row["score"] is None for row in control)
    assert [row["rank"] for row in answer["ranking"]] == list(range(1, 201))
    shuffled = np.random.default_rng(0).permutation(359).tolist()
    variant = {**request, "pool": digits_rows[shuffled].tolist(), "ids": [str(i) for i in shuffled]}
    variant |= {"acquisition": "entropy"}
    again = client.post("/acquire", json=variant).json()["ranking"]
    assert {row["id"] for row in again if row["control"]} == {row["id"] for row in control}
    labels = [{"id": row["id"], "label": str(truth[row["index"]])} for row in answer["ranking"]]
    assert post(client, labels).status_code == 200
    page = client.get("/models/digits/labels").json()
    assert (page["labels"], page["control_labels"]) == (200, 100)
    (live,) = page["live"]
    assert (live["version"], live["serving"], live["control_labels"]) == ("1", True, 100)
    rows = digits_rows[[row["index"] for row in control]]
    predictions = client.post("/predict", json={"inputs": rows.tolist(), "seed": 5}).json()[
        "predictions"
    ]
    accuracy = np.mean(
        [
            p["label"] == str(truth[row["index"]])
            for p, row in zip(predictions, control, strict=True)
        ]
    )
    figures = live["figures"]
    assert figures["accuracy"]["value"] == pytest.approx(accuracy)
    low, high = figures["accuracy"]["interval"]
    assert low < accuracy <= high
    coverage = np.mean(
        [
            str(truth[r["index"]]) in p["prediction_set"]
            for p, r in zip(predictions, control, strict=True)
        ]
    )
    assert figures["set_coverage_at_95"]["value"] == pytest.approx(coverage)


def test_rows_without_ids_get_ids_from_their_content(client_and_state, digits_rows):
    client, _ = client_and_state
    rows = [*digits_rows[:200].tolist(), digits_rows[0].tolist()]
    request = {"k": 100, "seed": 3, "keep": True, "control": 0.2}
    ranking = client.post("/acquire", json={**request, "pool": rows}).json()["ranking"]
    names = {row["index"]: row["id"] for row in ranking}
    assert {row["id"][:4] for row in ranking} == {"row-"} and len({*names.values()}) == 100
    assert sum(row["control"] for row in ranking) == 20
    reverse = client.post("/acquire", json={**request, "pool": rows[199::-1]}).json()["ranking"]
    same = [199 - row["index"] for row in reverse if row["control"]]
    assert same == [row["index"] for row in ranking if row["control"]]
    assert names.get(200, "row--2").endswith("-2"), "a copy of a row must get a numbered id"
    assert post(client, [{"id": row["id"], "label": "3"} for row in ranking]).status_code == 200
    again = client.post("/acquire", json={**request, "pool": rows}).json()
    assert again["excluded"] == 100


def test_invalid_keep_and_control_options_are_refused(client, digits_rows):
    request = {"pool": digits_rows[:3].tolist(), "k": 1}
    for fields, detail in (
        ({"control": 0.1}, "control: expected 0 unless `keep` is true"),
        ({"keep": True, "ids": ["a", "b", "c" * 257]}, "ids.2: expected 1 to 256"),
        (
            {"keep": True, "ids": ["a", "b", "c"], "control": 1.5},
            "control: expected less than or equal to 1",
        ),
    ):
        refusal = client.post("/acquire", json={**request, **fields})
        assert (refusal.status_code, refusal.json()["detail"][: len(detail)]) == (422, detail)


def test_annotator_of_a_label_is_the_name_of_the_key(serve, digits_store, tmp_path, digits_rows):
    keys = {"X-API-Key": "the-key-of-those-who-label"}
    settings = {"DUBITO_API_KEYS": keys["X-API-Key"], "DUBITO_STATE": str(tmp_path)}
    with serve(digits_store, **settings) as (url, _), httpx.Client(headers=keys) as client:
        labels = {"labels": [make_label("a", "3", digits_rows[0].tolist())]}
        assert client.post(f"{url}/labels", json=labels).status_code == 200
        (label,) = client.get(f"{url}/labels").json()["labels"]
        assert label["annotator"].startswith("api-")
        assert client.post(f"{url}/labels/delete", json={"ids": ["a"]}).json()["deleted"] == 1
        (former,) = client.get(f"{url}/labels", params={"former": True}).json()["labels"]
        assert former.pop("ended") >= label["time"]
        assert former == {**label, "ended_by": label["annotator"]}
