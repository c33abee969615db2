import httpx
import pytest

from tests.support.serving import wait_until
from tests.support.stores import publish_again

ADMIN = "the-key-of-the-administrator"
ROW = [0.0] * 64
RESET = "/admin/models/{}/versions/{}/drift/reset"
LATER = {"DUBITO_POLL_INTERVAL_S": "86400", "DUBITO_ADMIN_KEY": ADMIN}


@pytest.fixture
def administrator(open_client, own_store):
    with open_client(own_store.root, **LATER, headers={"X-API-Key": ADMIN}) as client:
        yield client


def get_version(client, version="latest"):
    """The version that answers."""
    return client.post("/predict", json={"inputs": [ROW], "version": version}).json()["version"]


def test_without_its_key_there_is_no_administration(client):
    for path in ("/admin/refresh", RESET.format("digits", 1), "/admin/nothing"):
        assert client.post(path).status_code == 404
        assert client.post(path, headers={"X-API-Key": ADMIN}).status_code == 404
    assert not any("/admin" in path for path in client.get("/openapi.json").json()["paths"])


def test_a_refresh_serves_what_is_published_moved_and_mended_at_once(
    administrator, own_store, digits_store
):
    assert publish_again(own_store, digits_store) == "2"
    assert get_version(administrator) == "1"
    expected = {"models": {"digits": {"serving": "2", "broken": {}}}}
    assert administrator.post("/admin/refresh").json() == expected
    assert get_version(administrator) == "2"
    own_store.set_alias("digits", "latest", "1")
    assert administrator.post("/admin/refresh").json()["models"]["digits"]["serving"] == "1"
    assert get_version(administrator) == "1"

    publish_again(own_store, digits_store)
    graph = own_store.root / "digits" / "3" / "network.onnx"
    full = graph.read_bytes()
    graph.write_bytes(full[:-1])
    answer = administrator.post("/admin/refresh").json()["models"]["digits"]
    assert answer["serving"] == "1"
    assert "network.onnx" in answer["broken"]["3"]
    graph.write_bytes(full)
    assert administrator.post("/admin/refresh").json() == {
        "models": {"digits": {"serving": "3", "broken": {}}}
    }


def test_an_absent_version_is_not_found_and_a_bad_alias_not_moved(administrator, own_store):
    for name, version in (
        ("digits", "2"),
        ("nothing", "1"),
        ("digits", "%2e%2e"),
        ("x" * 300, "1"),
    ):
        answer = administrator.post(RESET.format(name, version))
        assert answer.status_code == 404
        assert name == "digits" or name not in answer.json()["detail"]
    alias = own_store.root / "digits" / "aliases" / "latest"
    alias.unlink()
    alias.mkdir()
    answer = administrator.post("/admin/models/digits/versions/1/promote")
    assert answer.status_code == 409
    assert "latest: expected a writable store" in answer.json()["detail"]


def test_latest_is_moved_to_a_version_that_can_be_served_and_to_no_other(
    administrator, own_store, digits_store
):
    assert publish_again(own_store, digits_store) == "2"
    administrator.post("/admin/refresh")
    promote = "/admin/models/digits/versions/{}/promote"
    for version, before in (("1", "2"), ("latest", "1"), ("2", "1")):
        to = "1" if version == "latest" else version
        answer = administrator.post(promote.format(version))
        assert answer.json() == {"model": "digits", "version": to, "before": before, "key": "admin"}
        assert get_version(administrator) == to
        assert own_store.aliases("digits")["latest"] == to
    assert administrator.post(promote.format("9")).status_code == 404
    damaged = publish_again(own_store, digits_store)
    own_store.set_alias("digits", "latest", "2")
    (own_store.root / "digits" / damaged / "network.onnx").write_bytes(b"no graph")
    answer = administrator.post(promote.format(damaged))
    assert answer.status_code == 503
    assert "network.onnx" in answer.json()["detail"]
    assert own_store.aliases("digits")["latest"] == "2"


CANDIDATE = "/admin/models/digits/candidate"


def test_a_candidate_is_asked_for_once_and_given_up(serve, own_store):
    with (
        serve(own_store.root, DUBITO_JOBS_AT_ONCE="0", **LATER) as (url, _),
        httpx.Client(base_url=url, timeout=60, headers={"X-API-Key": ADMIN}) as client,
    ):
        none = {"can_fit": True, "command": "dubito candidate digits", "job": None, "lines": []}
        assert client.get(CANDIDATE).json() == {"model": "digits", **none}
        first = client.post(CANDIDATE)
        assert first.status_code == 202
        job = first.json()["job"]
        assert (job["kind"], job["state"], job["version"]) == ("candidate", "queued", "1")
        assert client.post(CANDIDATE).json()["job"]["id"] == job["id"]
        assert client.delete(CANDIDATE).json()["job"]["state"] == "cancelled"
        assert client.post(CANDIDATE).json()["job"]["id"] != job["id"]
        assert httpx.get(f"{url}{CANDIDATE}").status_code == 401
        assert client.get("/admin/models/nothing/candidate").status_code == 404


@pytest.mark.slow  # it imports torch
def test_what_fitting_a_candidate_says_is_in_its_job(administrator):
    administrator.post(CANDIDATE)

    def is_over():
        return administrator.get(CANDIDATE).json()["job"]["state"] in ("done", "failed")

    wait_until(is_over, 120)
    actual = administrator.get(CANDIDATE).json()
    assert actual["job"]["state"] == "done", actual
    assert actual["lines"] == ["0 of 1 required new labels"]
    result = administrator.get(actual["job"]["result"])
    assert result.text.split() == actual["lines"][0].split()
