import json
import pickle
import random
import signal
import struct
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from model_store.errors import InvalidInput
from tests.support.environment import ROOT, environment_with
from tests.support.recipes import write_recipe
from tests.support.serving import wait_until
from training.__main__ import main
from training.data.rows import Rows, Splits
from training.fitting.checkpoint import read_checkpoint, write_checkpoint
from training.fitting.plots import plot_run
from training.fitting.run import Run, _order
from training.recipe import load
from training.sections import NetworkSection

FIT = """
import sys

import training.fitting.run
from training.__main__ import main

training.fitting.run.CHECKPOINT_INTERVAL_S = 0.02
sys.exit(main())
"""


@pytest.fixture(scope="module")
def uninterrupted_folder(tmp_path_factory, fits):
    folder = tmp_path_factory.mktemp("uninterrupted")
    with pytest.MonkeyPatch.context() as changes:
        changes.setattr("training.fitting.run.plot_run", plot_run)
        assert run_fit(folder, changes) == 0
    return folder


@pytest.mark.slow
def test_repeatedly_killed_run_ends_with_the_same_weights(uninterrupted_folder, tmp_path):
    for _ in range(2):
        kill_after_checkpoint(tmp_path)
    with fit_process(tmp_path) as process:
        _, messages = process.communicate(timeout=240)
    assert process.returncode == 0, messages
    assert "resuming from step" in messages
    assert get_published_weights(tmp_path) == get_published_weights(uninterrupted_folder)
    assert get_metrics(tmp_path) == get_metrics(uninterrupted_folder)


def test_metrics_have_one_line_per_epoch_and_loss_decreases(uninterrupted_folder):
    metrics = get_metrics(uninterrupted_folder)
    assert [line["epoch"] for line in metrics] == [1, 2, 3, 4]
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    for line in metrics:
        assert line["loss"] == pytest.approx(line["nll"] + line["kl"] / 1298)
        assert 0 <= line["validation_accuracy"] <= 1


def test_plot_is_a_png(uninterrupted_folder):
    (path,) = uninterrupted_folder.glob("runs/*/progress.png")
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", content[16:24])
    assert width > 400
    assert height > 100


def test_finished_run_leaves_no_checkpoint_or_draft(uninterrupted_folder):
    (folder,) = uninterrupted_folder.glob("runs/*")
    assert {path.name for path in folder.iterdir()} == {".lock", "metrics.jsonl", "progress.png"}


@pytest.mark.usefixtures("fits")
def test_concurrent_fit_is_rejected_and_interrupt_exits_with_130(tmp_path, monkeypatch, capsys):
    with fit_process(tmp_path, epochs=100_000) as first:
        wait_until(lambda: first.poll() is not None or get_checkpoint(tmp_path) is not None)
        assert run_fit(tmp_path, monkeypatch, epochs=100_000) == 2
        *_, line = capsys.readouterr().err.splitlines()
        assert line.startswith("error: run: expected a run that no other process is working on")
        first.send_signal(signal.SIGINT)
        _, errors = first.communicate(timeout=120)
    assert first.returncode == 130
    assert "to resume from the last checkpoint, run the same command again" in errors
    assert "Traceback" not in errors


# Runs within this process


@pytest.fixture(autouse=True)
def frequent_checkpoints(monkeypatch):
    monkeypatch.setattr("training.fitting.run.CHECKPOINT_INTERVAL_S", 0.0)


@pytest.fixture(scope="module")
def splits(fits):
    """Three clusters in the plane."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 240)
    x = (np.array([[0, 0], [4, 0], [0, 4]])[y] + rng.normal(size=(240, 2))).astype(np.float32)
    parts = [Rows(x[i : i + 40], y[i : i + 40]) for i in range(0, 160, 40)]
    return Splits(Rows(x[160:], y[160:]), *parts)


def module(shape, outputs):
    return torch.nn.Linear(*shape, outputs)


def create_run(folder, splits, seed=0, epochs=3, network=None):
    folder.mkdir(exist_ok=True)
    recipe = load(make_recipe(folder, epochs, seed))
    recipe = recipe.model_copy(update={"network": network or recipe.network})
    return Run(recipe, splits, splits.train.x.shape[1:], 3, folder, torch.device("cpu"))


def test_every_checkpoint_leads_to_the_same_weights(splits, tmp_path):
    run = create_run(tmp_path / "whole", splits)
    snapshots = []
    thread = threading.Thread(target=run.fit, kwargs={"quiet": True})
    thread.start()
    while thread.is_alive():  # checkpoints are replaced atomically
        if run.checkpoint.exists():
            content = run.checkpoint.read_bytes()
            if not snapshots or content != snapshots[-1]:
                snapshots.append(content)
    thread.join()
    expected = run.model.state_dict()

    steps = []
    for i in {0, len(snapshots) // 2, len(snapshots) - 1}:
        folder = tmp_path / f"from-{i}"
        folder.mkdir()
        (folder / "checkpoint.safetensors").write_bytes(snapshots[i])
        resumed = create_run(folder, splits)
        assert resumed.resumed
        steps.append(resumed.progress.step)
        state = resumed.fit(quiet=True).state_dict()
        assert state.keys() == expected.keys()
        for name, tensor in state.items():
            assert torch.equal(tensor, expected[name]), (name, steps)
        assert drop_seconds(resumed.progress.history) == drop_seconds(run.progress.history)
        assert resumed.progress.best_epoch == run.progress.best_epoch
    assert any(step % run.epoch_steps for step in steps)


def test_weights_depend_on_the_seed(splits, tmp_path):
    states = [
        create_run(tmp_path / f"{i}", splits, seed, epochs=1).fit(quiet=True).state_dict()
        for i, seed in enumerate([5, 5, 6])
    ]
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
    name = "network.module.0.direction"
    assert not torch.equal(states[0][name], states[2][name])


def test_fit_returns_model_of_best_epoch(splits, tmp_path):
    run = create_run(tmp_path / "run", splits)
    state = run.fit(quiet=True).state_dict()
    assert 1 <= run.progress.best_epoch <= 3
    for name, tensor in state.items():
        assert torch.equal(tensor, run.best[name])


def test_exports_of_a_users_network_are_checked_before_the_fit(splits, tmp_path, monkeypatch):
    rows = []
    monkeypatch.setattr("training.fitting.run.check_exports", lambda _, x: rows.append(x))
    create_run(tmp_path / "own", splits, network=NetworkSection(factory=f"{__name__}:module"))
    assert len(rows) == 1
    create_run(tmp_path / "ours", splits)
    assert len(rows) == 1


@pytest.mark.parametrize("damage", ["empty", "cut", "other format", "other model", "without state"])
def test_unusable_checkpoint_is_rejected(splits, tmp_path, damage):
    run = create_run(tmp_path / "run", splits, epochs=1)
    run.fit(quiet=True)
    content = run.checkpoint.read_bytes()
    state = read_checkpoint(run.checkpoint, torch.device("cpu"))
    if damage == "empty":
        run.checkpoint.write_bytes(b"")
    elif damage == "cut":
        run.checkpoint.write_bytes(content[: len(content) // 2])
    elif damage == "other format":
        run.checkpoint.write_bytes(pickle.dumps({"model": [Rows]}, protocol=2))
    elif damage == "other model":
        state["model"]["network.module.0.bias"] = torch.zeros(3)
        write_checkpoint(run.checkpoint, state)
    else:
        del state["sums"]
        write_checkpoint(run.checkpoint, state)
    with pytest.raises(InvalidInput, match=r"delete it to start the fit again") as error:
        create_run(tmp_path / "run", splits, epochs=1)
    assert error.value.field == str(run.checkpoint)


# Errors of the command


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data", "nonsense"], "error: data.source: expected `digits`, `idx:DIR`, `images:PATH`"),
        (["--data", "idx:absent"], "error: data.source: expected an existing path"),
        (["--name", "../a"], "error: command line: name: "),
        (["--seed", "-1"], "error: command line: seed: "),
    ],
)
def test_invalid_option_exits_with_2_and_one_line(tmp_path, monkeypatch, capsys, options, message):
    assert get_error(tmp_path, monkeypatch, capsys, make_recipe(tmp_path), *options).startswith(
        message
    )


def test_invalid_recipe_exits_with_2_and_one_line(tmp_path, monkeypatch, capsys):
    recipe = make_recipe(tmp_path)
    recipe.write_text(recipe.read_text().replace("epochs = 4", "epochs = 0"))
    line = get_error(tmp_path, monkeypatch, capsys, recipe)
    assert (
        line
        == f"error: {recipe}: training.epochs: expected 1 or more for method bhn-realnvp, got 0"
    )
    assert "absent.toml: expected a readable recipe" in get_error(
        tmp_path, monkeypatch, capsys, tmp_path / "absent.toml"
    )


def test_invalid_target_or_weight_exits_with_2_and_one_line(tmp_path, monkeypatch, capsys):
    recipe = make_recipe(tmp_path)
    line = get_error(tmp_path, monkeypatch, capsys, recipe, "--target", "a")
    assert line.startswith(
        "error: data.target: expected no value, because `digits` has no named columns"
    )
    recipe.write_text(recipe.read_text().replace("[data]", '[data]\nweight = "a"'))
    assert get_error(tmp_path, monkeypatch, capsys, recipe).startswith(
        "error: data.weight: expected no value, because `digits` has no named columns"
    )
    recipe.write_text(recipe.read_text().replace('weight = "a"', ""))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.csv").write_text("a,b\n" + "1,2\n3,4\n" * 300)
    line = get_error(tmp_path, monkeypatch, capsys, recipe, "--data", "csv:a.csv", "--target", "c")
    assert line.startswith("error: data.target: expected one of the columns ['a', 'b'], got 'c'")
    recipe.write_text('task = "regression"\n' + recipe.read_text())
    (tmp_path / "data" / "a.csv").write_text("a,b\n" + "1,2\n3,2\n" * 400)
    line = get_error(tmp_path, monkeypatch, capsys, recipe, "--data", "csv:a.csv", "--target", "b")
    assert line.startswith("error: data.target: expected different training targets, got only 2.0")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is present")
def test_cuda_without_gpu_exits_with_2_and_one_line(tmp_path, monkeypatch, capsys):
    line = get_error(tmp_path, monkeypatch, capsys, make_recipe(tmp_path), "--device", "cuda")
    assert line.startswith("error: --device: ")


def get_error(folder, monkeypatch, capsys, recipe, *options):
    set_folders(folder, monkeypatch)
    assert main(["fit", str(recipe), "--quiet", *options]) == 2
    assert not (folder / "models").exists()
    *_, line = capsys.readouterr().err.splitlines()
    return line


# Helpers


def make_recipe(folder, epochs=4, seed=1):
    posterior = {"couplings": 2, "hidden": 8, "initial_log_std": -4.0}
    schedule = {"epochs": epochs, "batch_rows": 16}
    serving = {"draws": 2, "combined": ["residual"]}
    return write_recipe(folder, seed=seed, posterior=posterior, training=schedule, serving=serving)


def set_folders(folder, monkeypatch):
    for name, path in (("STORE", "models"), ("RUNS", "runs"), ("DATA", "data")):
        monkeypatch.setenv(f"DUBITO_{name}", str(folder / path))


def run_fit(folder, monkeypatch, *options, epochs=4):
    set_folders(folder, monkeypatch)
    recipe = str(make_recipe(folder, epochs))
    return main(["fit", recipe, "--quiet", "--device", "cpu", *options])


@contextmanager
def fit_process(folder, epochs=4):
    environment = environment_with(
        DUBITO_STORE=str(folder / "models"), DUBITO_RUNS=str(folder / "runs"), OMP_NUM_THREADS="1"
    )
    command = [
        sys.executable,
        "-c",
        FIT,
        "fit",
        str(make_recipe(folder, epochs)),
        "--quiet",
        "--device",
        "cpu",
    ]
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command, env=environment, cwd=ROOT, stdout=pipe, stderr=pipe, text=True
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
        for stream in (process.stdout, process.stderr):
            stream.close()


def kill_after_checkpoint(folder):
    """Kill `fit` at a random moment after a new checkpoint."""
    before = get_checkpoint(folder)
    with fit_process(folder) as process:
        wait_until(
            lambda: process.poll() is not None or get_checkpoint(folder) not in {None, before}
        )
        time.sleep(random.uniform(0, 0.2))
    assert process.returncode == -signal.SIGKILL


def get_checkpoint(folder):
    """Return the bytes of the run's checkpoint, or None."""
    for path in folder.glob("runs/*/checkpoint.safetensors"):
        return path.read_bytes()
    return None


def get_published_weights(folder):
    weights = load_file(folder / "models" / "small" / "1" / "weights.safetensors")
    return {
        name: (array.shape, str(array.dtype), array.tobytes()) for name, array in weights.items()
    }


def get_metrics(folder):
    (path,) = folder.glob("runs/*/metrics.jsonl")
    return drop_seconds([json.loads(line) for line in path.read_text().splitlines()])


def drop_seconds(history):
    """Remove wall-clock times from metrics."""
    return [
        {key: value for key, value in metrics.items() if key != "seconds"} for metrics in history
    ]


def test_epoch_contains_rows_in_proportion_to_weights():
    weights = np.array([0.0, 0.5, 1.0, 2.5, 4.0])
    epochs = [_order(5, 0, epoch, weights=weights) for epoch in range(4_000)]
    counts = torch.stack([torch.bincount(epoch, minlength=5) for epoch in epochs]).double()
    expected = torch.from_numpy(weights / weights.mean())
    assert ((counts - expected).abs() < 1.0).all()  # a systematic sample rounds up or down
    torch.testing.assert_close(counts.mean(0), expected, rtol=0, atol=0.03)
    first_rows = torch.bincount(torch.stack(epochs)[:, 0], minlength=5) / len(epochs)
    torch.testing.assert_close(first_rows.double(), expected / 5, rtol=0, atol=0.03)
