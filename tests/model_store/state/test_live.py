import math

import numpy as np
import pytest

from model_store.state.live import live_figures, wilson_interval


def prediction_set(yes, labels=("yes",)):
    return {"probabilities": {"no": 1 - yes, "yes": yes}, "set": list(labels)}


def test_classification_figures_match_manual_calculation():
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


def test_regression_figures_match_manual_calculation():
    rows = [
        ({"mean": 1.0, "std": 0.5, "interval": [0.0, 2.0]}, 2.0),
        ({"mean": 0.0, "std": 1.5, "interval": [-1.0, 1.0]}, 2.0),
    ]
    figures = live_figures(rows)
    assert figures["rmse"]["value"] == pytest.approx(math.sqrt(2.5))
    assert figures["std"]["value"] == pytest.approx(1.0)
    assert figures["interval_coverage_at_95"]["value"] == 0.5


def test_wilson_interval_matches_published_values():
    assert wilson_interval(81 / 263, 263) == pytest.approx(
        (0.2553, 0.3662), abs=1e-4
    )  # Newcombe 1998, table I
    assert wilson_interval(0.0, 20)[0] == 0.0
    assert wilson_interval(1.0, 20)[1] == 1.0


def test_intervals_have_approximately_nominal_coverage():
    rng = np.random.default_rng(0)
    hits = {"log_likelihood": 0, "brier": 0, "accuracy": 0}
    p = np.array([0.55, 0.7, 0.95])  # probability of the label
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
        for name in hits:
            low, high = figures[name]["interval"]
            hits[name] += low <= truth[name] <= high
    assert (
        min(hits.values()) >= 86
    )  # 95 of 100 expected; by chance, about 1 in 10,000 runs has fewer than 86
