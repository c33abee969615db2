import subprocess
import sys
from itertools import product

import numpy as np
import pytest

from model_store.scores import joint as joint_module
from model_store.scores.joint import BatchBald, greedy
from tests.support.environment import ROOT, environment_with


def get_samples(seed, draws=6, rows=7, classes=3):
    rng = np.random.default_rng(seed)
    logits = 3.0 * rng.normal(size=(draws, rows, classes))
    probs = np.where(logits < -3.0, 0.0, np.exp(logits)) + np.eye(classes)[0] * 1e-3
    return (probs / probs.sum(axis=2, keepdims=True)).astype(np.float32)


def information(probs, rows):
    entropy = conditional = 0.0
    for labels in product(range(probs.shape[2]), repeat=len(rows)):
        draw_probs = np.prod([probs[:, n, c] for n, c in zip(rows, labels, strict=True)], axis=0)
        entropy -= draw_probs.mean() * np.log(max(draw_probs.mean(), 1e-300))
        conditional -= np.mean(draw_probs * np.log(np.maximum(draw_probs, 1e-300)))
    return entropy - conditional


def get_joint(samples, seed=0):
    return BatchBald(BatchBald.from_probs(samples), len(samples), seed)


def select(joint, k, order=None):
    rows = len(joint.candidates.gain)
    return greedy(joint, np.arange(rows) if order is None else order, k)


@pytest.mark.parametrize("seed", range(4))
def test_greedy_selects_row_with_largest_brute_force_gain(seed):
    samples = get_samples(seed)
    selected = []
    for row, gain in select(get_joint(samples), 5):
        base = information(samples.astype(float), selected)
        gains = [information(samples.astype(float), [*selected, n]) - base for n in range(7)]
        remaining = [n for n in range(7) if n not in selected]
        assert gain == pytest.approx(gains[row], abs=1e-6)
        assert gain >= max(gains[n] for n in remaining) - 1e-6
        selected.append(row)


def test_gains_never_grow_and_stay_within_bounds():
    joint = get_joint(get_samples(1, draws=20, rows=40))
    rows = np.arange(40)
    gains = joint.candidates.gain
    for row in (3, 17, 3, 25, 8):
        joint.choose(row)
        next_gains = joint.gains(rows)
        assert (joint.bound(rows) >= next_gains).all()
        assert (next_gains <= gains + 1e-6).all()
        gains = next_gains


def test_bounded_search_matches_exhaustive_search():
    samples = get_samples(2, draws=20, rows=60)
    actual = select(get_joint(samples), 6)
    joint, remaining, expected = get_joint(samples), list(range(60)), []
    for _ in range(6):
        gains = joint.gains(np.array(remaining))
        best = remaining[int(gains.argmax())]
        expected.append((best, pytest.approx(gains.max(), abs=1e-6)))
        remaining.remove(best)
        joint.choose(best)
    assert actual == expected


def test_products_are_bit_identical_for_any_number_of_blas_threads():
    # Haswell kernels round differently at the edges of each thread's block.
    script = (
        "import numpy as np; from model_store.scores.joint import _products;"
        "rng = np.random.default_rng(0); a, b = rng.random((10, 100)), rng.random((7655, 100));"
        "print(hash(_products(a, b).tobytes()), hash(_products(b, a).tobytes()))"
    )
    outputs = []
    for threads in ("1", "2"):
        environment = environment_with(
            OPENBLAS_CORETYPE="Haswell", OPENBLAS_NUM_THREADS=threads, PYTHONHASHSEED="0"
        )
        command = [sys.executable, "-c", script]
        outputs.append(subprocess.check_output(command, env=environment, cwd=ROOT, timeout=120))
    assert outputs[0] == outputs[1]


def test_sampled_configurations_approximate_exact_gains(monkeypatch):
    samples = get_samples(3, draws=10, rows=30)
    exact = get_joint(samples)
    for row in range(6):
        exact.choose(row)
    expected = exact.gains(np.arange(30))
    assert exact._draw_S is None
    monkeypatch.setattr(joint_module, "MAX_CONFIGURATIONS", 500)
    estimates = []
    for seed in range(20):
        sampled = get_joint(samples, seed)
        for row in range(6):
            sampled.choose(row)
        assert sampled._draw_S is not None
        estimates.append(sampled.gains(np.arange(30)))
    error = np.std(estimates, axis=0) / np.sqrt(20)
    assert (np.abs(np.mean(estimates, axis=0) - expected) < 6.0 * error + 1e-6).all()
    assert np.std(estimates, axis=0).max() < 0.05


def test_identical_draws_yield_zero_gain():
    actual = select(get_joint(np.repeat(get_samples(5, draws=1), 4, axis=0)), 7)
    np.testing.assert_allclose([gain for _, gain in actual], 0.0, atol=1e-6)


def test_ties_are_broken_by_row_order():
    samples = np.repeat(get_samples(6, rows=2), 3, axis=1)  # equal rows: 0 to 2, 3 to 5
    actual = [row for row, _ in select(get_joint(samples), 2, order=np.array([4, 2, 0, 1, 3, 5]))]
    assert sorted(actual) in ([2, 4], [0, 2], [3, 4])
    reversed_order = [
        row for row, _ in select(get_joint(samples), 2, order=np.array([5, 3, 1, 0, 2, 4]))
    ]
    assert sorted(reversed_order) in ([1, 5], [0, 1], [3, 5])


def test_certain_draws_gain_log_2_per_row_until_distinguished():
    """Four draws are certain of one of two classes: two rows identify the draw (log 4 nats)."""
    predictions = np.array([[0, 0, 0], [0, 1, 0], [1, 0, 1], [1, 1, 1]])  # K, N
    actual = select(get_joint(np.eye(2, dtype=np.float32)[predictions]), 3)
    np.testing.assert_allclose([gain for _, gain in actual], [np.log(2), np.log(2), 0.0], atol=1e-9)
    assert {row for row, _ in actual[:2]} in ({0, 1}, {1, 2})
