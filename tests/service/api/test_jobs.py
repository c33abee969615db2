import io
import os
import signal
import time
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.faults import prevent_writes
from tests.support.serving import metric, open_client, serving, wait_until

K = 20
IDS = [f"row {i}" for i in range(359)]


@pytest.fixture(scope="module")
def pools(tmp_path_factory, digits_rows):
    folder = tmp_path_factory.mktemp("pools")
    np.savez(folder / "rows.npz", x=digits_rows, ids=np.array(IDS))
    np.save(folder / "long.npy", np.tile(digits_rows, (100, 1)))
    np.save(folder / "too_long.npy", np.tile(digits_rows, (300, 1)))
    return folder


@pytest.fixture(scope="module")
def service(digits_store, pools, tmp_path_factory):
    """A client of a service with a folder of pools."""
    state = str(tmp_path_factory.mktemp("state") / "made" / "later")
    settings = {
        "DUBITO_POOLS": str(pools),
        "DUBITO_STATE": state,
        "DUBITO_THREADS": "1",
        "DUBITO_MAX_SAMPLES": "4000",
    }
    with open_client(digits_store, **settings) as client:
        yield client


def start_job(client, path, body=None, **kwargs):
    """Create a job and check that it is accepted."""
    answer = (
        client.post(path, json=body, **kwargs) if body is not None else client.post(path, **kwargs)
    )
    assert answer.status_code == 202, answer.text
    job = answer.json()
    assert answer.headers["location"] == f"/jobs/{job['id']}"
    return job


def wait_for_job(client, job, seconds=60):
    """Wait until a job ends and return it."""
    wait_until(
        lambda: client.get(f"/jobs/{job['id']}").json()["state"] not in ("queued", "running"),
        seconds,
    )
    return client.get(f"/jobs/{job['id']}").json()


def count_rows(client):
    page, labels = client.get("/metrics").text, {"model": "digits", "version": "1"}
    return tuple(
        metric(page, f"dubito_{kind}_rows_total", **labels) for kind in ("acquired", "control")
    )


def get_result(client, job):
    job = wait_for_job(client, job)
    assert job["state"] == "done", job
    assert job["progress"] == 1.0
    return client.get(job["result"])


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"acquisition": "bald"}, marks=pytest.mark.slow),
        {"acquisition": "random"},
        pytest.param({"acquisition": "power_bald", "beta": 4.0}, marks=pytest.mark.slow),
        {"acquisition": "batchbald", "num_samples": 10, "k": 4},
        {"acquisition": "bald", "race": 0.05},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_acquire_job_matches_acquire(service, digits_rows, options):
    options = {"seed": 5, "k": K, **options}
    job = start_job(service, "/acquire/jobs", {"pool_file": "rows.npz", **options})
    expected = service.post(
        "/acquire", json={"pool": digits_rows.tolist(), "ids": IDS, **options}
    ).json()
    assert get_result(service, job).json() == expected


@pytest.mark.parametrize("options", [{}, {"fdr": 0.1}], ids=["fpr", "fdr"])
def test_predict_job_matches_predict(service, digits_rows, options):
    options = {"seed": 5, **options}
    job = start_job(service, "/predict/jobs", {"inputs_file": "rows.npz", **options})
    answer = service.post(
        "/predict",
        json={"inputs": digits_rows.tolist(), **options},
        headers={"Accept": "application/x-npz"},
    )
    expected = np.load(io.BytesIO(answer.content))
    actual = np.load(io.BytesIO(get_result(service, job).content))
    assert set(actual.files) == {*expected.files, "ids"}
    assert actual["ids"].tolist() == IDS
    assert all(np.array_equal(actual[name], expected[name]) for name in expected.files)


def test_parquet_predictions_have_a_column_for_each_value(service, digits_rows):
    request = {"inputs": digits_rows[:50].tolist(), "ids": IDS[:50], "seed": 5, "format": "parquet"}
    answer = get_result(service, start_job(service, "/predict/jobs", request))
    assert answer.headers["content-type"] == "application/vnd.apache.parquet"
    table = pq.read_table(io.BytesIO(answer.content))
    rows = service.post("/predict", json={"inputs": digits_rows[:50].tolist(), "seed": 5}).json()[
        "predictions"
    ]
    assert table["id"].to_pylist() == IDS[:50]
    assert table["label"].to_pylist() == [row["label"] for row in rows]
    assert table["bald"].to_pylist() == [row["bald"] for row in rows]
    assert table["probabilities.3"].to_pylist() == [row["probabilities"][3] for row in rows]
    sets = [
        {str(c) for c in range(10) if table[f"prediction_set.{c}"][i].as_py()} for i in range(50)
    ]
    assert sets == [set(row["prediction_set"]) for row in rows]
    assert table.schema.metadata[b"dubito.seed"] == b"5"


def test_job_accepts_a_file_as_body_and_options_as_query(service, pools, digits_rows):
    content = (pools / "rows.npz").read_bytes()
    headers = {"Content-Type": "application/x-npz"}
    job = start_job(service, "/acquire/jobs?k=3&seed=5", content=content, headers=headers)
    expected = service.post(
        "/acquire", json={"pool": digits_rows.tolist(), "ids": IDS, "k": 3, "seed": 5}
    ).json()
    assert get_result(service, job).json()["ranking"] == expected["ranking"]
    assert job["read_as"] == "the array x"
    wait_until(lambda: "dubito_jobs_running 0.0" in service.get("/metrics").text)
    assert 'dubito_jobs_total{kind="acquire",state="done"}' in service.get("/metrics").text


@pytest.mark.parametrize("suffix", ["npz", "parquet"])
def test_acquire_accepts_files_as_body_and_by_name(service, pools, digits_rows, suffix):
    media_type = {"npz": "application/x-npz", "parquet": "application/vnd.apache.parquet"}[suffix]
    path = pools / f"body.{suffix}"
    if suffix == "npz":
        np.savez_compressed(path, pool=digits_rows, ids=np.array(IDS))
    else:
        pq.write_table(pa.table({"id": IDS, "features": list(digits_rows)}), path)
    expected = service.post(
        "/acquire", json={"pool": digits_rows.tolist(), "ids": IDS, "k": 4, "seed": 2}
    ).json()
    headers = {"Content-Type": media_type}
    by_body = service.post("/acquire?k=4&seed=2", content=path.read_bytes(), headers=headers)
    by_name = service.post("/acquire", json={"pool_file": path.name, "k": 4, "seed": 2})
    assert by_body.json() == by_name.json() == expected
    damaged = service.post("/acquire", content=b"rubbish", headers=headers)
    assert (
        damaged.status_code,
        f"pool: expected a whole {suffix} file" in damaged.json()["detail"],
    ) == (422, True)
    oversized = service.post("/acquire", json={"pool_file": "too_long.npy"})
    assert oversized.status_code == 413
    assert "got 107700 (/acquire/jobs takes more)" in oversized.json()["detail"]


def test_running_job_reports_progress_and_can_be_cancelled_and_deleted(service):
    request = {"pool_file": "long.npy", "num_samples": 1000}
    link = f"/jobs/{start_job(service, '/acquire/jobs', request)['id']}"
    while (job := service.get(link).json())["progress"] == 0:
        assert job["state"] in ("queued", "running")
        time.sleep(0.05)
    assert job["state"] == "running"
    assert job["seconds_left"] > 0
    answer = service.get(f"{link}/result")
    assert answer.status_code == 409
    assert "got running" in answer.json()["detail"]
    assert service.delete(link).status_code == 409
    assert service.post(f"{link}/cancel").status_code == 200
    while (job := service.get(link).json())["state"] == "running":
        time.sleep(0.05)
    assert job["state"] == "cancelled"
    assert job["id"] in [entry["id"] for entry in service.get("/jobs").json()["jobs"]]
    assert service.delete(link).status_code == 200
    assert service.get(link).status_code == 404


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({}, 422, "pool: expected at least one row, got none"),
        ({"pool_file": "rows.npz", "pool": [[0] * 64]}, 422, "pool_file: expected no value"),
        ({"pool_file": "../rows.npz"}, 422, "a file in the folder of pools"),
        ({"pool_file": "no.npz"}, 422, "a file in the folder of pools"),
        ({"pool_file": "rows.npz", "k": 0}, 422, "k: expected"),
        ({"pool_file": "rows.npz", "ids": ["a"]}, 422, "ids: expected an id for each of the 359"),
        ({"pool_file": "rows.npz", "acquisition": "std"}, 422, "acquisition: expected"),
        ({"pool_file": "rows.npz", "deadline_s": 5}, 422, "deadline_s: expected no value"),
        ({"pool_file": "rows.npz", "model": "no"}, 404, "model: expected one of"),
        ({"pool": [[0] * 63]}, 422, "pool.0: expected an array of 64"),
    ],
    ids=range(10),
)
def test_invalid_job_is_refused_and_not_created(service, body, status, words):
    existing = service.get("/jobs").json()
    answer = service.post("/acquire/jobs", json=body)
    assert (answer.status_code, words in answer.json()["detail"]) == (status, True), answer.text
    assert service.get("/jobs").json() == existing


def test_invalid_row_fails_the_job_and_is_named_in_the_error(service, pools, digits_rows):
    rows = np.concatenate([digits_rows, digits_rows])
    rows[500, 3] = np.nan
    np.savez(pools / "odd.npz", x=rows, ids=np.array([f"row {i}" for i in range(len(rows))]))
    job = wait_for_job(service, start_job(service, "/predict/jobs", {"inputs_file": "odd.npz"}))
    assert job["state"] == "failed"
    assert job["error"].startswith("inputs_file.500.3: expected a finite number")
    assert job["error"].endswith("(id 'row 500')")
    assert "failed: inputs_file.500.3" in service.get(f"/jobs/{job['id']}/result").json()["detail"]


def test_file_changed_after_job_creation_fails_the_job(service, pools, digits_rows):
    np.save(pools / "changing.npy", digits_rows)
    blocking = start_job(service, "/acquire/jobs", {"pool_file": "long.npy", "num_samples": 1000})
    job = start_job(service, "/acquire/jobs", {"pool_file": "changing.npy"})
    np.save(pools / "changing.npy", digits_rows[:9])
    service.post(f"/jobs/{blocking['id']}/cancel")
    assert (
        "a file that is unchanged since the job was created" in wait_for_job(service, job)["error"]
    )


def find_job_processes(state):
    """List the processes that run jobs of a state folder."""
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            is_job = b"service.batch.job_process" in (process / "cmdline").read_bytes()
            if is_job and any(
                str(handle.readlink()).startswith(str(state))
                for handle in (process / "fd").iterdir()
            ):
                pids.append(int(process.name))
        except OSError:
            continue
    return pids


@pytest.mark.parametrize(
    "interruption",
    [
        "service killed",
        pytest.param("job process killed", marks=pytest.mark.slow),
        pytest.param("service stopped", marks=pytest.mark.slow),
    ],
)
def test_job_resumes_after_its_process_or_the_service_ends(
    digits_store, pools, digits_rows, tmp_path, interruption
):
    settings = {
        "DUBITO_POOLS": str(pools),
        "DUBITO_STATE": str(tmp_path / "state"),
        "DUBITO_THREADS": "1",
    }
    request = {"pool_file": "long.npy", "k": 5, "seed": 1, "num_samples": 40}
    with (
        serving(digits_store, **settings) as (url, process),
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        job = start_job(client, "/acquire/jobs", request)
        wait_until(lambda: client.get(f"/jobs/{job['id']}").json()["progress"] > 0)
        if interruption == "job process killed":
            (pid,) = find_job_processes(tmp_path / "state")
            os.kill(pid, signal.SIGKILL)
            assert wait_for_job(client, job, 120)["state"] == "done"
        elif interruption == "service killed":
            process.kill()
    with open_client(digits_store, **settings) as client:
        resumed_job = client.get(f"/jobs/{job['id']}").json()
        assert resumed_job["progress"] > 0
        actual = wait_for_job(client, job, 120)
        assert actual["state"] == "done", actual
        ranking = client.get(actual["result"]).json()["ranking"]
        expected = client.post(
            "/acquire", json={"pool": digits_rows.tolist(), "k": 1, "seed": 1, "num_samples": 40}
        ).json()
        assert [row["score"] for row in ranking] == [
            expected["ranking"][0]["score"]
        ] * 5  # each row is repeated 100 times
        assert len({row["index"] % 359 for row in ranking}) == 1
    wait_until(lambda: not find_job_processes(tmp_path / "state"))


@pytest.mark.slow
def test_long_job_yields_to_another_client_and_finishes_correctly(
    digits_store, pools, digits_rows, tmp_path
):
    settings = {
        "DUBITO_POOLS": str(pools),
        "DUBITO_STATE": str(tmp_path / "state"),
        "DUBITO_THREADS": "1",
        "DUBITO_API_KEYS": "the-key-of-client-one,the-key-of-client-two",
    }
    long_request = {"pool_file": "long.npy", "k": 5, "seed": 1, "num_samples": 100}
    limits = {"JOB_TURN_S": 0.1}
    with serving(digits_store, limits=limits, **settings) as (url, _), ExitStack() as stack:
        client, rival = (
            stack.enter_context(
                httpx.Client(
                    base_url=url, headers={"X-API-Key": f"the-key-of-client-{key}"}, timeout=60
                )
            )
            for key in ("one", "two")
        )
        long_job = start_job(client, "/acquire/jobs", long_request)
        wait_until(lambda: client.get(f"/jobs/{long_job['id']}").json()["progress"] > 0)
        short_job = start_job(rival, "/acquire/jobs", {"pool_file": "rows.npz"})
        wait_until(lambda: rival.get(f"/jobs/{short_job['id']}").json()["state"] != "queued")
        is_unfinished = client.get(f"/jobs/{long_job['id']}").json()["progress"] < 0.5
        short_job, long_job = (
            wait_for_job(rival, short_job, 240),
            wait_for_job(client, long_job, 240),
        )
        assert (short_job["state"], long_job["state"]) == ("done", "done")
        assert short_job["ended"] < long_job["ended"] or not is_unfinished
        ranking = client.get(long_job["result"]).json()["ranking"]
        request = {"pool": digits_rows.tolist(), "k": 1, "seed": 1, "num_samples": 100}
        score = client.post("/acquire", json=request).json()["ranking"][0]["score"]
        assert [row["score"] for row in ranking] == [score] * 5  # each row is repeated 100 times


def test_jobs_are_queued_up_to_the_limit_or_the_fair_share_of_a_client(
    digits_store, pools, tmp_path
):
    keys = "first-key-0123456789", "second-key-0123456789"
    settings = {
        "DUBITO_API_KEYS": ",".join(keys),
        "DUBITO_POOLS": str(pools),
        "DUBITO_STATE": str(tmp_path),
        "DUBITO_JOBS_AT_ONCE": "0",
    }
    with (
        serving(digits_store, DUBITO_MAX_JOBS="2", **settings) as (url, _),
        httpx.Client(base_url=url, headers={"X-API-Key": keys[0]}) as client,
        httpx.Client(base_url=url, headers={"X-API-Key": keys[1]}) as rival,
    ):
        for _ in range(2):
            start_job(client, "/acquire/jobs", {"pool_file": "rows.npz"})
        answer = client.post("/acquire/jobs", json={"pool_file": "rows.npz"})
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "60"
        start_job(rival, "/acquire/jobs", {"pool": [[0] * 64], "k": 1})  # within its share
        assert rival.post("/acquire/jobs", json={"pool": [[0] * 64]}).status_code == 429
        time.sleep(0.3)
        states = [job["state"] for job in client.get("/jobs").json()["jobs"]]
        assert states == ["queued", "queued"]


def test_keys_see_only_their_own_jobs(digits_store, pools, tmp_path):
    keys = tmp_path / "keys.toml"
    texts = {
        name: f'[[keys]]\nname = "{name.partition("-")[0]}"\nscopes = ["read", "{scope}"]\n'
        f'sha256 = "{sha256(f"the-long-key-of-{name}".encode()).hexdigest()}"\n'
        for name, scope in (
            *(("one", "acquire"), ("one-rotated", "acquire"), ("two", "acquire")),
            *(("boss", "admin"), ("limited", "admin")),
        )
    }
    texts["limited"] += 'models = ["another"]\n'
    keys.write_text("".join(texts.values()))
    settings = {
        "DUBITO_POOLS": str(pools),
        "DUBITO_STATE": str(tmp_path / "state"),
        "DUBITO_KEYS_FILE": str(keys),
    }
    with serving(digits_store, **settings) as (url, _):
        owner, rotated, two, boss, limited = (
            httpx.Client(base_url=url, headers={"X-API-Key": f"the-long-key-of-{name}"})
            for name in texts
        )
        job = start_job(owner, "/acquire/jobs", {"pool_file": "rows.npz"})
        assert owner.get(f"/jobs/{job['id']}").status_code == 200
        for outsider in (two, limited):
            for path in (f"/jobs/{job['id']}", f"/jobs/{job['id']}/result"):
                assert outsider.get(path).status_code == 404
            assert outsider.delete(f"/jobs/{job['id']}").status_code == 404
            assert outsider.post(f"/jobs/{job['id']}/cancel").status_code == 404
            assert outsider.get("/jobs").json() == {"jobs": []}
        for client in (owner, rotated, boss):
            assert [(j["id"], j["owner"]) for j in client.get("/jobs").json()["jobs"]] == [
                (job["id"], "one")
            ]
            assert client.post(f"/jobs/{job['id']}/cancel").is_success
        assert httpx.get(f"{url}/jobs/{job['id']}").status_code == 401
        assert owner.post("/predict/jobs", json={"inputs_file": "rows.npz"}).status_code == 403
        running = start_job(two, "/acquire/jobs", {"pool_file": "long.npy", "num_samples": 1000})
        keys.write_text("".join(text for name, text in texts.items() if name != "two"))
        assert wait_for_job(boss, running)["state"] == "cancelled"
        for client in (owner, rotated, two, boss, limited):
            client.close()


@pytest.mark.slow
def test_job_files_are_bounded_per_key_and_only_results_remain(digits_store, digits_rows, tmp_path):
    settings = {"DUBITO_MAX_JOB_BYTES": "200000", "DUBITO_STATE": str(tmp_path)}
    request = {"inputs": digits_rows[:100].tolist(), "num_samples": 10}  # 26 kB
    with (
        serving(digits_store, **settings) as (url, process),
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        job = start_job(client, "/predict/jobs", {**request, "format": "parquet"})
        assert wait_for_job(client, job)["state"] == "done"
        folder = tmp_path / "jobs" / job["id"]
        wait_until(lambda: [f.name for f in folder.iterdir()] == ["predictions.parquet"])
        assert client.get(f"/jobs/{job['id']}/result").status_code == 200
        (folder / "predictions.parquet").unlink()
        answer = client.get(f"/jobs/{job['id']}/result")
        assert (answer.status_code, "whose file is lost" in answer.json()["detail"]) == (404, True)
        large_request = {"inputs": [[0] * 64] * 800}
        answer = client.post("/predict/jobs", json=large_request)
        assert answer.status_code == 507
        assert "up to 200000 bytes of files for all jobs of one key" in answer.json()["detail"]
        job = start_job(client, "/predict/jobs", {"inputs": [[0] * 64] * 500, "num_samples": 10})
        assert wait_for_job(client, job)["state"] == "failed"
        assert "DUBITO_MAX_JOB_BYTES" in wait_for_job(client, job)["error"]
        wait_until(lambda: not any((tmp_path / "jobs" / job["id"]).iterdir()))
        assert len(list((tmp_path / "jobs").iterdir())) == 2
        assert "dubito_state_usable 1.0" in client.get("/metrics").text
        prevent_writes(process.pid)
        wait_until(lambda: "dubito_state_usable 0.0" in client.get("/metrics").text)
        assert client.get("/jobs").status_code == 200
        assert client.post("/predict/jobs", json=request).status_code == 507


def test_unusable_state_folder_fails_jobs_but_not_acquire(digits_store, pools, tmp_path):
    (tmp_path / "file").write_text("")
    with serving(digits_store, DUBITO_POOLS=str(pools), DUBITO_STATE=str(tmp_path / "file")) as (
        url,
        _,
    ):
        answer = httpx.post(f"{url}/acquire/jobs", json={"pool_file": "rows.npz"})
        assert answer.status_code == 503
        expected = "the service's state (DUBITO_STATE) cannot be read or written: "
        assert answer.json()["detail"].startswith(expected)
        assert str(tmp_path) not in answer.text
        assert httpx.post(f"{url}/acquire", json={"pool": [[0] * 64]}).status_code == 200


def test_acquire_job_handles_keep_control_and_exclusion_like_acquire(service, digits_rows):
    request = {
        "ids": [f"j{i}" for i in range(359)],
        "k": 40,
        "seed": 3,
        "keep": True,
        "control": 0.5,
    }
    pool = {"pool": digits_rows.tolist()}
    acquired, counts = service.get("/models/digits/labels").json()["acquired"], count_rows(service)
    job = start_job(service, "/acquire/jobs", {**request, **pool})
    assert wait_for_job(service, job)["state"] == "done"
    wait_until(lambda: count_rows(service) == (counts[0] + 40, counts[1] + 20))
    answer = get_result(service, job).json()
    assert service.get("/models/digits/labels").json()["acquired"] == acquired + 40
    assert answer == service.post("/acquire", json={**request, **pool}).json()
    assert sum(row["control"] for row in answer["ranking"]) == 20
    labels = [{"id": row["id"], "label": "3"} for row in answer["ranking"]]
    assert service.post("/labels", json={"labels": labels}).json()["accepted"] == 40
    counts = count_rows(service)
    job = start_job(service, "/acquire/jobs", {**request, **pool, "keep": False, "control": 0})
    assert wait_for_job(service, job)["state"] == "done"
    repeat = get_result(service, job).json()
    assert repeat["excluded"] == 40
    assert not {row["id"] for row in repeat["ranking"]} & {row["id"] for row in answer["ranking"]}
    anonymous_pool = {**request, **pool, "ids": None, "k": 2}
    job = start_job(service, "/acquire/jobs", anonymous_pool)
    assert wait_for_job(service, job)["state"] == "done"
    assert get_result(service, job).json() == service.post("/acquire", json=anonymous_pool).json()
    counts = counts[0] + 4, counts[1] + 2
    wait_until(lambda: count_rows(service) == counts)
    labelled_rows = {"pool": pool["pool"][:2], "ids": [row["id"] for row in answer["ranking"][:2]]}
    job = start_job(service, "/acquire/jobs", labelled_rows)
    assert (
        wait_for_job(service, job)["state"] == "done"
        and get_result(service, job).json()["ranking"] == []
    )
    assert count_rows(service) == counts
