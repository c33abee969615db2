import copy

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from model_store.inference.noise import standard_normal
from tests.support.environment import ROOT
from tests.support.models import scale_model
from training import recipe as recipes
from training.bayes.flows import iaf, realnvp
from training.data.rows import Rows
from training.export.graphs import PARITY_TOLERANCE, ParityError, export, load_runtime, parity
from training.export.served import fold, served_network
from training.model import build, initialise

SIZES = (6, 9, 7, 3)
RANDOM_OPS = {
    "RandomNormal",
    "RandomNormalLike",
    "RandomUniform",
    "RandomUniformLike",
    "Multinomial",
    "Bernoulli",
}


class Exported:
    """A fitted-like model with its graphs."""

    def __init__(self, flow):
        generator = torch.Generator().manual_seed(0)
        self.model = scale_model(flow, *SIZES)
        x = 3 + 2 * torch.randn(100, 6, generator=generator)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
        initialise(self.model, x)
        self.rows = Rows(x.numpy(), np.zeros(100, dtype=np.int64))
        fold(self.model)
        self.network = served_network(self.model, x, 0)
        self.files = export(self.model, self.network)
        self.runtime = load_runtime(self.model, self.files)


def pictures(_, classes):
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 2, 3), nn.Flatten(), nn.Linear(32, classes)
    )


@pytest.fixture(scope="module", params=[realnvp, iaf])
def exported(request, fits):
    return Exported(request.param)


@pytest.mark.parametrize(("draws", "rows"), [(1, 1), (1, 5), (7, 1), (4, 4), (33, 50)])
@torch.no_grad()
def test_torch_and_the_runtime_agree_for_any_number_of_draws_and_rows(exported, draws, rows):
    x = exported.rows.x[:rows]
    eps = standard_normal(3, 0, draws * rows, exported.runtime.noise_dimension)
    theta = exported.model.posterior(torch.from_numpy(eps))
    assert np.allclose(exported.runtime.sample(eps), theta.numpy(), atol=1e-5)
    paired = theta.reshape(draws, rows, -1)
    for selected in (paired, paired[:, :1]):
        log_probs, density = exported.network(torch.from_numpy(x), selected)
        served_log_probs, served_density = exported.runtime.run(x, selected.numpy())
        assert served_log_probs.shape == (draws, rows, 3)
        assert np.allclose(served_log_probs, log_probs.numpy(), atol=1e-4)
        assert np.allclose(served_density, density.numpy(), rtol=1e-4, atol=1e-6)


def test_parity_measures_differences_far_below_its_tolerance(exported):
    differences = parity(exported.model, exported.network, exported.runtime, exported.rows)
    assert set(differences) == {"theta", "probabilities", "density"}
    assert all(0 <= difference < PARITY_TOLERANCE / 10 for difference in differences.values())


def test_a_row_that_a_detector_scores_0_does_not_spoil_parity(exported):
    x = exported.rows.x.copy()
    x[3] = exported.network.spectrum.mean
    rows = Rows(x, exported.rows.y)
    assert (
        parity(exported.model, exported.network, exported.runtime, rows)["density"]
        < PARITY_TOLERANCE / 10
    )


@pytest.mark.parametrize("changed", ["theta", "probabilities", "density", "nan"])
def test_graphs_that_compute_something_else_are_refused(exported, changed):
    model, network = copy.deepcopy(
        (exported.model, exported.network)
    )  # together: they share the primary network
    assert model.network is network.network
    with torch.no_grad():
        if changed == "theta":
            model.posterior.output.shift[-1] += 0.01
        elif changed == "probabilities":
            model.network.module[-1].bias[0] += 0.1
        elif changed == "density":
            network.spectrum.mean += 0.1
        else:
            model.network.module[0].bias[0] = torch.nan
    with pytest.raises(ParityError, match="density" if changed == "nan" else changed):
        parity(model, network, exported.runtime, exported.rows)


def off_in_density(runtime, share):
    """A runtime whose density scores are off by a share of them."""

    def run(x, theta):
        outputs, density = runtime.run(x, theta)
        return outputs, density * np.float32(1 + share)

    off = copy.copy(runtime)
    off.run = run
    return off


def test_a_density_is_held_to_a_thousandth_of_its_size_however_large_or_small_that_is(exported):
    runtime, network = exported.runtime, exported.network
    scores = runtime.run(exported.rows.x, runtime.draw(0, 0, 1)[:, None])[1].mean(axis=0)
    assert scores.max() > 3  # 5e-4 of it is more than 1e-3
    assert scores.min() < 0.2  # and 5e-3 of this less
    parity(exported.model, network, off_in_density(runtime, 5e-4), exported.rows)
    with pytest.raises(ParityError, match="density"):
        parity(exported.model, network, off_in_density(runtime, 2e-3), exported.rows)


def off_in_theta(runtime, error):
    """A runtime whose last number of theta is off."""

    def sample(eps):
        theta = runtime.sample(eps)
        theta[:, -1] += np.float32(error)
        return theta

    off = copy.copy(runtime)
    off.sample = sample
    return off


@pytest.mark.parametrize(("size", "allowed", "refused"), [(0.0, 5e-4, 5e-3), (500.0, 0.2, 2.0)])
def test_theta_is_held_to_a_thousandth_of_its_size_or_of_one(exported, size, allowed, refused):
    model = copy.deepcopy(exported.model)
    with torch.no_grad():
        model.posterior.output.shift[-1] += size
    runtime = exported.runtime
    parity(model, exported.network, off_in_theta(runtime, size + allowed), exported.rows)
    with pytest.raises(ParityError, match="theta"):
        parity(model, exported.network, off_in_theta(runtime, size + refused), exported.rows)


def test_graphs_hold_standard_operators_none_of_them_random(exported):
    for file in exported.files.values():
        model = onnx.load_model_from_string(file)
        onnx.checker.check_model(model, full_check=True)
        assert not model.functions
        assert {domain.domain for domain in model.opset_import} == {""}
        assert {node.domain for node in model.graph.node} == {""}
        assert not {node.op_type for node in model.graph.node} & RANDOM_OPS


def test_graphs_hold_their_weights_and_say_nothing_of_the_machine_that_wrote_them(exported):
    for file in exported.files.values():
        model = onnx.load_model_from_string(file)
        assert all(
            tensor.data_location == onnx.TensorProto.DEFAULT for tensor in model.graph.initializer
        )
        assert not any(tensor.external_data for tensor in model.graph.initializer)
        parts = [model, model.graph, *model.graph.node, *model.graph.initializer]
        parts += [*model.graph.input, *model.graph.output, *model.graph.value_info]
        assert not any(part.doc_string for part in parts)
        parts = [part for part in parts[1:] if hasattr(part, "metadata_props")]
        assert not any(part.metadata_props for part in parts)
        assert {entry.key for entry in model.metadata_props} <= {"largest_result"}
        for text in (str(ROOT), "site-packages", ".py", "/home", "/tmp"):
            assert text.encode() not in file


@pytest.mark.usefixtures("fits")
def test_the_network_says_how_large_its_largest_result_is():
    recipe = recipes.validate(
        {
            "name": "pictures",
            "method": "bbb-gaussian",
            "data": {
                "source": "digits",
                "validation": 9,
                "reference": 9,
                "ranking": 9,
            },
            "network": {"factory": f"{__name__}:pictures"},
        },
        "pictures",
    )
    model = build(recipe, (8, 8), 3)
    x = torch.rand(50, 64)
    initialise(model, x)
    graphs = export(model, served_network(model, x, 0, names=("residual",)))
    network = onnx.load_model_from_string(graphs["network.onnx"])
    noted = {entry.key: int(entry.value) for entry in network.metadata_props}
    assert noted == {"largest_result": 9 * 8 * 4 * 4}


def test_only_draws_and_rows_are_free(exported):
    shapes = {}
    for file in exported.files.values():
        for tensor in onnx.load_model_from_string(file).graph.input:
            assert tensor.type.tensor_type.elem_type == onnx.TensorProto.FLOAT
            shapes[tensor.name] = [
                dim.dim_param or dim.dim_value for dim in tensor.type.tensor_type.shape.dim
            ]
    assert shapes == {"eps": ["draws", 19], "x": ["rows", 6], "theta": ["draws", "pairs", 19]}


def test_values_that_no_draw_changes_are_an_output_of_the_network(exported):
    graph = onnx.load_model_from_string(exported.files["network.onnx"]).graph
    (features,) = (output for output in graph.output if output.name == "features")
    axes = features.type.tensor_type.shape.dim
    assert [axis.dim_param or axis.dim_value for axis in axes] == ["rows", SIZES[1]]


def test_folding_keeps_the_function_and_the_state_still_loads():
    generator = torch.Generator().manual_seed(1)
    for flow in (realnvp, iaf):
        model = scale_model(flow, *SIZES)
        x, eps = torch.randn(5, 6, generator=generator), torch.randn(4, 19, generator=generator)
        fresh, before = copy.deepcopy(model), model.predict(x, eps)
        fold(model)
        torch.testing.assert_close(model.predict(x, eps), before)
        fresh.load_state_dict(model.state_dict())
        torch.testing.assert_close(fresh.predict(x, eps), before)
