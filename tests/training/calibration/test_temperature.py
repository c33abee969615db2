import math

import numpy as np
import pytest
import torch
from scipy import optimize, special

from model_store.inference.runtime import Runtime
from tests.support.models import scale_model
from tests.support.recipes import recipe_with
from training.bayes.flows import realnvp
from training.bayes.likelihoods import Categorical, Gaussian
from training.bayes.posterior import noise
from training.calibration.temperature import (
    PRIOR_STD,
    choose_temperature,
    fit_temperature,
    set_temperature,
)
from training.data.rows import Rows
from training.export.graphs import export
from training.export.quantise import quantise_network
from training.export.served import served_network
from training.fit import temper
from training.model import initialise
from training.seeds import Stream

ROWS = 20_000


def sample_classes(rows, scale=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = 2.0 * torch.randn(rows, 5, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]
    return torch.log_softmax(scale * logits, dim=-1)[None], labels


@pytest.mark.parametrize("scale", [0.4, 1.0, 2.5])
def test_temperature_recovers_scale_of_logits(scale):
    log_probs, y = sample_classes(ROWS, scale)
    actual = fit_temperature(Categorical(5), log_probs, y)
    # The information about log T in a row is the variance of log p over its classes at T.
    log_p = log_probs[0] / scale
    p = log_p.softmax(1)
    information = (p * log_p**2).sum() - (p * log_p).sum(1).square().sum()
    assert math.log(actual) == pytest.approx(math.log(scale), abs=6 / math.sqrt(information) + 1e-3)


@pytest.mark.parametrize("factor", [0.25, 1.0, 4.0])
def test_temperature_recovers_scale_of_variances(factor):
    generator = torch.Generator().manual_seed(1)
    mean, log_variance = torch.randn(2, ROWS, generator=generator, dtype=torch.float64)
    y = mean + (0.5 * log_variance).exp() * torch.randn(
        ROWS, generator=generator, dtype=torch.float64
    )
    moments = torch.stack([mean, log_variance - math.log(factor)], dim=-1)[None]
    actual = fit_temperature(Gaussian("homoscedastic"), moments, y)
    assert math.log(actual) == pytest.approx(math.log(factor), abs=6 * math.sqrt(2 / ROWS) + 1e-3)


def test_temperature_maximises_penalised_likelihood_of_mean_over_draws():
    generator = np.random.default_rng(0)
    logits, y = generator.normal(size=(7, 40, 3)), generator.integers(3, size=40)

    def loss(log_t):
        mean = special.softmax(logits / math.exp(log_t), axis=-1).mean(axis=0)
        return (log_t / PRIOR_STD) ** 2 / 2 - np.log(mean[np.arange(40), y]).sum()

    expected = optimize.minimize_scalar(loss, bounds=(-2.3, 2.3), method="bounded").x
    log_probs = torch.from_numpy(special.log_softmax(logits, axis=-1))
    assert math.log(
        fit_temperature(Categorical(3), log_probs, torch.from_numpy(y))
    ) == pytest.approx(expected, abs=2e-3)


def test_temperature_stays_above_0_if_all_labels_are_correct():
    log_probs = torch.log_softmax(5 * torch.eye(3, dtype=torch.float64).repeat(20, 1), dim=-1)[None]
    assert fit_temperature(Categorical(3), log_probs, torch.arange(3).repeat(20)) > 0.25


@pytest.mark.parametrize(
    ("rows", "scale"), [(60, 1.0), (60, 1.3), (2000, 1.0), (2000, 1.3), (2, 1.0)]
)
@pytest.mark.parametrize("seed", range(3))
def test_temperature_applies_only_if_cross_validated_gain_is_significant(rows, scale, seed):
    likelihood = Categorical(5)
    log_probs, y = sample_classes(rows, scale, seed)
    gains = np.zeros(rows)
    for fit_rows, test_rows in (
        (slice(0, None, 2), slice(1, None, 2)),
        (slice(1, None, 2), slice(0, None, 2)),
    ):
        t = fit_temperature(likelihood, log_probs[:, fit_rows], y[fit_rows])
        after = torch.log_softmax(log_probs[0, test_rows] / t, dim=-1)
        gains[test_rows] = (after - log_probs[0, test_rows])[torch.arange(len(after)), y[test_rows]]
    actual = choose_temperature(likelihood, log_probs, y)
    assert actual.gain == pytest.approx(gains.mean(), abs=1e-12)
    assert actual.standard_error == pytest.approx(gains.std(ddof=1) / math.sqrt(rows), abs=1e-12)
    assert actual.value == (actual.fitted if actual.gain > actual.standard_error else 1.0)
    if rows == 2000 and scale == 1.3:  # a gain of 10 standard errors
        assert actual.value == pytest.approx(1.3, abs=0.3)


def test_temperature_is_1_for_one_row():
    assert choose_temperature(Categorical(5), *sample_classes(1)).value == 1.0


@pytest.fixture(scope="module")
def model():
    model = scale_model(realnvp, 20, 96, 96, 96, 5, hidden=16)
    x = torch.randn(300, 20, generator=torch.Generator().manual_seed(0))
    initialise(model, x)
    with torch.no_grad():
        model.posterior.output.shift[-5:].mul_(4.0)
    return model.eval(), Rows(x.numpy(), np.random.default_rng(0).integers(5, size=300))


@pytest.mark.usefixtures("fits")
def test_float_and_int8_graphs_apply_the_temperature(model):
    model, rows = model
    result = served_network(model, torch.from_numpy(rows.x), 0, names=())

    def outputs():
        files = export(model, result)
        for network in (files["network.onnx"], quantise_network(files["network.onnx"])):
            runtime = Runtime(files["sampler.onnx"], network, model.posterior.noise_dimension)
            yield runtime.run(rows.x[:8], runtime.draw(0, 0, 6)[:, None])[0]

    model.likelihood.temperature.fill_(1.0)
    base_outputs = list(outputs())
    temperature = set_temperature(model, rows, 10, 0).value
    assert temperature > 1.5
    assert temperature == pytest.approx(model.likelihood.temperature.item())
    for base, actual in zip(base_outputs, outputs(), strict=True):
        expected = special.log_softmax(base.astype(np.float64) / temperature, axis=-1)
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("draws", [2, 30])
def test_temper_ignores_previous_temperature_and_uses_served_draws(model, draws):
    (model, rows), recipe = model, recipe_with(serving={"draws": draws})
    model.likelihood.temperature.fill_(3.0)
    temperature = temper(model, recipe, rows)
    model.likelihood.temperature.fill_(1.0)
    eps = noise(model.posterior, draws, recipe.seed, Stream.TEMPERATURE)
    predictions = model.predict(torch.from_numpy(rows.x), eps).double()
    expected = choose_temperature(model.likelihood, predictions, torch.from_numpy(rows.y))
    assert temperature == expected
