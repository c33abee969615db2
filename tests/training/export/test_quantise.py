import numpy as np
import onnx
import pytest
import torch

from model_store.inference.runtime import Runtime
from tests.support.models import scale_model
from training.bayes.flows import realnvp
from training.data.rows import Rows
from training.export.graphs import CHECKED_DETECTORS, export
from training.export.quantise import quantisation_error, quantise_network
from training.export.served import fold, served_network
from training.model import initialise

INPUTS, HIDDEN = 30, 96
DIMENSION = 3 * HIDDEN + 10


@pytest.fixture(scope="module")
def graphs(fits):
    generator = torch.Generator().manual_seed(0)
    model = scale_model(realnvp, INPUTS, HIDDEN, HIDDEN, HIDDEN, 10, hidden=64)
    x = torch.randn(200, INPUTS, generator=generator)
    initialise(model, x)
    with torch.no_grad():  # move couplings away from their initial identity
        for module in model.posterior.flow.steps:
            module.conditioner.output.scale.fill_(1.0)
            module.conditioner.output.bias.copy_(
                torch.randn(len(module.conditioner.output.bias), generator=generator)
            )
    fold(model)
    exact = export(model, served_network(model, x, 0))
    integer = {
        "sampler.onnx": exact["sampler.onnx"],
        "network.onnx": quantise_network(exact["network.onnx"]),
    }
    return exact, integer, Rows(x.numpy(), np.zeros(200, dtype=np.int64))


@pytest.fixture(scope="module")
def runtimes(graphs):
    exact, integer, _ = graphs
    return (
        Runtime(exact["sampler.onnx"], exact["network.onnx"], DIMENSION),
        Runtime(integer["sampler.onnx"], integer["network.onnx"], DIMENSION),
    )


def test_only_hidden_products_are_quantised(graphs):
    exact, integer, _ = graphs
    nodes = onnx.load_model_from_string(integer["network.onnx"]).graph.node
    assert sum(node.op_type == "MatMulIntegerToFloat" for node in nodes) == 2 + 2
    initializers = {
        tensor.name
        for tensor in onnx.load_model_from_string(integer["network.onnx"]).graph.initializer
    }
    assert "network.module.0.direction" in initializers
    assert not {"network.module.2.direction", "network.module.4.direction"} & initializers
    assert len(integer["network.onnx"]) < len(exact["network.onnx"])


def test_quantised_network_stays_within_rounding_error(graphs, runtimes):
    exact, integer = runtimes
    x = graphs[2].x
    theta = exact.draw(3, 0, 7)[:, None]
    log_probs, density = exact.run(x, theta)
    rounded, same_density = integer.run(x, theta)
    np.testing.assert_array_equal(
        density[:, :3], same_density[:, :3]
    )  # Input detectors match exactly. The last detector uses the embedding.
    np.testing.assert_allclose(density[:, 3], same_density[:, 3], rtol=0.2)
    # Two products have relative errors of about 1/127 per element, averaged over 96 inputs.
    assert 0 < np.abs(np.exp(rounded) - np.exp(log_probs)).max() < 0.05


@pytest.mark.parametrize("rows", [1, 2, 3, 17, 64])
def test_row_gets_same_bits_alone_and_in_batch(graphs, runtimes, rows):
    integer = runtimes[1]
    theta = integer.draw(4, 0, 50)[:, None]
    batch, _ = integer.run(graphs[2].x[:rows], theta)
    for n in range(rows):
        single, _ = integer.run(graphs[2].x[n : n + 1], theta)
        np.testing.assert_array_equal(single[:, 0], batch[:, n])


def test_paired_draws_match_shared_draws_for_each_row(graphs, runtimes):
    integer = runtimes[1]
    x = graphs[2].x[:5]
    draws = np.stack([integer.draw(seed, 0, 6) for seed in range(5)], axis=1)
    paired, _ = integer.run(x, draws)
    for n in range(5):
        shared, _ = integer.run(x, draws[:, n : n + 1])
        np.testing.assert_array_equal(paired[:, n], shared[:, n])


def test_row_with_all_units_inactive_is_not_nan(graphs, runtimes):
    theta = np.full((2, 1, 3 * HIDDEN + 10), -1e4, dtype=np.float32)
    log_probs, _ = runtimes[1].run(np.abs(graphs[2].x[:4]), theta)
    assert not np.isnan(log_probs).any()


def test_quantisation_error_is_compared_with_monte_carlo_error(graphs, runtimes):
    error = quantisation_error(*runtimes, graphs[2], 100)
    assert error.int8_probabilities > 0
    assert error.is_hidden == (error.int8_probabilities < error.int8_monte_carlo)
    identical = quantisation_error(runtimes[0], runtimes[0], graphs[2], 100)
    assert identical.int8_probabilities == 0
    assert identical.int8_same_label == 1
    assert identical.is_hidden


class NoisyRuntime(Runtime):
    def __init__(self):
        pass

    def draw(self, seed, first_draw, num_draws):
        return np.full((num_draws, 1), seed, dtype=np.float32)

    def run(self, x, theta):
        p = 0.5 + 0.01 * np.random.default_rng(int(theta[0, 0, 0])).normal(size=len(x))
        log_probs = np.log(np.stack([p, 1 - p], axis=1)).astype(np.float32)
        return np.repeat(log_probs[None], len(theta), axis=0), np.zeros(
            (len(x), 0), dtype=np.float32
        )


def test_monte_carlo_error_is_for_one_draw_set():
    rows = Rows(np.zeros((512, 1), dtype=np.float32), np.zeros(512, dtype=np.int64))
    error = quantisation_error(NoisyRuntime(), NoisyRuntime(), rows, 3)
    assert error.int8_probabilities == 0
    assert error.int8_monte_carlo == pytest.approx(0.01, rel=0.15)  # five standard deviations


@pytest.mark.usefixtures("fits")
def test_small_network_is_not_quantised():
    generator = torch.Generator().manual_seed(0)
    model = scale_model(realnvp, 8, 16, 16, 3, couplings=1, hidden=4)
    x = torch.randn(50, 8, generator=generator)
    files = export(model, served_network(model, x, 0, names=CHECKED_DETECTORS))
    assert quantise_network(files["network.onnx"]) == files["network.onnx"]
