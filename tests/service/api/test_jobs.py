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
    """A client of a service with pools."""
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
    """A job that was accepted."""
    answer = (
        client.post(path, json=body, **kwargs) if body is not None else client.post(path, **kwargs)
    )
    assert answer.status_code == 202, answer.text
    job = answer.json()
    assert answer.headers["location"] == f"/jobs/{job['id']}"
    return job


def wait_for_job(client, job, seconds=60):
    """A job when it is over."""
    wait_until(
        lambda: client.get(f"/jobs/{job['id']}").json()["state"] not in ("queued", "running"),
        seconds,
    )
    return client.get(f"/jobs/{job['id']}").json()


def rows_kept(client):
    page, of_model = client.get("/metrics").text, {"model": "digits", "version": "1"}
    return tuple(
        metric(page, f"dubito_{kind}_rows_total", **of_model) for kind in ("acquired", "control")
    )


def result(client, job):
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
def test_a_job_ranks_as_acquire_does(service, digits_rows, options):
    options = {"seed": 5, "k": K, **options}
    job = start_job(service, "/acquire/jobs", {"pool_file": "rows.npz", **options})
    at_once = service.post(
        "/acquire", json={"pool": digits_rows.tolist(), "ids": IDS, **options}
    ).json()
    assert result(service, job).json() == at_once


@pytest.mark.parametrize("options", [{}, {"fdr": 0.1}], ids=["fpr", "fdr"])
def test_a_job_predicts_as_predict_does(service, digits_rows, options):
    options = {"seed": 5, **options}
    job = start_job(service, "/predict/jobs", {"inputs_file": "rows.npz", **options})
    rows = service.post(
        "/predict",
        json={"inputs": digits_rows.tolist(), **options},
        headers={"Accept": "application/x-npz"},
    )
    expected = np.load(io.BytesIO(rows.content))
    actual = np.load(io.BytesIO(result(service, job).content))
    assert set(actual.files) == {*expected.files, "ids"}
    assert actual["ids"].tolist() == IDS
    assert all(np.array_equal(actual[name], expected[name]) for name in expected.files)


def test_a_table_of_predictions_has_a_column_for_each_number(service, digits_rows):
    inline = {"inputs": digits_rows[:50].tolist(), "ids": IDS[:50], "seed": 5, "format": "parquet"}
    answer = result(service, start_job(service, "/predict/jobs", inline))
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


def test_a_file_comes_as_the_body_with_the_rest_in_the_query(service, pools, digits_rows):
    content = (pools / "rows.npz").read_bytes()
    headers = {"Content-Type": "application/x-npz"}
    job = start_job(service, "/acquire/jobs?k=3&seed=5", content=content, headers=headers)
    at_once = service.post(
        "/acquire", json={"pool": digits_rows.tolist(), "ids": IDS, "k": 3, "seed": 5}
    ).json()
    assert result(service, job).json()["ranking"] == at_once["ranking"]
    assert job["read_as"] == "the array x"
    wait_until(lambda: "dubito_jobs_running 0.0" in service.get("/metrics").text)
    assert 'dubito_jobs_total{kind="acquire",state="done"}' in service.get("/metrics").text


@pytest.mark.parametrize("ending", ["npz", "parquet"])
def test_acquire_takes_files_too(service, pools, digits_rows, ending):
    media_type = {"npz": "application/x-npz", "parquet": "application/vnd.apache.parquet"}[ending]
    path = pools / f"body.{ending}"
    if ending == "npz":
        np.savez_compressed(path, pool=digits_rows, ids=np.array(IDS))
    else:
        pq.write_table(pa.table({"id": IDS, "features": list(digits_rows)}), path)
    expected = service.post(
        "/acquire", json={"pool": digits_rows.tolist(), "ids": IDS, "k": 4, "seed": 2}
    ).json()
    headers = {"Content-Type": media_type}
    body = service.post("/acquire?k=4&seed=2", content=path.read_bytes(), headers=headers)
    names = service.post("/acquire", json={"pool_file": path.name, "k": 4, "seed": 2})
    assert body.json() == names.json() == expected
    wrong = service.post("/acquire", content=b"rubbish", headers=headers)
    assert (
        wrong.status_code,
        f"pool: expected a whole {ending} file" in wrong.json()["detail"],
    ) == (422, True)
    long = service.post("/acquire", json={"pool_file": "too_long.npy"})
    assert long.status_code == 413
    assert "got 107700 (/acquire/jobs takes more)" in long.json()["detail"]


def test_a_running_job_reports_progress_and_is_cancelled_then_deleted(service):
    request = {"pool_file": "long.npy", "num_samples": 1000}
    link = f"/jobs/{start_job(service, '/acquire/jobs', request)['id']}"
    while (job := service.get(link).json())["progress"] == 0:
        assert job["state"] in ("queued", "running")
        time.sleep(0.05)
    assert job["state"] == "running"
    assert job["seconds_left"] > 0
    early = service.get(f"{link}/result")
    assert early.status_code == 409
    assert "got running" in early.json()["detail"]
    assert service.delete(link).status_code == 409
    assert service.post(f"{link}/cancel").status_code == 200
    while (job := service.get(link).json())["state"] == "running":
        time.sleep(0.05)
    assert job["state"] == "cancelled"
    assert job["id"] in [items["id"] for items in service.get("/jobs").json()["jobs"]]
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
def test_what_cannot_be_a_job_is_refused_at_once_and_leaves_nothing(service, body, status, words):
    before = service.get("/jobs").json()
    answer = service.post("/acquire/jobs", json=body)
    assert (answer.status_code, words in answer.json()["detail"]) == (status, True), answer.text
    assert service.get("/jobs").json() == before


def test_a_row_that_cannot_be_computed_fails_the_job_and_is_named(service, pools, digits_rows):
    rows = np.concatenate([digits_rows, digits_rows])
    rows[500, 3] = np.nan
    np.savez(pools / "odd.npz", x=rows, ids=np.array([f"row {i}" for i in range(len(rows))]))
    job = wait_for_job(service, start_job(service, "/predict/jobs", {"inputs_file": "odd.npz"}))
    assert job["state"] == "failed"
    assert job["error"].startswith("inputs_file.500.3: expected a finite number")
    assert job["error"].endswith("(id 'row 500')")
    assert "failed: inputs_file.500.3" in service.get(f"/jobs/{job['id']}/result").json()["detail"]


def test_a_file_that_changed_since_fails_the_job(service, pools, digits_rows):
    np.save(pools / "changing.npy", digits_rows)
    blocking = start_job(service, "/acquire/jobs", {"pool_file": "long.npy", "num_samples": 1000})
    job = start_job(service, "/acquire/jobs", {"pool_file": "changing.npy"})
    np.save(pools / "changing.npy", digits_rows[:9])
    service.post(f"/jobs/{blocking['id']}/cancel")
    assert (
        "a file that is unchanged since the job was created" in wait_for_job(service, job)["error"]
    )


def job_processes(state):
    """Processes that run a job of a state folder."""
    actual = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            is_job = b"service.batch.job_process" in (process / "cmdline").read_bytes()
            if is_job and any(
                str(handle.readlink()).startswith(str(state))
                for handle in (process / "fd").iterdir()
            ):
                actual.append(int(process.name))
        except OSError:
            continue
    return actual


@pytest.mark.parametrize(
    "who",
    [
        "the service",
        pytest.param("the job's process", marks=pytest.mark.slow),
        pytest.param("the service, in order", marks=pytest.mark.slow),
    ],
)
def test_a_job_goes_on_after_its_process_or_the_service_ended(
    digits_store, pools, digits_rows, tmp_path, who
):
    settings = {
        "DUBITO_POOLS": str(pools),
        "DUBITO_STATE": str(tmp_path / "state"),
        "DUBITO_THREADS": "1",
    }
    asks = {"pool_file": "long.npy", "k": 5, "seed": 1, "num_samples": 40}
    with (
        serving(digits_store, **settings) as (url, process),
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        job = start_job(client, "/acquire/jobs", asks)
        wait_until(lambda: client.get(f"/jobs/{job['id']}").json()["progress"] > 0)
        if who == "the job's process":
            (number,) = job_processes(tmp_path / "state")
            os.kill(number, signal.SIGKILL)
            assert wait_for_job(client, job, 120)["state"] == "done"
        elif who == "the service":
            process.kill()
    with open_client(digits_store, **settings) as client:
        retained = client.get(f"/jobs/{job['id']}").json()
        assert retained["progress"] > 0
        actual = wait_for_job(client, job, 120)
        assert actual["state"] == "done", actual
        ranking = client.get(actual["result"]).json()["ranking"]
        best = client.post(
            "/acquire", json={"pool": digits_rows.tolist(), "k": 1, "seed": 1, "num_samples": 40}
        ).json()
        assert [row["score"] for row in ranking] == [
            best["ranking"][0]["score"]
        ] * 5  # the pool has it 100 times
        assert len({row["index"] % 359 for row in ranking}) == 1
    wait_until(lambda: not job_processes(tmp_path / "state"))


@pytest.mark.slow
def test_a_long_job_gives_way_to_another_client_s_and_ends_as_it_would_have(
    digits_store, pools, digits_rows, tmp_path
):
    settings = {
        "DUBITO_POOLS": str(pools),
        "DUBITO_STATE": str(tmp_path / "state"),
        "DUBITO_THREADS": "1",
        "DUBITO_API_KEYS": "the-key-of-client-one,the-key-of-client-two",
    }
    long = {"pool_file": "long.npy", "k": 5, "seed": 1, "num_samples": 100}
    limits = {"JOB_TURN_S": 0.1}
    with serving(digits_store, limits=limits, **settings) as (url, _), ExitStack() as stack:
        item, two = (
            stack.enter_context(
                httpx.Client(
                    base_url=url, headers={"X-API-Key": f"the-key-of-client-{key}"}, timeout=60
                )
            )
            for key in ("one", "two")
        )
        first = start_job(item, "/acquire/jobs", long)
        wait_until(lambda: item.get(f"/jobs/{first['id']}").json()["progress"] > 0)
        second = start_job(two, "/acquire/jobs", {"pool_file": "rows.npz"})
        wait_until(lambda: two.get(f"/jobs/{second['id']}").json()["state"] != "queued")
        is_long = item.get(f"/jobs/{first['id']}").json()["progress"] < 0.5
        second, full = wait_for_job(two, second, 240), wait_for_job(item, first, 240)
        assert (second["state"], full["state"]) == ("done", "done")
        assert second["ended"] < full["ended"] or not is_long
        ranking = item.get(full["result"]).json()["ranking"]
        best = {"pool": digits_rows.tolist(), "k": 1, "seed": 1, "num_samples": 100}
        score = item.post("/acquire", json=best).json()["ranking"][0]["score"]
        assert [row["score"] for row in ranking] == [score] * 5  # the pool has it 100 times


def test_a_service_that_runs_no_jobs_takes_them_until_a_client_has_too_many(
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
        httpx.Client(base_url=url, headers={"X-API-Key": keys[1]}) as other,
    ):
        for _ in range(2):
            start_job(client, "/acquire/jobs", {"pool_file": "rows.npz"})
        answer = client.post("/acquire/jobs", json={"pool_file": "rows.npz"})
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "60"
        start_job(other, "/acquire/jobs", {"pool": [[0] * 64], "k": 1})  # it has its share
        assert other.post("/acquire/jobs", json={"pool": [[0] * 64]}).status_code == 429
        time.sleep(0.3)
        states = [job["state"] for job in client.get("/jobs").json()["jobs"]]
        assert states == ["queued", "queued"]


def test_keys_see_their_own_jobs_alone(digits_store, pools, tmp_path):
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
        item, rotated, two, boss, limited = (
            httpx.Client(base_url=url, headers={"X-API-Key": f"the-long-key-of-{name}"})
            for name in texts
        )
        job = start_job(item, "/acquire/jobs", {"pool_file": "rows.npz"})
        assert item.get(f"/jobs/{job['id']}").status_code == 200
        for other in (two, limited):
            for path in (f"/jobs/{job['id']}", f"/jobs/{job['id']}/result"):
                assert other.get(path).status_code == 404
            assert other.delete(f"/jobs/{job['id']}").status_code == 404
            assert other.post(f"/jobs/{job['id']}/cancel").status_code == 404
            assert other.get("/jobs").json() == {"jobs": []}
        for client in (item, rotated, boss):
            assert [(j["id"], j["owner"]) for j in client.get("/jobs").json()["jobs"]] == [
                (job["id"], "one")
            ]
            assert client.post(f"/jobs/{job['id']}/cancel").is_success
        assert httpx.get(f"{url}/jobs/{job['id']}").status_code == 401
        assert item.post("/predict/jobs", json={"inputs_file": "rows.npz"}).status_code == 403
        running = start_job(two, "/acquire/jobs", {"pool_file": "long.npy", "num_samples": 1000})
        keys.write_text("".join(text for name, text in texts.items() if name != "two"))
        assert wait_for_job(boss, running)["state"] == "cancelled"
        for client in (item, rotated, two, boss, limited):
            client.close()


@pytest.mark.slow
def test_files_of_one_key_s_jobs_are_bounded_and_a_result_is_all_that_stays(
    digits_store, digits_rows, tmp_path
):
    settings = {"DUBITO_MAX_JOB_BYTES": "200000", "DUBITO_STATE": str(tmp_path)}
    rows = {"inputs": digits_rows[:100].tolist(), "num_samples": 10}  # 26 kB
    with (
        serving(digits_store, **settings) as (url, process),
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        job = start_job(client, "/predict/jobs", {**rows, "format": "parquet"})
        assert wait_for_job(client, job)["state"] == "done"
        folder = tmp_path / "jobs" / job["id"]
        wait_until(lambda: [f.name for f in folder.iterdir()] == ["predictions.parquet"])
        assert client.get(f"/jobs/{job['id']}/result").status_code == 200
        (folder / "predictions.parquet").unlink()
        lost = client.get(f"/jobs/{job['id']}/result")
        assert (lost.status_code, "whose file is lost" in lost.json()["detail"]) == (404, True)
        too_much = {"inputs": [[0] * 64] * 800}
        answer = client.post("/predict/jobs", json=too_much)
        assert answer.status_code == 507
        assert "up to 200000 bytes of files for all jobs of one key" in answer.json()["detail"]
        long = start_job(client, "/predict/jobs", {"inputs": [[0] * 64] * 500, "num_samples": 10})
        assert wait_for_job(client, long)["state"] == "failed"
        assert "DUBITO_MAX_JOB_BYTES" in wait_for_job(client, long)["error"]
        wait_until(lambda: not any((tmp_path / "jobs" / long["id"]).iterdir()))
        assert len(list((tmp_path / "jobs").iterdir())) == 2
        assert "dubito_state_usable 1.0" in client.get("/metrics").text
        prevent_writes(process.pid)
        wait_until(lambda: "dubito_state_usable 0.0" in client.get("/metrics").text)
        assert client.get("/jobs").status_code == 200
        assert client.post("/predict/jobs", json=rows).status_code == 507


def test_a_state_folder_that_cannot_be_written_to_is_told(digits_store, pools, tmp_path):
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


def test_a_job_keeps_sets_aside_and_leaves_out_as_a_request_does(service, digits_rows):
    request = {
        "ids": [f"j{i}" for i in range(359)],
        "k": 40,
        "seed": 3,
        "keep": True,
        "control": 0.5,
    }
    pool = {"pool": digits_rows.tolist()}
    before, counted = service.get("/models/digits/labels").json()["acquired"], rows_kept(service)
    job = start_job(service, "/acquire/jobs", {**request, **pool})
    assert wait_for_job(service, job)["state"] == "done"
    wait_until(lambda: rows_kept(service) == (counted[0] + 40, counted[1] + 20))
    by_job = result(service, job).json()
    assert service.get("/models/digits/labels").json()["acquired"] == before + 40
    assert by_job == service.post("/acquire", json={**request, **pool}).json()
    assert sum(row["control"] for row in by_job["ranking"]) == 20
    labels = [{"id": row["id"], "label": "3"} for row in by_job["ranking"]]
    assert service.post("/labels", json={"labels": labels}).json()["accepted"] == 40
    counted = rows_kept(service)
    job = start_job(service, "/acquire/jobs", {**request, **pool, "keep": False, "control": 0})
    assert wait_for_job(service, job)["state"] == "done"
    again = result(service, job).json()
    assert again["excluded"] == 40
    assert not {row["id"] for row in again["ranking"]} & {row["id"] for row in by_job["ranking"]}
    unnamed = {**request, **pool, "ids": None, "k": 2}
    job = start_job(service, "/acquire/jobs", unnamed)
    assert wait_for_job(service, job)["state"] == "done"
    assert result(service, job).json() == service.post("/acquire", json=unnamed).json()
    counted = counted[0] + 4, counted[1] + 2
    wait_until(lambda: rows_kept(service) == counted)
    full = {"pool": pool["pool"][:2], "ids": [row["id"] for row in by_job["ranking"][:2]]}
    job = start_job(service, "/acquire/jobs", full)
    assert (
        wait_for_job(service, job)["state"] == "done"
        and result(service, job).json()["ranking"] == []
    )
    assert rows_kept(service) == counted
