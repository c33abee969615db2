"""Choosing from a pool that is scored in parts: of copies, and of the rows that gain most alone."""

import numpy as np
import pytest

from model_store.scores.joint import BatchBald
from service.engine.acquisition import copies_of, id_hashes, jointly
from service.engine.jobs import Best
from service.engine.threads import at_once

DRAWS, ROWS = 8, 60


def said(seed):
    """Class probabilities of draws that disagree about few of the rows."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(DRAWS, ROWS, 3)) * rng.gamma(0.5, 2.0, size=(ROWS, 1))
    probs = np.exp(logits)
    return (probs / probs.sum(axis=2, keepdims=True)).astype(np.float32)


def best_of(probs, most, part):
    """The best candidates, of parts of so many rows."""
    best = Best(most)
    for first in range(0, ROWS, part):
        best.take(BatchBald.of(probs[:, first : first + part]), first)
    return best


@pytest.mark.parametrize("most", [60, 20])
def test_what_is_kept_of_parts_are_the_rows_that_gain_most_alone(most):
    probs = said(0)
    whole = BatchBald.of(probs)
    for part in (1, 7, 25, 60):
        best = best_of(probs, most, part)
        assert set(best.rows) == set(np.argsort(-whole.gain)[:most])
        assert best.candidates.gain.tolist() == whole.gain[best.rows].tolist()
        assert best.candidates.own.tolist() == whole.own[best.rows].tolist()
        assert best.candidates.said.tolist() == whole.said[best.rows].tolist()


@pytest.mark.parametrize("seed", range(3))
def test_a_choice_from_the_rows_that_gain_most_alone_is_that_from_all(seed):
    """If the last one chosen gains more than the first one left out did alone."""
    probs, copies = said(seed), at_once(copies_of(np.arange(ROWS, dtype=np.float32)[:, None]))
    hashes = id_hashes([str(i) for i in range(ROWS)], seed)

    def chosen(most):
        best = best_of(probs[:, copies.first], most, 7)
        rows, gains = at_once(jointly(BatchBald(best.candidates, DRAWS, seed), best.rows, copies, hashes, 3))
        return rows.tolist(), gains

    rows, gains = chosen(ROWS)
    enough = int((BatchBald.of(probs).gain >= gains[-1]).sum())
    assert enough < ROWS
    assert chosen(enough)[0] == rows


def test_copies_are_the_same_in_whatever_order_rows_come():
    x = np.array([[1, 2], [3, 4], [1, 2], [0, 0], [-0.0, 0], [3, 4]], dtype=np.float32)
    copies = at_once(copies_of(x))
    assert x[copies.first][copies.group].tobytes() == x.tobytes()
    assert len(copies.first) == 4
    order = np.array([5, 0, 3, 1, 4, 2])
    again = at_once(copies_of(x[order]))
    assert x[order][again.first].tobytes() == x[copies.first].tobytes()
    assert again.group.tolist() == copies.group[order].tolist()
