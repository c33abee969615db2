"""The attacker who only asks: what it finds where it can be known, and what it counts."""

from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.questions import PAIRS, Service, attack, near_others, share
from model_store.conformal.rank_tables import ConformalPValues
from model_store.scores.classification import predictive_scores, predictive_sums
from training.data import Rows

SIZE, RADIUS, STEPS = 8, 0.2, 20


class Line(Service):
    """Two classes by the sign of x - .5, summed over numbers, and a flag on rows whose first number
    is too large; it keeps what it is asked."""

    def __init__(self, flags_above=np.inf):
        spec = SimpleNamespace(minimum=0.0, maximum=1.0)
        super().__init__(SimpleNamespace(manifest=SimpleNamespace(input=spec)), 0)
        self.flags_above, self.asked = flags_above, []

    def ask(self, x):
        self.rows += len(x)
        self.asked.append(x)
        logits = 20.0 * (x.astype(np.float64) - 0.5).sum(axis=1)
        log_probs = -np.logaddexp(0.0, np.stack([logits, -logits], axis=1))
        p_value = np.where(x[:, 0] > self.flags_above, 0.01, 1.0)
        return SimpleNamespace(
            scores=predictive_scores(predictive_sums(log_probs[None])),
            p_values=ConformalPValues(p_value, {"first": p_value}),
            detected={"first": x[:, 0].astype(np.float64)},
        )


@pytest.mark.parametrize(
    ("start", "flags_above", "wrong", "unflagged"),
    [
        (0.4, np.inf, True, True),  # .1 from the border
        (0.25, np.inf, False, False),  # .25 from it
        (0.4, -1.0, True, False),  # every row is flagged
        (0.4, 0.45, True, True),  # the flag lets rows through whose first number stays small
    ],
)
def test_a_row_loses_its_label_and_flag_if_and_only_if_the_radius_reaches(
    start, flags_above, wrong, unflagged
):
    service, x = Line(flags_above), np.full(SIZE, start, dtype=np.float32)
    found = attack(service, x, 0, RADIUS, STEPS, 0)
    assert (found.wrong is not None, found.unflagged is not None) == (wrong, unflagged)
    assert all(np.abs(asked - x).max() <= RADIUS + 1e-6 for asked in service.asked)
    if unflagged:
        assert found.unflagged == service.rows - 10  # asked again ten times
        assert found.again == 1.0
        assert share([found], found.unflagged) == 1.0
        assert share([found], found.unflagged - 1) == 0.0
    else:
        assert service.rows == STEPS * (2 * PAIRS + 1)


def test_rows_near_others_are_counted():
    x = np.array([[0.0, 0.0], [0.1, 0.0], [1.0, 1.0]], dtype=np.float32)
    rows = Rows(x, np.zeros(3, dtype=np.int64))
    assert near_others(rows, 0.2) == pytest.approx(2 / 3)
    assert near_others(rows, 0.05) == 0.0
