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
def attacked(rows):
    """An ensemble of linear softmax models."""
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


def log_probs(attacked, x, draws=MEMBERS):
    with torch.no_grad():
        return log_mean_probs(attacked.log_probs(x, attacked.theta(AttackDraws(draws))))


def labels(attacked, x):
    return log_probs(attacked, x).argmax(1)


def gradient(attacked, x, y, draws):
    weights = torch.stack(
        [m.weight for m in attacked.network.modules() if isinstance(m, nn.Linear)]
    )[:draws].double()
    probs = torch.einsum("kci,ni->knc", weights, x.double()).softmax(-1)
    custom = probs[:, torch.arange(len(x)), y]
    share = custom / custom.sum(0)
    return torch.einsum("kn,knc,kci->ni", share, probs - nn.functional.one_hot(y, CLASSES), weights)


@pytest.mark.parametrize("draws", [1, MEMBERS])
def test_fgsm_moves_along_the_sign_of_the_gradient_known_by_hand(attacked, rows, draws):
    y = labels(attacked, rows)
    (updated,) = fgsm(attacked, rows, y, [0.01], AttackDraws(draws))
    expected = gradient(attacked, rows, y, draws)
    inside = (rows > MINIMUM + 0.1) & (rows < MAXIMUM - 0.1) & (expected.abs() > 1e-5)
    assert inside.float().mean() > 0.5
    assert torch.equal((updated - rows).sign()[inside], expected.sign().float()[inside])
    assert torch.allclose((updated - rows).abs()[inside], torch.tensor(0.01 * SPAN), rtol=1e-4)


def test_fgsm_succeeds_more_often_the_larger_its_step(attacked, rows):
    y = labels(attacked, rows)
    retained = [
        (labels(attacked, updated) == y).sum()
        for updated in fgsm(attacked, rows, y, [0.0, 0.1, 0.3], AttackDraws(4))
    ]
    assert retained[0] == ROWS
    assert retained[0] > retained[1] > retained[2]


def everything(attacked, rows, seed=0, fresh=False):
    y = labels(attacked, rows)
    draws = AttackDraws(3, seed, fresh)

    def statistic(_, density):
        return density[:, 0]

    return {
        "fgsm": (0.1, fgsm(attacked, rows, y, [0.1], draws)[0]),
        "towards": (0.05, towards(attacked, rows, torch.zeros_like(y), 5, draws, 0.01)),
        "pgd": (0.1, pgd(attacked, rows, y, 0.1, 5, draws, seed)),
        "quiet_pgd": (0.1, quiet_pgd(attacked, rows, y, 0.1, 5, draws, statistic, seed)),
    }


def test_no_attack_leaves_its_radius_or_the_range(attacked, rows):
    for name, (radius, updated) in everything(attacked, rows).items():
        assert updated.shape == rows.shape
        assert (updated - rows).abs().max() <= radius * SPAN * (1 + 1e-5), name
        assert (updated != rows).any(), name
        assert updated.min() >= MINIMUM, name
        assert updated.max() <= MAXIMUM, name


@pytest.fixture
def drawn(rows):
    """A Bayesian hypernetwork, whose draws are noise."""
    model = scale_model(realnvp, INPUTS, 8, CLASSES, log_scale=0.0).eval()
    return AttackedModel(served_network(model, rows, 0), model.posterior, MINIMUM, MAXIMUM)


def test_an_attack_is_a_function_of_its_seeds(drawn, rows):
    first, second = everything(drawn, rows), everything(drawn, rows)
    other = everything(drawn, rows, seed=1)
    for name in first:
        assert torch.equal(first[name][1], second[name][1])
        assert not torch.equal(first[name][1], other[name][1])


def test_fresh_draws_differ_by_step_and_fixed_ones_do_not(drawn):
    for fresh in (False, True):
        draws = AttackDraws(3, 5, fresh)
        assert torch.equal(drawn.theta(draws, 0), drawn.theta(draws, 1)) is not fresh
    six = drawn.theta(AttackDraws(6, 5))
    assert torch.allclose(torch.cat([drawn.theta(AttackDraws(3, 5, True), i) for i in (0, 1)]), six)


def test_rows_in_other_company_are_attacked_alike(attacked, rows):
    y = labels(attacked, rows)
    together = fgsm(attacked, rows, y, [0.1], AttackDraws(3))[0]
    assert torch.equal(fgsm(attacked, rows[:7], y[:7], [0.1], AttackDraws(3))[0], together[:7])
    together = pgd(attacked, rows, y, 0.1, 4, AttackDraws(3), 8)
    assert torch.allclose(pgd(attacked, rows[:7], y[:7], 0.1, 4, AttackDraws(3), 8), together[:7])


def test_a_targeted_attack_raises_the_targets_probability(attacked, rows):
    target = torch.zeros(ROWS, dtype=torch.int64)
    places = [
        rows,
        *(towards(attacked, rows, target, n, AttackDraws(MEMBERS), 0.02) for n in (3, 10)),
    ]
    reached = torch.stack([log_probs(attacked, x)[:, 0] for x in places])
    away = reached[0] < -1e-3  # the others are there already
    assert away.sum() > ROWS // 3
    assert (reached.diff(dim=0)[:, away] > 0).all()


def test_pgd_finds_a_loss_at_least_as_high_as_fgsm(attacked, rows):
    y = labels(attacked, rows)
    (one_step,) = fgsm(attacked, rows, y, [0.1], AttackDraws(MEMBERS))
    large = pgd(attacked, rows, y, 0.1, 40, AttackDraws(MEMBERS))
    losses = [-log_probs(attacked, x).gather(1, y[:, None]).mean() for x in (rows, one_step, large)]
    assert losses[0] < losses[1] < losses[2] + 1e-3


def test_a_quiet_attack_changes_labels_and_is_quieter_than_pgd(attacked, rows):
    y = labels(attacked, rows)

    def statistic(_, density):
        return density[:, 0]

    draws = AttackDraws(MEMBERS)
    loud = pgd(attacked, rows, y, 0.25, 20, draws)
    quiet = quiet_pgd(attacked, rows, y, 0.25, 20, draws, statistic)
    network = attacked.network
    residual = torch.nn.Sequential(network.spectrum, network.density["residual"])
    pair = (labels(attacked, loud) != y) & (labels(attacked, quiet) != y)
    assert pair.sum() > ROWS // 4
    assert residual(quiet)[pair].median() < residual(loud)[pair].median()
    assert (residual(quiet) <= residual(loud))[pair].float().mean() > 0.5


@pytest.fixture(scope="module")
def model(digits_store):
    return Model.load(ModelStore(digits_store).open("digits", "1", files=NEEDED))


def test_the_differentiable_flag_is_the_flags_statistic_and_has_gradients(model, digits_rows):
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


def test_attacks_lower_the_accuracy_of_a_published_version(digits_store, model, tmp_path):
    version = open_parent(ModelStore(digits_store), "digits", "model")
    measured = measure_attacks(version, model, tmp_path, rows=32)
    iterated = {"towards-first-class", "pgd-0.1", "pgd-0.2", "quiet-pgd-0.1", "quiet-pgd-0.2"}
    steps = {f"fgsm-{step:g}-of-{draws}-draws" for step in STEPS for draws in (1, 32)}
    assert set(measured) == steps | iterated
    assert measured["pgd-0.2"]["accuracy"] < measured["fgsm-0.05-of-1-draws"]["accuracy"] - 0.2
    quiet = measured["quiet-pgd-0.2"]
    assert quiet["hits"] <= 1 - quiet["accuracy"]
    assert {"flag", *model.manifest.detectors.combined} <= set(quiet["scores"])
