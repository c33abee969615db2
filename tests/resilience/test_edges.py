import httpx
import numpy as np

from model_store.artifacts.report import publish_report
from model_store.conformal.rank_tables import conformal_p_value
from service.models.drift import RECENT_ROWS
from tests.support.drift import new_drift, watch
from tests.support.stores import publish_again

ODD_JSON = {
    "integer-beyond-64-bits": b"1" + b"0" * 40,
    "lone-surrogate": b'"\\ud800"',
    "arrays-in-arrays": b"[" * 400 + b"]" * 400,
}


def test_odd_evaluation_reports_are_none_and_their_models_are_described(
    serve, own_store, digits_store
):
    for name, value in ODD_JSON.items():
        publish_again(own_store, digits_store, name)
        actual = publish_report(own_store, name, "1", {"created": "now", "summary": {}}, b"")
        path = own_store.root / actual.path / "report.json"
        path.write_bytes(
            path.read_bytes().replace(b'"summary": {}', b'"summary": {"odd": ' + value + b"}")
        )
        assert value in path.read_bytes()
    with serve(own_store.root) as (url, _):
        for name in ODD_JSON:
            answer = httpx.get(f"{url}/models/{name}")
            assert (name, answer.status_code) == (name, 200)
            assert (name, answer.json()["report"]) == (name, None)
            assert (name, answer.json()["serving"]) == (name, "1")


def test_ids_of_a_form_are_an_array_item_by_item_as_openapi_says_or_as_json(client):
    def request(*ids):
        parts = [("pool", ("a.png", b"no image", "image/png"))] * 2 + [
            ("ids", (None, text)) for text in ids
        ]
        return client.post("/acquire", files=parts).json()["detail"]

    assert request("a", "b").startswith("pool.0")  # the ids are right
    assert request('["a", "b"]').startswith("pool.0")
    assert request("a").startswith("ids: expected an id for each of the 2 pool rows, got 1")
    assert request("a", "a").startswith("ids: expected unique ids")
    assert "expected one value" in request('["a", "b"]', "c")


# Drift


def test_rows_that_repeat_count_once_and_raise_no_alarm():
    ranking, row = np.arange(200.0), np.ones((1, 4), dtype=np.float32)
    again, once = new_drift(ranking), new_drift(ranking)
    for _ in range(500):
        p_values = conformal_p_value(np.array([190.5]), ranking)
        watch(again, p_values)
        once.watch(p_values, row)
    assert again.report().alarm
    assert (once.report().alarm, once.report().rows) == (False, 1)


def test_rows_that_differ_count_as_before_and_their_memory_is_bounded():
    generator, ranking = np.random.default_rng(), np.arange(200.0)
    scores = generator.uniform(150, 200, 3 * RECENT_ROWS)
    plain, hashed = new_drift(ranking), new_drift(ranking)
    for part in np.split(scores, len(scores) // 16):
        p_values = conformal_p_value(part, ranking)
        watch(plain, p_values)
        hashed.watch(p_values, generator.normal(size=(16, 4)).astype(np.float32))
    assert plain.report() == hashed.report()
    assert hashed.report().alarm
    assert len(hashed._recent) == RECENT_ROWS
