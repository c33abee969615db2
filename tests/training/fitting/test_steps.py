import pytest
import torch
from torch import nn
from torch.nn import functional

from experiments.certify.exact import METHODS, recipe
from tests.support.recipes import recipe_with
from training.bayes.posterior import noise
from training.fitting.steps import FLUSH_STEPS, KLSchedule, Steps, adam, flush_moments
from training.model import build

STEPS = 1500  # .9**n is denormal from about n = 830


def fit_weights(flush_steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    weights = nn.Parameter(torch.linspace(-1.0, 1.0, 9))
    optimizer = torch.optim.Adam([weights], lr=1e-2, fused=True)
    for step in range(STEPS):
        gradient = torch.ones(9) if step < 3 else torch.eye(9)[-1]
        weights.grad = gradient
        optimizer.step()
        if step % flush_steps == 0:
            flush_moments(optimizer)
    return weights.detach(), optimizer.state[weights]["exp_avg"]


def test_flushing_moments_removes_denormals_and_does_not_affect_the_fit() -> None:
    expected, unflushed_means = fit_weights(10 * STEPS)
    weights, means = fit_weights(FLUSH_STEPS)
    tiny = torch.finfo(torch.float32).tiny
    assert ((unflushed_means != 0) & (unflushed_means.abs() < tiny)).any()
    assert not ((means != 0) & (means.abs() < tiny)).any()
    assert means[-1] != 0
    assert torch.equal(expected, weights)


def first_step(model, settings, x):
    """Return the predictions of the first step for each draw and row."""
    steps = Steps(model, settings, (5,), adam(model, settings), len(x))
    x, eps = steps.inputs(x, 0)
    return model.sample(x, eps, steps.groups(len(x)))[0]


@pytest.mark.parametrize("method", METHODS)
def test_training_draws_are_antithetic_and_serving_draws_are_not(method):
    settings = recipe(method, -1.0, **METHODS[method])
    model = build(settings, (5,), 0)
    x = torch.randn(16, 5)
    result = first_step(model, settings, x)[..., 0]
    theta = model.posterior(torch.zeros(1, model.posterior.noise_dimension))
    centre = model.likelihood(model.network(x, theta[None]))[..., 0]
    assert len(result) == settings.samples
    assert not torch.allclose(result[:1], centre, rtol=1e-2)
    torch.testing.assert_close(result.mean(0, keepdim=True), centre, rtol=1e-4, atol=1e-5)
    first, second = noise(model.posterior, 2, 0)
    assert not torch.allclose(first, -second)


def test_row_groups_have_different_masks_and_rows_keep_their_sample_count():
    settings = recipe_with(method="dropout-alpha", network={"hidden": [8]}, posterior={})
    model = build(settings, (5,), 3)
    result = first_step(model, settings, torch.ones(16, 5))
    assert result.shape == (10, 16, 3)
    by_group = result.unflatten(1, (8, 2))
    torch.testing.assert_close(by_group[:, :, 0], by_group[:, :, 1])
    distinct_outputs = by_group[:, :, 0].flatten(0, 1).round(decimals=4).unique(dim=0)
    assert len(distinct_outputs) > settings.samples  # among 80 masks of 8 units


@pytest.mark.parametrize(
    ("method", "task", "epoch_steps", "epochs"),
    [
        ("bbb-gaussian", "regression", 25, 80.0),  # 2,000 steps
        ("mvn", "regression", 5, 100.0),  # a tenth of all epochs
        ("bbb-gaussian", "classification", 25, 0.0),
        ("bhn-realnvp", "regression", 25, 0.0),
    ],
)
def test_kl_weight_ramps_up_only_for_regression_with_weight_posterior(
    method, task, epoch_steps, epochs
):
    settings = recipe_with(method=method, task=task, posterior={}, training={"epochs": 1000})
    schedule = KLSchedule.from_recipe(settings, 10, epoch_steps)
    assert schedule.ramp_epochs == epochs
    steps = max(1, round(epochs * epoch_steps))
    weights = [schedule.weight(step) for step in (0, steps - 1, steps)]
    assert weights == pytest.approx([0.1 / steps, 0.1, 0.1])


@pytest.mark.parametrize(
    ("is_continued", "ramp", "epochs"), [(True, None, 0.0), (False, None, 80.0), (True, 7, 7)]
)
def test_continued_posterior_has_no_kl_ramp_unless_configured(is_continued, ramp, epochs):
    training = {"epochs": 1000, "kl_ramp_epochs": ramp}
    settings = recipe_with(
        method="bbb-gaussian", task="regression", posterior={}, training=training
    )
    assert KLSchedule.from_recipe(settings, 10, 25, is_continued).ramp_epochs == epochs


def test_gradients_of_confident_predictions_are_not_denormal():
    model = build(recipe_with(method="bbb-gaussian"), (5,), 3)
    generator = torch.Generator().manual_seed(0)
    size = model.posterior.theta_dimension
    model.posterior.start_at(5.0 * torch.randn(size, generator=generator))
    x = torch.randn(256, 5, generator=generator)
    outputs = []
    model.likelihood.register_forward_pre_hook(lambda _, inputs: outputs.extend(inputs))
    eps = noise(model.posterior, 2, 0)
    predictions, _ = model.sample(x, eps)
    outputs[0].retain_grad()
    predictions.gather(2, predictions.argmax(-1, keepdim=True)).sum().backward()
    with torch.no_grad():
        expected = predictions.exp() - functional.one_hot(predictions.argmax(-1), 3)
    gradient, tiny = -outputs[0].grad, torch.finfo(torch.float32).tiny
    assert ((expected != 0) & (expected.abs() < tiny)).any()
    assert not ((gradient != 0) & (gradient.abs() < tiny)).any()
    torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=1e-6)
