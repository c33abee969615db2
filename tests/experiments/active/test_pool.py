import numpy as np
import pytest

from experiments.active.simulation import candidate_rows, choose, initial_labels
from model_store.acquisition.choice import Choice
from model_store.errors import InvalidInput


def log_probs(rng, draws, rows, classes=3):
    logits = 2.0 * rng.normal(size=(draws, rows, classes))
    return (logits - np.log(np.exp(logits).sum(-1, keepdims=True))).astype(np.float32)


def select(outputs, acquisition, k, task="classification", race=None, requests=None):
    def predict(rows, draws):
        if requests is not None:
            requests.append((len(rows), draws.stop - draws.start))
        return outputs[draws][:, rows]

    ids = [str(i) for i in range(outputs.shape[1])]
    choice = Choice(task, acquisition, k, len(outputs), race)
    return choose(predict, ids, choice, 7).tolist()


@pytest.mark.parametrize(("count", "counts"), [(6, [2, 2, 2]), (7, [2, 2, 3]), (40, [5, 15, 20])])
def test_initial_labels_are_balanced_while_classes_have_rows(count, counts):
    y = np.repeat([0, 1, 2], [5, 15, 30])
    rows = initial_labels(y, 3, count, seed=3)
    assert len(set(rows.tolist())) == count
    assert sorted(np.bincount(y[rows]).tolist()) == counts


def test_initial_labels_of_regression_depend_on_seed():
    y = np.arange(50, dtype=np.float32)
    assert initial_labels(y, 0, 10, 1).tolist() == initial_labels(y, 0, 10, 1).tolist()
    assert set(initial_labels(y, 0, 10, 1).tolist()) != set(initial_labels(y, 0, 10, 2).tolist())


@pytest.mark.parametrize(
    ("count", "expected"), [(2, "at least 3"), (51, "1 to 50"), (0, "1 to 50")]
)
def test_invalid_initial_label_count_is_rejected(count, expected):
    with pytest.raises(InvalidInput, match=f"--initial: expected {expected}"):
        initial_labels(np.repeat([0, 1, 2], [5, 15, 30]), 3, count, 0)


def test_constant_initial_targets_are_rejected():
    with pytest.raises(
        InvalidInput, match="--initial: expected enough labels to include two values"
    ):
        initial_labels(np.zeros(50, dtype=np.float32), 0, 10, 0)


def test_candidates_are_unlabelled_and_stable_across_label_sets():
    small, extra = np.array([3, 4]), np.array([3, 4, 11, 12, 13])
    first, second = (
        set(candidate_rows(labelled, 100, 60, 5, 2).tolist()) for labelled in (small, extra)
    )
    assert len(first) == len(second) == 60
    assert not first & set(small.tolist())
    assert not second & set(extra.tolist())
    assert len(first & second) >= 57
    assert set(candidate_rows(small, 100, 60, 5, 3).tolist()) != first
    assert len(candidate_rows(extra, 20, 60, 5, 2)) == 15


def test_bald_selects_rows_with_most_disagreement():
    rng = np.random.default_rng(0)
    outputs = log_probs(rng, 40, 30)
    probs = np.exp(outputs.astype(np.float64))
    mean = probs.mean(0)
    bald = -(mean * np.log(mean)).sum(-1) + (probs * np.log(probs)).sum(-1).mean(0)
    assert select(outputs, "bald", 6) == np.argsort(-bald)[:6].tolist()


def test_race_selects_same_rows_with_fewer_draws():
    rng = np.random.default_rng(1)
    logits = log_probs(rng, 100, 400) * np.where(np.arange(400) < 20, 1.0, 0.0)[:, None]
    outputs = (logits - np.log(np.exp(logits).sum(-1, keepdims=True))).astype(np.float32)
    requests = []
    assert select(outputs, "bald", 8, race=0.01, requests=requests) == select(outputs, "bald", 8)
    assert requests[0] == (400, 10)
    assert sum(rows for rows, draws in requests if draws == 100) < 100


def test_bald_with_single_draw_selects_random_rows():
    first, second = (log_probs(np.random.default_rng(seed), 1, 60) for seed in (4, 5))
    assert select(first, "bald", 5) == select(second, "bald", 5) != [0, 1, 2, 3, 4]
    assert select(first, "entropy", 5) != select(second, "entropy", 5)


def test_regression_selects_rows_with_largest_epistemic_variance():
    rng = np.random.default_rng(3)
    spread = rng.uniform(0.1, 3.0, size=25)
    mean = rng.normal(size=(200, 25)) * spread
    outputs = np.stack([mean, np.zeros_like(mean)], axis=-1).astype(np.float32)
    assert (
        select(outputs, "epistemic_variance", 4, "regression")
        == np.argsort(-mean.std(0))[:4].tolist()
    )
