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
    """Initialised model with its exported graphs."""

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


@pytest.fixture(scope="module", params=[realnvp, pytest.param(iaf, marks=pytest.mark.slow)])
def exported(request, fits):
    return Exported(request.param)


@pytest.mark.parametrize(("draws", "rows"), [(1, 1), (1, 5), (7, 1), (4, 4), (33, 50)])
@torch.no_grad()
def test_torch_and_runtime_agree_for_any_number_of_draws_and_rows(exported, draws, rows):
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


def test_parity_differences_are_far_below_tolerance(exported):
    differences = parity(exported.model, exported.network, exported.runtime, exported.rows)
    assert set(differences) == {"theta", "probabilities", "density"}
    assert all(0 <= difference < PARITY_TOLERANCE / 10 for difference in differences.values())


def test_parity_allows_rows_with_zero_density_score(exported):
    x = exported.rows.x.copy()
    x[3] = exported.network.spectrum.mean
    rows = Rows(x, exported.rows.y)
    assert (
        parity(exported.model, exported.network, exported.runtime, rows)["density"]
        < PARITY_TOLERANCE / 10
    )


@pytest.mark.parametrize("output", ["theta", "probabilities", "density", "nan"])
def test_parity_rejects_graphs_with_different_results(exported, output):
    model, network = copy.deepcopy(
        (exported.model, exported.network)
    )  # copied together because they share the primary network
    assert model.network is network.network
    with torch.no_grad():
        if output == "theta":
            model.posterior.output.shift[-1] += 0.01
        elif output == "probabilities":
            model.network.module[-1].bias[0] += 0.1
        elif output == "density":
            network.spectrum.mean += 0.1
        else:
            model.network.module[0].bias[0] = torch.nan
    with pytest.raises(ParityError, match="density" if output == "nan" else output):
        parity(model, network, exported.runtime, exported.rows)


def shift_density(runtime, share):
    """Return a runtime with a relative error in its density scores."""

    def run(x, theta):
        outputs, density = runtime.run(x, theta)
        return outputs, density * np.float32(1 + share)

    shifted = copy.copy(runtime)
    shifted.run = run
    return shifted


def test_density_tolerance_is_relative_for_small_and_large_scores(exported):
    runtime, network = exported.runtime, exported.network
    scores = runtime.run(exported.rows.x, runtime.draw(0, 0, 1)[:, None])[1].mean(axis=0)
    assert scores.max() > 3  # 5e-4 of this exceeds 1e-3.
    assert scores.min() < 0.2  # 5e-3 of this is below 1e-3.
    parity(exported.model, network, shift_density(runtime, 5e-4), exported.rows)
    with pytest.raises(ParityError, match="density"):
        parity(exported.model, network, shift_density(runtime, 2e-3), exported.rows)


def shift_theta(runtime, error):
    """Return a runtime with an error in the last number of theta."""

    def sample(eps):
        theta = runtime.sample(eps)
        theta[:, -1] += np.float32(error)
        return theta

    shifted = copy.copy(runtime)
    shifted.sample = sample
    return shifted


@pytest.mark.parametrize(
    ("size", "small_error", "large_error"), [(0.0, 5e-4, 5e-3), (500.0, 0.2, 2.0)]
)
def test_theta_tolerance_is_relative_with_minimum_scale_of_one(
    exported, size, small_error, large_error
):
    model = copy.deepcopy(exported.model)
    with torch.no_grad():
        model.posterior.output.shift[-1] += size
    runtime = exported.runtime
    parity(model, exported.network, shift_theta(runtime, size + small_error), exported.rows)
    with pytest.raises(ParityError, match="theta"):
        parity(model, exported.network, shift_theta(runtime, size + large_error), exported.rows)


def test_graphs_contain_only_standard_deterministic_operators(exported):
    for file in exported.files.values():
        model = onnx.load_model_from_string(file)
        onnx.checker.check_model(model, full_check=True)
        assert not model.functions
        assert {domain.domain for domain in model.opset_import} == {""}
        assert {node.domain for node in model.graph.node} == {""}
        assert not {node.op_type for node in model.graph.node} & RANDOM_OPS


def test_graphs_embed_weights_and_contain_no_machine_details(exported):
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
def test_network_metadata_contains_size_of_largest_result():
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
    metadata = {entry.key: int(entry.value) for entry in network.metadata_props}
    assert metadata == {"largest_result": 9 * 8 * 4 * 4}


def test_only_draw_and_row_axes_are_dynamic(exported):
    shapes = {}
    for file in exported.files.values():
        for tensor in onnx.load_model_from_string(file).graph.input:
            assert tensor.type.tensor_type.elem_type == onnx.TensorProto.FLOAT
            shapes[tensor.name] = [
                dim.dim_param or dim.dim_value for dim in tensor.type.tensor_type.shape.dim
            ]
    assert shapes == {"eps": ["draws", 19], "x": ["rows", 6], "theta": ["draws", "pairs", 19]}


def test_network_outputs_features_shared_by_all_draws(exported):
    graph = onnx.load_model_from_string(exported.files["network.onnx"]).graph
    (features,) = (output for output in graph.output if output.name == "features")
    axes = features.type.tensor_type.shape.dim
    assert [axis.dim_param or axis.dim_value for axis in axes] == ["rows", SIZES[1]]


def test_folding_preserves_predictions_and_state_dict():
    generator = torch.Generator().manual_seed(1)
    for flow in (realnvp, iaf):
        model = scale_model(flow, *SIZES)
        x, eps = torch.randn(5, 6, generator=generator), torch.randn(4, 19, generator=generator)
        fresh, expected = copy.deepcopy(model), model.predict(x, eps)
        fold(model)
        torch.testing.assert_close(model.predict(x, eps), expected)
        fresh.load_state_dict(model.state_dict())
        torch.testing.assert_close(fresh.predict(x, eps), expected)
