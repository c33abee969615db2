import numpy as np
import pytest
import torch

from model_store.inference.model import detector_scores
from model_store.inference.noise import DRAW_INDEX
from model_store.inference.runtime import MAX_DRAW_SET_BYTES
from model_store.scores.classification import predictive_scores, predictive_sums
from training.data.rows import Rows
from training.export.graphs import CHECKED_DETECTORS, export, load_runtime
from training.export.served import served_network
from training.model import build, initialise
from training.recipe import Recipe
from training.scoring import MIN_SHARING_ROWS, draw_seed, rows_per_draw_set, served_scores

INPUTS, HIDDEN = 30, 700
DRAWS = 1000


@pytest.fixture(scope="module")
def runtime(fits):
    return build_runtime("bbb-gaussian", {"initial_log_std": -1.0})


def build_runtime(method, posterior):
    recipe = Recipe.model_validate(
        {
            "name": "a",
            "method": method,
            "data": {
                "source": "digits",
                "validation": 1,
                "reference": 1,
                "ranking": 1,
            },
            "network": {"hidden": [HIDDEN]},
            "posterior": posterior,
            "training": {"epochs": 1},
        }
    )
    model = build(recipe, (INPUTS,), 4).eval()
    x = torch.from_numpy(rows().x)
    initialise(model, x)
    files = export(model, served_network(model, x, 0, names=CHECKED_DETECTORS))
    return load_runtime(model, files)


def rows():
    x = np.random.default_rng(0).normal(size=(200, INPUTS)).astype(np.float32)
    return Rows(x, np.zeros(200, dtype=np.int64))


@pytest.mark.slow
def test_streamed_draw_set_is_bit_identical_to_a_stored_draw_set(runtime):
    x = rows().x[:3]
    assert DRAWS * runtime.draw_bytes > MAX_DRAW_SET_BYTES
    streamed = runtime.draw_set(7, DRAWS)
    assert streamed.theta is None
    stored = runtime.draw_set(7, 100)
    assert stored.theta is not None
    log_probs, density = runtime.run_set(x, streamed)
    assert log_probs.shape == (DRAWS, 3, 4)
    first, same_density = runtime.run_set(x, stored)
    np.testing.assert_array_equal(log_probs[:100], first)
    np.testing.assert_array_equal(density, same_density)


def test_rows_run_in_parts_are_bit_identical_to_single_rows(runtime):
    draws = runtime.draw_set(7, 3)
    outputs, density = runtime.run_set(rows().x, draws)  # more rows than one run takes
    for n in (0, 127, 128, 199):
        row_outputs, row_density = runtime.run_set(rows().x[n : n + 1], draws)
        np.testing.assert_array_equal(row_outputs[:, 0], outputs[:, n])
        np.testing.assert_array_equal(row_density[0], density[n])


def test_calibration_rows_that_share_draws_match_a_request(runtime):
    sample, counts, share = rows().take(np.arange(10)), [1, 3], 4
    names = CHECKED_DETECTORS
    scores, densities = served_scores(runtime, sample, counts, 3, share)
    for i, start in enumerate(range(0, 10, share)):
        log_probs, density = runtime.run_set(
            sample.x[start : start + share], runtime.draw_set(draw_seed(3, i), 3)
        )
        for j, count in enumerate(counts):
            expected = predictive_scores(predictive_sums(log_probs[:count]), standard_errors=False)
            for name, values in detector_scores(expected, density, names).items():
                actual = detector_scores(scores[j], densities, names)[name]
                np.testing.assert_allclose(
                    actual[start : start + share], values, rtol=1e-9, atol=1e-12
                )


@pytest.mark.slow
@pytest.mark.usefixtures("fits")
def test_rows_share_a_draw_set_only_if_draws_are_large_or_identical(runtime):
    assert rows_per_draw_set(runtime, 200, 100) == MIN_SHARING_ROWS
    assert rows_per_draw_set(runtime, 10_000, 1000) > MIN_SHARING_ROWS
    members = build_runtime("ensemble", {"members": 2})
    assert members.algorithm == DRAW_INDEX
    assert rows_per_draw_set(members, 200, 2) == 200
    masks = build_runtime("dropout", {})
    assert rows_per_draw_set(masks, 200, 100) == 1
