import numpy as np
import pytest
import torch
from torch import nn

from experiments.attacks import (
    STEPS,
    AttackDraws,
    AttackedModel,
    differentiable_flag,
    fgsm,
    log_mean_probs,
    measure_attacks,
    pgd,
    quiet_pgd,
    towards,
)
from model_store.artifacts.store import ModelStore
from model_store.conformal.detectors import flag_statistic
from model_store.inference.model import NEEDED, Model
from tests.support.models import scale_model
from training.bayes.flows import realnvp
from training.bayes.likelihoods import Categorical
from training.bayes.members import MemberPosterior
from training.bayes.network import BayesianModel
from training.export.served import served_network
from training.networks.networks import MemberNetwork
from training.versions import open_parent

MINIMUM, MAXIMUM = -2.0, 6.0
SPAN = MAXIMUM - MINIMUM
ROWS, INPUTS, CLASSES, MEMBERS = 200, 6, 3, 4


@pytest.fixture
def rows():
    return MINIMUM + SPAN * torch.rand(ROWS, INPUTS, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def ensemble(rows):
    """Create an ensemble of linear softmax models."""
    generator = torch.Generator().manual_seed(0)
    members = [nn.Linear(INPUTS, CLASSES) for _ in range(MEMBERS)]
    for member in members:
        with torch.no_grad():
            member.weight.copy_(torch.randn(CLASSES, INPUTS, generator=generator))
            member.bias.zero_()
    model = BayesianModel(
        MemberNetwork(members, (INPUTS,)), MemberPosterior(MEMBERS), Categorical(CLASSES)
    ).eval()
    return AttackedModel(served_network(model, rows, 0), model.posterior, MINIMUM, MAXIMUM)


def log_probs(model, x, draws=MEMBERS):
    with torch.no_grad():
        return log_mean_probs(model.log_probs(x, model.theta(AttackDraws(draws))))


def labels(model, x):
    return log_probs(model, x).argmax(1)


def gradient(ensemble, x, y, draws):
    weights = torch.stack(
        [m.weight for m in ensemble.network.modules() if isinstance(m, nn.Linear)]
    )[:draws].double()
    probs = torch.einsum("kci,ni->knc", weights, x.double()).softmax(-1)
    label_probs = probs[:, torch.arange(len(x)), y]
    share = label_probs / label_probs.sum(0)
    return torch.einsum("kn,knc,kci->ni", share, probs - nn.functional.one_hot(y, CLASSES), weights)


@pytest.mark.parametrize("draws", [1, MEMBERS])
def test_fgsm_moves_along_sign_of_analytic_gradient(ensemble, rows, draws):
    y = labels(ensemble, rows)
    (adversarial,) = fgsm(ensemble, rows, y, [0.01], AttackDraws(draws))
    expected = gradient(ensemble, rows, y, draws)
    inside = (rows > MINIMUM + 0.1) & (rows < MAXIMUM - 0.1) & (expected.abs() > 1e-5)
    assert inside.float().mean() > 0.5
    assert torch.equal((adversarial - rows).sign()[inside], expected.sign().float()[inside])
    assert torch.allclose((adversarial - rows).abs()[inside], torch.tensor(0.01 * SPAN), rtol=1e-4)


def test_larger_fgsm_steps_succeed_more_often(ensemble, rows):
    y = labels(ensemble, rows)
    unchanged_counts = [
        (labels(ensemble, adversarial) == y).sum()
        for adversarial in fgsm(ensemble, rows, y, [0.0, 0.1, 0.3], AttackDraws(4))
    ]
    assert unchanged_counts[0] == ROWS
    assert unchanged_counts[0] > unchanged_counts[1] > unchanged_counts[2]


def run_attacks(model, rows, seed=0, fresh=False):
    y = labels(model, rows)
    draws = AttackDraws(3, seed, fresh)

    def statistic(_, density):
        return density[:, 0]

    return {
        "fgsm": (0.1, fgsm(model, rows, y, [0.1], draws)[0]),
        "towards": (0.05, towards(model, rows, torch.zeros_like(y), 5, draws, 0.01)),
        "pgd": (0.1, pgd(model, rows, y, 0.1, 5, draws, seed)),
        "quiet_pgd": (0.1, quiet_pgd(model, rows, y, 0.1, 5, draws, statistic, seed)),
    }


def test_attacks_stay_within_radius_and_input_range(ensemble, rows):
    for name, (radius, adversarial) in run_attacks(ensemble, rows).items():
        assert adversarial.shape == rows.shape
        assert (adversarial - rows).abs().max() <= radius * SPAN * (1 + 1e-5), name
        assert (adversarial != rows).any(), name
        assert adversarial.min() >= MINIMUM, name
        assert adversarial.max() <= MAXIMUM, name


@pytest.fixture
def hypernetwork(rows):
    """Create a Bayesian hypernetwork, whose draws depend on noise."""
    model = scale_model(realnvp, INPUTS, 8, CLASSES, log_scale=0.0).eval()
    return AttackedModel(served_network(model, rows, 0), model.posterior, MINIMUM, MAXIMUM)


def test_attacks_depend_only_on_seeds(hypernetwork, rows):
    first, second = run_attacks(hypernetwork, rows), run_attacks(hypernetwork, rows)
    reseeded = run_attacks(hypernetwork, rows, seed=1)
    for name in first:
        assert torch.equal(first[name][1], second[name][1])
        assert not torch.equal(first[name][1], reseeded[name][1])


def test_only_fresh_draws_differ_between_steps(hypernetwork):
    for fresh in (False, True):
        draws = AttackDraws(3, 5, fresh)
        assert torch.equal(hypernetwork.theta(draws, 0), hypernetwork.theta(draws, 1)) is not fresh
    six_draws = hypernetwork.theta(AttackDraws(6, 5))
    assert torch.allclose(
        torch.cat([hypernetwork.theta(AttackDraws(3, 5, True), i) for i in (0, 1)]), six_draws
    )


def test_attack_does_not_depend_on_other_rows(ensemble, rows):
    y = labels(ensemble, rows)
    batch = fgsm(ensemble, rows, y, [0.1], AttackDraws(3))[0]
    assert torch.equal(fgsm(ensemble, rows[:7], y[:7], [0.1], AttackDraws(3))[0], batch[:7])
    batch = pgd(ensemble, rows, y, 0.1, 4, AttackDraws(3), 8)
    assert torch.allclose(pgd(ensemble, rows[:7], y[:7], 0.1, 4, AttackDraws(3), 8), batch[:7])


def test_targeted_attack_raises_target_probability(ensemble, rows):
    target = torch.zeros(ROWS, dtype=torch.int64)
    stages = [
        rows,
        *(towards(ensemble, rows, target, n, AttackDraws(MEMBERS), 0.02) for n in (3, 10)),
    ]
    target_log_probs = torch.stack([log_probs(ensemble, x)[:, 0] for x in stages])
    can_rise = target_log_probs[0] < -1e-3  # The other rows already have this label.
    assert can_rise.sum() > ROWS // 3
    assert (target_log_probs.diff(dim=0)[:, can_rise] > 0).all()


def test_pgd_reaches_at_least_the_loss_of_fgsm(ensemble, rows):
    y = labels(ensemble, rows)
    (one_step,) = fgsm(ensemble, rows, y, [0.1], AttackDraws(MEMBERS))
    many_steps = pgd(ensemble, rows, y, 0.1, 40, AttackDraws(MEMBERS))
    losses = [
        -log_probs(ensemble, x).gather(1, y[:, None]).mean() for x in (rows, one_step, many_steps)
    ]
    assert losses[0] < losses[1] < losses[2] + 1e-3


def test_quiet_attack_changes_labels_with_lower_score_than_pgd(ensemble, rows):
    y = labels(ensemble, rows)

    def statistic(_, density):
        return density[:, 0]

    draws = AttackDraws(MEMBERS)
    loud = pgd(ensemble, rows, y, 0.25, 20, draws)
    quiet = quiet_pgd(ensemble, rows, y, 0.25, 20, draws, statistic)
    network = ensemble.network
    residual = torch.nn.Sequential(network.spectrum, network.density["residual"])
    is_changed = (labels(ensemble, loud) != y) & (labels(ensemble, quiet) != y)
    assert is_changed.sum() > ROWS // 4
    assert residual(quiet)[is_changed].median() < residual(loud)[is_changed].median()
    assert (residual(quiet) <= residual(loud))[is_changed].float().mean() > 0.5


@pytest.fixture(scope="module")
def model(digits_store):
    return Model.load(ModelStore(digits_store).open("digits", "1", files=NEEDED))


def test_differentiable_flag_matches_flag_statistic_and_has_gradients(model, digits_rows):
    calibration, names = model.calibration, model.manifest.detectors.density
    theta = model.runtime.draw(0, 0, 100)
    log_probs, density = model.runtime.run(digits_rows[:40], theta[:, None])
    prediction = model.prediction(log_probs, density)
    surprisals = calibration.compute_surprisals(
        prediction.detected, prediction.calibrated_scores.labels, 100
    )
    expected = flag_statistic(surprisals, calibration.names.combined)
    outputs = torch.from_numpy(log_probs).double().requires_grad_()
    statistic = differentiable_flag(calibration, names)(outputs, torch.from_numpy(density).double())
    assert np.allclose(statistic.detach().numpy(), expected, rtol=1e-4, atol=1e-4)
    (gradient,) = torch.autograd.grad(statistic.sum(), outputs)
    assert torch.isfinite(gradient).all()
    assert (gradient != 0).any()


def test_attacks_lower_accuracy_of_published_version(digits_store, model, tmp_path):
    version = open_parent(ModelStore(digits_store), "digits", "model")
    measured = measure_attacks(version, model, tmp_path, rows=32)
    iterated = {"towards-first-class", "pgd-0.1", "pgd-0.2", "quiet-pgd-0.1", "quiet-pgd-0.2"}
    steps = {f"fgsm-{step:g}-of-{draws}-draws" for step in STEPS for draws in (1, 32)}
    assert set(measured) == steps | iterated
    assert measured["pgd-0.2"]["accuracy"] < measured["fgsm-0.05-of-1-draws"]["accuracy"] - 0.2
    quiet = measured["quiet-pgd-0.2"]
    assert quiet["hits"] <= 1 - quiet["accuracy"]
    assert {"flag", *model.manifest.detectors.combined} <= set(quiet["scores"])
