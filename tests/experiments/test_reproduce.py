import json
import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from scipy import stats

from experiments import measures
from experiments.active.protocol import End, Protocol
from experiments.cells import Cell, Column, Measured, Target, measure_missing
from experiments.certify import chains, moons
from experiments.command import load_targets
from experiments.findings import Claim, difference_interval, findings_page, read_claims
from experiments.measures import load_recipe
from experiments.pages import OLDER, write_pages
from experiments.tables import (
    accuracy,
    alpha,
    detection,
    gaps,
    labelling,
    parameters,
    pruning,
    toys,
    undecided,
)
from model_store.errors import InvalidInput
from training.__main__ import main
from training.bayes.posterior import standard_noise
from training.fit import Fitted, fit
from training.folders import hold

MOVING = "the held-out likelihood still rose"


def get_target(calls, seeds=3):
    def measure(row):
        def measure_seed(seed, _):
            calls.append((row, seed))
            moving = [MOVING] if (row, seed) == ("b", 0) else []
            return Measured({"accuracy": 90.0 + seed}, "data", moving)

        return measure_seed

    return Target(
        name="table",
        title="A table",
        protocol="Three rows.",
        rows={row: measure(row) for row in ("a", "b", "c")},
        columns={"accuracy": Column("accuracy, %")},
        papers={"a": {"accuracy": 90.5}},
        draw=lambda *_: plt.figure(),
        seeds=seeds,
    )


def test_cells_are_measured_again_only_on_request_after_new_revision(tmp_path):
    calls = []
    target = get_target(calls)
    assert measure_missing([target], tmp_path, tmp_path / "runs", None, quiet=True) == 0
    assert calls == [(row, seed) for row in "abc" for seed in range(3)]
    assert measure_missing([target], tmp_path, tmp_path / "runs", None, quiet=True) == 0
    assert len(calls) == 9
    assert measure_missing([target], tmp_path, tmp_path, None, quiet=True, again=True) == 0
    assert len(calls) == 9
    revised = replace(target, revision=2)
    assert measure_missing([revised], tmp_path, tmp_path, None, quiet=True) == 0
    assert len(calls) == 9
    assert measure_missing([revised], tmp_path, tmp_path, None, quiet=True, again=True) == 0
    assert len(calls) == 18
    cell = json.loads((tmp_path / "table" / "a-1.json").read_text())
    assert cell["measured"]["values"] == {"accuracy": 91.0}
    assert (cell["seed"], cell["revision"]) == (1, 2)
    assert {"torch", "python"} < cell["versions"].keys()


def test_exhausted_budget_starts_no_further_cell(tmp_path):
    calls = []
    num_missing = measure_missing([get_target(calls)], tmp_path, tmp_path, 1e-9, quiet=True)
    assert num_missing == 9 - len(calls)
    assert num_missing >= 8


def test_failed_cell_is_logged_and_others_are_measured(tmp_path, caplog):
    def fail(_, __):
        raise InvalidInput("data.source", "a folder", "none")

    target = get_target([])
    target = replace(target, rows={**target.rows, "b": fail})
    assert measure_missing([target], tmp_path, tmp_path, None, quiet=True) == 3
    assert {row: len(cells) for row, cells in target.results(tmp_path).items()} == {
        "a": 3,
        "b": 0,
        "c": 3,
    }
    assert "table: b, seed 2 was not measured: data.source: expected a folder" in caplog.text


def test_cell_of_another_process_is_skipped(tmp_path):
    calls = []
    target, runs = get_target(calls), tmp_path / "runs"
    with hold(runs / "reproduce" / "cells" / "table-b-1"):
        assert measure_missing([target], tmp_path, runs, None, quiet=True) == 1
    assert len(calls) == 8
    assert ("b", 1) not in calls
    assert measure_missing([target], tmp_path, runs, None, quiet=True) == 0
    assert calls[8:] == [("b", 1)]


def test_all_rows_get_minimum_seeds_before_extra_seeds(tmp_path):
    missing = [*get_target([], seeds=4).missing(tmp_path)]
    assert [seed for _, seed in missing] == [0, 1, 2] * 3 + [3] * 3


def test_page_shows_complete_rows_and_explains_empty_rows(tmp_path):
    target = get_target([])
    measure_missing([target], tmp_path, tmp_path, None, quiet=True)
    (tmp_path / "table" / "c-2.json").unlink()
    write_pages([target], tmp_path, tmp_path)
    page = (tmp_path / "table.md").read_text()
    assert "| a | 91.00±1.00 (90.5) |" in page
    assert "| b | – |" in page
    assert f"* In some seeds, {MOVING}: `b` (1 of 3)." in page
    assert "* `c`: 2 of 3 seeds." in page
    assert OLDER not in page
    assert (tmp_path / "table.png").stat().st_size > 1000
    index = (tmp_path / "README.md").read_text()
    assert "- [table](table.md): A table (8 of 9 cells)" in index
    path = tmp_path / "table" / "a-0.json"
    path.write_text(path.read_text().replace("90.0", "Infinity"))
    write_pages([target], tmp_path, tmp_path)
    assert "| a | not finite (90.5) |" in (tmp_path / "table.md").read_text()
    path.write_text(path.read_text().replace("Infinity", "90.0"))
    for seed in range(2):
        (tmp_path / "table" / f"c-{seed}.json").unlink()
    write_pages([replace(target, revision=2)], tmp_path, tmp_path)
    assert "* Not run: `c`." in (tmp_path / "table.md").read_text()
    page = (tmp_path / "table.md").read_text()
    assert f"| a {OLDER} | 91.00±1.00 (90.5) |" in page
    assert f"* {OLDER} measured by an earlier revision" in page


def test_row_counts_if_most_seeds_have_converged(tmp_path):
    target = get_target([], seeds=4)
    measure_missing([target], tmp_path, tmp_path, None, quiet=True)
    write_pages([target], tmp_path, tmp_path)
    page = (tmp_path / "table.md").read_text()
    assert "Each row has 4 seeds." in page
    assert "| b | 91.50±1.29 |" in page
    assert MOVING not in page


def test_targets_are_listed_and_unknown_targets_rejected(tmp_path, capsys):
    assert main(["reproduce", "--list", "--out", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    for name, target in load_targets().items():
        assert f"{name} " in output
        assert {*target.papers} <= {*target.rows}
        assert all({*paper_values} <= {*target.columns} for paper_values in target.papers.values())
    assert main(["reproduce", "table-9", "--out", str(tmp_path)]) == 2
    assert "TARGET: expected one of" in capsys.readouterr().err


def test_pattern_selects_rows_of_target(tmp_path, capsys):
    assert main(["reproduce", "uci/yacht-*", "--list", "--out", str(tmp_path)]) == 0
    target = load_targets()["uci"]
    rows = [row for row in target.rows if row.startswith("yacht-")]
    assert f" of {len(rows) * target.seeds:4} " in capsys.readouterr().out
    assert main(["reproduce", "uci/venus-*", "--list", "--out", str(tmp_path)]) == 2
    assert "ROWS: expected some of" in capsys.readouterr().err


@pytest.mark.fits
def test_toy_is_fitted_and_plotted(tmp_path):
    target = load_targets()["toy-cubic"]
    target = replace(target, rows={"mle": target.rows["mle"]}, seeds=1)
    assert measure_missing([target], tmp_path, tmp_path / "runs", None, quiet=True) == 0
    (cell,) = target.results(tmp_path)["mle"]
    assert cell.measured.values["ratio"] == 0.0
    assert len(cell.measured.values["rows"][0]) == 20
    write_pages([target], tmp_path, tmp_path)
    assert not (tmp_path / "toy-cubic.md").exists()
    assert not (tmp_path / "toy-cubic.png").exists()
    (samples,) = [a for a in target.draw(target, target.results(tmp_path)).axes if a.get_title()]
    assert samples.get_title() == "mle"


def test_claims_hold_fail_or_are_inconclusive(tmp_path):
    values = {"a": [3.0, 3.1, 3.2], "b": [1.0, 1.1, 0.9], "c": [3.0, 3.2, 3.1]}

    def measure(row):
        return lambda seed, _: Measured({"accuracy": values[row][seed]}, "data")

    target = replace(get_target([]), rows={row: measure(row) for row in values})
    claims = [
        Claim(f"{pair}", "paper", "table", "accuracy", [(*pair,)]) for pair in ("ab", "ba", "ac")
    ]
    assert (
        findings_page({"table": target}, tmp_path, tmp_path, claims).count("| not measured |") == 3
    )
    measure_missing([target], tmp_path, tmp_path, None, quiet=True)
    actual = [claim.judge(target, tmp_path)[0] for claim in claims]
    assert actual == ["holds", "does not hold", "inconclusive"]
    repeated_claim = replace(claims[0], pairs=[("a", "b")] * 9)
    assert repeated_claim.judge(target, tmp_path) == ("holds", "in 9 of 9")
    incomplete_claim = replace(repeated_claim, pairs=[*repeated_claim.pairs, ("a", "d")])
    assert incomplete_claim.judge(target, tmp_path) == ("holds", "in 9 of 9, 1 not measured")
    (tmp_path / "table" / "b-2.json").unlink()
    assert repeated_claim.judge(target, tmp_path) == ("not measured", "")


def test_no_loss_claim_uses_margin(tmp_path):
    def measure(row):
        return lambda seed, _: Measured({"accuracy": {"a": 90.0, "b": 90.2}[row] + seed / 100}, "")

    target = replace(get_target([]), rows={row: measure(row) for row in "ab"})
    measure_missing([target], tmp_path, tmp_path, None, quiet=True)
    claim = Claim("no loss", "paper", "table", "accuracy", [("a", "b")])
    assert claim.judge(target, tmp_path)[0] == "does not hold"
    assert replace(claim, margin=0.3).judge(target, tmp_path)[0] == "holds"


def test_difference_interval_matches_welch():
    generator = np.random.default_rng(0)
    first, second = generator.normal(1.0, 2.0, 7), generator.normal(0.0, 0.5, 4)
    expected = stats.ttest_ind(first, second, equal_var=False).confidence_interval(0.95)
    actual = difference_interval(first.tolist(), second.tolist())
    np.testing.assert_allclose(actual, (expected.low, expected.high))


def test_tables_mark_rows_with_non_elbo_kl_weight():
    for target in (accuracy.TABLE_1, accuracy.WEIGHT_UNCERTAINTY, accuracy.LONG):
        for row, measure in target.rows.items():
            recipe, changes = measure.args
            weight = accuracy.make_recipe(recipe, 0, **changes).training.kl_weight
            expected = 1.0 if weight is None else weight * accuracy.TRAIN_ROWS
            assert float(target.kl_weights.get(row, "1")) == pytest.approx(expected)


def test_every_claim_refers_to_existing_rows():
    targets = load_targets()
    for claim in read_claims():
        assert {row for pair in claim.pairs for row in pair} <= {*targets[claim.target].rows}


def test_moons_uncertainty_is_compared_near_and_far_from_rows():
    rows = np.zeros((1, 2), dtype=np.float32)
    exact = np.tile([[0.4], [0.6]], len(moons.GRID))
    is_far = np.linalg.norm(moons.GRID, axis=1) >= moons.FAR
    exact[:, is_far] = [[0.0], [1.0]]
    approximate = np.full((2, len(moons.GRID)), 0.5)
    approximate[:, is_far] = [[0.25], [0.75]]
    approximate[:, ~is_far] = 0.75
    values = moons.compare(approximate, exact, rows)
    mutual = np.log(2) + 0.25 * np.log(0.25) + 0.75 * np.log(0.75)
    assert values["ratio_far"] == pytest.approx(mutual / np.log(2))
    assert values["bald_near"] == pytest.approx(0.0)
    assert values["ratio_near"] == pytest.approx(0.0)


def test_table_uncertainty_is_compared_with_exact_posterior():
    draws = np.random.default_rng(0).normal(size=(4_000, 1))
    scale = np.array([0.5, 1.0, 2.0, 3.0, 4.0, 5.0])  # test rows, then rows off the data

    def moments(factor, log_variance):
        means = factor * scale * draws
        return np.stack([means, np.full_like(means, log_variance)], axis=-1)

    exact = chains.Exact(moments(1.0, 0.0), 3, {}, "")
    exact_values = chains.compare(exact.moments, exact)
    assert exact_values["ratio"] == exact_values["ratio_off"] == 1.0
    assert chains.compare(moments(0.5, 0.0), exact)["ratio"] == pytest.approx(0.5)


def test_correlation_p_values_are_uniform_only_for_independent_parameters():
    generator = np.random.default_rng(0)
    theta = generator.normal(size=(500, 60))
    values = parameters.p_values(theta)
    assert len(values) == 60 * 59 / 2
    assert stats.kstest(values, "uniform").pvalue > 1e-3
    expected = stats.pearsonr(theta[:, 0], theta[:, 1]).pvalue
    assert values[0] == pytest.approx(expected)
    assert parameters.p_values(np.repeat(theta[:, :1], 2, axis=1)) == pytest.approx(0.0)


@pytest.mark.slow
def test_divergence_from_exact_posterior_matches_monte_carlo(tmp_path):
    changes = {**parameters.PRODUCTS["bhn-weights-0"], "training": {"epochs": 20, "batch_rows": 30}}
    network = {"factory": "experiments.tables.parameters:product"}
    recipe = parameters.make_toy_recipe("product", 0, {**changes, "network": network})
    data = toys.dataset(partial(parameters.draw_identity, 1.0), 30, 0)
    trained_model = fit(recipe, data, runs=tmp_path, quiet=True)
    actual = parameters.divergence_from_exact(trained_model)

    model, rows = trained_model.model, trained_model.splits.train
    eps = standard_noise(200_000, 2, 1)
    with torch.no_grad():

        def log_likelihood(theta):
            result = model.likelihood(model.network(torch.from_numpy(rows.x), theta[:, None]))
            return model.likelihood.log_likelihood(result, torch.from_numpy(rows.y)).sum(1).double()

        theta, log_ratio = model.posterior.sample(eps)
        evidence = log_likelihood(eps).logsumexp(0) - math.log(len(eps))  # eps follows the prior
        ratios = log_ratio - log_likelihood(theta) + evidence
    error = ratios.std().item() * (1 / (10 * parameters.EVALUATIONS)) ** 0.5
    assert actual == pytest.approx(ratios.mean().item(), abs=5 * error)


@pytest.mark.slow
def test_left_out_digit_and_pruned_weights_are_measured(tmp_path, monkeypatch):
    def shorten(method):
        return lambda _, seed, **changes: load_recipe(
            f"digits-{method}",
            seed,
            data={"leave_out": changes.get("data", {}).get("leave_out", [])},
            training={"epochs": 8},
        )

    monkeypatch.setattr(detection, "make_recipe", shorten("mle"))
    digit = detection.TABLE_3.rows["mlp"](3, tmp_path)
    assert {*digit.values} == {*detection.TABLE_3.columns}
    assert 50.0 < digit.values["variation_ratio"] < 100.0
    monkeypatch.setattr(pruning, "make_recipe", shorten("bbb-mixture"))
    pruning.PRUNING.rows["0"](0, tmp_path)
    small = pruning.PRUNING.rows["95"](0, tmp_path).values
    [model] = tmp_path.glob("digits-bbb-mixture-*/models/digits-bbb-mixture")
    assert [path.name for path in model.iterdir() if path.name.isdigit()] == ["1"]
    assert small["kept"] <= 5.0
    assert small["bytes"] < 100.0
    assert {*pruning.PRUNING.columns} < {*small}
    assert np.dot(small["density"], np.diff(pruning.EDGES)) == pytest.approx(1.0, abs=1e-3)


@pytest.mark.slow
def test_alpha_dropout_is_attacked_and_timed(tmp_path, monkeypatch):
    def shorten(base, seed, **changes):
        training = changes.get("training", {}) | {"epochs": 2}
        return load_recipe(base.replace("mnist", "digits"), seed, training=training)

    monkeypatch.setattr(alpha, "load_recipe", shorten)
    for row in ("mlp", "alpha-0.5"):
        assert {*alpha.ALPHA.columns} < {*alpha.ALPHA.rows[row](0, tmp_path).values}
    assert alpha.ALPHA_DRAWS.rows["2"](0, tmp_path).values["seconds"] > 0.0


@pytest.mark.slow
@pytest.mark.fits
def test_rows_are_undecided_by_uncertainty_or_flag(tmp_path, monkeypatch):
    monkeypatch.setattr(
        undecided, "load_recipe", lambda _, seed, **__: load_recipe("digits-mle", seed)
    )
    monkeypatch.setattr(undecided, "RISK", 0.1)
    monkeypatch.setattr(undecided, "OTHERS", ())
    monkeypatch.setattr(undecided, "SETS", ("test", "rotated", "uniform"))
    values = undecided.measure("mle", 0, tmp_path).values
    assert values["answered_wrong"] < 10.0
    assert values["undecided_test"] < 50.0 < values["undecided_uniform"]
    for name in undecided.SETS:
        assert values[f"doubt_{name}"] <= values[f"undecided_{name}"]


@pytest.mark.slow
@pytest.mark.fits
def test_unusual_images_are_detected_and_flagged(tmp_path, monkeypatch):
    monkeypatch.setattr(detection, "outlier_sources", tuple)
    monkeypatch.setattr(detection, "load_recipe", lambda _, seed: load_recipe("digits-mle", seed))
    values = detection.NEAR_FAR.rows["dropout"](0, tmp_path).values
    assert values["flagged_test"] < 15.0 < values["flagged_rotated"]
    assert 50.0 < values["entropy_uniform"] <= 100.0


@pytest.mark.fits
def test_gap_split_removes_middle_third_of_column(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    table = rng.normal(size=(180, 3))
    table[:, 2] = table[:, 0] + 0.1 * rng.normal(size=180)
    folder = tmp_path / "uci" / "yacht"
    folder.mkdir(parents=True)
    np.savetxt(folder / "data.txt", table)
    (folder / "index_features.txt").write_text("0\n1\n")
    (folder / "index_target.txt").write_text("2\n")
    monkeypatch.setenv("DUBITO_DATA", str(tmp_path))
    monkeypatch.setattr(gaps, "STEPS", 20)
    values = gaps.GAPS.rows["yacht-laplace"](1, tmp_path / "runs").values
    assert {*gaps.GAPS.columns} <= {*values}

    order, random = (make_order(table, 1) for make_order in gaps.ORDERS.values())
    train, gap = table[order[:120], 1], table[order[120:], 1]
    assert ((train <= gap.min()) | (train >= gap.max())).all()
    assert sorted(order) == sorted(random) == [*range(180)]


def test_rows_can_have_fewer_seeds(tmp_path):
    target = replace(get_target([], seeds=4), row_seeds={"a": 2})
    assert target.num_cells == len([*target.missing(tmp_path)]) == 10
    measure_missing([target], tmp_path, tmp_path, None, quiet=True)
    assert [len(cells) for cells in target.results(tmp_path).values()] == [2, 4, 4]


@pytest.mark.fits
def test_arm_below_target_counts_labels_beyond_end(tmp_path, monkeypatch):
    monkeypatch.setattr(
        labelling, "load_recipe", lambda _, seed: load_recipe("digits-dropout", seed)
    )
    monkeypatch.setattr(labelling, "PROTOCOL", Protocol(10, 10, 50, 5, 5, 1))
    monkeypatch.setattr(labelling, "END", End(30, labelling.ACCURACY))
    for row in ("bhn-warm-bald", "bhn-warm-random"):
        values = labelling.FIGURE_4.rows[row](0, tmp_path).values
        assert values["labels_at"] == [10, 20, 30]
        assert values["labels"] == 40.0
        assert max(values["accuracies"]) < 100 * labelling.ACCURACY


@pytest.mark.parametrize(
    ("stop_reason", "warnings"),
    [
        ("after 30 epochs: levelled off after 20", []),
        ("after 30 epochs, the limit of training.max_epochs: too few", [MOVING]),
        ("after 30 epochs, as configured", [MOVING]),
    ],
)
def test_fit_that_levelled_off_may_still_rise(tmp_path, stop_reason, warnings):
    rows = [{"validation_log_likelihood": 0.1 * epoch} for epoch in range(30)]
    lines = "\n".join(json.dumps(row) for row in rows)
    (tmp_path / "metrics.jsonl").write_text(lines)
    model = object.__new__(Fitted)
    vars(model).update(folder=tmp_path, provenance=SimpleNamespace(stopped=stop_reason))
    assert measures.find_moving_curves(model) == warnings


def test_arms_are_compared_with_random_where_all_seeds_have_labels():
    curves = {
        "bhn-warm-bald": [[60.0, 95.0], [62.0, 96.0, 97.0], [61.0, 97.0, 98.0]],
        "bhn-warm-random": [[60.0, 91.0, 92.0], [62.0, 92.0, 93.0], [61.0, 93.0, 94.0]],
    }
    counts = {"labels": 310.0, "labels_at": [20, 30, 40]}
    results = {
        row: [
            Cell(row, seed, Measured({**counts, "accuracies": accuracies}, ""), 1.0, "", 1, {})
            for seed, accuracies in enumerate(seed_accuracies)
        ]
        for row, seed_accuracies in curves.items()
    }
    output = labelling.FIGURE_4.conclude(results)
    assert "`bhn-warm-bald` unknown." in output  # No seed reaches the target.
    half_width = stats.t.ppf(0.975, 4) * math.sqrt(2 / 3)  # difference 4, variances 1
    assert f"`bhn-warm-bald` {4 - half_width:.1f} to {4 + half_width:.1f} at 30." in output
