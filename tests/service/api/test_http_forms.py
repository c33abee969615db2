import io
from datetime import datetime, timedelta

import httpx
import numpy as np
import pytest

ROWS = {"inputs": [[8] * 64], "seed": 7}
GETS = ["/", "/docs", "/openapi.json", "/metrics", "/health/ready", "/models", "/models/digits"]
MORE_GETS = ["/models/digits/versions/1", "/models/digits/labels", "/labels", "/jobs", "/v2"]
ORIGIN = "https://app.example.com"


@pytest.mark.parametrize("path", GETS + MORE_GETS)
def test_head_matches_get_without_the_body(client, path):
    head, get = client.head(path), client.get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == get.headers["content-type"]
    assert client.head("/predict").headers["allow"] == "POST"


def test_media_type_with_zero_weight_is_not_sent(client):
    for media_range, subtype in ("application/x-npz;q=0", "json"), ("application/x-npz", "x-npz"):
        headers = {"Accept": f"application/json, {media_range}"}
        answer = client.post("/predict", json=ROWS, headers=headers)
        assert answer.headers["content-type"] == f"application/{subtype}"


@pytest.mark.parametrize(
    ("accept", "media_type"),
    [
        (["application/x-npz;q=0.1, application/json"], "json"),
        (["application/json;q=0.1, application/x-npz;q=0.2"], "x-npz"),
        (["text/html", "application/x-npz"], "x-npz"),
        (["*/*;q=0.1", "application/x-npz;q=0.2"], "x-npz"),
        (["APPLICATION/X-NPZ;Q=0.5, */*;q=0.5"], "x-npz"),
        (["*/*"], "json"),
        (["text/html"], "json"),
    ],
)
def test_highest_weight_of_all_accept_headers_selects_the_media_type(client, accept, media_type):
    headers = [("Accept", line) for line in accept]
    request = client.build_request("POST", "/predict", json=ROWS)
    del request.headers["accept"]
    request.headers = httpx.Headers([*request.headers.multi_items(), *headers])
    assert client.send(request).headers["content-type"] == f"application/{media_type}"


@pytest.mark.parametrize(
    ("accept", "is_compressed"),
    [
        (["gzip;q=0"], False),
        (["*;q=0"], False),
        (["gzip;q=0.1, identity"], False),
        (["br", "gzip;q=0.5"], True),
        (["*"], True),
        (["notgzip"], False),
    ],
)
@pytest.mark.parametrize("path", ["/predict", "/openapi.json", "/page/main.js"])
def test_gzip_is_used_only_for_clients_that_accept_it(client, path, accept, is_compressed):
    body = {**ROWS, "inputs": [[8] * 64] * 200}
    is_post = path == "/predict"
    request = client.build_request(
        "POST" if is_post else "GET", path, json=body if is_post else None
    )
    del request.headers["accept-encoding"]
    headers = [*request.headers.multi_items(), *(("Accept-Encoding", line) for line in accept)]
    request.headers = httpx.Headers(headers)
    answer = client.send(request)
    assert ("content-encoding" in answer.headers) == is_compressed
    assert "Accept-Encoding" in answer.headers["vary"]


@pytest.mark.parametrize("path", ["/models", "/models/digits", "/jobs", "/labels", "/jobs/none"])
def test_unknown_query_parameters_are_refused(client, path):
    answer = client.get(path, params={"seeed": "7"})
    assert answer.status_code == 422
    assert "seeed" in answer.json()["detail"]
    assert client.post("/labels?seeed=7", json={}).status_code == 422


def test_predict_accepts_parquet_and_npz_files(client, digits_rows):
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = digits_rows[:3]
    table, file, arrays = pa.table({"x": pa.array(rows.tolist())}), io.BytesIO(), io.BytesIO()
    parquet.write_table(table, file)
    np.savez(arrays, x=rows)
    expected = client.post("/predict", json={"inputs": rows.tolist(), "seed": 7}).json()
    for kind, body in (("vnd.apache.parquet", file), ("x-npz", arrays)):
        headers = {"Content-Type": f"application/{kind}"}
        answer = client.post("/predict?seed=7", content=body.getvalue(), headers=headers)
        assert answer.json() == expected
    answer = client.post("/predict?seeed=7", content=file.getvalue(), headers=headers)
    assert "seeed" in answer.json()["detail"]


def test_paths_can_have_the_v1_prefix(client, digits_rows):
    body = {"inputs": digits_rows[:1].tolist(), "seed": 7}
    assert client.post("/v1/predict", json=body).json() == client.post("/predict", json=body).json()
    answer = client.post("/v1/predict/jobs", json=body)
    assert answer.headers["location"] == f"/v1/jobs/{answer.json()['id']}"
    assert client.get(answer.headers["location"]).status_code == 200


def test_jobs_are_listed_latest_first_with_times_in_utc(client):
    expected = [client.post("/predict/jobs", json=ROWS).json()["id"] for _ in range(3)]
    jobs = client.get("/jobs").json()["jobs"]
    assert [job["id"] for job in jobs[:3]] == expected[::-1]
    assert datetime.fromisoformat(jobs[0]["created"]).utcoffset() == timedelta(0)
    assert client.get("/labels?limit=0").status_code == 422
    detail = client.get("/labels?limit=null").json()["detail"]
    assert detail.startswith("limit: expected a valid integer")


def test_allowed_origins_can_send_requests_and_links_have_the_prefix(
    open_client, digits_store, tmp_path
):
    settings = {
        "DUBITO_ALLOWED_ORIGINS": ORIGIN,
        "DUBITO_PREFIX": "/doubt",
        "DUBITO_STATE": str(tmp_path),
    }
    with open_client(digits_store, **settings) as client:
        page_headers = {"Origin": ORIGIN, "Sec-Fetch-Site": "cross-site"}
        preflight = {"Access-Control-Request-Method": "POST"}
        assert client.options("/predict", headers=page_headers | preflight).status_code == 200
        answer = client.post("/predict", json=ROWS, headers=page_headers)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, ORIGIN)
        foreign_headers = {**page_headers, "Origin": "https://evil.example.com"}
        assert client.options("/predict", headers=foreign_headers | preflight).status_code == 400
        answer = client.post("/predict", json=ROWS, headers=foreign_headers)
        assert answer.status_code == 403
        assert "access-control-allow-origin" not in answer.headers
        for prefix in ("", "/doubt"):  # whether or not the proxy removes it
            answer = client.post(f"{prefix}/v1/predict/jobs", json=ROWS)
            assert answer.headers["location"].startswith("/doubt/v1/jobs/")
            assert '"/doubt/openapi.json"' in client.get(f"{prefix}/docs").text.replace("'", '"')
