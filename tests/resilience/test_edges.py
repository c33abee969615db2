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


def test_models_with_invalid_reports_are_described_without_report(
    serve, writable_store, digits_store
):
    for name, value in ODD_JSON.items():
        publish_again(writable_store, digits_store, name)
        actual = publish_report(writable_store, name, "1", {"created": "now", "summary": {}}, b"")
        path = writable_store.root / actual.path / "report.json"
        path.write_bytes(
            path.read_bytes().replace(b'"summary": {}', b'"summary": {"odd": ' + value + b"}")
        )
        assert value in path.read_bytes()
    with serve(writable_store.root) as (url, _):
        for name in ODD_JSON:
            response = httpx.get(f"{url}/models/{name}")
            assert (name, response.status_code) == (name, 200)
            assert (name, response.json()["report"]) == (name, None)
            assert (name, response.json()["serving"]) == (name, "1")


def test_form_ids_can_be_repeated_fields_or_json_array(client):
    def get_detail(*ids):
        parts = [("pool", ("a.png", b"no image", "image/png"))] * 2 + [
            ("ids", (None, text)) for text in ids
        ]
        return client.post("/acquire", files=parts).json()["detail"]

    assert get_detail("a", "b").startswith("pool.0")  # valid ids
    assert get_detail('["a", "b"]').startswith("pool.0")
    assert get_detail("a").startswith("ids: expected an id for each of the 2 pool rows, got 1")
    assert get_detail("a", "a").startswith("ids: expected unique ids")
    assert "expected one value" in get_detail('["a", "b"]', "c")


# Drift


def test_repeated_rows_count_once_and_raise_no_alarm():
    ranking, row = np.arange(200.0), np.ones((1, 4), dtype=np.float32)
    unhashed, hashed = new_drift(ranking), new_drift(ranking)
    for _ in range(500):
        p_values = conformal_p_value(np.array([190.5]), ranking)
        watch(unhashed, p_values)
        hashed.watch(p_values, row)
    assert unhashed.report().alarm
    assert (hashed.report().alarm, hashed.report().rows) == (False, 1)


def test_distinct_rows_all_count_and_memory_is_bounded():
    generator, ranking = np.random.default_rng(), np.arange(200.0)
    scores = generator.uniform(150, 200, 3 * RECENT_ROWS)
    unhashed, hashed = new_drift(ranking), new_drift(ranking)
    for part in np.split(scores, len(scores) // 16):
        p_values = conformal_p_value(part, ranking)
        watch(unhashed, p_values)
        hashed.watch(p_values, generator.normal(size=(16, 4)).astype(np.float32))
    assert unhashed.report() == hashed.report()
    assert hashed.report().alarm
    assert len(hashed._recent) == RECENT_ROWS
