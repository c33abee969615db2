from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.support.recipes import recipe_with
from training.data.rows import Rows, Splits
from training.fit import advise
from training.fitting.run import Run
from training.fitting.stopping import add_wrong_row, cooling_epochs, find_moving, get_patience
from training.recipe import TrainingSection


def history(epochs=60, noise=0.001, **slopes):
    rng = np.random.default_rng(0)
    names = {"validation_log_likelihood": -1.0, "objective": 1.0, "log_std": -3.0}
    return [
        {
            name: start + slopes.get(name, 0.0) * i + noise * rng.normal()
            for name, start in names.items()
        }
        for i in range(epochs)
    ]


@pytest.mark.parametrize(
    ("slopes", "messages"),
    [
        ({}, []),
        ({"validation_log_likelihood": 0.01}, ["the held-out likelihood still rose"]),
        ({"validation_log_likelihood": -0.01}, []),
        ({"objective": -0.01}, ["the bound still fell"]),
        ({"objective": 0.01}, []),
        ({"log_std": 0.02}, ["the spread still moved"]),
        (
            {"log_std": -0.02, "objective": -0.01},
            ["the bound still fell", "the spread still moved"],
        ),
        ({"validation_log_likelihood": 0.0002}, []),
    ],
    ids=str,
)
def test_find_moving_lists_curves_that_are_not_level(slopes, messages):
    assert find_moving(history(**slopes), 20, has_bound=True) == messages


def test_find_moving_without_bound_uses_only_held_out_likelihood():
    assert find_moving(history(objective=-0.01, log_std=0.02), 20, has_bound=False) == []
    assert find_moving(history(20), 20, has_bound=False) == ["too few epochs to tell"]


def test_patience_depends_on_epoch_steps_and_is_the_shortest_cooling():
    levelling, early = TrainingSection(), TrainingSection(early_stopping=True)
    assert [get_patience(levelling, steps) for steps in (1, 10, 1000)] == [600, 60, 5]
    assert [get_patience(early, steps) for steps in (1, 10, 1000)] == [400, 40, 16]
    assert get_patience(TrainingSection(patience=7), 1) == 7
    assert [cooling_epochs(epochs, 10) for epochs in (6, 30, 90)] == [10, 15, 45]


@pytest.fixture(autouse=True)
def frequent_checkpoints(monkeypatch):
    monkeypatch.setattr("training.fitting.run.CHECKPOINT_INTERVAL_S", 0.0)


@pytest.fixture(scope="module")
def splits(fits):
    """Two overlapping classes in the plane."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 480)
    x = (y[:, None] + rng.normal(size=(480, 2))).astype(np.float32)
    parts = [Rows(x[i : i + 80], y[i : i + 80]) for i in range(0, 320, 80)]
    return Splits(Rows(x[320:], y[320:]), *parts)


def create_run(folder, splits, **training):
    folder.mkdir(exist_ok=True)
    content = {"epochs": None, "batch_rows": 40, **training}
    recipe = recipe_with(method="mle", network={"hidden": [4]}, training=content)
    return Run(recipe, splits, (2,), 2, folder, torch.device("cpu"))


def test_fit_levels_off_and_then_decays_rates_until_its_end(splits, tmp_path):
    run = create_run(tmp_path / "a", splits, patience=8, max_epochs=300)
    rates = []
    step = run._step
    run._step = lambda index: (step(index), rates.append(run.optimizer.param_groups[0]["lr"]))
    run.fit(quiet=True)
    levelled, epochs = run.progress.levelled, len(run.progress.history)
    assert 8 <= levelled < 200
    assert epochs == levelled + cooling_epochs(levelled, 8)
    assert run.stopped() == f"after {epochs} epochs: levelled off after {levelled}"
    steady = levelled * run.epoch_steps
    assert set(rates[:steady]) == {1e-3}
    assert rates[steady:] == sorted(rates[steady:], reverse=True)
    assert rates[-1] == pytest.approx(1e-4, rel=0.1)


def test_fit_reports_epoch_limit_or_configured_epochs(splits, tmp_path):
    run = create_run(tmp_path / "a", splits, patience=20, max_epochs=30, learning_rate=1e-4)
    run.fit(quiet=True)
    assert len(run.progress.history) == 30
    assert run.stopped().startswith("after 30 epochs, the limit of training.max_epochs: ")
    fixed_run = create_run(tmp_path / "b", splits, epochs=2)
    fixed_run.fit(quiet=True)
    assert fixed_run.stopped() == "after 2 epochs, as configured"


def test_early_stopping_returns_best_epoch_and_ends_after_patience(splits, tmp_path):
    small = replace(splits, train=splits.train.take(np.arange(40)))  # overfits quickly
    options = {"early_stopping": True, "patience": 20, "batch_rows": 10, "learning_rate": 0.1}
    run = create_run(tmp_path / "a", small, max_epochs=300, **options)
    model = run.fit(quiet=True)
    scores = [epoch["stopping_log_likelihood"] for epoch in run.progress.history]
    best = int(np.argmax(scores)) + 1
    assert run.progress.best_epoch == best
    assert len(scores) == best + 20 < 300
    _, log_likelihood, _, *errors, _ = run._validate().unbind(1)
    assert add_wrong_row(log_likelihood, *errors).item() == pytest.approx(max(scores), rel=1e-6)
    expected = run.progress.history[best - 1]["validation_log_likelihood"]
    assert run.validation_log_likelihood() == expected
    assert {group["lr"] for group in run.optimizer.param_groups} == {0.1}
    message = f"after {len(scores)} epochs: the held-out likelihood was best after {best}"
    assert run.stopped() == message
    assert model is run.model
    limited_run = create_run(tmp_path / "b", small, max_epochs=best + 5, **options)
    limited_run.fit(quiet=True)
    reason = f"after {best + 5} epochs, the limit of training.max_epochs: "
    assert limited_run.stopped() == f"{reason}the held-out likelihood was best after {best}"


@pytest.mark.parametrize(
    ("reason", "advice"),
    [
        ("after 5 epochs, as configured", ""),
        ("after 30 epochs: the held-out likelihood was best after 8", "would not help"),
        ("after 9 epochs, the limit of training.max_epochs: loss", "raise the limit"),
    ],
)
def test_advice_depends_on_the_reason_for_stopping(reason, advice):
    assert advice in advise(reason)
    assert bool(advise(reason)) == bool(advice)
