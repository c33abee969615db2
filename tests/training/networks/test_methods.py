from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.stats import ks_2samp
from torch import nn

from model_store.acquisition.ranking import PoolScorer
from model_store.inference.noise import DRAW_INDEX
from model_store.inference.noise import noise as draw
from model_store.scores.classification import predictive_scores, predictive_sums
from model_store.scores.joint import BatchBald
from model_store.scores.tasks import get_predictive
from tests.support.recipes import recipe_with
from training.bayes.posterior import noise
from training.data.rows import Rows
from training.detectors import FOR_ANY_SHAPE
from training.export.graphs import (
    CHECKED_DETECTORS,
    PARITY_TOLERANCE,
    export,
    joint_model,
    load_runtime,
    parity,
)
from training.export.served import fold, served_network
from training.fitting.laplace import fit_laplace
from training.fitting.steps import alpha_objective
from training.methods import METHODS, Laplace
from training.model import build, initialise
from training.networks.local import localise

ROWS, SHAPE, CLASSES = 20, (6, 6), 4
SETS, SET_DRAWS = 200, 20
SMALL = {
    "bhn-realnvp": {"couplings": 2, "hidden": 8, "initial_log_std": -2.0},
    "bhn-iaf": {"couplings": 2, "hidden": 8, "initial_log_std": -2.0},
    "bhn-weights": {"couplings": 2, "hidden": 8, "initial_log_std": -2.0},
    "variational-hypernet": {"hidden": 6, "initial_log_std": -2.0},
    "dropout": {"prior_std": 2.0},
    "gp-layer": {"features": 16},
    "last-layer-hmc": {"draws": 20},
    "ensemble": {"members": 3, "prior_std": 1.0},
    "batch-ensemble": {"members": 3, "prior_std": 1.0},
}
SIMILAR_METHODS = (
    *("dropout-alpha", "mle-dropout", "bbb-mixture", "mle", "ensemble", "anchored-ensemble"),
    *("bhn-iaf", "last-layer-hmc", "gp-layer", "dropout"),
)
CASES = [
    *((method, "mlp") for method in METHODS if method not in SIMILAR_METHODS),
    ("dropout", "residuals"),
]
SLOW_CASES = [
    *((method, "mlp") for method in SIMILAR_METHODS),
    *((method, "residuals") for method in ("bhn-realnvp", "bbb-mixture", "ensemble")),
    *((method, "skips") for method in ("bhn-iaf", "mvn", "variational-hypernet")),
    *(("laplace", network) for network in ("residuals", "skips", "groups")),
    ("gp-layer", "residuals"),
]


class Residuals(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.stem = nn.Conv2d(shape[0], 5, 3, padding="same")
        self.inner = nn.Conv2d(5, 5, (3, 1), padding=(1, 0), bias=False)
        self.norm = nn.BatchNorm2d(5)
        self.down = nn.Conv2d(5, 6, 2, stride=2, dilation=1)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(6, classes)

    def forward(self, x):
        h = torch.relu(self.stem(x))
        h = torch.relu(h + self.norm(self.inner(h)))
        return self.head(
            self.drop(nn.functional.adaptive_avg_pool2d(torch.relu(self.down(h)), 1).flatten(1))
        )


class SkipConnection(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        size = int(np.prod(shape))
        self.first, self.norm, self.last = (
            nn.Linear(size, size),
            nn.LayerNorm(size),
            nn.Linear(size, classes),
        )

    def forward(self, x):
        x = x.flatten(1)
        return self.last(x + torch.tanh(self.norm(self.first(x))))


def groups(shape, classes):
    """Build a module with grouped convolutions, one of them depthwise."""
    return nn.Sequential(
        *(
            nn.Conv2d(shape[0], 4, 3, stride=2),
            nn.ReLU(inplace=True),
            nn.Conv2d(4, 6, 2, groups=2),
            nn.Tanh(),
        ),
        *(
            nn.Flatten(2),
            nn.Conv1d(6, 6, 1, groups=6, bias=False),
            nn.Flatten(),
            nn.Linear(6, classes),
        ),
    )


NETWORKS = {
    "mlp": {"hidden": [9, 7]},
    "residuals": {"factory": f"{__name__}:Residuals"},
    "skips": {"factory": f"{__name__}:SkipConnection"},
    "groups": {"factory": f"{__name__}:groups"},
}


def recipe(method, network):
    return recipe_with(method=method, network=NETWORKS[network], posterior=SMALL.get(method, {}))


class Case:
    def __init__(self, method, network):
        generator = torch.Generator().manual_seed(0)
        self.recipe = recipe(method, network)
        self.x = 3 + 2 * torch.randn(ROWS, 36, generator=generator)
        self.y = torch.arange(ROWS) % CLASSES
        self.model = self.build_model()
        initialise(self.model, self.x)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        self.draws = self.model.posterior.max_draws or 6
        self.gradients = self.compute_gradients()
        if isinstance(self.recipe.posterior, Laplace):
            rows = (self.x, self.y)
            with pytest.MonkeyPatch.context() as changes:  # short chains
                changes.setattr("training.fitting.laplace.WARM_UP", 20)
                changes.setattr("training.fitting.laplace.DRAWS", 20)
                fit_laplace(self.model, self.recipe.posterior, rows, rows, 0, 6)
        self.model.eval()
        fold(self.model)
        # The graphs of detectors do not depend on the method.
        has_all_detectors = (method, network) == ("bhn-realnvp", "mlp")
        served_model = localise(self.model, self.x)
        result = served_network(
            served_model, self.x, 0, names=FOR_ANY_SHAPE if has_all_detectors else CHECKED_DETECTORS
        )
        joint = joint_model(self.model, served_model)
        self.files = export(served_model, result, joint=joint)
        self.runtime = load_runtime(served_model, self.files)
        rows = Rows(self.x.numpy(), self.y.numpy())
        self.parity = parity(served_model, result, self.runtime, rows, joint)

    def build_model(self):
        return build(self.recipe, SHAPE, CLASSES)

    def compute_gradients(self):
        eps = noise(self.model.posterior, self.draws, 1, 2)
        log_probs, kl = self.model.train().sample(self.x, eps)
        loss, _ = alpha_objective(
            self.model.likelihood.log_likelihood(log_probs, self.y), kl, 1e-2, 0.5
        )
        loss.backward()
        return {name: parameter.grad for name, parameter in self.model.named_parameters()}


def cases():
    yield from (pytest.param(case, id="-".join(case)) for case in CASES)
    yield from (
        pytest.param(case, id="-".join(case), marks=pytest.mark.slow) for case in SLOW_CASES
    )


@pytest.fixture(scope="module", params=cases())
def case(request, fits):
    return Case(*request.param)


def test_gradients_reach_every_parameter(case):
    for name, gradient in case.gradients.items():
        assert gradient is not None, name
        assert gradient.isfinite().all(), name
        assert gradient.abs().max() > 0, name


def test_step_and_centre_run_on_the_models_device(case, monkeypatch):
    # Parameters stay the same objects if they move, as on a GPU.
    monkeypatch.setattr(torch.__future__, "get_swap_module_params_on_conversion", lambda: True)
    model, (x, y) = case.build_model().to("meta"), (case.x.to("meta"), case.y.to("meta"))
    result, kl = model.sample(x, noise(model.posterior, case.draws, 1, 2).to("meta"))
    loss, _ = alpha_objective(model.likelihood.weighted_log_likelihood(result, y), kl, 1e-2, 0.5)
    loss.backward()
    model.serve(x, model.posterior.centre().to("meta")[None, None], ROWS)


def test_torch_and_onnxruntime_agree(case):
    assert set(case.parity) == {"theta", "probabilities", "density"}
    assert all(0 <= difference < PARITY_TOLERANCE / 10 for difference in case.parity.values())


def test_outputs_are_reproducible_and_depend_on_noise(case):
    x = case.x.numpy()
    first, repeated, different = (
        case.runtime.run_set(x, case.runtime.draw_set(s, case.draws))[0] for s in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, repeated)
    is_random = case.runtime.algorithm != DRAW_INDEX and case.model.posterior.max_draws is None
    assert (first != different).any() == is_random


def test_draws_do_not_depend_on_offset_and_count(case):
    theta = case.runtime.draw(5, 0, case.draws)
    np.testing.assert_array_equal(case.runtime.draw(5, 0, 1), theta[:1])
    np.testing.assert_array_equal(case.runtime.draw(5, case.draws - 1, 1), theta[-1:])


def test_row_outputs_are_bit_identical_in_any_batch(case):
    draws = case.runtime.draw_set(5, case.draws)
    outputs, density = case.runtime.run_set(case.x.numpy(), draws)
    for rows in (1, 2, 3, 7):
        part, part_density = case.runtime.run_set(case.x.numpy()[:rows], draws)
        np.testing.assert_array_equal(part, outputs[:, :rows])
        np.testing.assert_array_equal(part_density, density[:rows])
        part = case.runtime.run_outputs(case.x.numpy()[:rows], draws)
        np.testing.assert_array_equal(part, outputs[:, :rows])
    last, _ = case.runtime.run_set(case.x.numpy()[-1:], draws)
    np.testing.assert_array_equal(last[:, 0], outputs[:, -1])


def test_draw_outputs_are_bit_identical_in_separate_runs(case):
    draws = case.runtime.draw_set(5, case.draws)
    assert draws.theta is not None
    outputs, _ = case.runtime.run(case.x.numpy(), draws.theta[:, None])
    for k in range(case.draws):
        draw_outputs, _ = case.runtime.run(case.x.numpy(), draws.theta[k : k + 1, None])
        np.testing.assert_array_equal(draw_outputs[0], outputs[k])


def test_local_outputs_have_the_distribution_of_weight_draws(case):
    if not case.runtime.has_joint:
        pytest.skip("weights are drawn directly")
    x = case.x[:2].numpy()
    local, weights = (
        statistics(runtime.run_outputs(x, runtime.draw_set(seed, SETS * SET_DRAWS)))
        for runtime, seed in ((case.runtime, 1), (case.runtime.joint, 2))
    )
    p_values = [ks_2samp(a, b).pvalue for a, b in zip(local, weights, strict=True)]
    assert min(p_values) * len(p_values) > 0.01  # Holm's correction


def test_joint_scores_use_weight_draws(case):
    predictive = get_predictive("classification", None)
    model = SimpleNamespace(runtime=case.runtime, predictive=predictive)
    draws = case.runtime.draw_set(5, case.draws)
    actual = PoolScorer(model, "batchbald").candidates(case.x.numpy(), draws)
    posterior = case.model.posterior
    eps = torch.from_numpy(draw(posterior.algorithm, 5, 0, case.draws, posterior.noise_dimension))
    probs = case.model.predict(case.x, eps).exp().numpy()
    expected = BatchBald.from_probs(probs)
    np.testing.assert_allclose(actual.outputs, expected.outputs, atol=1e-5)


def statistics(log_probs):
    """Return samples of log probabilities, entropy and BALD."""
    sets = log_probs.reshape(SETS, SET_DRAWS, -1, CLASSES)
    scores = [predictive_scores(predictive_sums(part), standard_errors=False) for part in sets]
    columns = [log_probs[..., :-1].reshape(len(log_probs), -1)]
    columns += [np.stack([getattr(s, name) for s in scores]) for name in ("entropy", "bald")]
    return [sample for column in columns for sample in column.T]


def test_new_model_with_loaded_weights_predicts_the_same(case):
    fresh = case.build_model().eval()
    fresh.load_state_dict(case.model.state_dict())
    eps = noise(case.model.posterior, case.draws, 7)
    torch.testing.assert_close(fresh.predict(case.x, eps), case.model.predict(case.x, eps))


def test_chunked_predictions_match_separate_draws(case):
    eps = noise(case.model.posterior, case.draws, 7)
    with torch.no_grad():
        one_by_one = [
            case.model.likelihood(
                case.model.network(case.x, case.model.posterior(e[None])[:, None])
            )
            for e in eps
        ]
    torch.testing.assert_close(
        case.model.predict(case.x, eps, chunk_rows=30), torch.cat(one_by_one)
    )
