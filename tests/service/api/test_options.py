"""A request's options: the rates that a calibration can give, and no others."""

import threading

import pytest

from model_store.errors import InvalidInput
from service.api.options import decision_options
from service.api.schemas import PredictRequest
from service.models.drift import Drift, Watched
from service.models.models import Served
from service.models.reservoir import Reservoir
from tests.support import tiny

SMALLEST = 1 / (tiny.RANKING + 1)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    model = tiny.loaded(tmp_path_factory.mktemp("tiny"))
    return Served(
        model,
        Reservoir(model, 0, threading.Event()),
        Drift(Watched.of_ranking(model.calibration.rank_tables(20).statistic)),
    )


@pytest.mark.parametrize("field", ["fpr", "fdr"])
def test_the_smallest_rate_is_accepted_and_none_below_it(served, field):
    def options(rate):
        return decision_options(PredictRequest(inputs=[], **{field: rate}), served, 20)

    assert getattr(options(SMALLEST), field) == SMALLEST
    with pytest.raises(
        InvalidInput, match=rf"^{field}: expected at least 0\.01, .* got 0\.009999$"
    ):
        options(0.009999)


def test_without_a_rate_flags_fire_at_5_percent(served):
    options = decision_options(PredictRequest(inputs=[]), served, 20)
    assert (options.fpr, options.fdr, options.risk) == (0.05, None, None)
