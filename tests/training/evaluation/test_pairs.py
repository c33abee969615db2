import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from training.__main__ import main
from training.evaluation.metrics import Mean, Resamples, Share
from training.evaluation.pairs import difference, difference_interval, mcnemar, measure_loss

SAMPLES = 300
RARE = 1e-6  # probability of a chance failure
PAIRS = st.integers(1, 60).flatmap(
    lambda n: st.integers(0, n).flatmap(
        lambda b: st.integers(0, n - b).map(lambda c: (b, c, n))  # gained, lost, rows
    )
)


@given(PAIRS)
def test_mcnemar_p_value_doubles_binomial_tail(pairs):
    gained, lost, _ = pairs
    expected = min(1.0, 2 * stats.binom.sf(max(gained, lost) - 1, gained + lost, 0.5))
    assert mcnemar(gained, lost) == pytest.approx(expected)


@given(PAIRS)
def test_difference_interval_contains_estimate_and_has_positive_width(pairs):
    gained, lost, rows = pairs
    low, high = difference_interval(gained, lost, rows)
    actual = (gained - lost) / rows
    assert -1 <= low <= actual + 1e-9
    assert actual - 1e-9 <= high <= 1
    assert high - low > 0.5 / rows
    mirrored = difference_interval(lost, gained, rows)
    assert mirrored == pytest.approx((-high, -low), abs=1e-6)


def simulate_versions(generator, rows, shift):
    hardness = generator.random(rows)
    first = hardness + 0.1 * generator.normal(size=rows) < 0.9
    second = hardness + 0.1 * generator.normal(size=rows) < 0.9
    return first, second & (generator.random(rows) > shift)


@pytest.mark.parametrize("shift", [0.0, 0.05])
def test_difference_intervals_cover_true_difference(shift):
    generator = np.random.default_rng(0)
    large = simulate_versions(generator, 1_000_000, shift)
    truth = large[1].mean() - large[0].mean()
    resamples = Resamples.draw(150, 0, 300)
    covered = np.zeros(2, dtype=int)
    for _ in range(SAMPLES):
        first, second = simulate_versions(generator, 150, shift)
        shares = difference(Share(first), Share(second), resamples)
        means = difference(Mean(first.astype(float)), Mean(second.astype(float)), resamples)
        covered += [low <= truth <= high for low, high in (shares.interval, means.interval)]
        assert (shares.first, shares.second) == pytest.approx((means.first, means.second))
    assert (stats.binom.cdf(covered, SAMPLES, [0.95, 0.92]) > RARE).all(), covered


@pytest.mark.parametrize("kind", [Share, Mean])
def test_loss_interval_keeps_false_alarm_rate_and_detects_real_losses(kind):
    generator = np.random.default_rng(1)
    resamples = Resamples.draw(150, 0, 300)
    false_alarms, detections = 0, 0
    for _ in range(SAMPLES):
        for shift in (0.0, 0.2):
            first, second = (
                kind(hits if kind is Share else hits.astype(float))
                for hits in simulate_versions(generator, 150, shift)
            )
            is_worse = measure_loss("test_accuracy", second, first, resamples)[1][0] > 0
            false_alarms, detections = (
                false_alarms + (is_worse and not shift),
                detections + (is_worse and shift > 0),
            )
    assert stats.binom.sf(false_alarms - 1, SAMPLES, 0.04) > RARE
    assert detections > 0.9 * SAMPLES


def test_loss_lies_inside_its_interval():
    generator = np.random.default_rng(2)
    resamples = Resamples.draw(2000, 0, 300)
    first, second = simulate_versions(generator, 2000, 0.1)
    for kind in (Share, Mean):
        candidate, baseline = (
            kind(hits if kind is Share else hits.astype(float)) for hits in (second, first)
        )
        loss, (low, high) = measure_loss("test_accuracy", candidate, baseline, resamples)
        assert loss == pytest.approx(first.mean() - second.mean())
        assert 0.02 < low < loss < high < 0.3


def test_flag_rates_farther_from_target_count_as_worse():
    rows = np.arange(1000)
    near, distant = Share(rows < 60), Share(rows < 0)
    resamples = Resamples.draw(1000, 0)
    loss, interval = measure_loss("flag_rate_at_05", distant, near, resamples)
    assert loss == pytest.approx(0.04)
    assert interval[0] > 0
    assert measure_loss("flag_rate_at_05", near, distant, resamples)[1][1] < 0
    for metric, sign in (("test_accuracy", 1), ("test_brier", -1)):
        loss, (low, high) = measure_loss(metric, distant, near, resamples)
        assert loss == pytest.approx(sign * 0.06) and low < loss < high


@pytest.fixture
def compare(evaluated_store, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DUBITO_STORE", str(evaluated_store))
    monkeypatch.setenv("DUBITO_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("DUBITO_DATA", str(evaluated_store.parent))

    def run(*options):
        code = main(["compare", *options])
        return code, *capsys.readouterr()

    return run


def test_comparing_version_with_itself_gives_no_difference(compare):
    code, text, _ = compare("digits:1", "digits", "--rows", "60", "--draws", "10")
    assert code == 0
    code, out, _ = compare("digits:1", "digits", "--rows", "60", "--draws", "10", "--json")
    actual = json.loads(out)
    assert actual["rows"] == 60
    assert {"accuracy", "log_likelihood", "brier", "flagged.0.05", "aurc.entropy"} < set(
        actual["differences"]
    )
    for name, entry in actual["differences"].items():
        assert entry["first"] == entry["second"]
        assert entry["p_value"] == 1
        low, high = entry["interval"]
        assert (low, high) == (0, 0) if entry["test"] == "bootstrap" else low < 0 < high
        assert f"\n{name} " in text


def test_invalid_arguments_print_one_line_and_exit_with_2(compare):
    for options, message in (
        (("digits", "nothing"), "nothing"),
        (("digits", "digits:9"), "version"),
        (("digits", "digits", "--draws", "0"), "--draws"),
        (("digits", "digits", "--rows", "1"), "--rows"),
    ):
        code, _, errors = compare(*options)
        assert code == 2
        *_, error = errors.splitlines()
        assert error.startswith("error: ")
        assert message in error
