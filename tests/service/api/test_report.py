import shutil

import pytest


@pytest.fixture(scope="module")
def evaluated(evaluated_store):
    from tests.support.serving import open_client

    with open_client(evaluated_store) as client:
        yield client


def test_a_model_links_its_card_and_every_link_works(evaluated):
    linked = evaluated.get("/models/digits").json()["report"]
    report = evaluated.get(linked["href"]).json()
    assert linked["version"] == report["version"] == "1"
    assert linked["summary"] == report["summary"]
    assert set(linked["files"]) == {"report.json", "report.html"}
    kinds = {"json": "application/json", "png": "image/png"}
    kinds["html"] = "text/html; charset=utf-8"
    starts = {"json": b"{", "png": b"\x89PNG", "html": b"<!DOCTYPE html>"}
    for file, href in linked["files"].items():
        answer = evaluated.get(href)
        kind = file.rpartition(".")[2]
        assert answer.headers["content-type"] == kinds[kind]
        assert answer.content.startswith(starts[kind])
        assert answer.headers["content-security-policy"].startswith("sandbox; default-src 'none';")
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_a_version_may_be_named_by_an_alias(evaluated):
    assert evaluated.get("/models/digits/versions/latest/report").json()["version"] == "1"


@pytest.mark.parametrize(
    "path",
    [
        "/models/digits/versions/1/report/weights.safetensors",
        "/models/digits/versions/1/report/..%2f..%2f..%2f1%2fmanifest.json",
        "/models/digits/versions/1/report/%2e%2e",
        "/models/digits/versions/1/report/%2fetc%2fpasswd",
        "/models/digits/versions/1/report/a%00b",
        "/models/digits/versions/1/report/%ff",
        "/models/digits/versions/2/report",
        "/models/digits/versions/..%2f1/report",
        "/models/digits/versions/%2e%2e/report/report.json",
        "/models/nothing/versions/1/report",
        "/models/..%2fdigits/versions/1/report",
        "/models/digits/versions/aliases/report",
    ],
)
def test_nothing_else_is_given(evaluated, path):
    answer = evaluated.get(path)
    assert answer.status_code == 404
    assert answer.headers["content-type"] == "application/problem+json"
    assert b"sha256" not in answer.content


def test_a_model_without_a_card_says_so(client):
    assert client.get("/models/digits").json()["report"] is None
    answer = client.get("/models/digits/versions/1/report")
    assert answer.status_code == 404
    assert "dubito evaluate digits:1" in answer.json()["detail"]


def test_a_damaged_card_leaves_the_model_served(open_client, evaluated_store, tmp_path):
    shutil.copytree(evaluated_store, tmp_path / "models")
    (tmp_path / "models/digits/reports/1/report.json").write_bytes(b"{")
    with open_client(tmp_path / "models") as client:
        model = client.get("/models/digits").json()
        assert (model["serving"], model["report"]) == ("1", None)
        answer = client.get("/models/digits/versions/1/report")
        assert answer.status_code == 503
        assert "report.json" in answer.json()["detail"]
