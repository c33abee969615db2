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
    ("slopes", "said"),
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
def test_what_still_moves_is_named(slopes, said):
    assert find_moving(history(**slopes), 20, has_bound=True) == said


def test_a_method_without_a_bound_goes_by_the_held_out_likelihood_alone():
    assert find_moving(history(objective=-0.01, log_std=0.02), 20, has_bound=False) == []
    assert find_moving(history(20), 20, has_bound=False) == ["too few epochs to tell"]


def test_patience_is_of_steps_if_epochs_are_short_and_rates_decay_over_half_as_many():
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
    """Two classes of the plane that overlap."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 480)
    x = (y[:, None] + rng.normal(size=(480, 2))).astype(np.float32)
    parts = [Rows(x[i : i + 80], y[i : i + 80]) for i in range(0, 320, 80)]
    return Splits(Rows(x[320:], y[320:]), *parts)


def begin(folder, splits, **training):
    folder.mkdir(exist_ok=True)
    content = {"epochs": None, "batch_rows": 40, **training}
    recipe = recipe_with(method="mle", network={"hidden": [4]}, training=content)
    return Run(recipe, splits, (2,), 2, folder, torch.device("cpu"))


def test_a_fit_ends_when_it_has_levelled_off_and_rates_decay_to_its_end(splits, tmp_path):
    run = begin(tmp_path / "a", splits, patience=8, max_epochs=300)
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


def test_a_fit_that_has_no_more_time_says_what_still_moved(splits, tmp_path):
    run = begin(tmp_path / "a", splits, patience=20, max_epochs=30, learning_rate=1e-4)
    run.fit(quiet=True)
    assert len(run.progress.history) == 30
    assert run.stopped().startswith("after 30 epochs, the limit of training.max_epochs: ")
    output = begin(tmp_path / "b", splits, epochs=2)
    output.fit(quiet=True)
    assert output.stopped() == "after 2 epochs, as configured"


def test_early_stopping_keeps_the_likeliest_epoch_and_ends_patience_epochs_behind_it(
    splits, tmp_path
):
    small = replace(splits, train=splits.train.take(np.arange(40)))  # soon learned by heart
    expected = {"early_stopping": True, "patience": 20, "batch_rows": 10, "learning_rate": 0.1}
    run = begin(tmp_path / "a", small, max_epochs=300, **expected)
    model = run.fit(quiet=True)
    observed = [epoch["stopping_log_likelihood"] for epoch in run.progress.history]
    best = int(np.argmax(observed)) + 1
    assert run.progress.best_epoch == best
    assert len(observed) == best + 20 < 300
    _, log_likelihood, _, *wrong, _ = run._validate().unbind(1)
    assert add_wrong_row(log_likelihood, *wrong).item() == pytest.approx(max(observed), rel=1e-6)
    output = run.progress.history[best - 1]["validation_log_likelihood"]
    assert run.validation_log_likelihood() == output
    assert {group["lr"] for group in run.optimizer.param_groups} == {0.1}
    message = f"after {len(observed)} epochs: the held-out likelihood was best after {best}"
    assert run.stopped() == message
    assert model is run.model
    short = begin(tmp_path / "b", small, max_epochs=best + 5, **expected)
    short.fit(quiet=True)
    largest = f"after {best + 5} epochs, the limit of training.max_epochs: "
    assert short.stopped() == f"{largest}the held-out likelihood was best after {best}"


@pytest.mark.parametrize(
    ("reason", "advice"),
    [
        ("after 5 epochs, as configured", ""),
        ("after 30 epochs: the held-out likelihood was best after 8", "would not help"),
        ("after 9 epochs, the limit of training.max_epochs: loss", "raise the limit"),
    ],
)
def test_the_log_advises_whether_to_train_longer(reason, advice):
    assert advice in advise(reason)
    assert bool(advise(reason)) == bool(advice)
