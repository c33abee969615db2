import numpy as np
import pytest
from scipy import integrate, stats

from training.evaluation.metrics import TargetMeasures, distribution_function, pit_measures

MEAN, STD = np.array([[0.0], [1.5], [-4.0]]), np.array([[1.0], [0.3], [2.0]])
OUTPUTS = np.stack([MEAN, 2 * np.log(STD)], axis=-1)  # three draws of one row


def mixture_cdf(value):
    return np.mean(
        [stats.norm.cdf(value, m, s) for m, s in zip(MEAN[:, 0], STD[:, 0], strict=True)]
    )


@pytest.mark.parametrize("y", [-9.0, -1.0, 1.4, 6.0])
def test_target_measures_match_numerical_integrals(y):
    measures = TargetMeasures.compute(OUTPUTS.astype(np.float32), np.array([y], dtype=np.float32))
    below = integrate.quad(lambda t: mixture_cdf(t) ** 2, -40, y, limit=200)[0]
    above = integrate.quad(lambda t: (1 - mixture_cdf(t)) ** 2, y, 40, limit=200)[0]
    assert measures.crps[0] == pytest.approx(below + above, rel=1e-5)
    assert measures.pit[0] == pytest.approx(mixture_cdf(y), rel=1e-5)
    density = np.mean(stats.norm.pdf(y, MEAN[:, 0], STD[:, 0]))
    assert measures.log_likelihood[0] == pytest.approx(np.log(density), rel=1e-5)


def test_pit_is_uniform_only_for_correct_distribution():
    generator = np.random.default_rng(1)
    rows = 2000
    outputs = np.zeros((2, rows, 2))
    right = pit_measures(distribution_function(outputs, generator.normal(size=rows)))
    assert right["p_value"] > 1e-6
    assert right["distance"] < 0.06
    narrow = pit_measures(distribution_function(outputs, 2 * generator.normal(size=rows)))
    assert narrow["p_value"] < 1e-6
    assert narrow["distance"] == pytest.approx(
        0.16, abs=0.04
    )  # largest CDF gap between N(0, 4) and N(0, 1)
