import json
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch

from experiments.active.learner import Learner
from experiments.active.rounds import Record
from tests.support.environment import ROOT, environment_in, working_in
from tests.support.recipes import write_recipe
from tests.support.serving import wait_until
from training.__main__ import main
from training.data import load
from training.fitting.checkpoint import write_checkpoint
from training.folders import hold
from training.recipe import load as load_recipe

pytestmark = pytest.mark.slow  # many fits

OPTIONS = [
    "--until",
    "40",
    "--batch",
    "10",
    "--candidates",
    "60",
    "--draws",
    "6",
    "--test-draws",
    "3",
    "--epochs",
    "2",
]
TWO_SEEDS = [*OPTIONS, "--seeds", "2", "--start", "both"]


def simulate(folder, *options, name="small", **changes):
    with working_in(folder):
        recipe = write_recipe(folder, name=name, network={"hidden": [8]}, **changes)
        return main(["active", str(recipe), "--quiet", *options])


def get_rounds(folder):
    records = sorted(folder.glob("runs/active/*/*.jsonl"))
    return {
        path.name: [
            {key: value for key, value in json.loads(line).items() if not key.endswith("_s")}
            for line in path.read_text().splitlines()
        ]
        for path in records
    }


def get_report(folder):
    (path,) = folder.glob("runs/active/*/active.json")
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    assert simulate(folder, *TWO_SEEDS) == 0
    return folder


def test_rounds_label_new_rows_and_arms_of_one_seed_start_equally(uninterrupted):
    actual = get_rounds(uninterrupted)
    assert set(actual) == {
        f"{a}-{s}-{seed}.jsonl"
        for a in ("bald", "random")
        for s in ("warm", "cold")
        for seed in (0, 1)
    }
    for rounds in actual.values():
        assert [item["labels"] for item in rounds] == [20, 30, 40]
        rows = [row for item in rounds for row in item["rows"]]
        assert len(set(rows)) == len(rows) == 40
        assert all(0 <= item["metric"] <= 1 for item in rounds)
    first = {name: rounds[0] for name, rounds in actual.items()}
    assert first["bald-warm-0.jsonl"] == first["random-cold-0.jsonl"]
    assert first["bald-warm-0.jsonl"] != first["bald-warm-1.jsonl"]
    y = load(load_recipe(uninterrupted / "small.toml"), uninterrupted).train.y
    assert np.bincount(y[first["bald-warm-0.jsonl"]["rows"]]).tolist() == [2] * 10
    assert actual["bald-warm-0.jsonl"][1]["rows"] != actual["random-warm-0.jsonl"][1]["rows"]
    assert actual["bald-warm-0.jsonl"][1]["metric"] != actual["bald-cold-0.jsonl"][1]["metric"]


def test_report_compares_all_arms_with_random_choice(uninterrupted):
    content = get_report(uninterrupted)
    assert [(arm["acquisition"], arm["start"]) for arm in content["arms"]] == [
        ("bald", "warm"),
        ("random", "warm"),
        ("bald", "cold"),
        ("random", "cold"),
    ]
    last = [
        arm["rounds"][seed][-1]["metric"]
        for arm in content["arms"]
        if arm["acquisition"] == "random"
        for seed in "01"
    ]
    assert content["target"] == pytest.approx(np.mean(last))
    for arm in content["arms"]:
        assert (arm["saved"] is None) == (arm["acquisition"] == "random")
    (page,) = uninterrupted.glob("runs/active/*/active.md")
    text = page.read_text()
    assert "none are held out" in text
    assert "| small, warm, bald |" in text
    assert page.with_name("active.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_interrupted_simulation_resumes_with_same_results(uninterrupted, tmp_path, monkeypatch):
    measure, add, stops = Learner.measure, Record.add, iter(range(100))

    def stopped_measure(self, *arguments):
        if next(stops) % 5 == 3:
            raise KeyboardInterrupt
        return measure(self, *arguments)

    def stopped_add(self, outcome, state):
        if (
            next(stops) % 7 == 2
        ):  # A kill during the write leaves the weights of an unfinished round.
            write_checkpoint(
                self.path.with_name(f"{self.path.stem}-{len(self.rounds):04d}.safetensors"), state
            )
            with self.path.open("a") as file:
                file.write('{"labels": 3')
            raise KeyboardInterrupt
        add(self, outcome, state)

    monkeypatch.setattr(Learner, "measure", stopped_measure)
    monkeypatch.setattr(Record, "add", stopped_add)
    codes = []
    while not codes or codes[-1] == 130:
        codes.append(simulate(tmp_path, *TWO_SEEDS))
    assert codes[-1] == 0
    assert len(codes) > 4
    assert get_rounds(tmp_path) == get_rounds(uninterrupted)


@pytest.mark.slow
@pytest.mark.usefixtures("fits")
def test_killed_simulation_resumes_with_same_results(uninterrupted, tmp_path):
    recipe = write_recipe(tmp_path, name="small", network={"hidden": [8]})
    command = [sys.executable, "-m", "training", "active", str(recipe), "--quiet", *TWO_SEEDS]
    with subprocess.Popen(
        command, env=environment_in(tmp_path), cwd=ROOT, stdout=subprocess.DEVNULL
    ) as process:
        wait_until(lambda: process.poll() is not None or len(get_rounds(tmp_path)) > 1, 60)
        process.send_signal(signal.SIGKILL)
    assert simulate(tmp_path, *TWO_SEEDS) == 0
    assert get_rounds(tmp_path) == get_rounds(uninterrupted)


def test_adding_labels_and_seeds_reuses_finished_rounds(uninterrupted, tmp_path, monkeypatch):
    fewer = [*TWO_SEEDS, "--until", "30", "--seeds", "1"]
    assert simulate(tmp_path, *fewer) == 0
    first_rounds = get_rounds(tmp_path)
    assert simulate(tmp_path, *TWO_SEEDS, "--report") == 0
    assert get_rounds(tmp_path) == first_rounds
    assert get_report(tmp_path)["unfinished"]["small, warm, bald"] == [0, 1]
    fits = []
    fit = Learner.fit
    monkeypatch.setattr(
        Learner,
        "fit",
        lambda self, index, *rest: fits.append(len(index)) or fit(self, index, *rest),
    )
    assert simulate(tmp_path, *TWO_SEEDS) == 0
    assert get_rounds(tmp_path) == get_rounds(uninterrupted)
    assert sum(len(rounds) for rounds in first_rounds.values()) + len(fits) == 24
    assert get_report(tmp_path)["unfinished"] == {}


def test_report_requires_rounds_and_works_during_simulation(uninterrupted, tmp_path, capsys):
    assert simulate(tmp_path, *OPTIONS, "--report") == 2
    assert "--report: expected rounds that were simulated" in capsys.readouterr().err
    folder = shutil.copytree(uninterrupted, tmp_path / "running")
    (run,) = (path.parent for path in folder.glob("runs/active/*/.lock"))
    with hold(run):
        assert simulate(folder, *TWO_SEEDS) == 2
        assert simulate(folder, *TWO_SEEDS, "--report") == 0


def test_arm_ends_after_three_rounds_at_target(tmp_path):
    assert (
        simulate(tmp_path, *OPTIONS, "--seeds", "1", "--until", "100", "--target-accuracy", "0.001")
        == 0
    )
    assert {len(rounds) for rounds in get_rounds(tmp_path).values()} == {3}
    for arm in get_report(tmp_path)["arms"]:
        assert arm["needed"] == {"0": {"labels": 20, "is_reached": True}}


def test_regression_is_measured_by_rmse(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 3)).astype(np.float32)
    np.savez(tmp_path / "line.npz", x=x, y=(x[:, 0] * 5 + 20).astype(np.float32))
    options = [*OPTIONS, "--seeds", "1", "--start", "warm", "--epochs", "25"]
    assert (
        simulate(
            tmp_path, *options, name="line", task="regression", data={"source": "npz:line.npz"}
        )
        == 0
    )
    content = get_report(tmp_path)
    assert (content["metric"], content["task"]) == ("rmse", "regression")
    assert {arm["acquisition"] for arm in content["arms"]} == {"epistemic_variance", "random"}
    for rounds in get_rounds(tmp_path).values():
        assert 0 < rounds[-1]["metric"] < 8


def test_restored_learner_continues_with_optimiser_state(tmp_path):
    recipe = load_recipe(write_recipe(tmp_path, name="small", network={"hidden": [8]}))
    data = load(recipe, tmp_path)
    learner, restored = (Learner(recipe, data, 0, torch.device("cpu")) for _ in range(2))
    learner.begin(0)
    learner.fit(np.arange(30), 0, 2)
    restored.restore(learner.state(), 0)
    for item in (learner, restored):
        item.fit(np.arange(40), 1, 2)
    assert learner.measure(3, 1) == restored.measure(3, 1)


@pytest.mark.parametrize(
    ("options", "changes", "message"),
    [
        (["--initial", "5"], {}, "--initial: expected at least 10, one label per class, got 5"),
        (["--until", "10"], {}, "--until: expected at least 20 (--initial), got 10"),
        (["--candidates", "9"], {}, "--candidates: expected at least 10 (--batch), got 9"),
        (["--batch", "0"], {}, "--batch: expected at least 1, got 0"),
        (["--race", "1.5"], {}, "--race: expected a number in (0, 1), got 1.5"),
        (["--target-accuracy", "95"], {}, "--target-accuracy: expected a number"),
        (["--target-rmse", "2"], {}, "--target-rmse: expected --target-accuracy"),
        (["--acquisition", "variance"], {}, "acquisition: expected one of "),
        ([], {"method": "laplace"}, "method: expected a method fitted by steps"),
    ],
)
def test_invalid_simulation_arguments_print_one_line(tmp_path, capsys, options, changes, message):
    assert simulate(tmp_path, *OPTIONS, *options, **changes) == 2
    errors = capsys.readouterr().err
    assert errors.startswith(f"error: {message}")
    assert errors.count("\n") == 1
