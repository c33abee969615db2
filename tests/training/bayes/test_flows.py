import pytest
import torch
from torch import nn
from torch.func import jacrev, vmap

from training.bayes.flows import (
    Autoregressive,
    Coupling,
    ElementwiseAffine,
    WeightNormLinear,
    iaf,
    realnvp,
)

HIDDEN = 16


class JoinedCoupling(nn.Module):
    """A coupling that takes and returns its halves as one tensor."""

    def __init__(self, *settings, **options):
        super().__init__()
        self.coupling = Coupling(*settings, **options)

    def forward(self, z):
        halves, log_det = self.coupling(z.tensor_split((z.shape[-1] // 2,), dim=-1))
        return torch.cat(halves, dim=-1), log_det


TRANSFORMS = {
    "coupling": lambda d, g: JoinedCoupling(d, HIDDEN, g),
    "autoregressive": lambda d, g: Autoregressive(d, HIDDEN, g),
    "flipped coupling": lambda d, g: JoinedCoupling(d, HIDDEN, g, flipped=True),
    "flipped autoregressive": lambda d, g: Autoregressive(d, HIDDEN, g, flipped=True),
    "affine": lambda d, g: ElementwiseAffine(d, -1.0),
}
for _couplings in (0, 1, 2, 4):
    TRANSFORMS[f"realnvp-{_couplings}"] = lambda d, g, c=_couplings: realnvp(d, c, HIDDEN, -1.0, g)
    TRANSFORMS[f"iaf-{_couplings}"] = lambda d, g, c=_couplings: iaf(d, c, HIDDEN, -1.0, g)
CASES = [(name, dimension) for name in TRANSFORMS for dimension in (2, 5, 8)]
CASES += [(name, 1) for name in ("affine", "realnvp-0", "realnvp-4", "iaf-0", "iaf-1")]
every_flow = pytest.mark.parametrize(("name", "dimension"), CASES)


def make(name, dimension, seed=0):
    generator = torch.Generator().manual_seed(seed)
    flow = TRANSFORMS[name](dimension, generator).double()
    with torch.no_grad():
        for parameter in flow.parameters():
            parameter.add_(
                0.5 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            )
    return flow


def noise(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@every_flow
def test_rows_do_not_depend_on_other_rows(name, dimension):
    flow, z = make(name, dimension), noise(4, dimension)
    updated, log_det = flow(z)
    for row in range(4):
        row_output, row_log_det = flow(z[row])
        torch.testing.assert_close(updated[row], row_output)
        torch.testing.assert_close(log_det[row], row_log_det)


@every_flow
def test_log_determinant_is_finite_and_matches_jacobian(name, dimension):
    flow, z = make(name, dimension), noise(6, dimension)
    jacobian = vmap(jacrev(lambda row: flow(row)[0]))(z)
    torch.testing.assert_close(flow(z)[1], torch.linalg.slogdet(jacobian).logabsdet)
    assert flow(z)[1].isfinite().all()


@pytest.mark.parametrize("couplings", [0, 1, 2, 4])
def test_score_of_theta_matches_full_jacobian(couplings):
    flow, eps = make(f"realnvp-{couplings}", 5), noise(6, 5)

    def log_density(row):
        return -0.5 * row.square().sum() - flow(row)[1]

    jacobian, slope = vmap(jacrev(lambda row: flow(row)[0]))(eps), vmap(jacrev(log_density))(eps)
    theta, log_det, score = flow.with_score(eps)
    torch.testing.assert_close((theta, log_det), flow(eps))
    torch.testing.assert_close(score, torch.linalg.solve(jacobian.mT, slope))


@pytest.mark.parametrize("flow", [realnvp, iaf])
def test_flow_starts_near_its_affine_layer(flow):
    z = noise(100, 6)
    theta, log_det = flow(6, 4, HIDDEN, -3.0, torch.Generator().manual_seed(0)).double()(z)
    # Each of 4 steps moves a coordinate by up to a few times NEAR_IDENTITY.
    torch.testing.assert_close(theta, torch.exp(torch.tensor(-3.0)) * z, atol=0.02, rtol=0)
    torch.testing.assert_close(
        log_det, torch.full((100,), -18.0, dtype=torch.float64), atol=1.0, rtol=0
    )


@pytest.mark.parametrize("dimension", [2, 5, 8])
@pytest.mark.parametrize("hidden", [1, 2, 3, 7, 8, 64])
def test_autoregressive_coordinates_depend_only_on_earlier_coordinates(dimension, hidden):
    generator = torch.Generator().manual_seed(0)
    flow = Autoregressive(dimension, hidden, generator).double()
    jacobian = vmap(jacrev(lambda row: flow(row)[0]))(noise(500, dimension)).abs().amax(0)
    assert torch.equal(jacobian, jacobian.tril())
    dependence = jacobian.tril(-1)
    # With 500 rows of noise almost all units are active, so each coordinate except the last has an
    # effect.
    assert (dependence.amax(0)[:-1] > 0).all()
    if hidden >= dimension - 1:  # a unit for every degree
        assert (jacobian.diagonal(-1) > 0).all()


@pytest.mark.parametrize(
    ("name", "fixed_slice"), [("coupling", slice(0, 2)), ("flipped coupling", slice(2, 5))]
)
def test_coupling_changes_only_one_half(name, fixed_slice):
    z = noise(7, 5)
    updated, _ = make(name, 5)(z)
    is_fixed = torch.zeros(5, dtype=torch.bool)
    is_fixed[fixed_slice] = True
    assert torch.equal(updated[:, is_fixed], z[:, is_fixed])
    assert (updated[:, ~is_fixed] != z[:, ~is_fixed]).all()


@pytest.mark.parametrize("is_masked", [False, True])
def test_weight_norm_linear_matches_its_equation_before_and_after_folding(is_masked):
    generator = torch.Generator().manual_seed(0)
    mask = torch.tensor([[1.0, 1, 0, 1], [0, 1, 1, 0], [0, 0, 0, 0]]) if is_masked else None
    layer = WeightNormLinear(4, 3, generator, 0.7, mask).double()
    with torch.no_grad():
        layer.bias.copy_(noise(3))
        layer.scale.mul_(1 + noise(3))
        layer.scale[0].neg_()
    x = noise(2, 5, 4)
    expected = torch.empty(2, 5, 3, dtype=torch.float64)
    for unit in range(3):
        v = layer.direction[unit] * (mask.double()[unit] if is_masked else 1.0)
        length = v.square().sum().sqrt()
        product = x @ v / length if length > 0 else torch.zeros(2, 5, dtype=torch.float64)
        expected[..., unit] = layer.scale[unit] * product + layer.bias[unit]
    torch.testing.assert_close(layer(x), expected.detach() + 0)
    layer.fold()
    torch.testing.assert_close(layer(x), expected.detach())
    torch.testing.assert_close(layer.scale, torch.linalg.vector_norm(layer.direction, dim=1))
