import httpx
import pytest

from tests.support.serving import wait_until
from tests.support.stores import publish_again

ADMIN = "the-key-of-the-administrator"
ROW = [0.0] * 64
RESET = "/admin/models/{}/versions/{}/drift/reset"
SETTINGS = {"DUBITO_POLL_INTERVAL_S": "86400", "DUBITO_ADMIN_KEY": ADMIN}


@pytest.fixture
def administrator(open_client, writable_store):
    with open_client(writable_store.root, **SETTINGS, headers={"X-API-Key": ADMIN}) as client:
        yield client


def get_version(client, version="latest"):
    """Return the version that serves requests."""
    return client.post("/predict", json={"inputs": [ROW], "version": version}).json()["version"]


def test_admin_routes_are_absent_without_an_admin_key(client):
    for path in ("/admin/refresh", RESET.format("digits", 1), "/admin/nothing"):
        assert client.post(path).status_code == 404
        assert client.post(path, headers={"X-API-Key": ADMIN}).status_code == 404
    assert not any("/admin" in path for path in client.get("/openapi.json").json()["paths"])


def test_refresh_applies_publications_alias_moves_and_repairs_at_once(
    administrator, writable_store, digits_store
):
    assert publish_again(writable_store, digits_store) == "2"
    assert get_version(administrator) == "1"
    expected = {"models": {"digits": {"serving": "2", "broken": {}}}}
    assert administrator.post("/admin/refresh").json() == expected
    assert get_version(administrator) == "2"
    writable_store.set_alias("digits", "latest", "1")
    assert administrator.post("/admin/refresh").json()["models"]["digits"]["serving"] == "1"
    assert get_version(administrator) == "1"

    publish_again(writable_store, digits_store)
    graph = writable_store.root / "digits" / "3" / "network.onnx"
    content = graph.read_bytes()
    graph.write_bytes(content[:-1])
    answer = administrator.post("/admin/refresh").json()["models"]["digits"]
    assert answer["serving"] == "1"
    assert "network.onnx" in answer["broken"]["3"]
    graph.write_bytes(content)
    assert administrator.post("/admin/refresh").json() == {
        "models": {"digits": {"serving": "3", "broken": {}}}
    }


def test_unknown_version_is_not_found_and_unwritable_alias_conflicts(administrator, writable_store):
    for name, version in (
        ("digits", "2"),
        ("nothing", "1"),
        ("digits", "%2e%2e"),
        ("x" * 300, "1"),
    ):
        answer = administrator.post(RESET.format(name, version))
        assert answer.status_code == 404
        assert name == "digits" or name not in answer.json()["detail"]
    alias = writable_store.root / "digits" / "aliases" / "latest"
    alias.unlink()
    alias.mkdir()
    answer = administrator.post("/admin/models/digits/versions/1/promote")
    assert answer.status_code == 409
    assert "latest: expected a writable store" in answer.json()["detail"]


def test_latest_is_promoted_only_to_versions_that_can_be_served(
    administrator, writable_store, digits_store
):
    assert publish_again(writable_store, digits_store) == "2"
    administrator.post("/admin/refresh")
    promote = "/admin/models/digits/versions/{}/promote"
    for version, old in (("1", "2"), ("latest", "1"), ("2", "1")):
        new = "1" if version == "latest" else version
        answer = administrator.post(promote.format(version))
        assert answer.json() == {"model": "digits", "version": new, "before": old, "key": "admin"}
        assert get_version(administrator) == new
        assert writable_store.aliases("digits")["latest"] == new
    assert administrator.post(promote.format("9")).status_code == 404
    damaged = publish_again(writable_store, digits_store)
    writable_store.set_alias("digits", "latest", "2")
    (writable_store.root / "digits" / damaged / "network.onnx").write_bytes(b"no graph")
    answer = administrator.post(promote.format(damaged))
    assert answer.status_code == 503
    assert "network.onnx" in answer.json()["detail"]
    assert writable_store.aliases("digits")["latest"] == "2"


CANDIDATE = "/admin/models/digits/candidate"


def test_candidate_job_is_created_once_and_can_be_cancelled(serve, writable_store):
    with (
        serve(writable_store.root, DUBITO_JOBS_AT_ONCE="0", **SETTINGS) as (url, _),
        httpx.Client(base_url=url, timeout=60, headers={"X-API-Key": ADMIN}) as client,
    ):
        status = {"can_fit": True, "command": "dubito candidate digits", "job": None, "lines": []}
        assert client.get(CANDIDATE).json() == {"model": "digits", **status}
        first = client.post(CANDIDATE)
        assert first.status_code == 202
        job = first.json()["job"]
        assert (job["kind"], job["state"], job["version"]) == ("candidate", "queued", "1")
        assert client.post(CANDIDATE).json()["job"]["id"] == job["id"]
        assert client.delete(CANDIDATE).json()["job"]["state"] == "cancelled"
        assert client.post(CANDIDATE).json()["job"]["id"] != job["id"]
        assert httpx.get(f"{url}{CANDIDATE}").status_code == 401
        assert client.get("/admin/models/nothing/candidate").status_code == 404


@pytest.mark.slow  # imports torch
def test_candidate_job_contains_the_output_of_the_fit(administrator):
    administrator.post(CANDIDATE)

    def is_finished():
        return administrator.get(CANDIDATE).json()["job"]["state"] in ("done", "failed")

    wait_until(is_finished, 120)
    actual = administrator.get(CANDIDATE).json()
    assert actual["job"]["state"] == "done", actual
    assert actual["lines"] == ["0 of 1 required new labels"]
    result = administrator.get(actual["job"]["result"])
    assert result.text.split() == actual["lines"][0].split()
