import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from model_store.inference.noise import standard_normal
from model_store.inference.runtime import Runtime
from tests.support.models import scale_model
from training.bayes.flows import realnvp
from training.data import Rows
from training.export.graphs import CHECKED_DETECTORS, export
from training.export.quantise import quantisation_error, quantise_network, quantise_sampler
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
    with torch.no_grad():  # couplings far from the identity that they start at
        for module in model.posterior.flow.transforms[:-1]:
            module.conditioner.output.scale.fill_(1.0)
            module.conditioner.output.bias.copy_(
                torch.randn(len(module.conditioner.output.bias), generator=generator)
            )
    fold(model)
    exact = export(model, served_network(model, x, 0))
    integer = {
        "sampler.onnx": quantise_sampler(exact["sampler.onnx"], DIMENSION),
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


def test_hidden_products_of_draws_are_integer_and_the_first_and_last_are_not(graphs):
    exact, integer, _ = graphs
    nodes = onnx.load_model_from_string(integer["network.onnx"]).graph.node
    assert sum(node.op_type == "MatMulIntegerToFloat" for node in nodes) == 2 + 2
    large = {
        tensor.name
        for tensor in onnx.load_model_from_string(integer["network.onnx"]).graph.initializer
    }
    assert "network.module.0.direction" in large
    assert not {"network.module.2.direction", "network.module.4.direction"} & large
    assert len(integer["network.onnx"]) < len(exact["network.onnx"])


def test_every_linear_layer_of_the_sampler_is_integer(graphs):
    exact, integer, _ = graphs
    before, after = (
        onnx.load_model_from_string(files["sampler.onnx"]).graph.node for files in (exact, integer)
    )
    assert sum(node.op_type == "Gemm" for node in before) == 4
    assert sum(node.op_type == "MatMulIntegerToFloat" for node in after) == 4
    assert all(node.op_type != "Gemm" for node in after)
    assert len(integer["sampler.onnx"]) < 0.5 * len(exact["sampler.onnx"])


def test_integer_draws_are_those_of_the_flow_to_the_precision_of_their_levels(runtimes):
    exact, integer = (runtime.draw(5, 0, 400) for runtime in runtimes)
    error = np.sqrt(np.square(integer - exact).mean(axis=0)) / exact.std(axis=0)
    assert 0 < error.max() < 0.1  # of a standard deviation; a level is 1/63 of the largest input
    np.testing.assert_allclose(integer.std(axis=0), exact.std(axis=0), rtol=0.05)


@pytest.mark.parametrize("count", [1, 2, 7, 25])
def test_an_integer_draw_does_not_depend_on_the_draws_beside_it(runtimes, count):
    full = runtimes[1].draw(6, 0, 60)
    np.testing.assert_array_equal(runtimes[1].draw(6, 13, count), full[13 : 13 + count])


def test_noise_beyond_the_range_is_clipped(runtimes):
    theta = runtimes[1].sample(np.full((1, DIMENSION), 6.3, dtype=np.float32))
    assert np.isfinite(theta).all()


def test_it_computes_the_network_to_the_precision_of_its_levels(graphs, runtimes):
    exact, integer = runtimes
    x = graphs[2].x
    theta = exact.draw(3, 0, 7)[:, None]
    log_probs, density = exact.run(x, theta)
    rounded, same_density = integer.run(x, theta)
    np.testing.assert_array_equal(
        density[:, :3], same_density[:, :3]
    )  # the input's; the last is of the embedding
    np.testing.assert_allclose(density[:, 3], same_density[:, 3], rtol=0.2)
    # Two products with relative errors of about 1/127 an element, averaged over 96 inputs.
    assert 0 < np.abs(np.exp(rounded) - np.exp(log_probs)).max() < 0.05


@pytest.mark.parametrize("rows", [1, 2, 3, 17, 64])
def test_a_row_gets_the_same_bits_alone_and_in_any_batch(graphs, runtimes, rows):
    integer = runtimes[1]
    theta = integer.draw(4, 0, 50)[:, None]
    together, _ = integer.run(graphs[2].x[:rows], theta)
    for n in range(rows):
        alone, _ = integer.run(graphs[2].x[n : n + 1], theta)
        np.testing.assert_array_equal(alone[:, 0], together[:, n])


def test_paired_draws_are_the_shared_ones_row_by_row(graphs, runtimes):
    integer = runtimes[1]
    x = graphs[2].x[:5]
    draws = np.stack([integer.draw(seed, 0, 6) for seed in range(5)], axis=1)
    paired, _ = integer.run(x, draws)
    for n in range(5):
        shared, _ = integer.run(x, draws[:, n : n + 1])
        np.testing.assert_array_equal(paired[:, n], shared[:, n])


def test_a_row_whose_units_are_all_silent_is_finite(graphs, runtimes):
    theta = np.full((2, 1, 3 * HIDDEN + 10), -1e4, dtype=np.float32)
    log_probs, _ = runtimes[1].run(np.abs(graphs[2].x[:4]), theta)
    assert not np.isnan(log_probs).any()


def test_the_error_is_reported_beside_the_monte_carlo_error(graphs, runtimes):
    error = quantisation_error(*runtimes, graphs[2], 100)
    assert error.int8_probabilities > 0
    assert error.is_hidden == (error.int8_probabilities < error.int8_monte_carlo)
    nothing = quantisation_error(runtimes[0], runtimes[0], graphs[2], 100)
    assert nothing.int8_probabilities == 0
    assert nothing.int8_same_label == 1
    assert nothing.is_hidden


def test_inputs_that_reach_farther_below_0_than_above_are_not_clipped():
    """theta = C (eps A - 4) + d: the second layer's inputs lie between about -8 and 0."""
    generator = np.random.default_rng(3)
    constants = {"A": generator.normal(size=(64, 64)) / 8, "b": np.full(64, -4.0)}
    constants |= {"C": generator.normal(size=(64, 64)), "d": np.zeros(64)}
    nodes = [
        helper.make_node("Gemm", ["eps", "A", "b"], ["h"], transB=1),
        helper.make_node("Gemm", ["h", "C", "d"], ["theta"], transB=1),
    ]
    values = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["K", 64])
        for name in ("eps", "theta")
    ]
    tensors = [numpy_helper.from_array(a.astype(np.float32), name) for name, a in constants.items()]
    graph = helper.make_graph(nodes, "sampler", values[:1], values[1:], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    exact = model.SerializeToString()
    eps = standard_normal(5, 0, 200, 64)
    theta, rounded = (
        ort.InferenceSession(sampler, providers=["CPUExecutionProvider"]).run(
            ["theta"], {"eps": eps}
        )[0]
        for sampler in (exact, quantise_sampler(exact, 64))
    )
    assert 0 < np.sqrt(np.square(rounded - theta).mean()) < 0.1 * theta.std(axis=0).mean()


class Scattered(Runtime):
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


def test_the_monte_carlo_error_is_that_of_one_draw_set():
    rows = Rows(np.zeros((512, 1), dtype=np.float32), np.zeros(512, dtype=np.int64))
    error = quantisation_error(Scattered(), Scattered(), rows, 3)
    assert error.int8_probabilities == 0
    assert error.int8_monte_carlo == pytest.approx(
        0.01, rel=0.15
    )  # five deviations of such an estimate


@pytest.mark.usefixtures("fits")
def test_a_small_network_is_left_as_it_is():
    generator = torch.Generator().manual_seed(0)
    model = scale_model(realnvp, 8, 16, 16, 3, couplings=1, hidden=4)
    x = torch.randn(50, 8, generator=generator)
    files = export(model, served_network(model, x, 0, names=CHECKED_DETECTORS))
    assert (
        quantise_sampler(files["sampler.onnx"], model.network.theta_dimension)
        == files["sampler.onnx"]
    )
    assert quantise_network(files["network.onnx"]) == files["network.onnx"]
