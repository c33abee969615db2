import threading

import httpx

from model_store.errors import NotFound
from service.models.models import Models
from service.models.preflights import Preflights
from service.models.watcher import Watcher
from service.settings import Settings
from tests.support.serving import SOON, predict_blank, wait_until
from tests.support.stores import publish_again


def model(client, name="digits"):
    return client.get(f"/models/{name}").json()


def test_an_alias_that_moves_to_a_broken_version_goes_on_with_the_one_before_and_the_log_says_so_once(
    serve, own_store, digits_store
):
    for _ in range(2):
        publish_again(own_store, digits_store)
    own_store.set_alias("digits", "champion", "1")
    (own_store.root / "digits" / "2" / "network.onnx").write_bytes(b"no graph")
    with (
        serve(own_store.root, **SOON) as (url, process),
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        assert predict_blank(client, version="champion").json()["version"] == "1"
        for alias in ("champion", "latest"):
            own_store.set_alias("digits", alias, "2")
        wait_until(lambda: "2" in model(client)["broken"])
        own_store.set_alias("digits", "other", "3")
        wait_until(lambda: predict_blank(client, version="other").status_code == 200)
        assert predict_blank(client, version="champion").json()["version"] == "1"
        assert predict_blank(client).json()["version"] == "3"
        assert predict_blank(client, version="2").status_code == 503
        own_store.set_alias("digits", "champion", "3")
        wait_until(lambda: predict_blank(client, version="champion").json()["version"] == "3")
        process.terminate()
        log = process.communicate(timeout=60)[1]
    message = [line for line in log.splitlines() if "cannot serve" in line]
    assert len(message) == 2
    assert all("model digits version 2: network.onnx: " in line for line in message)
    assert "champion keeps serving version 1" in log
    assert "latest keeps serving version 3" in log


def test_the_least_recently_used_versions_are_unloaded_under_the_memory_bound(
    open_client, own_store, digits_store
):
    with open_client(own_store.root, **SOON) as client:
        (item,) = model(client)["in_memory"].values()
    for name in ("digits", "digits", "other"):
        publish_again(own_store, digits_store, name)
    settings = {
        **SOON,
        "DUBITO_MAX_MODEL_BYTES": str(2 * item + item // 2),
        "DUBITO_DEFAULT_MODEL": "digits",
    }
    with open_client(own_store.root, **settings) as client:

        def in_memory():
            return {
                (name, version)
                for name in ("digits", "other")
                for version in model(client, name)["in_memory"]
            }

        assert in_memory() == {("digits", "3"), ("other", "1")}
        assert predict_blank(client).json()["version"] == "3"
        assert predict_blank(client, version="1").json()["version"] == "1"
        assert in_memory() == {("digits", "3"), ("digits", "1")}
        assert model(client, "other")["serving"] == "1"
        assert client.get("/health/ready").json()["models"] == {"digits": "3", "other": "1"}
        before = predict_blank(client, seed=1).content
        assert predict_blank(client, model="other").json()["version"] == "1"
        assert in_memory() == {("digits", "3"), ("other", "1")}
        for version in ("1", "2", "3", "1", "2"):
            assert predict_blank(client, version=version).json()["version"] == version
            assert len(in_memory()) <= 2
        assert ("digits", "3") not in in_memory()
        client.post("/predict", json={"inputs": [[1.0] * 64]})
        assert model(client)["drift"]["rows"] == 2
        assert predict_blank(client, seed=1).content == before


def test_a_version_that_alone_is_larger_than_the_bound_is_refused_and_says_why(
    open_client, own_store, digits_store
):
    settings = {**SOON, "DUBITO_MAX_MODEL_BYTES": "1000"}
    with open_client(own_store.root, **settings) as client:
        for answer in (predict_blank(client), client.get("/health/ready")):
            assert answer.status_code == 503
            assert (
                "expected at most 1000 bytes in memory (DUBITO_MAX_MODEL_BYTES)"
                in answer.json()["detail"]
            )
        assert "DUBITO_MAX_MODEL_BYTES" in model(client)["broken"]["1"]
        assert model(client)["in_memory"] == {}


def test_a_version_deleted_while_it_is_asked_for_by_number_is_not_found_and_never_broken(
    own_store, digits_store
):
    settings, ending = (
        Settings(store=own_store.root, threads=1, preflight_timeout_s=0),
        threading.Event(),
    )
    models = Models(settings, threading.Event(), Preflights(settings, ending))
    watcher = Watcher(models, ending)
    watcher.refresh()

    def churn():
        for _ in range(30):
            publish_again(own_store, digits_store)
            own_store.keep("digits", 1)

    churning = threading.Thread(target=churn)
    churning.start()
    answered = 0
    while churning.is_alive():
        number = own_store.versions("digits")[0]
        try:
            assert models.get("digits", number).version == number
            answered += 1
        except NotFound:
            pass
        assert models.get("digits").version == "1"
        assert models.errors("digits") == {}
    assert answered > 0
    watcher.refresh()
    assert models.get("digits").version == "31"
