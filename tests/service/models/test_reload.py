import threading

import httpx

from model_store.errors import NotFound
from service.models.models import Models
from service.models.preflights import Preflights
from service.models.watcher import Watcher
from service.settings import Settings
from tests.support.serving import FAST_POLLING, predict_blank, wait_until
from tests.support.stores import publish_again


def get_model(client, name="digits"):
    return client.get(f"/models/{name}").json()


def test_alias_moved_to_a_broken_version_keeps_the_previous_and_logs_once(
    serve, writable_store, digits_store
):
    for _ in range(2):
        publish_again(writable_store, digits_store)
    writable_store.set_alias("digits", "champion", "1")
    (writable_store.root / "digits" / "2" / "network.onnx").write_bytes(b"no graph")
    with (
        serve(writable_store.root, **FAST_POLLING) as (url, process),
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        assert predict_blank(client, version="champion").json()["version"] == "1"
        for alias in ("champion", "latest"):
            writable_store.set_alias("digits", alias, "2")
        wait_until(lambda: "2" in get_model(client)["broken"])
        writable_store.set_alias("digits", "other", "3")
        wait_until(lambda: predict_blank(client, version="other").status_code == 200)
        assert predict_blank(client, version="champion").json()["version"] == "1"
        assert predict_blank(client).json()["version"] == "3"
        assert predict_blank(client, version="2").status_code == 503
        writable_store.set_alias("digits", "champion", "3")
        wait_until(lambda: predict_blank(client, version="champion").json()["version"] == "3")
        process.terminate()
        log = process.communicate(timeout=60)[1]
    messages = [line for line in log.splitlines() if "cannot serve" in line]
    assert len(messages) == 2
    assert all("model digits version 2: network.onnx: " in line for line in messages)
    assert "champion keeps serving version 1" in log
    assert "latest keeps serving version 3" in log


def test_least_recently_used_versions_are_unloaded_at_the_memory_limit(
    open_client, writable_store, digits_store
):
    with open_client(writable_store.root, **FAST_POLLING) as client:
        (version_bytes,) = get_model(client)["in_memory"].values()
    for name in ("digits", "digits", "other"):
        publish_again(writable_store, digits_store, name)
    settings = {
        **FAST_POLLING,
        "DUBITO_MAX_MODEL_BYTES": str(2 * version_bytes + version_bytes // 2),
        "DUBITO_DEFAULT_MODEL": "digits",
    }
    with open_client(writable_store.root, **settings) as client:

        def in_memory():
            return {
                (name, version)
                for name in ("digits", "other")
                for version in get_model(client, name)["in_memory"]
            }

        assert in_memory() == {("digits", "3"), ("other", "1")}
        assert predict_blank(client).json()["version"] == "3"
        assert predict_blank(client, version="1").json()["version"] == "1"
        assert in_memory() == {("digits", "3"), ("digits", "1")}
        assert get_model(client, "other")["serving"] == "1"
        assert client.get("/health/ready").json()["models"] == {"digits": "3", "other": "1"}
        before = predict_blank(client, seed=1).content
        assert predict_blank(client, model="other").json()["version"] == "1"
        assert in_memory() == {("digits", "3"), ("other", "1")}
        for version in ("1", "2", "3", "1", "2"):
            assert predict_blank(client, version=version).json()["version"] == version
            assert len(in_memory()) <= 2
        assert ("digits", "3") not in in_memory()
        client.post("/predict", json={"inputs": [[1.0] * 64]})
        assert get_model(client)["drift"]["rows"] == 2
        assert predict_blank(client, seed=1).content == before


def test_version_larger_than_the_memory_limit_is_refused_with_the_reason(
    open_client, writable_store, digits_store
):
    settings = {**FAST_POLLING, "DUBITO_MAX_MODEL_BYTES": "1000"}
    with open_client(writable_store.root, **settings) as client:
        for response in (predict_blank(client), client.get("/health/ready")):
            assert response.status_code == 503
            assert (
                "expected at most 1000 bytes in memory (DUBITO_MAX_MODEL_BYTES)"
                in response.json()["detail"]
            )
        assert "DUBITO_MAX_MODEL_BYTES" in get_model(client)["broken"]["1"]
        assert get_model(client)["in_memory"] == {}


def test_version_deleted_during_a_request_is_not_found_and_never_broken(
    writable_store, digits_store
):
    settings, ending = (
        Settings(store=writable_store.root, threads=1, preflight_timeout_s=0),
        threading.Event(),
    )
    models = Models(settings, threading.Event(), Preflights(settings, ending))
    watcher = Watcher(models, ending)
    watcher.refresh()

    def churn():
        for _ in range(30):
            publish_again(writable_store, digits_store)
            writable_store.keep("digits", 1)

    thread = threading.Thread(target=churn)
    thread.start()
    successes = 0
    while thread.is_alive():
        number = writable_store.versions("digits")[0]
        try:
            assert models.get("digits", number).version == number
            successes += 1
        except NotFound:
            pass
        assert models.get("digits").version == "1"
        assert models.errors("digits") == {}
    assert successes > 0
    watcher.refresh()
    assert models.get("digits").version == "31"
