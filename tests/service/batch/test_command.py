import argparse
import base64
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from model_store.acquisition.ranking import PoolScorer
from model_store.errors import InvalidInput
from model_store.inference.model import Model
from model_store.inference.runtime import Runtime
from service.batch import command, shards
from service.batch.files import Stopped
from service.commands import add_commands
from service.settings import Settings
from tests.support.data_sets import get_content
from tests.support.environment import ROOT, environment_with, run_service
from tests.support.images import pixel
from tests.support.ray_cluster import processes
from tests.support.serving import open_client, wait_until

SEED = 5
DRAWS = 10
IDS = [f"row {i}" for i in range(359)]
OPTIONS = ["--workers", "1", "--shard-rows", "60", "--num-samples", "10", "--seed", "5"]


def write(path, rows, ids=None, **options):
    """Write rows to a Parquet file as a column of lists."""
    names = {} if ids is None else {"id": ids}
    pq.write_table(
        pa.table({**names, "x": pa.array(list(rows), pa.list_(pa.float32()))}), path, **options
    )


@pytest.fixture(scope="module")
def data(tmp_path_factory, digits_rows):
    """Write the digits to two files, the first with three row groups."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "deeper").mkdir()
    write(folder / "a.parquet", digits_rows[:200], IDS[:200], row_group_size=70)
    write(folder / "deeper" / "b.parquet", digits_rows[200:], IDS[200:])
    write(folder / "_draft.parquet", digits_rows[:3])
    return folder


def run_in_process(options, numbers, workers):
    """Process shards one after another."""
    worker = shards.Worker(options, 1)
    for number in numbers:
        yield worker.result(number)


def run_command(store, kind, *arguments):
    """Run `score` or `rank` in this process."""
    parser = argparse.ArgumentParser()
    add_commands(parser.add_subparsers())
    options = parser.parse_args([kind, *map(str, arguments)])
    command.process_data_set(options, Settings(store=store))


@pytest.fixture
def run(digits_store, monkeypatch):
    def run(kind, source, out=None, *options, workers=None, **overrides):
        monkeypatch.setattr(
            command, "run_local", run_in_process if workers is None else shards.run_local
        )
        arguments = ["--quiet", *options]
        defaults = {"out": out, "workers": workers or 1, "shard_rows": 60, "num_samples": DRAWS}
        for name, value in {**defaults, "seed": SEED, **overrides}.items():
            arguments += [] if value is None else [f"--{name.replace('_', '-')}", value]
        run_command(digits_store, kind, source, *arguments)

    return run


@pytest.fixture(scope="module")
def output(data, digits_store, tmp_path_factory):
    out = tmp_path_factory.mktemp("scored") / "out"
    run_command(digits_store, "score", data, "--out", out, "--quiet", *OPTIONS)
    return out


def get_table(out):
    """Read all parts of an output."""
    return pa.concat_tables([pq.read_table(path) for path in sorted(out.glob("part-*.parquet"))])


def test_score_matches_predict(output, client, digits_rows):
    request = {"inputs": digits_rows.tolist(), "seed": SEED, "num_samples": DRAWS}
    expected = client.post("/predict", json=request).json()["predictions"]
    table = get_table(output)
    assert table["id"].to_pylist() == IDS
    for name in ("label", "entropy", "bald", "p_value", "flag"):
        assert table[name].to_pylist() == [row[name] for row in expected], name
    assert table["probabilities.3"].to_pylist() == [row["probabilities"][3] for row in expected]
    summary = {"rows": 359, "rejected": 0, "parts": 7}
    assert json.loads((output / "done.json").read_bytes()) == summary
    assert pq.read_metadata(output / "part-00000-of-00007.parquet").metadata[b"dubito.seed"] == b"5"


def test_score_options_match_predict(run, data, tmp_path, client, digits_rows):
    options = {"fpr": 0.1, "coverage": 0.8}
    run("score", data / "a.parquet", tmp_path / "out", **options)
    request = {"inputs": digits_rows[:200].tolist(), "seed": SEED, "num_samples": DRAWS, **options}
    expected = client.post("/predict", json=request, headers={"Accept": "application/x-npz"})
    expected, table = np.load(io.BytesIO(expected.content)), get_table(tmp_path / "out")
    for name in ("num_samples", "bald", "p_value", "flag"):
        assert np.array_equal(table[name].to_numpy(), expected[name]), name
    assert np.array_equal(table["prediction_set.7"].to_numpy(), expected["prediction_set"][:, 7])


@pytest.mark.parametrize(
    "options",
    [
        {"acquisition": "bald"},
        {"acquisition": "random"},
        {"acquisition": "power_bald"},
        {"acquisition": "power_bald", "beta": 0.5},
        {"acquisition": "entropy", "priors": {str(i): 0.55 if i == 8 else 0.05 for i in range(10)}},
    ],
    ids=lambda options: "-".join(
        str(value) for value in options.values() if not isinstance(value, dict)
    ),
)
def test_rank_matches_acquire(run, data, capsys, client, digits_rows, options):
    draws = {"seed": SEED, "num_samples": DRAWS}
    request = {"pool": digits_rows.tolist(), "ids": IDS, "k": 20, **draws, **options}
    arguments = {
        name: json.dumps(value) if name == "priors" else value for name, value in options.items()
    }
    run("rank", data, None, "-k", 20, **arguments)
    assert json.loads(capsys.readouterr().out) == client.post("/acquire", json=request).json()


def test_rank_matches_acquire_for_copies_across_files_without_ids(
    run, tmp_path, client, digits_rows
):
    """Rank 50 rows among three copies of each of 30 rows."""
    rows = np.concatenate([digits_rows[:30], digits_rows[:30][::-1], digits_rows[:30]])
    (tmp_path / "data").mkdir()
    for i in range(3):
        write(tmp_path / "data" / f"{i}.parquet", rows[30 * i : 30 * i + 30])
    run("rank", tmp_path / "data", tmp_path / "out", "-k", 50)
    request = {"pool": rows.tolist(), "k": 50, "seed": SEED, "num_samples": DRAWS}
    expected = client.post("/acquire", json=request).json()
    assert json.loads((tmp_path / "out" / "ranking.json").read_bytes()) == expected
    table = pq.read_table(tmp_path / "out" / "ranking.parquet")
    for name in ("rank", "id", "index", "score"):
        assert table[name].to_pylist() == [row[name] for row in expected["ranking"]]


@pytest.mark.slow
def test_job_resumes_after_its_driver_is_killed_with_identical_output(
    data, output, digits_store, tmp_path
):
    out = tmp_path / "out"
    arguments = ["score", str(data), "--out", str(out), *OPTIONS]
    for _ in range(2):
        process = subprocess.Popen(
            [sys.executable, "-m", "service", *arguments],
            env=environment_with(DUBITO_STORE=str(digits_store)),
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        before = len(list(out.glob("part-*")))
        wait_until(
            lambda n=before, p=process: len(list(out.glob("part-*"))) > n or p.poll() is not None
        )
        process.kill()
        process.wait()
    (out / ".draft-of-the-killed").write_bytes(b"half")
    completed = run_service(*arguments, DUBITO_STORE=str(digits_store))
    assert completed.returncode == 0, completed.stderr
    assert get_content(out) == get_content(output)


def test_existing_parts_are_not_recomputed(run, data, output, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(output, out)
    part = out / "part-00003-of-00007.parquet"
    part.unlink()
    mtimes = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    run("score", data, out, seed=None)
    assert {path: path.stat().st_mtime_ns for path in mtimes} == mtimes
    assert get_content(out) == get_content(output)


def worker_pids():
    """Return the ids of this process's shard workers."""
    return processes("spawn_main", os.getpid())


def test_killed_worker_is_replaced(run, data, output, tmp_path):
    killed_pids = []

    def kill():
        wait_until(worker_pids)
        for pid in worker_pids():
            os.kill(pid, signal.SIGKILL)
            killed_pids.append(pid)

    killer = threading.Thread(target=kill)
    killer.start()
    run("score", data, tmp_path / "out", workers=2)
    killer.join()
    assert killed_pids
    assert get_content(tmp_path / "out") == get_content(output)


def test_shard_is_abandoned_after_repeated_worker_deaths():
    with pytest.raises(Stopped, match=r"^out: part 3 was tried 5 times: a worker process died$"):
        next(shards.run_rounds(lambda _: [], [4, 3]))


def write_odd_rows(folder, digits_rows):
    rows = [row.tolist() for row in digits_rows[:100]]
    rows[3], rows[50] = None, rows[50][:63]
    rows[70][5] = float("nan")
    ids = [None if i == 99 else name for i, name in enumerate(IDS[:100])]
    folder.mkdir()
    write(folder / "odd.parquet", rows, ids)
    return np.delete(np.arange(100), [3, 50, 70, 99])


def test_unreadable_rows_are_counted_and_written_with_a_reason(
    run, tmp_path, digits_rows, client, capsys
):
    good = write_odd_rows(tmp_path / "data", digits_rows)
    run("score", tmp_path / "data", tmp_path / "out", max_rejects=0.04)
    assert get_table(tmp_path / "out")["id"].to_pylist() == [IDS[i] for i in good]
    assert json.loads((tmp_path / "out" / "done.json").read_bytes())["rejected"] == 4
    files = sorted((tmp_path / "out" / "rejects").iterdir())
    assert [file.name for file in files] == [f"part-0000{i}-of-00002.jsonl" for i in range(2)]
    rejects = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    names = [*((i, IDS[i]) for i in (3, 50, 70)), (99, None)]
    assert [(row["row"], row["id"]) for row in rejects] == names
    assert [row["reason"] for row in rejects] == [
        "source: odd.parquet.3: expected 64 numbers in x, got none",
        "source: odd.parquet.50: expected 64 numbers, got 63",
        "source: odd.parquet.70.5: expected a finite number in float32's range, got another value",
        "id: expected an id for each row, got none in row 99",
    ]
    run("rank", tmp_path / "data", None, "-k", 10, max_rejects=0.04)
    actual = json.loads(capsys.readouterr().out)["ranking"]
    request = {
        "pool": digits_rows[good].tolist(),
        "ids": [IDS[i] for i in good],
        "k": 10,
        "seed": SEED,
    }
    expected = client.post("/acquire", json={**request, "num_samples": DRAWS}).json()["ranking"]
    assert [(row["id"], row["score"]) for row in actual] == [
        (row["id"], row["score"]) for row in expected
    ]


def test_too_many_unreadable_rows_stop_the_job_until_the_limit_is_raised(
    run, tmp_path, digits_rows
):
    write_odd_rows(tmp_path / "data", digits_rows)
    for _ in range(2):
        message = r"^source: expected at most 0\.01 of 100 rows .* got \d so far \(source: odd"
        with pytest.raises(Stopped, match=message):
            run("score", tmp_path / "data", tmp_path / "out")
    assert list((tmp_path / "out" / "rejects").iterdir())
    run("score", tmp_path / "data", tmp_path / "out", max_rejects=0.04)
    assert len(get_table(tmp_path / "out")) == 96


def test_rows_with_non_finite_results_are_rejected(run, tmp_path, digits_rows, monkeypatch, capsys):
    """Simulate a model that overflows for rows whose first value is 16."""
    rows = digits_rows[:20].copy()
    rows[7, 0] = 16

    run_set, overflows = Runtime.run_set, []

    def record_overflows(runtime, x, draws):
        overflows.append(x[:, 0] == 16)
        return run_set(runtime, x, draws)

    def prediction(model, *arguments):
        result = predict(model, *arguments)
        if overflows:  # empty while the model is loaded
            result.scores.by_name()[result.scores.overall][overflows.pop()] = np.nan
        return result

    predict = Model.prediction
    monkeypatch.setattr(Runtime, "run_set", record_overflows)
    monkeypatch.setattr(Model, "prediction", prediction)
    monkeypatch.setattr(
        PoolScorer,
        "scores",
        lambda _, x, __: np.where(x[:, 0] == 16, np.nan, x.sum(axis=1)),
    )
    write(tmp_path / "huge.parquet", rows)
    run("score", tmp_path / "huge.parquet", tmp_path / "out", max_rejects=0.05)
    (line,) = (tmp_path / "out" / "rejects" / "part-00000-of-00001.jsonl").read_text().splitlines()
    assert json.loads(line)["row"] == 7
    assert "not finite" in json.loads(line)["reason"]
    assert get_table(tmp_path / "out")["id"].to_pylist() == [str(i) for i in range(20) if i != 7]
    run("rank", tmp_path / "huge.parquet", None, "-k", 20, max_rejects=0.05)
    ranking = json.loads(capsys.readouterr().out)["ranking"]
    assert sorted(row["index"] for row in ranking) == [i for i in range(20) if i != 7]


@pytest.mark.parametrize(
    ("overrides", "difference"),
    [
        ({"seed": 6}, "seed 5 instead of 6"),
        ({"fpr": 0.2}, "fpr 0.05 instead of 0.2"),
        ({"shard_rows": 50}, "shard_rows 60 instead of 50"),
    ],
)
def test_output_of_another_job_is_rejected(run, data, output, overrides, difference):
    before = get_content(output)
    with pytest.raises(
        InvalidInput,
        match=f"^out: expected an empty folder or bucket.* got the output of another job: {difference}$",
    ):
        run("score", data, output, **overrides)
    assert get_content(output) == before


def test_output_of_changed_data_is_rejected(run, data, output, tmp_path):
    shutil.copytree(data, tmp_path / "data")
    os.utime(tmp_path / "data" / "a.parquet")
    with pytest.raises(InvalidInput, match=r"^out: .*: a\.parquet has changed$"):
        run("score", tmp_path / "data", output)


def test_damaged_output_is_named(run, data, tmp_path):
    out = tmp_path / "out"
    run("rank", data, out, "-k", 5)
    part = sorted(out.glob("part-*.parquet"))[0]
    part.write_bytes(part.read_bytes()[:-8])
    with pytest.raises(InvalidInput, match=f"^out: expected a whole parquet file, '{part.name}'"):
        run("rank", data, out, "-k", 5)
    (out / "job.json").write_text("{}")
    with pytest.raises(
        InvalidInput, match=r"^out: expected an empty .*, got an invalid job\.json$"
    ):
        run("rank", data, out, "-k", 5)


def test_bad_input_is_named(run, data, tmp_path, digits_rows):
    def check(message, kind="score", source=data, out=tmp_path / "out", **overrides):
        with pytest.raises(InvalidInput, match=message):
            run(kind, source, out, **overrides)
        assert (tmp_path / "out" / "job.json").exists() == ("ray" in overrides)

    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    (tmp_path / "text.parquet").write_text("no table")
    (tmp_path / "others").mkdir()
    write(tmp_path / "others" / "a.parquet", digits_rows[:3], IDS[:3])
    write(tmp_path / "others" / "b.parquet", digits_rows[:3])
    write(tmp_path / "narrow.parquet", digits_rows[:3, :1].repeat(2, axis=1))
    pq.write_table(pa.table({"x": ["a", "b"]}), tmp_path / "words.parquet")
    check(
        r"^source: expected a \.parquet file, or a folder of such files, got .*absent",
        source=tmp_path / "absent",
    )
    check("^source: expected a data set of .parquet files, got none", source=tmp_path / "empty")
    check("^source: text.parquet: expected a whole parquet file", source=tmp_path / "text.parquet")
    check(
        "^source: words.parquet: expected one column of lists of 64 numbers",
        source=tmp_path / "words.parquet",
    )
    check("^source: b.parquet: expected the columns that a.parquet has", source=tmp_path / "others")
    check("^out: expected an empty folder or bucket.* without job.json", out=tmp_path / "full")
    check("^out: expected a location outside the data set", out=data / "out")
    check("^priors: expected a JSON object", priors="{")
    check("^num_samples: expected at most 1000", kind="rank", num_samples=5000)
    check("^acquisition: expected one of", kind="rank", acquisition="variance")
    check("^acquisition: expected a score of single rows", kind="rank", acquisition="batchbald")
    check("^max-rejects: expected a share", max_rejects=2)
    check("^ray: expected the extra `scale` to be installed, got no Ray", ray="local")


def test_rank_rejects_duplicate_ids(run, tmp_path, digits_rows):
    write(tmp_path / "same.parquet", digits_rows[:3], ["a", "b", "a"])
    with pytest.raises(
        Stopped,
        match=r"^ids: expected unique ids, got duplicates such as 'a'$",
    ):
        run("rank", tmp_path / "same.parquet")


def test_command_reports_an_error_in_one_line(digits_store, data, tmp_path):
    arguments = "score", str(tmp_path / "absent"), "--out", str(tmp_path / "out")
    completed = run_service(*arguments, DUBITO_STORE=str(digits_store))
    assert completed.returncode == 2
    assert completed.stderr.startswith("error: source: expected")
    assert completed.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "model",
    [
        *("people", "pictures", "rents"),
        *(pytest.param(model, marks=pytest.mark.slow) for model in ("texts", "groups")),
    ],
)
def test_score_and_jobs_match_predict_for_every_kind_of_input(
    kinds_service, kinds, tmp_path, model
):
    client, (columns, inputs) = kinds_service, get_example(model)
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    options = ["--out", tmp_path / "out", "--model", model, "--seed", "3", "--quiet"]
    rows = tmp_path / "rows.parquet"
    run_command(kinds, "score", rows, *options, "--workers", "1")
    request = {"model": model, "inputs": inputs, "seed": 3}
    expected = client.post("/predict", json=request, headers={"Accept": "application/x-npz"})
    assert expected.status_code == 200, expected.text
    expected, table = np.load(io.BytesIO(expected.content)), get_table(tmp_path / "out")
    assert table["p_value"].to_pylist() == expected["p_value"].tolist()
    name = "mean" if model == "rents" else "entropy"
    assert table[name].to_pylist() == expected[name].tolist()
    assert table["flag"].to_pylist() == expected["flag"].tolist()
    job = client.post("/predict/jobs", json=request).json()
    wait_until(lambda: client.get(f"/jobs/{job['id']}").json()["state"] == "done")
    answer = np.load(io.BytesIO(client.get(f"/jobs/{job['id']}/result").content))
    for array in ("flag", name, *(["missing"] if "missing" in expected else [])):
        assert answer[array].tolist() == expected[array].tolist()
    if "missing" in expected:
        names = [expected["columns"][row].tolist() for row in expected["missing"]]
        assert [text.split(", ") if text else [] for text in table["missing"].to_pylist()] == names
        strict = client.post("/predict", json={**request, "missing": "reject"})
        assert (strict.status_code == 422) == any(names)


@pytest.fixture(scope="module")
def kinds_service(kinds):
    """Return a client of a service with a model of every input kind."""
    with open_client(kinds) as client:
        yield client


def get_example(model):
    if model == "texts":
        texts = ["a lovely film", "the meal was cold", "and it"]
        return {"text": texts, "other": [1, 2, 3]}, texts
    if model == "pictures":
        files = [pixel(color) for color in ("red", "blue", "white")]
        struct = [{"bytes": file, "path": None} for file in files]
        return {"image": struct}, [base64.b64encode(file).decode() for file in files]
    if model == "groups":
        rows = [[0.5, 1.0, -2.0], [3.0, 0.0, 1.0]]
        return {name: [row[i] for row in rows] for i, name in enumerate("abc")}, rows
    pairs = [(30, "Rome"), (51, "Paris"), (18, None), (None, "Oslo")]
    people = [{"age": age, "city": city} for age, city in pairs]
    return {name: [row[name] for row in people] for name in ("city", "age")}, people
