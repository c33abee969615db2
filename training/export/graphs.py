"""Export of a fitted model to ONNX graphs, with parity checks against torch."""

import copy
import math
import re
from functools import partial

import numpy as np
import onnx
import onnx.shape_inference
import torch
from jaxtyping import Float
from onnx import numpy_helper
from torch import Tensor, nn

from model_store.errors import DubitoError, InvalidInput, clean_message, one_line
from model_store.inference.graphs import GraphError, extract_subgraph
from model_store.inference.noise import noise
from model_store.inference.runtime import (
    OUTPUTS,
    TERMS,
    WEIGHT_NOISE,
    WEIGHT_OUTPUTS,
    WEIGHTS,
    WEIGHTS_PER_DRAW,
    Runtime,
)
from model_store.scores.tasks import PREDICTIVES
from training.bayes.layers import WeightLayer
from training.bayes.likelihoods import Gaussian, Likelihood
from training.bayes.network import BayesianModel, Network
from training.data.rows import Rows
from training.export.exporter import DRAWS, ROWS, export_graph
from training.export.served import ServedNetwork, served_network
from training.networks.local import localise
from training.networks.networks import MemberNetwork, noise_rows
from training.networks.probes import list_operators

PARITY_TOLERANCE = 1e-3  # far above rounding errors
PARITY_ROWS = 64
PARITY_DRAWS = 16
CHECKED_ROWS = 16
CHECKED_DETECTORS = ("feature_neighbours",)  # the others do not depend on the module
ROUNDED_SHARE = 1e-3
NO_SUCH_OPERATOR = re.compile(r"No ONNX function found for <OpOverload\(op='([\w.]+)'")
# Operators that return a Python value.
READS_VALUES = {"_local_scalar_dense", "is_nonzero"}
UNTRANSLATED = re.compile(r"Error when translating node .*?target=torch\.ops\.(\w+\.\w+)")


class ParityError(DubitoError):
    """Raised if the exported graphs do not reproduce the fitted model's outputs."""


def export(
    model: BayesianModel,
    network: ServedNetwork,
    with_terms: bool = False,
    joint: BayesianModel | None = None,
) -> dict[str, bytes]:
    """Export `sampler.onnx` (eps -> theta) and `network.onnx`.

    The network maps (x, theta) to outputs and density scores. With `with_terms`, it also returns
    `ServedNetwork.terms`. With `joint` (see `joint_model`), it also maps noise to the theta and
    outputs of `joint`.
    """
    rows, draws = 3, 2
    x = torch.zeros(rows, math.prod(model.network.shape))
    eps = torch.zeros(draws, model.posterior.noise_dimension)
    k, n = torch.export.Dim(DRAWS), torch.export.Dim(ROWS)
    sampler = export_graph(model.posterior, (eps,), {"eps": {0: k}}, ["theta"])
    # Export for a shared theta; a paired theta works in the same graph by broadcasting.
    theta = torch.zeros(draws, 1, model.posterior.theta_dimension)
    outputs = [OUTPUTS[model.likelihood.task], "density"]
    with_terms = with_terms and bool(network.attributed)
    if with_terms:
        outputs.append(TERMS)
    inputs: dict[str, Tensor] = {"x": x, "theta": theta}
    axes = {"x": {0: n}, "theta": {0: k}}
    if joint is not None:
        outputs += [WEIGHTS, WEIGHT_OUTPUTS]
        inputs[WEIGHT_NOISE] = torch.zeros(draws, joint.posterior.noise_dimension)
        axes[WEIGHT_NOISE] = {0: torch.export.Dim(f"weight_{DRAWS}")}
    module: nn.Module = network
    if with_terms or joint is not None:
        module = _Outputs(network, with_terms, joint)
    exported = export_graph(module, tuple(inputs.values()), axes, outputs)
    _add_features(exported, outputs[0])
    if joint is not None:  # no weights are drawn by default
        empty = np.zeros((0, joint.posterior.noise_dimension), dtype=np.float32)
        exported.graph.initializer.append(numpy_helper.from_array(empty, WEIGHT_NOISE))
    if model.network.is_paired:
        (theta_input,) = (i for i in exported.graph.input if i.name == "theta")
        theta_input.type.tensor_type.shape.dim[1].dim_param = "pairs"
    layers = [part for part in (joint or model).modules() if isinstance(part, WeightLayer)]
    if any(layer.index is not None for layer in layers):  # pruned
        # The graph expands theta to matrices with zeros.
        numbers = sum(math.prod(layer.shape) for layer in layers if layer.index is not None)
        exported.metadata_props.add(key=WEIGHTS_PER_DRAW, value=str(numbers))
    graphs = {"sampler.onnx": sampler, "network.onnx": exported}
    return {name: graph.SerializeToString() for name, graph in graphs.items()}


def joint_model(model: BayesianModel, served: BayesianModel) -> BayesianModel | None:
    """Return the model for joint scores, if the task has any and `served` cannot compute them."""
    has_joint_scores = bool(PREDICTIVES[model.likelihood.task].joint_acquisitions)
    return model if has_joint_scores and served is not model else None


class _Outputs(nn.Module):
    """A served network with its optional outputs."""

    def __init__(
        self, network: ServedNetwork, with_terms: bool, joint: BayesianModel | None
    ) -> None:
        super().__init__()
        self.network, self.with_terms, self.joint = network, with_terms, joint

    def forward(self, x: Tensor, theta: Tensor, noise: Tensor | None = None) -> tuple[Tensor, ...]:
        outputs: tuple[Tensor, ...] = self.network(x, theta)
        if self.with_terms:
            outputs += (self.network.terms(x),)
        if self.joint is not None and noise is not None:
            weights = self.joint.posterior(noise)[:, None]
            outputs += (weights, self.joint.likelihood(self.joint.network(x, weights)))
        return outputs


def _add_features(model: onnx.ModelProto, output: str) -> None:
    """Add the output `features`, the last values that do not depend on the draws.

    The service computes them once per row. They are omitted if no single vector per row suffices.
    """
    by_row, by_draw = {"x"}, {"theta"}
    row_nodes, features = [], set[str]()
    for node in extract_subgraph(model, ("x", "theta"), (output,)).graph.node:
        if by_draw.intersection(node.input):
            by_draw.update(node.output)
            features |= by_row.intersection(node.input)
        elif by_row.intersection(node.input) and node.op_type != "Shape":
            by_row.update(node.output)
            row_nodes.append(node)
    for node in reversed(row_nodes):
        if len(features) > 1 and features.intersection(node.output):
            features = features.difference(node.output) | by_row.intersection(node.input)
    for value in onnx.shape_inference.infer_shapes(model).graph.value_info:
        axes = value.type.tensor_type.shape.dim
        if {value.name} == features and len(axes) == 2 and axes[0].dim_param == ROWS:
            for node in model.graph.node:
                for names in (node.input, node.output):
                    names[:] = ["features" if name == value.name else name for name in names]
            value.name = "features"
            model.graph.output.append(value)


def load_runtime(model: BayesianModel, graphs: dict[str, bytes]) -> Runtime:
    """Load graphs into a CPU runtime, because GPU results can depend on the batch."""
    return Runtime(
        graphs["sampler.onnx"],
        graphs["network.onnx"],
        model.posterior.noise_dimension,
        algorithm=model.posterior.algorithm,
        paired=model.network.is_paired,
        on_processors=True,
    )


def check_exports(model: BayesianModel, x: Float[Tensor, "N I"] | None = None) -> None:
    """Check before a fit that a model's network can be exported and served.

    `x` are valid input rows, by default noise.
    """
    trial = copy.deepcopy(model).cpu().eval()
    if x is None:
        x = noise_rows(trial.network.shape)[:CHECKED_ROWS].flatten(1)
    try:
        local = localise(trial, x)
        network = served_network(local, x, 0, names=CHECKED_DETECTORS)
        joint = joint_model(trial, local)
        runtime = load_runtime(local, export(local, network, joint=joint))
        rows = Rows(x.numpy(), np.zeros(len(x), dtype=np.int64))
        parity(local, network, runtime, rows, joint)
    except ParityError as error:
        expected = "a module with equal outputs in onnxruntime and torch"
        raise InvalidInput("network", expected, one_line(error)) from error
    except Exception as error:
        raise InvalidInput("network", *_explain_failure(error, trial.network, x)) from error


@torch.no_grad()
def _explain_failure(error: Exception, network: Network, x: Tensor) -> tuple[str, str]:
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) and cause not in causes:
        assert isinstance(cause, Exception)
        causes.append(cause)
    texts = [clean_message(cause) for cause in causes]
    run = partial(network, x, torch.zeros(2, 1, network.theta_dimension))
    for text in texts:
        unknown = NO_SUCH_OPERATOR.search(text) or UNTRANSLATED.search(text)
        if unknown is not None:
            operator = unknown[1].rpartition(".")[2]
            # Layers of the converted module have the names of the user's layers.
            module = "members.0" if isinstance(network, MemberNetwork) else "module"
            calls = list_operators(network.get_submodule(module), run)
            places = (
                f" ({layer})" for call, layer in calls if call.overloadpacket.__name__ == operator
            )
            return "operators that ONNX supports", f"{operator}{next(places, '')}"
    names = {call.overloadpacket.__name__ for call, _ in list_operators(network, run)}
    if any("data-dependent" in text for text in texts) or READS_VALUES & names:
        expected = "a forward pass without control flow that depends on values (use torch.where)"
        return expected, "one with if, while, int(), float() or .item() of a tensor"
    if isinstance(error, GraphError):
        expected = "a module of operators that the service supports (docs/networks.md)"
        return expected, one_line(error)
    reason = texts[-1].partition(" While executing ")[0][:200]  # file names follow
    return "a module that can be exported and served", f"{type(causes[-1]).__name__}: {reason}"


@torch.no_grad()
def parity(
    model: BayesianModel,
    network: ServedNetwork,
    runtime: Runtime,
    rows: Rows,
    joint: BayesianModel | None = None,
) -> dict[str, float]:
    """Compare the runtime with torch on the same noise, with shared and paired draws.

    `joint` (see `joint_model`) is compared first.

    Returns the largest difference by kind. Differences of probabilities and log variances are
    absolute. The others are relative to:

    * theta: the largest of its magnitude, the coordinate's mean magnitude and 1
    * density scores: the larger of the score and the detector's mean
    * terms of density scores: their sum over the row
    * means of a regression: the target's standard deviation
    """
    if joint is not None:
        parity(joint, network.replace(joint), runtime.joint, rows)
    x = rows.x[:PARITY_ROWS].astype(np.float32)
    posterior = model.posterior
    draws = min(PARITY_DRAWS, posterior.max_draws or PARITY_DRAWS)
    pairs = len(x) if model.network.is_paired else 1
    eps = noise(posterior.algorithm, 0, 0, draws * pairs, posterior.noise_dimension)
    theta = posterior(torch.from_numpy(eps)).numpy()
    sampled = runtime.sample(eps)
    size = np.maximum(np.abs(theta), 1.0)  # float32 rounds large scales relative to their size
    worst = {"theta": 0.0, "density": 0.0}

    def compare(name: str, difference: np.ndarray) -> None:
        largest = np.max(np.abs(difference), initial=worst.get(name, 0.0))  # propagates NaN
        worst[name] = float(largest)

    compare("theta", _relative(sampled, theta, size))
    paired = theta.reshape(draws, pairs, -1)
    for shared_or_paired in (paired[:, :1], paired):
        theta_by_row = torch.from_numpy(runtime.theta_by_row(x, shared_or_paired))
        outputs, density = network(torch.from_numpy(x), theta_by_row)
        run_outputs, run_density = runtime.run(x, shared_or_paired)
        differences = _differences(run_outputs, outputs.numpy(), model.likelihood)
        for name, values in differences.items():
            compare(name, values)
        compare("density", _relative(run_density, density.numpy(), density.numpy()))
    if runtime.terms_shape is not None:
        terms = network.terms(torch.from_numpy(x)).numpy()
        compare("terms", _relative(runtime.terms(x), terms, terms.sum(axis=2, keepdims=True)))
    for name, difference in worst.items():
        if not difference <= PARITY_TOLERANCE:
            expected = f"{name} within {PARITY_TOLERANCE} of torch's"
            raise ParityError(f"parity: expected {expected}, got a difference of {difference}")
    _check_independent_rows(runtime, x, paired[:, :1])
    return worst


def _check_independent_rows(runtime: Runtime, x: np.ndarray, theta: np.ndarray) -> None:

    def answers(rows: np.ndarray) -> dict[str, np.ndarray]:
        outputs, densities = runtime.run(rows, theta)
        arrays = {"outputs": outputs.swapaxes(0, 1), "densities": densities}
        if runtime.terms_shape is not None:
            arrays["terms"] = runtime.terms(rows)
        return arrays

    together = answers(x)
    for n in range(len(x)):
        for name, alone in answers(x[n : n + 1]).items():
            if not np.array_equal(alone[0], together[name][n]):
                expected = f"the same bits of a row's {name} alone and in a batch"
                raise ParityError(f"parity: expected {expected}, got different ones")


def _differences(
    actual: np.ndarray, expected: np.ndarray, likelihood: Likelihood
) -> dict[str, np.ndarray]:
    if not isinstance(likelihood, Gaussian):
        return {"probabilities": np.exp(actual) - np.exp(expected)}
    mean, difference = expected[..., 0], actual - expected
    # float32 rounds targets far from 0 to steps that can be close to their standard deviation.
    scale = np.maximum(likelihood.target_std.numpy(), ROUNDED_SHARE * np.abs(mean))
    return {"mean": difference[..., 0] / scale, "log_variance": difference[..., 1]}


def _relative(actual: np.ndarray, expected: np.ndarray, size: np.ndarray) -> np.ndarray:
    """Compute differences relative to the value or the mean, whichever is larger."""
    scale = np.maximum(size, size.mean(axis=0))
    difference = actual - expected
    return np.divide(difference, scale, out=difference, where=scale > 0)
