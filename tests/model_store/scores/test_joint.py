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


def information(probs, chosen):
    entropy = conditional = 0.0
    for labels in product(range(probs.shape[2]), repeat=len(chosen)):
        of_draws = np.prod([probs[:, n, c] for n, c in zip(chosen, labels, strict=True)], axis=0)
        entropy -= of_draws.mean() * np.log(max(of_draws.mean(), 1e-300))
        conditional -= np.mean(of_draws * np.log(np.maximum(of_draws, 1e-300)))
    return entropy - conditional


def get_joint(samples, seed=0):
    return BatchBald(BatchBald.from_probs(samples), len(samples), seed)


def choice(joint, k, order=None):
    rows = len(joint.candidates.gain)
    return greedy(joint, np.arange(rows) if order is None else order, k)


@pytest.mark.parametrize("seed", range(4))
def test_each_row_chosen_is_the_one_that_adds_most_by_brute_force(seed):
    samples = get_samples(seed)
    selected = []
    for row, gain in choice(get_joint(samples), 5):
        earlier = information(samples.astype(float), selected)
        gains = [information(samples.astype(float), [*selected, n]) - earlier for n in range(7)]
        left = [n for n in range(7) if n not in selected]
        assert gain == pytest.approx(gains[row], abs=1e-6)
        assert gain >= max(gains[n] for n in left) - 1e-6
        selected.append(row)


def test_bounds_are_not_below_gains_and_gains_never_grow():
    joint = get_joint(get_samples(1, draws=20, rows=40))
    rows = np.arange(40)
    gains = joint.candidates.gain
    for row in (3, 17, 3, 25, 8):
        joint.choose(row)
        later = joint.gains(rows)
        assert (joint.bound(rows) >= later).all()
        assert (later <= gains + 1e-6).all()
        gains = later


def test_the_search_with_bounds_chooses_as_one_that_computes_all():
    samples = get_samples(2, draws=20, rows=60)
    actual = choice(get_joint(samples), 6)
    joint, left, expected = get_joint(samples), list(range(60)), []
    for _ in range(6):
        gains = joint.gains(np.array(left))
        best = left[int(gains.argmax())]
        expected.append((best, pytest.approx(gains.max(), abs=1e-6)))
        left.remove(best)
        joint.choose(best)
    assert actual == expected


def test_products_have_the_same_bits_however_many_threads_blas_has():
    # kernels of this processor round otherwise at the edges of what each thread has
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


def test_sampled_configurations_come_near_all_of_them(monkeypatch):
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


def test_draws_that_agree_leave_nothing_to_gain():
    actual = choice(get_joint(np.repeat(get_samples(5, draws=1), 4, axis=0)), 7)
    np.testing.assert_allclose([gain for _, gain in actual], 0.0, atol=1e-6)


def test_of_rows_that_gain_as_much_the_first_in_order_is_chosen():
    samples = np.repeat(get_samples(6, rows=2), 3, axis=1)  # rows 0 to 2 are alike, and 3 to 5
    actual = [row for row, _ in choice(get_joint(samples), 2, order=np.array([4, 2, 0, 1, 3, 5]))]
    assert sorted(actual) in ([2, 4], [0, 2], [3, 4])
    backwards = [
        row for row, _ in choice(get_joint(samples), 2, order=np.array([5, 3, 1, 0, 2, 4]))
    ]
    assert sorted(backwards) in ([1, 5], [0, 1], [3, 5])


def test_a_batch_of_certain_draws_tells_the_draws_apart_and_no_more():
    """Four draws that are sure of one of two classes: two rows tell which, log 4 nats in all."""
    says = np.array([[0, 0, 0], [0, 1, 0], [1, 0, 1], [1, 1, 1]])  # K, N
    actual = choice(get_joint(np.eye(2, dtype=np.float32)[says]), 3)
    np.testing.assert_allclose([gain for _, gain in actual], [np.log(2), np.log(2), 0.0], atol=1e-9)
    assert {row for row, _ in actual[:2]} in ({0, 1}, {1, 2})
