import shutil

import pytest


@pytest.fixture(scope="module")
def evaluated_client(evaluated_store):
    from tests.support.serving import open_client

    with open_client(evaluated_store) as client:
        yield client


def test_model_links_its_report_and_all_links_work(evaluated_client):
    link = evaluated_client.get("/models/digits").json()["report"]
    report = evaluated_client.get(link["href"]).json()
    assert link["version"] == report["version"] == "1"
    assert link["summary"] == report["summary"]
    assert set(link["files"]) == {"report.json", "report.html"}
    kinds = {"json": "application/json", "png": "image/png"}
    kinds["html"] = "text/html; charset=utf-8"
    starts = {"json": b"{", "png": b"\x89PNG", "html": b"<!DOCTYPE html>"}
    for file, href in link["files"].items():
        answer = evaluated_client.get(href)
        kind = file.rpartition(".")[2]
        assert answer.headers["content-type"] == kinds[kind]
        assert answer.content.startswith(starts[kind])
        assert answer.headers["content-security-policy"].startswith("sandbox; default-src 'none';")
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_report_can_be_requested_by_alias(evaluated_client):
    assert evaluated_client.get("/models/digits/versions/latest/report").json()["version"] == "1"


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
def test_paths_outside_reports_are_not_found(evaluated_client, path):
    answer = evaluated_client.get(path)
    assert answer.status_code == 404
    assert answer.headers["content-type"] == "application/problem+json"
    assert b"sha256" not in answer.content


def test_missing_report_suggests_the_evaluate_command(client):
    assert client.get("/models/digits").json()["report"] is None
    answer = client.get("/models/digits/versions/1/report")
    assert answer.status_code == 404
    assert "dubito evaluate digits:1" in answer.json()["detail"]


def test_model_with_damaged_report_is_served(open_client, evaluated_store, tmp_path):
    shutil.copytree(evaluated_store, tmp_path / "models")
    (tmp_path / "models/digits/reports/1/report.json").write_bytes(b"{")
    with open_client(tmp_path / "models") as client:
        model = client.get("/models/digits").json()
        assert (model["serving"], model["report"]) == ("1", None)
        answer = client.get("/models/digits/versions/1/report")
        assert answer.status_code == 503
        assert "report.json" in answer.json()["detail"]
