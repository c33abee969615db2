import subprocess
import sys
from itertools import product

import numpy as np
import pytest

from model_store.scores import joint as joint_module
from model_store.scores.joint import BatchBald, ClassMaxDet, TargetMaxDet, greedy
from tests.support.environment import ROOT, environment_with

JOINT = {
    "batchbald": BatchBald,
    "max_det of classes": ClassMaxDet,
    "max_det of targets": TargetMaxDet,
}


def get_samples(name, seed, draws=6, rows=7, classes=3):
    rng = np.random.default_rng(seed)
    if name == "max_det of targets":
        return np.stack(
            [rng.normal(size=(draws, rows)), rng.gamma(2.0, size=(draws, rows))], axis=-1
        )
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


def determinant(name, samples, chosen):
    if name == "max_det of targets":
        mean, std = samples[..., 0], samples[..., 1]
        cov, noise = np.cov(mean.T, bias=True), np.square(std).mean(axis=0)
    else:
        values = samples.astype(np.float64)
        cov = sum(np.cov(values[..., c].T, bias=True) for c in range(values.shape[2]))
        noise = 1.0 - np.square(values).sum(axis=2).mean(axis=0) + joint_module.MIN_NOISE
    scaled = cov / np.sqrt(np.outer(noise, noise))
    return 0.5 * np.linalg.slogdet(np.eye(len(chosen)) + scaled[np.ix_(chosen, chosen)])[1]


def worth(name, samples, chosen):
    if not chosen:
        return 0.0
    return (
        information(samples.astype(float), chosen)
        if name == "batchbald"
        else determinant(name, samples, chosen)
    )


def get_joint(name, samples, seed=0):
    return JOINT[name](JOINT[name].from_samples(samples), len(samples), seed)


def choice(joint, k, copies=None, order=None):
    rows = len(joint.candidates.gain)
    copies = np.ones(rows, dtype=int) if copies is None else copies
    return greedy(joint, copies, np.arange(rows) if order is None else order, k)


@pytest.mark.parametrize("name", JOINT)
@pytest.mark.parametrize("seed", range(4))
def test_each_row_chosen_is_the_one_that_adds_most_by_brute_force(name, seed):
    samples = get_samples(name, seed)
    selected = []
    for row, gain in choice(get_joint(name, samples), 5):
        gains = [
            worth(name, samples, [*selected, n]) - worth(name, samples, selected) for n in range(7)
        ]
        left = [n for n in range(7) if n not in selected]
        assert gain == pytest.approx(gains[row], abs=1e-6)
        assert gain >= max(gains[n] for n in left) - 1e-6
        selected.append(row)


@pytest.mark.parametrize("name", JOINT)
def test_bounds_are_not_below_gains_and_gains_never_grow(name):
    joint = get_joint(name, get_samples(name, 1, draws=20, rows=40))
    rows = np.arange(40)
    gains = joint.candidates.gain
    for row in (3, 17, 3, 25, 8):
        joint.choose(row)
        later = joint.gains(rows)
        assert (joint.bound(rows) >= later).all()
        assert (later <= gains + 1e-6).all()
        gains = later


@pytest.mark.parametrize("name", JOINT)
def test_the_search_with_bounds_chooses_as_one_that_computes_all(name):
    samples = get_samples(name, 2, draws=20, rows=60)
    actual = choice(get_joint(name, samples), 6)
    joint, left, expected = get_joint(name, samples), list(range(60)), []
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
    samples = get_samples("batchbald", 3, draws=10, rows=30)
    exact = get_joint("batchbald", samples)
    for row in range(6):
        exact.choose(row)
    expected = exact.gains(np.arange(30))
    assert exact._draw_S is None
    monkeypatch.setattr(joint_module, "MAX_CONFIGURATIONS", 500)
    estimates = []
    for seed in range(20):
        sampled = get_joint("batchbald", samples, seed)
        for row in range(6):
            sampled.choose(row)
        assert sampled._draw_S is not None
        estimates.append(sampled.gains(np.arange(30)))
    error = np.std(estimates, axis=0) / np.sqrt(20)
    assert (np.abs(np.mean(estimates, axis=0) - expected) < 6.0 * error + 1e-6).all()
    assert np.std(estimates, axis=0).max() < 0.05


@pytest.mark.parametrize("name", JOINT)
def test_what_is_kept_has_the_size_that_is_stated(name):
    samples = get_samples(name, 0, draws=5, rows=4)
    assert JOINT[name].from_samples(samples).outputs.shape == (
        4,
        JOINT[name].numbers_per_row(5, samples.shape[2]),
    )


@pytest.mark.parametrize("name", JOINT)
def test_copies_are_chosen_once_until_all_others_are(name):
    samples = get_samples(name, 4)
    selected = [
        row
        for row, _ in choice(get_joint(name, samples), 9, copies=np.array([1, 3, 1, 1, 1, 1, 1]))
    ]
    assert sorted(selected[:7]) == list(range(7))
    assert selected[7:] == [1, 1]


@pytest.mark.parametrize("name", JOINT)
def test_draws_that_agree_leave_nothing_to_gain(name):
    actual = choice(get_joint(name, np.repeat(get_samples(name, 5, draws=1), 4, axis=0)), 7)
    np.testing.assert_allclose([gain for _, gain in actual], 0.0, atol=1e-6)


@pytest.mark.parametrize("name", JOINT)
def test_of_rows_that_gain_as_much_the_first_in_order_is_chosen(name):
    samples = np.repeat(
        get_samples(name, 6, rows=2), 3, axis=1
    )  # rows 0 to 2 are alike, and 3 to 5
    actual = [
        row for row, _ in choice(get_joint(name, samples), 2, order=np.array([4, 2, 0, 1, 3, 5]))
    ]
    assert sorted(actual) in ([2, 4], [0, 2], [3, 4])
    backwards = [
        row for row, _ in choice(get_joint(name, samples), 2, order=np.array([5, 3, 1, 0, 2, 4]))
    ]
    assert sorted(backwards) in ([1, 5], [0, 1], [3, 5])


def test_a_batch_of_certain_draws_tells_the_draws_apart_and_no_more():
    """Four draws that are sure of one of two classes: two rows tell which, log 4 nats in all."""
    says = np.array([[0, 0, 0], [0, 1, 0], [1, 0, 1], [1, 1, 1]])  # K, N
    actual = choice(get_joint("batchbald", np.eye(2, dtype=np.float32)[says]), 3)
    np.testing.assert_allclose([gain for _, gain in actual], [np.log(2), np.log(2), 0.0], atol=1e-9)
    assert {row for row, _ in actual[:2]} in ({0, 1}, {1, 2})
