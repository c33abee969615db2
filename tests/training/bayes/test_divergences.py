import math

import pytest
import torch
from torch import nn
from torch.distributions import (
    Independent,
    MixtureSameFamily,
    MultivariateNormal,
    Normal,
    kl_divergence,
)

from training.bayes.dropout import MaskPosterior
from training.bayes.flows import iaf, realnvp
from training.bayes.gaussian import MixturePriorPosterior, NormalPriorPosterior, ScaleMixturePrior
from training.bayes.hypernetwork import HypernetworkPosterior
from training.bayes.layers import Slot, Stochastic
from training.bayes.matrix_normal import MatrixNormalPosterior
from training.bayes.posterior import standard_noise
from training.networks.networks import DrawnNetwork, MemberNetwork

PRIOR_STD, NOISE_STD = 1.5, 0.7


def perturb(posterior, seed=0):
    """Convert a posterior to float64 and perturb its parameters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in posterior.double().parameters():
            parameter.add_(
                0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            )
    return posterior


def test_gaussian_kl_and_gradient_match_closed_form():
    posterior = perturb(NormalPriorPosterior(5, -1.0, 0.8))
    q = Independent(Normal(posterior.mu, posterior.sigma), 1)
    p = Independent(Normal(torch.zeros(5, dtype=torch.float64), 0.8), 1)
    theta, kl = posterior.sample(standard_noise(3, 5, 0).double())
    torch.testing.assert_close(kl, kl_divergence(q, p).expand(3))
    gradients = (
        torch.autograd.grad(value, [posterior.mu, posterior.rho])
        for value in (kl[0], kl_divergence(q, p))
    )
    torch.testing.assert_close(*gradients)
    torch.testing.assert_close(
        theta, posterior.mu + posterior.sigma * standard_noise(3, 5, 0).double()
    )


@pytest.mark.parametrize("name", ["bbb-gaussian", "bbb-mixture", "mvn"])
def test_layer_moments_have_the_gradients_of_separate_operations(name):
    slots = [Slot("a", (3, 2)), Slot("b", (2, 2))]
    posterior = perturb(
        {
            "bbb-gaussian": lambda: NormalPriorPosterior(10, -1.0, 0.8),
            "bbb-mixture": lambda: MixturePriorPosterior(
                10, -1.0, ScaleMixturePrior(0.3, 1.2, 0.1)
            ),
            "mvn": lambda: MatrixNormalPosterior(slots, -1.0, 0.8),
        }[name]()
    )
    eps = standard_noise(3, 10, 0).double()
    mean, std = posterior.moments()
    *expected, kl = mean.split([6, 4]), std.square().split([6, 4]), posterior.kl(eps, mean, std)
    *actual, actual_kl = posterior.layer_moments(eps, [6, 4])
    weights = standard_noise(1, 20, 1).double()[0]
    losses = []
    for parts, divergence in ((expected, kl), (actual, actual_kl)):
        moments = torch.cat([moment for part in parts for moment in part])
        losses.append(weights @ moments.sin() + 1.7 * divergence.mean())
    torch.testing.assert_close(losses[0], losses[1])
    gradients = (torch.autograd.grad(loss, [*posterior.parameters()]) for loss in losses)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(
    ("pi", "std_1", "std_2"), [(0.3, 1.2, 0.1), (0.7, 0.1, 1.2), (0.25, 0.37, 0.0025)]
)
def test_mixture_kl_and_gradient_match_log_density_ratio(pi, std_1, std_2):
    posterior = perturb(MixturePriorPosterior(5, -1.0, ScaleMixturePrior(pi, std_1, std_2)))
    theta, kl = posterior.sample(standard_noise(7, 5, 0).double())
    scales = Normal(
        torch.zeros(2, dtype=torch.float64), torch.tensor([std_1, std_2], dtype=torch.float64)
    )
    weights = torch.distributions.Categorical(torch.tensor([pi, 1 - pi], dtype=torch.float64))
    log_prior = MixtureSameFamily(weights, scales).log_prob(theta)
    log_ratio = (Normal(posterior.mu, posterior.sigma).log_prob(theta) - log_prior).sum(1)
    torch.testing.assert_close(kl, log_ratio)
    gradients = (
        torch.autograd.grad(value.sum(), [posterior.mu, posterior.rho], retain_graph=True)
        for value in (kl, log_ratio)
    )
    torch.testing.assert_close(*gradients)


def test_mixture_prior_with_equal_scales_is_gaussian():
    theta = standard_noise(7, 5, 0).double()
    expected = Normal(0.0, 0.6).log_prob(theta)
    torch.testing.assert_close(ScaleMixturePrior(0.4, 0.6, 0.6).log_density(theta), expected)


@pytest.mark.parametrize("prior_std", [1.0, 0.5])
def test_matrix_normal_kl_and_covariance_match_vectorised_normal(prior_std):
    posterior = perturb(
        MatrixNormalPosterior([Slot("a", (3, 2)), Slot("b", (2, 1))], -0.5, prior_std)
    )
    kl = 0.0
    for mean, row, column in zip(
        posterior.means, posterior.log_rows, posterior.log_columns, strict=True
    ):
        covariance = torch.kron(torch.diag((2 * row).exp()), torch.diag((2 * column).exp()))
        prior = MultivariateNormal(
            torch.zeros_like(mean).flatten(), prior_std**2 * torch.eye(mean.numel()).double()
        )
        kl += kl_divergence(MultivariateNormal(mean.flatten(), covariance), prior)
    estimates = posterior.sample(standard_noise(4, 8, 0).double())[1]
    torch.testing.assert_close(estimates, kl.expand(4))
    root = posterior(torch.eye(8).double()) - posterior(torch.zeros(1, 8).double())
    expected = [
        math.exp(2 * (r + c))
        for r in posterior.log_rows[0].tolist()
        for c in posterior.log_columns[0].tolist()
    ]
    torch.testing.assert_close(
        (root.T @ root).diagonal()[:6], torch.tensor(expected, dtype=torch.float64)
    )


def test_hypernet_kl_and_draws_match_matrix_normal_of_each_row():
    torch.manual_seed(0)
    stochastic = Stochastic("hypernet", hidden=4, initial_log_std=-1.0)
    network = DrawnNetwork(nn.Linear(3, 2), stochastic, (3,)).double()
    layer = network.module[0]
    with torch.no_grad():
        layer.head.weight.mul_(5)
    x = standard_noise(4, 3, 1).double()
    m, *logits = layer.infer(x)
    a, b = (logit.sigmoid() for logit in logits)
    kls, means, variances = [], [], []
    for n in range(4):
        mean = m[n][:, None] * layer.base
        covariance = torch.kron(torch.diag(a[n]), torch.diag(b[n]))
        q = MultivariateNormal(mean.flatten(), covariance)
        p = MultivariateNormal(torch.zeros(6).double(), torch.eye(6).double())
        kls.append(kl_divergence(q, p))
        means.append(x[n] @ mean + layer.bias)
        variances.append((x[n].square() * a[n]).sum() * b[n])
    mean, variance = torch.stack(means), torch.stack(variances)
    with torch.no_grad():
        outputs, kl = network.train().run(x, torch.zeros(20_000, 1, 6).double())
        torch.testing.assert_close(kl, torch.stack(kls).mean().expand_as(kl))
        result = network.eval()(x, standard_noise(20_000, 6, 2).double()[:, None])
    # Means and variances of 20,000 draws are off by 6 standard errors once in 500 million.
    for samples in (outputs, result):
        assert ((samples.mean(0) - mean).abs() < 6 * (variance / 20_000).sqrt()).all()
        assert ((samples.var(0) / variance - 1).abs() < 6 * math.sqrt(2 / 20_000)).all()


def test_hypernet_weights_start_at_initial_std_and_never_exceed_prior():
    torch.manual_seed(0)
    network = DrawnNetwork(nn.Linear(3, 2), Stochastic("hypernet", initial_log_std=-1.0), (3,))
    layer, x = network.module[0], standard_noise(50, 3, 1)
    with torch.no_grad():
        result = network.eval()(1e15 * x, standard_noise(10, 6, 2)[:, None])
        _, *extreme_logits = layer.infer(1e30 * x)
        layer.trunk.weight.zero_()
        layer.trunk.bias.zero_()
        _, *initial_logits = layer.infer(x)
    assert result.isfinite().all()
    for logit in extreme_logits:
        assert logit.sigmoid().max() == 1.0
    for logit in initial_logits:
        torch.testing.assert_close(logit.sigmoid().log(), torch.full_like(logit, -1.0))


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("kind", ["chain", "folded", "convolution"])
def test_local_samples_match_weight_draws_with_separate_noise_per_row(kind, has_bias):
    torch.manual_seed(0)
    layer = (
        nn.Conv2d(1, 2, 2, bias=has_bias)
        if kind == "convolution"
        else nn.Linear(4, 2, bias=has_bias)
    )
    module = nn.Sequential(layer, nn.Identity() if kind == "chain" else nn.Flatten())
    shape = (1, 2, 2) if kind == "convolution" else (4,)
    network = DrawnNetwork(module, Stochastic("weights"), shape).double()
    mean, std = standard_noise(2, network.theta_dimension, 1).double()
    std = std.abs()
    x = standard_noise(3, 4, 2).double()
    with torch.no_grad():
        samples = network.sample_locally(x, [mean], [std.square()], 20_000)
        theta = mean + std * standard_noise(20_000, network.theta_dimension, 3).double()
        expected = network(x, theta[:, None])
    assert samples.shape == expected.shape
    variance = expected.var(0)
    # Six standard errors for differences between the means and variances of 20,000 draws.
    assert ((samples.mean(0) - expected.mean(0)).abs() < 6 * (2 * variance / 20_000).sqrt()).all()
    assert ((samples.var(0) / variance - 1).abs() < 6 * math.sqrt(4 / 20_000)).all()
    assert torch.corrcoef(samples[:, :2, 0].T)[0, 1].abs() < 6 / math.sqrt(20_000)
    with torch.no_grad():
        same = network.sample_locally(
            x[:1].expand(4, -1), [torch.zeros_like(mean)], [std.square()], 3
        )
    torch.testing.assert_close(same[2], -same[0])
    assert len(same[1, :, 0].abs().unique()) == 4


@pytest.mark.parametrize(("kind", "count"), [("weights", 79_400 + 994), ("hypernet", 164_198)])
def test_parameter_counts_match_paper(kind, count):
    # Kristiadi, table 1: 784-100-10 without biases; hypernets with 30 hidden units.
    module = nn.Sequential(
        nn.Linear(784, 100, bias=False), nn.ReLU(), nn.Linear(100, 10, bias=False)
    )
    network = DrawnNetwork(module, Stochastic(kind, hidden=30), (784,))
    modules = [network] if kind == "hypernet" else [MatrixNormalPosterior(network.slots, -1.0, 1.0)]
    assert sum(p.numel() for part in modules for p in part.parameters()) == count


def test_masks_have_configured_keep_rate_and_mean_1():
    posterior = MaskPosterior([Slot("a", (2,), 0.8), Slot("b", (1,), 0.5)])
    theta = posterior(standard_noise(50_000, 3, 0))
    for i, keep in enumerate((0.8, 0.8, 0.5)):
        assert set(theta[:, i].tolist()) == {0.0, torch.tensor(1 / keep).item()}
        # The keep rate of 50,000 draws is off by 6 standard errors once in 500 million.
        assert abs((theta[:, i] > 0).float().mean() - keep) < 6 * math.sqrt(
            keep * (1 - keep) / 50_000
        )
    result = MaskPosterior([Slot("a", (2,), 0.8)], is_served=False)
    assert torch.equal(result(standard_noise(4, 2, 0)), torch.ones(4, 2))


def problem():
    generator = torch.Generator().manual_seed(0)
    mix = torch.tensor([[1.0, 0.6, 0.0], [0.0, 1.0, 0.0], [0.0, 0.3, 2.0]], dtype=torch.float64)
    design = torch.randn(40, 3, generator=generator, dtype=torch.float64) @ mix
    y = design @ torch.tensor([0.5, -1.0, 0.2], dtype=torch.float64)
    y = y + NOISE_STD * torch.randn(40, generator=generator, dtype=torch.float64)
    precision = design.T @ design / NOISE_STD**2 + torch.eye(3, dtype=torch.float64) / PRIOR_STD**2
    mean = torch.linalg.solve(precision, design.T @ y / NOISE_STD**2)
    covariance = NOISE_STD**2 * torch.eye(40).double() + PRIOR_STD**2 * design @ design.T
    evidence = MultivariateNormal(torch.zeros(40).double(), covariance).log_prob(y).item()
    return design, y, precision, mean, evidence


def log_likelihood(design, y, theta):
    return Normal(theta @ design.T, NOISE_STD).log_prob(y).sum(1)


def flow_posterior(flow):
    transform = flow(3, 2, 12, -1.0, torch.Generator().manual_seed(0))
    return HypernetworkPosterior(transform, 3, PRIOR_STD)


FAMILIES = {
    # A "full" family contains the posterior, so its best bound is the log evidence.
    "bbb-gaussian": (lambda: NormalPriorPosterior(3, -2.0, PRIOR_STD), "factorised"),
    "bbb-mixture": (
        lambda: MixturePriorPosterior(3, -2.0, ScaleMixturePrior(0.5, PRIOR_STD, PRIOR_STD)),
        "factorised",
    ),
    "mvn": (lambda: MatrixNormalPosterior([Slot("a", (3, 1))], -2.0, PRIOR_STD), "factorised"),
    "bhn-weights": (lambda: flow_posterior(realnvp), "full"),
    "bhn-iaf": (lambda: flow_posterior(iaf), "full"),
}


@pytest.mark.usefixtures("fits")
@pytest.mark.parametrize("family", FAMILIES)
def test_fit_recovers_best_posterior_in_family_for_linear_regression(
    family,
):
    make, kind = FAMILIES[family]
    design, y, precision, mean, evidence = problem()
    posterior = make().double()
    half = standard_noise(1_000, 3, 5).double()
    eps = torch.cat([half, -half])
    optimizer = torch.optim.LBFGS(
        posterior.parameters(), max_iter=150, line_search_fn="strong_wolfe"
    )

    def negative_bound():
        optimizer.zero_grad()
        theta, kl = posterior.sample(eps)
        loss = (kl - log_likelihood(design, y, theta)).mean()
        loss.backward()
        return loss

    optimizer.step(negative_bound)
    with torch.no_grad():
        fresh = standard_noise(20_000, 3, 6).double()
        theta, kl = posterior.sample(fresh)
        terms = log_likelihood(design, y, theta) - kl
        gap, error = evidence - terms.mean().item(), (terms.std() / math.sqrt(20_000)).item()
    factorised_gap = 0.5 * (precision.diagonal().log().sum() - torch.logdet(precision)).item()
    assert factorised_gap > 0.1
    best_gap = factorised_gap if kind == "factorised" else 0.0
    # With 2,000 fixed draws, the excess is about (parameters) / (2 x 2,000). The .05 allows for
    # the hundreds of parameters of the flows.
    assert best_gap - 6 * error < gap < best_gap + 6 * error + 0.05
    stds = (precision.inverse().diagonal() if kind == "full" else 1 / precision.diagonal()).sqrt()
    torch.testing.assert_close(theta.std(0), stds, rtol=0.12, atol=0)
    assert ((theta.mean(0) - mean).abs() < 0.15 * stds).all()


def fit_members(network, design, y):
    optimizer = torch.optim.LBFGS(network.parameters(), max_iter=100, line_search_fn="strong_wolfe")
    members = torch.arange(2.0).double()[:, None, None]

    def loss():
        optimizer.zero_grad()
        errors = (y - network(design, members)[..., 0]) / NOISE_STD
        value = 0.5 * errors.square().sum(1).mean() + network.weight_decay(PRIOR_STD)
        value.backward()
        return value

    optimizer.step(loss)


def test_anchored_member_is_posterior_mode_for_prior_around_its_anchor():
    design, y, _, _, _ = problem()
    torch.manual_seed(0)
    members = [nn.Linear(3, 1, bias=False) for _ in range(2)]
    network = MemberNetwork(members, (3,), anchor_std=PRIOR_STD).double()
    anchors = [member.weight[0].detach().clone() for member in network.members]
    fit_members(network, design, y)
    prior_precision = 3.0 / (2.0 * PRIOR_STD**2)
    gram = design.T @ design / NOISE_STD**2 + prior_precision * torch.eye(3).double()
    for member, anchor in zip(network.members, anchors, strict=True):
        right_side = design.T @ y / NOISE_STD**2 + prior_precision * anchor
        expected = torch.linalg.solve(gram, right_side)
        torch.testing.assert_close(member.weight[0].detach(), expected, rtol=1e-4, atol=1e-6)


def test_anchors_of_embedding_attention_and_gru_are_prior_draws():
    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(60, 16, padding_idx=0)
            self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
            self.norm = nn.LayerNorm((5, 16))
            self.recurrent = nn.GRU(16, 16, batch_first=True)

        def forward(self, x):
            h = self.embedding(x)
            return self.recurrent(self.norm(self.attention(h, h, h)[0]))[0].flatten(1)

    torch.manual_seed(0)
    network = MemberNetwork([Layers()], (5,), examples=torch.ones(4, 5).long(), anchor_std=2.0)
    member = network.members[0]
    assert (member.norm.weight == 1).all()
    assert (member.embedding.weight[0] == 0).all()
    anchored = {id(parameter) for parameter, *_ in network.anchors}
    for name, parameter in member.named_parameters():
        assert (id(parameter) in anchored) == (not name.startswith("norm"))
        if not name.startswith("norm"):
            has_inputs = "weight" in name and not name.startswith("embedding")
            std = 2.0 * math.sqrt(2 / 16) if has_inputs else 2.0
            # Six standard errors of a standard deviation
            assert abs(parameter.std() / std - 1) < 6 / math.sqrt(2 * parameter.numel()), name


def test_ensemble_members_with_weight_decay_find_posterior_mode():
    design, y, _, mean, _ = problem()
    network = MemberNetwork([nn.Linear(3, 1, bias=False) for _ in range(2)], (3,)).double()
    fit_members(network, design, y)
    for member in network.members:
        torch.testing.assert_close(member.weight[0].detach(), mean, rtol=1e-4, atol=1e-6)


def gradients(posterior, eps):
    loss = posterior.sample(eps)[1].mean()
    values = torch.autograd.grad(loss, [*posterior.parameters()], allow_unused=True)
    return torch.cat([g.flatten() for g in values if g is not None])


def test_path_gradients_are_unbiased():
    flow = realnvp(4, 2, 6, -0.5, torch.Generator().manual_seed(0))
    full = perturb(HypernetworkPosterior(flow, 4, PRIOR_STD))
    paths = HypernetworkPosterior(flow, 4, PRIOR_STD, follows_paths=True)
    eps = standard_noise(4000, 4, 0).double()
    torch.testing.assert_close(paths.sample(eps), full.sample(eps))
    parts = [gradients(paths, part) - gradients(full, part) for part in eps.split(100)]
    differences = torch.stack(parts)
    error = differences.std(0) / math.sqrt(len(differences))
    assert (differences.mean(0).abs() <= 5.0 * error + 1e-9).all()


def test_path_gradient_of_each_draw_is_zero_at_exact_posterior():
    flow = realnvp(4, 0, 6, math.log(PRIOR_STD), torch.Generator().manual_seed(0)).double()
    eps = standard_noise(1, 4, 0).double()
    for follows_paths in (True, False):
        actual = gradients(HypernetworkPosterior(flow, 4, PRIOR_STD, follows_paths), eps)
        assert (actual.abs().max() < 1e-6) == follows_paths
