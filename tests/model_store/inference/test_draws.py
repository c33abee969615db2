"""Rows under draws: parts of rows and of draws are the same parts of the whole."""

import numpy as np
import pytest

from tests.support import tiny

ROWS = 7


@pytest.fixture
def whole(tmp_path):
    """A model, what it knows of rows before their draws, and what it says of each row by each draw
    of its own."""
    model = tiny.loaded(tmp_path)
    x = tiny.rows(np.random.default_rng(0), ROWS)
    theta = np.stack([model.runtime.draw(seed, 0, tiny.DRAWS) for seed in range(ROWS)], axis=1)
    return model, x, model.runtime.before_draws(x)[0], theta


@pytest.mark.parametrize("rows", [slice(2, 5), np.array([6, 0, 3])], ids=["slice", "index"])
@pytest.mark.parametrize(("first", "last"), [(0, tiny.DRAWS), (5, 10)])
def test_each_row_is_under_its_own_draws_or_all_under_the_same(whole, rows, first, last):
    model, x, known, theta = whole
    own = model.runtime.own_draws(known, theta)(rows, first, last)
    assert own.tolist() == model.runtime.run(x, theta)[0][first:last, rows].tolist()
    draws = model.runtime.draw_set(3, tiny.DRAWS)
    shared = model.runtime.shared_draws(known, draws)(rows, first, last)
    assert shared.tolist() == model.runtime.run_set(x, draws)[0][first:last, rows].tolist()
    assert own.tolist() != shared.tolist()
