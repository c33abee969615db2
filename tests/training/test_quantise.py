"""Integer arithmetic in the exported network: what it computes, and that rows still do not see each other."""

import numpy as np
import onnx
import pytest
import torch

from model_store.runtime import Runtime
from training.data import Rows
from training.detectors import Residual, ServedNetwork
from training.export import export
from training.flows import realnvp
from training.model import BayesianModel, initialise
from training.networks import MLP
from training.posteriors import HypernetworkPosterior
from training.quantise import quantisation_error, quantise

INPUTS, HIDDEN = 30, 96


@pytest.fixture(scope="module")
def graphs():
    """Sampler, float32 network and integer network of a model on random rows, and the rows."""
    generator = torch.Generator().manual_seed(0)
    network = MLP((INPUTS, HIDDEN, HIDDEN, HIDDEN, 10), generator)
    posterior = HypernetworkPosterior(
        realnvp(network.theta_dimension, 2, 8, -2.0, generator), network.theta_dimension, 1.0
    )
    model = BayesianModel(network, posterior)
    x = torch.randn(200, INPUTS, generator=generator)
    initialise(model, x)
    files = export(model, ServedNetwork(network, {"residual": Residual.fit(x)}))
    rows = Rows(x.numpy(), np.zeros(200, dtype=np.int64))
    return files["sampler.onnx"], files["network.onnx"], quantise(files["network.onnx"]), rows


@pytest.fixture(scope="module")
def runtimes(graphs):
    sampler, exact, integer, _ = graphs
    dimension = 3 * HIDDEN + 10
    return Runtime(sampler, exact, dimension), Runtime(sampler, integer, dimension)


def test_hidden_products_of_draws_are_integer_and_the_first_and_last_are_not(graphs):
    nodes = onnx.load_model_from_string(graphs[2]).graph.node
    assert sum(node.op_type == "MatMulInteger" for node in nodes) == 2
    assert sum(node.op_type in ("MatMul", "Gemm") for node in nodes) == 2 + 2  # and the residual's two
    assert len(graphs[2]) < len(graphs[1])


def test_it_computes_the_network_to_the_precision_of_its_levels(graphs, runtimes):
    exact, integer = runtimes
    x = graphs[3].x
    theta = exact.draw(3, 0, 7)[:, None]
    log_probs, density = exact.run(x, theta)
    rounded, same_density = integer.run(x, theta)
    np.testing.assert_array_equal(density, same_density)
    # Two products with relative errors of about 1/127 an element, averaged over 96 inputs.
    assert 0 < np.abs(np.exp(rounded) - np.exp(log_probs)).max() < 0.05


@pytest.mark.parametrize("rows", [1, 2, 3, 17, 64])
def test_a_row_gets_the_same_bits_alone_and_in_any_batch(graphs, runtimes, rows):
    integer = runtimes[1]
    theta = integer.draw(4, 0, 50)[:, None]
    together, _ = integer.run(graphs[3].x[:rows], theta)
    for n in range(rows):
        alone, _ = integer.run(graphs[3].x[n : n + 1], theta)
        np.testing.assert_array_equal(alone[:, 0], together[:, n])


def test_paired_draws_are_the_shared_ones_row_by_row(graphs, runtimes):
    integer = runtimes[1]
    x = graphs[3].x[:5]
    draws = np.stack([integer.draw(seed, 0, 6) for seed in range(5)], axis=1)
    paired, _ = integer.run(x, draws)
    for n in range(5):
        shared, _ = integer.run(x, draws[:, n : n + 1])
        np.testing.assert_array_equal(paired[:, n], shared[:, n])


def test_a_row_whose_units_are_all_silent_is_finite(graphs, runtimes):
    theta = np.full((2, 1, 3 * HIDDEN + 10), -1e4, dtype=np.float32)  # most activations are 0 after such scales
    log_probs, _ = runtimes[1].run(np.abs(graphs[3].x[:4]), theta)
    assert not np.isnan(log_probs).any()


def test_the_error_is_reported_beside_the_monte_carlo_error(graphs, runtimes):
    error = quantisation_error(*runtimes, graphs[3], 100)
    assert error.int8_probabilities > 0
    assert error.is_hidden == (error.int8_probabilities < error.int8_monte_carlo)
    nothing = quantisation_error(runtimes[0], runtimes[0], graphs[3], 100)
    assert nothing.int8_probabilities == 0
    assert nothing.int8_same_label == 1
    assert nothing.is_hidden


def test_a_small_network_is_left_as_it_is():
    generator = torch.Generator().manual_seed(0)
    network = MLP((8, 16, 16, 3), generator)
    posterior = HypernetworkPosterior(
        realnvp(network.theta_dimension, 1, 4, -2.0, generator), network.theta_dimension, 1.0
    )
    x = torch.randn(50, 8, generator=generator)
    files = export(BayesianModel(network, posterior), ServedNetwork(network, {"residual": Residual.fit(x)}))
    nodes = onnx.load_model_from_string(quantise(files["network.onnx"])).graph.node
    assert all(node.op_type != "MatMulInteger" for node in nodes)
