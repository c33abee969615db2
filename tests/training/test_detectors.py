"""Density detectors: the residual against numpy's SVD, and its cases in closed form."""

import numpy as np
import pytest
import torch
from conftest import scale_mlp

from training.detectors import EXPLAINED, Residual, ServedNetwork
from training.likelihoods import Categorical


def data(rows=300, seed=0):
    """Rows of 8 numbers whose 8 directions have very different variances, away from the origin."""
    rng = np.random.default_rng(seed)
    rotation = np.linalg.qr(rng.normal(size=(8, 8)))[0]
    return (rng.normal(size=(rows, 8)) * [10, 8, 5, 2, 1, 0.5, 0.2, 0.1]) @ rotation + 20


def score(detector, x):
    return detector(torch.from_numpy(np.float32(x))).numpy()


def test_the_residual_is_that_of_numpys_svd():
    x, new = data(), data(seed=0)[:50] + np.random.default_rng(1).normal(size=(50, 8))
    detector = Residual.fit(torch.from_numpy(np.float32(x)))
    _, singular, directions = np.linalg.svd(x - x.mean(0), full_matrices=False)
    share = np.cumsum(singular**2) / np.sum(singular**2)
    kept = 1 + int(np.sum(share < EXPLAINED))
    assert detector.components.shape == (8, kept)
    rest = (new - x.mean(0)) @ directions[kept:].T
    assert np.allclose(score(detector, new), np.square(rest).sum(1), rtol=1e-3)


def test_points_of_the_span_score_nothing_and_others_their_squared_distance_from_it():
    detector = Residual.fit(torch.from_numpy(np.float32(data())))
    components, mean = detector.components.numpy(), detector.mean.numpy()
    inside = mean + np.random.default_rng(2).normal(size=(20, components.shape[1])) @ components.T
    assert np.all(score(detector, inside) <= 1e-8 * np.square(inside - mean).sum(axis=1))
    orthogonal = np.linalg.svd(components)[0][:, -1]
    assert np.allclose(score(detector, inside + 3 * orthogonal), 9, rtol=1e-4)


@pytest.mark.parametrize("columns", [1, 2, 3])
def test_one_direction_at_least_is_left_to_look_at(columns):
    x = (
        torch.randn(50, columns, generator=torch.Generator().manual_seed(0))
        * torch.tensor([100.0, 0.1, 0.1])[:columns]
    )
    detector = Residual.fit(x)
    assert detector.components.shape[1] < columns
    assert (detector(x) > 0).any()


def test_constant_data_give_a_finite_detector():
    x = torch.full((10, 4), 7.0)
    detector = Residual.fit(x)
    assert torch.equal(detector(x), torch.zeros(10))
    assert (detector(x + torch.randn(10, 4, generator=torch.Generator().manual_seed(0))) > 0).all()


def test_the_served_network_gives_the_detectors_beside_the_network():
    x = torch.from_numpy(np.float32(data()))
    network = scale_mlp(8, 5, 3)
    served = ServedNetwork(network, Categorical(3), {"a": Residual.fit(x), "b": Residual.fit(x[:20])})
    theta = torch.ones(2, 1, 8)
    log_probs, features, density = served(x, theta)
    assert torch.equal(log_probs, torch.log_softmax(network(x, theta)[0], -1))
    assert torch.equal(features, network(x, theta)[1])
    assert torch.equal(density, torch.stack([served.density["a"](x), served.density["b"](x)], dim=1))
