import csv
import io
import json
import re
import shlex
import subprocess
import sys
import time
from argparse import Namespace
from hashlib import sha256
from pathlib import Path

import httpx
import numpy as np
import pyarrow.parquet
import pytest
from PIL import Image

from dubito import Client
from dubito.actions import print_table, progress_bar, show_predictions, wait_or_cancel
from dubito.command import KEY_VARIABLE, URL_VARIABLE, main
from dubito.files import write
from dubito.predictions import Predictions
from tests.support.environment import ROOT, environment_with
from tests.support.images import pixel
from tests.support.serving import wait_until

GUIDE = ROOT / "client" / "README.md"


def test_predictions_are_printed_as_a_table(run, url, key, digits_rows):
    np.save("rows.npy", digits_rows[:25])
    status, out, err = run("predict", "rows.npy", "--seed", 7, "--rows", 3)
    with Client(url, key=key) as client:
        answer = client.predict(digits_rows[:25], seed=7)
    lines = out.splitlines()
    assert (status, err) == (0, "")
    assert lines[0] == "digits version 1, seed 7"
    assert lines[2].split() == [
        "row",
        "label",
        "probability",
        "entropy",
        "bald",
        "p_value",
        "flag",
        "set",
    ]
    assert [line.split()[:2] for line in lines[4:7]] == [
        [str(n), answer.label[n]] for n in range(3)
    ]
    assert (
        lines[-1]
        == f"{answer.flag.sum()} of 25 rows flagged as unusual; 22 more rows (--rows, --out)"
    )


def test_complete_predictions_are_printed_as_json_or_written_to_files(
    run, url, key, digits_rows, tmp_path
):
    np.save("rows.npy", digits_rows[:4])
    with Client(url, key=key) as client:
        answer = client.predict(digits_rows[:4], seed=7, fpr=0.1)
    options = ("predict", "rows.npy", "--seed", 7, "--fpr", 0.1, "--model", "digits:latest")
    printed = json.loads(run(*options, "--json", "--out", "rows.csv")[1])
    assert (printed["seed"], printed["fpr"], printed["classes"]) == (7, 0.1, list(answer.classes))
    assert [row["label"] for row in printed["predictions"]] == answer.label.tolist()
    assert [row["probabilities.3"] for row in printed["predictions"]] == answer.probabilities[
        :, 3
    ].tolist()
    with (tmp_path / "rows.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["bald"]) for row in rows] == answer.bald.tolist()
    assert run(*options, "--out", "rows.npz")[0] == 0
    with np.load("rows.npz", allow_pickle=False) as arrays:
        assert np.array_equal(arrays["probabilities"], answer.probabilities)
    status, _, err = run(*options, "--out", "rows.xlsx")
    assert (status, err) == (
        1,
        "dubito: --out: expected a name that ends in .csv, .npz, .parquet, got rows.xlsx\n",
    )


def test_rows_are_read_from_stdin_and_answers_written_to_parquet(
    run, url, key, monkeypatch, digits_rows
):
    with Client(url, key=key) as client:
        expected = client.predict(digits_rows[:3], seed=7)
    arrays, npz = io.BytesIO(), io.BytesIO()
    np.save(arrays, digits_rows[:3])
    np.savez(npz, x=digits_rows[:3])
    items = digits_rows[:3].tolist()
    lines = "\n".join(map(json.dumps, items))
    for content in (arrays.getvalue(), npz.getvalue(), json.dumps(items).encode(), lines.encode()):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        assert run("predict", "-", "--seed", 7, "--out", "answers.parquet")[0] == 0
        table = pyarrow.parquet.read_table("answers.parquet")
        assert table.column("label").to_pylist() == expected.label.tolist()
        assert table.column("bald").to_pylist() == expected.bald.tolist()
        assert table.schema.metadata[b"dubito.seed"] == b"7"
    for content, model in ((b"age,city\n31,Rome\n", "people"), (pixel("red"), "pictures")):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        assert run("predict", "-", "--model", model)[0] == 0
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    _, _, err = run("predict", "-")
    assert err == "dubito: standard input is empty\n"


def test_explanations_are_printed_for_each_row(run, tmp_path, digits_rows):
    np.save("rows.npy", np.stack([digits_rows[0], np.full(64, 16.0)]))
    _, out, _ = run("predict", "rows.npy", "--model", "digits", "--explain")
    *_, heading, first, second = out.splitlines()
    assert heading == "explanations:"
    assert re.match(r"  0: \w+ \d+%, \w+ \d+%", first)
    assert second.startswith("  1: ")
    (tmp_path / "people.jsonl").write_text('{"age": 310, "city": "Rome"}\n')
    _, out, _ = run("predict", "people.jsonl", "--model", "people", "--explain")
    assert re.match(r"  0: \w+ \d+%", out.splitlines()[-1])
    status, _, err = run("predict", "rows.npy", "--explain", "--job")
    assert (status, err.startswith("dubito: --explain: ")) == (1, True)


def test_tables_are_read_by_the_service(run, tmp_path):
    (tmp_path / "people.csv").write_text("id,age,city\nanna,31,Rome\nben,,Oslo\n")
    status, out, _ = run("predict", "people.csv", "--model", "rents")
    assert status == 0
    rows = [line.split() for line in out.splitlines()[2:6]]
    assert rows[0] == ["row", "mean", "std", "epistemic_std", "low", "high", "p_value", "flag"]
    assert [row[0] for row in rows[2:]] == ["anna", "ben"]
    (tmp_path / "people.tsv").write_text("age\tcity\trent\n31\tRome\t700\n31\tAtlantis\t800\n")
    _, out, _ = run("predict", "people.tsv", "--model", "rents")
    assert out.splitlines()[-2:] == [
        "ignored columns: rent",
        "rows with missing or unknown categories: city in 1",
    ]
    _, out, _ = run("predict", "people.tsv", "--model", "rents", "--version", "1", "--json")
    printed = json.loads(out)
    assert (printed["version"], printed["unknown_categories"]) == ("1", {"city": 1})
    assert run("predict", "people.tsv", "--model", "rents", "--version", "9")[0] == 1
    (tmp_path / "pool.csv").write_text("age,city\n31,Rome\n31,Atlantis\n")
    _, out, _ = run("acquire", "pool.csv", "--model", "rents")
    assert out.splitlines()[-2:] == [
        "2 of 2 rows",
        "rows with missing or unknown categories: city in 1",
    ]


def test_missing_values_and_unknown_groups_are_listed(url, key, capsys):
    with Client(url, key=key) as client:
        answer = client.predict([{"age": 31, "city": "Rome"}] * 3, model="rents")
    missing = np.array([[False] * 2, [True, False], [True, True]])
    arrays = dict(answer.arrays, missing=missing, category=np.array(["north", "", ""]))
    options = Namespace(out=None, json=False, rows=3)
    show_predictions(Predictions(arrays), options, [])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-5] == (
        "rows without a known group: 2; the least favourable group applies to them"
    )
    assert lines[-3:] == ["flagged because of missing values:", "  1: age", "  2: age, city"]


def test_invalid_json_line_is_named(run, tmp_path):
    (tmp_path / "people.jsonl").write_text('{"age": 31}\n{"age":\n')
    status, _, err = run("predict", "people.jsonl", "--model", "rents")
    assert status == 1
    assert "people.jsonl: invalid JSON in line 2: " in err


def test_json_lines_and_images_are_read_as_rows(run, tmp_path):
    (tmp_path / "people.jsonl").write_text(
        '{"age": 31, "city": "Rome"}\n\n{"age": null, "city": "Oslo"}\n'
    )
    printed = json.loads(run("predict", "people.jsonl", "--model", "people", "--json")[1])
    assert len(printed["predictions"]) == 2
    (tmp_path / "people.json").write_text(
        '\ufeff[{"age": 31, "city": "Rome"}, {"age": 4, "city": "Oslo\u2028"}]'
    )
    printed = json.loads(run("predict", "people.json", "--model", "people", "--json")[1])
    assert len(printed["predictions"]) == 2
    for name in ("a.png", "b.png"):
        Image.new("RGB", (1, 1), "red").save(name)
    _, out, _ = run("predict", "a.png", "b.png", "--model", "pictures")
    assert [line.split()[0] for line in out.splitlines()[4:6]] == ["a.png", "b.png"]
    _, out, _ = run(
        "acquire", "a.png", "b.png", "--model", "pictures", "--json", "--acquisition", "random"
    )
    assert {row["id"] for row in json.loads(out)["ranking"]} == {"a.png", "b.png"}


def test_files_with_equal_names_are_identified_by_path(run, tmp_path):
    names = ["a/1.png", "b/1.png"]
    for name in names:
        (tmp_path / name).parent.mkdir()
        Image.new("RGB", (1, 1), "red").save(name)
    _, out, _ = run("predict", *names, "--model", "pictures")
    assert [line.split()[0] for line in out.splitlines()[4:6]] == names
    _, out, _ = run("acquire", *names, "--model", "pictures", "--json", "--acquisition", "random")
    assert sorted(row["id"] for row in json.loads(out)["ranking"]) == names


def test_spreadsheet_formulas_in_csv_files_are_escaped(run, tmp_path):
    formulas, plain = ["=1+1", "+a", "-a", "@a", "\ta", "\ra"], ["a", "-1.5", "'a", "1=1"]
    texts = [*formulas, *plain]
    arrays = {"ids": np.array(texts), "classes": np.array(["=x", "y"]), "mean": np.full(10, -1.0)}
    write(Predictions(arrays), tmp_path / "rows.csv")
    with (tmp_path / "rows.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["id"] for row in rows] == [*(f"'{text}" for text in formulas), *plain]
    assert {row["mean"] for row in rows} == {"-1.0"}
    row = {"id": "=1+1", "label": "no", "input": {"age": 7, "city": "Oslo"}}
    classes = json.loads(run("models", "--json")[1])["models"]
    row["label"] = next(item["classes"][0] for item in classes if item["name"] == "people")
    (tmp_path / "row.jsonl").write_text(json.dumps(row) + "\n")
    model = ("--model", "people")
    run("labels", "push", "row.jsonl", *model)
    (tmp_path / "labels.csv").write_text(run("labels", "export", *model)[1])
    assert "\n'=1+1," in (tmp_path / "labels.csv").read_text()
    pushed = json.loads(run("labels", "push", "labels.csv", *model, "--json")[1])
    assert pushed["accepted"] == 0
    assert pushed["known"] > 0
    run("labels", "delete", "=1+1", *model)


def test_ranking_of_a_pool_is_printed(run, url, key, digits_rows):
    np.savez("pool.npz", x=digits_rows[:30], ids=np.array([f"picture {i}" for i in range(30)]))
    with Client(url, key=key) as client:
        ranking = client.acquire(
            digits_rows[:30], k=3, seed=7, ids=[f"picture {i}" for i in range(30)]
        )
    _, out, _ = run("acquire", "pool.npz", "-k", 3, "--seed", 7)
    lines = out.splitlines()
    assert lines[2].split() == ["rank", "index", "id", "score", "control"]
    assert [" ".join(line.split()[2:4]) for line in lines[4:7]] == ranking.id.tolist()
    assert lines[-1] == "3 of 30 rows"
    output = json.loads(run("acquire", "pool.npz", "-k", 3, "--seed", 7, "--job", "--json")[1])
    assert [row["score"] for row in output["ranking"]] == ranking.score.tolist()


def test_labels_are_pushed_listed_exported_and_deleted(run, url, key, tmp_path):
    rows = [{"age": age, "city": "Rome"} for age in (20, 30, 40)]
    pool = [{"id": f"r{n}", **row} for n, row in enumerate(rows)]
    (tmp_path / "pool.csv").write_text(
        "id,age,city\n" + "".join(f"{row['id']},{row['age']},Rome\n" for row in pool)
    )
    assert run("acquire", "pool.csv", "--model", "people", "-k", 3, "--keep")[0] == 0
    classes = json.loads(run("models", "--json")[1])["models"]
    first, second = next(item["classes"] for item in classes if item["name"] == "people")[:2]
    (tmp_path / "labels.csv").write_text(f"id,label\nr0,{first}\nr1,{second}\nr2,\n")
    push = ("labels", "push", "labels.csv", "--model", "people")
    assert run(*push)[1] == "people: 2 new labels, 0 known, 0 replaced; 2 in total\n"
    output = json.loads(run(*push, "--json")[1])
    assert output == {"model": "people", "accepted": 0, "known": 2, "replaced": 0, "labels": 2}
    entries = [{"id": "r0", "label": first, "comment": "a remark"}]
    content = {"model": "people", "labels": entries}
    httpx.post(f"{url}/labels", json=content, headers={"X-API-Key": key}).raise_for_status()
    row = {"id": "mine", "label": first, "input": {"age": 7, "city": "Oslo"}}
    (tmp_path / "more.jsonl").write_text(json.dumps(row) + "\n")
    assert run("labels", "push", "more.jsonl", "--model", "people")[0] == 0
    _, out, _ = run("labels", "list", "--model", "people")
    name = f"api-{sha256(key.encode()).hexdigest()[:12]}"
    assert [re.split("  +", line)[:3] for line in out.splitlines()[2:5]] == [
        ["r0", first, name],
        ["r1", second, name],
        ["mine", first, name],
    ]
    _, out, _ = run("labels", "export", "--model", "people")
    exported = list(csv.DictReader(io.StringIO(out)))
    assert [row["id"] for row in exported] == ["r0", "r1", "mine"]
    assert {row["control"] for row in exported} == {"False"}
    assert [row["comment"] for row in exported] == ["a remark", "", ""]
    assert exported[0]["time"].endswith("+00:00")
    query = ("labels", "list", "--model", "people", "--annotator", "nobody", "--json")
    assert json.loads(run(*query)[1]) == {"labels": []}
    _, out, _ = run("labels", "delete", "r0", "mine", "other", "--model", "people")
    assert out == "people: 2 of 3 deleted, 1 left\n"
    _, out, _ = run("labels", "list", "--former", "--model", "people")
    assert {line.split()[0] for line in out.splitlines()[-4:-2]} == {"r0", "mine"}
    _, out, _ = run("labels", "export", "--former", "--model", "people")
    former = list(csv.DictReader(io.StringIO(out)))[-2:]
    assert {(row["id"], row["ended_by"]) for row in former} == {("r0", name), ("mine", name)}
    assert all(row["ended"] >= row["time"] for row in former)
    (tmp_path / "twice.csv").write_text(f"id,label\nr0,{first}\nr0,{first}\n")
    (tmp_path / "none.csv").write_text("name,class\nr0,3\n")
    (tmp_path / "latin.csv").write_bytes("id,label\nr0,Köln\n".encode("cp1252"))
    for name, message in (
        ("latin.csv", "dubito: 'utf-8' codec can't decode byte 0xf6 in position 13: invalid"),
        ("twice.csv", "dubito: twice.csv: line 2: expected a unique id, got 'r0'\n"),
        ("none.csv", "dubito: none.csv: expected lines with an `id` and a `label` or a `target`"),
    ):
        status, _, err = run("labels", "push", name, "--model", "people")
        assert (status, err.startswith(message)) == (1, True), err


def test_jobs_are_listed_and_their_results_printed(run, url, key, tmp_path, digits_rows):
    with Client(url, key=key) as client:
        job = client.predict_job(digits_rows[:4], model="digits", seed=7)
        ranking = client.acquire_job(digits_rows[:4], model="digits", k=2, seed=7)
        expected = client.predict(digits_rows[:4], model="digits", seed=7)
        client.wait(ranking)
    _, out, _ = run("jobs", "result", job.id, "--out", "answers.csv")
    assert out.startswith("digits version 1, seed 7\n")
    with (tmp_path / "answers.csv").open(newline="") as file:
        assert [row["label"] for row in csv.DictReader(file)] == expected.label.tolist()
    assert run("jobs", "result", ranking.id)[1].splitlines()[-1] == "2 of 4 rows"
    _, out, _ = run("jobs", "list")
    states = {line.split()[0]: line.split()[1:4] for line in out.splitlines()[2:] if line}
    assert states[job.id] == ["predict", "done", "100%"]
    output = json.loads(run("jobs", "status", job.id, ranking.id, "--json")[1])["jobs"]
    assert [item["state"] for item in output] == ["done", "done"]
    assert run("jobs", "cancel", job.id)[0] == 0
    assert run("jobs", "delete", job.id)[0] == 0
    status, _, err = run("jobs", "status", job.id)
    assert (status, err.startswith("dubito: ")) == (1, True)


def test_interrupt_cancels_the_job(url, key, digits_rows):
    def interrupt(job, on_progress):
        raise KeyboardInterrupt

    with Client(url, key=key) as client:
        blocker = client.predict_job(inputs_file="digits.npy")  # delays the next job
        job = client.predict_job(inputs_file="digits.npy")
        with pytest.raises(KeyboardInterrupt):
            wait_or_cancel(client, job, interrupt, print)
        assert client.job(job).state == "cancelled"
        client.cancel(blocker)


def test_sigterm_cancels_the_job(url, key, digits_rows, tmp_path):
    np.savez(tmp_path / "rows.npz", digits_rows)
    with Client(url, key=key) as client:
        jobs = [client.predict_job(inputs_file="digits.npy", num_samples=500) for _ in range(4)]
        existing = {job.id for job in client.jobs()}
        process = subprocess.Popen(
            [sys.executable, "-m", "dubito", "predict", "rows.npz"],
            env=environment_with(
                PYTHONPATH=str(ROOT / "client"), **{URL_VARIABLE: url, KEY_VARIABLE: f"{key}\n"}
            ),
            cwd=tmp_path,
        )
        wait_until(lambda: {job.id for job in client.jobs()} - existing)
        (new_id,) = {job.id for job in client.jobs()} - existing
        time.sleep(0.5)  # the command must receive the job id first
        process.terminate()
        assert process.wait(20) == 143
        assert client.job(new_id).state == "cancelled"
        for job in jobs:
            client.cancel(job)


def test_connection_errors_name_the_proxy(run, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://user:secret@127.0.0.1:9")
    status, _, err = run("models", "--url", "http://dubito.test")
    assert status == 1
    assert "(at http://dubito.test; the environment sets the proxy http://127.0.0.1:9)" in err
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert "proxy" not in run("models", "--url", "http://127.0.0.1:9")[2]


def test_models_are_listed(run):
    status, out, _ = run("models")
    assert status == 0
    rows = {line.split()[0]: line for line in out.splitlines()[2:]}
    assert set(rows) == {"digits", "people", "rents", "pictures"}
    assert "10 classes: 0, 1, 2" in rows["digits"]
    assert rows["rents"].endswith("rent")
    assert len(json.loads(run("models", "--json")[1])["models"]) == 4


def test_errors_print_one_line_and_set_the_exit_code(run, monkeypatch, digits_rows):
    np.save("rows.npy", digits_rows[:2, :63])
    status, out, err = run("predict", "rows.npy")
    assert (status, out) == (1, "")
    assert re.fullmatch(r"dubito: inputs: expected .*, got shape \(2, 63\)\n", err)
    absent = "dubito: absent.npy: No such file or directory\n"
    assert run("predict", "absent.npy") == (1, "", absent)
    for suffix in ("npy", "jsonl", "json"):
        Path(f"bad.{suffix}").write_text("{")
        status, _, err = run("predict", f"bad.{suffix}")
        assert (status, err.startswith(f"dubito: bad.{suffix}: invalid")) == (1, True)
    status, _, err = run("predict", "rows.npy", "--out", "nowhere/rows.csv")
    assert (status, err.startswith("dubito: --out: ")) == (1, True)
    monkeypatch.setenv(KEY_VARIABLE, "wrong")
    status, out, err = run("models")
    assert (status, out, err.startswith("dubito: ")) == (1, "", True)
    status, _, err = run("models", "--url", "http://127.0.0.1:9")
    assert status == 1
    assert "ConnectError" in err
    assert "(at http://127.0.0.1:9)" in err
    for arguments in (["predict"], ["predict", "rows.npy", "--rows", "-1"]):
        with pytest.raises(SystemExit) as raised:
            main(arguments)
        assert raised.value.code == 2


def test_module_runs_as_the_command(url, key):
    environment = environment_with(
        PYTHONPATH=str(ROOT / "client"), **{URL_VARIABLE: url, KEY_VARIABLE: key}
    )
    command = [sys.executable, "-m", "dubito", "models"]
    completed = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (completed.returncode, completed.stderr) == (0, "")
    assert "digits" in completed.stdout


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_bar_is_shown_only_in_terminals(monkeypatch):
    pytest.importorskip("rich")
    for stream, is_shown in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "stderr", stream)
        with progress_bar("ranking") as progress:
            progress(0.25)
        assert ("ranking" in stream.getvalue()) == is_shown


ODD_ROWS = [("\x1b[31mred\n", 0.123456), ("x" * 99, float("nan")), ("y", np.float64(2))]


def test_printed_table_replaces_control_characters(capsys):
    print_table(("id", "score"), ODD_ROWS)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert lines[2].split() == ["?[31mred?", "0.1235"]
    assert max(map(len, lines)) == 40 + 2 + 6
    assert lines[4].endswith("     2")


def test_examples_in_the_client_guide_run(run, url, key, capsys):
    blocks = re.findall(r"```(python|console)\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    names, printed, commands = {}, "", []
    for kind, block in blocks:
        if kind == "python":
            exec(
                block.replace('Client("http://127.0.0.1:8000"', f'Client("{url}", key="{key}"'),
                names,
            )
            printed += capsys.readouterr().out
        else:
            commands += re.findall(r"^\$ dubito (.*)$", block, re.MULTILINE)
    assert printed.startswith("<Predictions of 100 rows by digits version 1, seed ")
    for line in ("abstain: no `risk` applies: set one", "1.0 1797", "2 "):
        assert f"\n{line}" in printed
    assert "\ninputs | an array of shape (N, 8, 8) or (N, 64) | shape (100, 63)\n" in printed
    assert "\n404 " in printed
    assert len(commands) > 3
    for line in commands:
        status, _, err = run(*shlex.split(line))
        assert (status, err) == (0, ""), line
