import math

import numpy as np
import pytest

from model_store.state.live import live_figures, wilson_interval


def prediction_set(yes, inside=("yes",)):
    return {"probabilities": {"no": 1 - yes, "yes": yes}, "set": list(inside)}


def test_figures_of_classes_by_hand():
    rows = [
        (prediction_set(0.8), "yes"),
        (prediction_set(0.6), "no"),
        (prediction_set(0.9, ("no", "yes")), "no"),
    ]
    figures = live_figures(rows)
    assert figures["accuracy"]["value"] == pytest.approx(1 / 3)
    expected = (math.log(0.8) + math.log(0.4) + math.log(0.1)) / 3
    assert figures["log_likelihood"]["value"] == pytest.approx(expected)
    assert figures["brier"]["value"] == pytest.approx((2 * 0.04 + 2 * 0.36 + 2 * 0.81) / 3)
    assert figures["set_coverage_at_95"]["value"] == pytest.approx(2 / 3)
    assert live_figures([(prediction_set(1.0), "other")])["brier"]["value"] == pytest.approx(2.0)


def test_figures_of_targets_by_hand():
    rows = [
        ({"mean": 1.0, "std": 0.5, "interval": [0.0, 2.0]}, 2.0),
        ({"mean": 0.0, "std": 1.5, "interval": [-1.0, 1.0]}, 2.0),
    ]
    figures = live_figures(rows)
    assert figures["rmse"]["value"] == pytest.approx(math.sqrt(2.5))
    assert figures["std"]["value"] == pytest.approx(1.0)
    assert figures["interval_coverage_at_95"]["value"] == 0.5


def test_the_interval_of_a_share_is_wilson_s():
    assert wilson_interval(81 / 263, 263) == pytest.approx(
        (0.2553, 0.3662), abs=1e-4
    )  # Newcombe 1998, table I
    assert wilson_interval(0.0, 20)[0] == 0.0
    assert wilson_interval(1.0, 20)[1] == 1.0


def test_intervals_hold_what_they_are_of_about_as_often_as_they_say():
    rng = np.random.default_rng(0)
    stored = {"log_likelihood": 0, "brier": 0, "accuracy": 0}
    p = np.array([0.55, 0.7, 0.95])  # of the label
    truth = {
        "accuracy": p.mean(),
        "log_likelihood": (p * np.log(p) + (1 - p) * np.log(1 - p)).mean(),
        "brier": (2 * p * (1 - p)).mean(),
    }
    for _ in range(100):
        confidence = rng.choice(p, 200)
        label = np.where(rng.random(200) < confidence, "yes", "no").tolist()
        figures = live_figures(
            [(prediction_set(c), y) for c, y in zip(confidence.tolist(), label, strict=True)]
        )
        for name in stored:
            low, high = figures[name]["interval"]
            stored[name] += low <= truth[name] <= high
    assert (
        min(stored.values()) >= 86
    )  # of 100, where 95 are expected: by chance fewer once in some 10,000
