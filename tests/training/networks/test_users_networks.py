import math
import sys
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional

from model_store.errors import InvalidInput
from model_store.inference.graphs import GraphError
from tests.support.recipes import content_with
from training import model as models
from training.bayes.dropout import MaskPosterior
from training.bayes.layers import Stochastic, WeightLayer, grouped_matmul, initial_weights, patches
from training.bayes.likelihoods import Categorical
from training.bayes.network import BayesianModel
from training.bayes.posterior import noise
from training.export import graphs
from training.export.graphs import check_exports
from training.model import build
from training.networks.architectures import call_factory, gal_cnn, papers_cnn, source_digest
from training.networks.networks import DrawnNetwork, MemberNetwork
from training.recipe import Recipe

SHAPE = (2, 7, 6)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = self.first

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


class MixesRows(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x - x.mean(0))


class Masked(nn.Module):
    def forward(self, x):
        return torch.dropout(x, 0.5, train=True)


class Uses(nn.Module):
    """Two layers with an unsupported forward."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.first, self.mask, self.last = nn.Linear(4, 4), Masked(), nn.Linear(4, 4)
        if kind == "lock":
            self.lock = threading.Lock()
        if kind == "tied":
            self.last.weight = self.first.weight

    def forward(self, x):
        match self.kind:
            case "unused":
                return self.last(x)
            case "weight":
                return self.last(x @ self.first.weight)
            case "weight too":
                return self.last(self.first(x)) @ self.first.weight
            case "twice":
                return self.last(self.first(torch.relu(self.first(x))))
            case "random":
                return self.last(self.first(x) + torch.rand(4))
            case "functional dropout":
                return self.last(nn.functional.dropout(self.first(x), 0.5, self.training))
            case "masked":
                return self.last(self.mask(self.first(x)))
        return self.last(self.first(x))


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (
            nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 3)),
            "a module that returns a tensor, got a tuple",
        ),
        (Uses("lock"), "a module that copy.deepcopy can copy, got TypeError"),
        (
            nn.Sequential(nn.Linear(4, 4), Uses("random")),
            "different outputs in a second call, from layer 1: Uses",
        ),
        (
            Uses("unused"),
            "layer first: Linear: it never runs; call it in forward, remove it from the module, or",
        ),
        (
            Uses("weight"),
            "layer first: Linear: forward reads its weights directly; call the layer instead",
        ),
        (
            Uses("weight too"),
            "layer first: Linear: forward reads its weights directly; call the layer instead",
        ),
        (
            Uses("twice"),
            "layer first: Linear: it runs 2 times; use a separate layer for each call",
        ),
        (
            Uses("tied"),
            "layer first: Linear: last reads its weights directly; call the layer instead, or exclude",
        ),
        (Uses("random"), "different outputs in a second call, from forward itself"),
        (
            nn.Sequential(nn.Linear(4, 4), Uses("functional dropout")),
            "without random numbers in training (use Dropout layers), got different outputs in a second "
            "call, from layer 1: Uses",
        ),
        (Uses("masked"), "different outputs in a second call, from layer mask: Masked"),
        (
            nn.Sequential(nn.Embedding(4, 3)),
            "a module that runs on a batch of rows, got RuntimeError",
        ),
        (
            nn.Sequential(nn.Linear(4, 4), nn.Bilinear(4, 4, 3)),
            "a module that runs on a batch of rows, got TypeError",
        ),
        (Twice(), "layer second: Linear: it is also layer first"),
        (MixesRows(), "mixes rows"),
        (nn.Sequential(nn.ReLU()), "a Linear, Conv1d or Conv2d layer to draw, got none"),
        (nn.Sequential(nn.Linear(5, 3)), "a module that runs on a batch of rows"),
    ],
)
def test_unsupported_modules_are_rejected_by_name(module, message):
    for samples in ("scales", "weights"):
        with pytest.raises(InvalidInput, match=r"network: ") as error:
            DrawnNetwork(module, Stochastic(samples), (4,))
        assert message in str(error.value)


def test_functional_dropout_is_rejected_unless_frozen():
    module = nn.Sequential(Uses("functional dropout"), nn.Linear(4, 3))
    with pytest.raises(InvalidInput, match="layer 0: Uses"):
        MemberNetwork([module], (4,))
    DrawnNetwork(module, Stochastic("scales", layers=["1"]), (4,), trained=[])


def test_dropout_inside_attention_and_recurrent_layers_is_disabled():
    attention = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.5, batch_first=True)
    recurrent = nn.Sequential(attention, Output(nn.GRU(4, 4, 2, dropout=0.5, batch_first=True)))
    module = nn.Sequential(recurrent, nn.Flatten(), nn.Linear(20, 3))
    network = DrawnNetwork(module, Stochastic("scales"), (5, 4)).train()
    x, theta = torch.randn(3, 20), torch.ones(1, 1, network.theta_dimension)
    torch.testing.assert_close(network(x, theta), network(x, theta), rtol=0, atol=0)


class Output(nn.Module):
    def __init__(self, steps):
        super().__init__()
        self.steps = steps

    def forward(self, x):
        return self.steps(x)[0]


def test_network_without_a_maskable_layer_is_rejected():
    with pytest.raises(
        InvalidInput,
        match=r"a second layer to mask, or posterior\.input_rate, got neither",
    ):
        DrawnNetwork(nn.Linear(4, 3), Stochastic("masks"), (4,))


def test_masks_apply_to_inputs_of_linear_layers_also_for_sequences():
    module = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2), nn.Flatten())
    network = DrawnNetwork(module, Stochastic("masks"), (5, 4)).eval()
    assert [slot.shape for slot in network.slots] == [(3,)]
    x, mask = torch.randn(6, 20), torch.tensor([2.0, 0.0, 2.0])
    hidden = torch.relu(module[0](x.unflatten(1, (5, 4)))) * mask
    outputs = network(x, torch.stack([mask, torch.ones(3)])[:, None])
    torch.testing.assert_close(outputs[0], module[2](hidden).flatten(1))


def test_convolutions_are_rejected_by_name_for_hypernetworks():
    grouped = nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.Flatten(), nn.Linear(4 * 5 * 4, 3))
    with pytest.raises(
        InvalidInput, match="layer 0: Conv2d: a variational hypernetwork needs Linear layers"
    ):
        DrawnNetwork(grouped, Stochastic("hypernet"), SHAPE)


def test_users_module_is_not_modified():
    module = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Dropout(0.3), nn.Linear(80, 3)
    )
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    for samples in ("scales", "weights", "masks"):
        DrawnNetwork(module, Stochastic(samples), SHAPE).initialise(torch.randn(9, 84))
    assert [type(layer) for layer in module] == [
        nn.Conv2d,
        nn.BatchNorm2d,
        nn.Flatten,
        nn.Dropout,
        nn.Linear,
    ]
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


@pytest.mark.parametrize(
    "convolution",
    [
        nn.Conv2d(2, 5, 3),
        nn.Conv2d(2, 5, (3, 2), stride=(2, 1), padding=(1, 0)),
        nn.Conv2d(2, 5, 3, padding="same", dilation=2, bias=False),
        nn.Conv2d(2, 5, 2, padding="valid", stride=3),
        nn.Conv2d(2, 5, 3, padding=2, padding_mode="circular"),
        nn.Conv2d(2, 6, (2, 3), groups=2, padding=1),
        nn.Conv2d(6, 6, 3, groups=6),
        nn.Conv1d(2, 5, 4, stride=2, padding=1),
        nn.Conv1d(6, 3, 3, groups=3, dilation=2, padding_mode="replicate", padding=2),
    ],
)
def test_patch_products_match_convolution(convolution):
    axes = SHAPE[1:] if isinstance(convolution, nn.Conv2d) else SHAPE[1:2]
    x = torch.randn(4, convolution.in_channels, *axes)
    columns, shape = patches(x, convolution)
    matrix = initial_weights(convolution)
    weight, bias = (matrix[:-1], matrix[-1]) if convolution.bias is not None else (matrix, 0)
    expected = convolution(x)
    assert expected.shape[2:] == shape
    offsets = math.prod(convolution.kernel_size)
    outputs = grouped_matmul(columns[None], weight[None], convolution.groups, offsets)[0] + bias
    torch.testing.assert_close(outputs.movedim(1, 2).unflatten(2, shape), expected)


def test_initial_weights_reproduce_the_module():
    module = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(168, 3)
    ).eval()
    network = DrawnNetwork(module, Stochastic("weights"), SHAPE).eval()
    assert sum(isinstance(layer, WeightLayer) for layer in network.modules()) == 2
    x = 5 + 2 * torch.randn(6, 84)
    theta = network.initialise(x)
    expected = module(((x - x.mean()) / x.std()).unflatten(1, SHAPE))
    for draws in (1, 3):  # torch's convolution, and patch products
        outputs = network(x, theta.expand(draws, 1, -1))
        torch.testing.assert_close(outputs, expected.expand(draws, -1, -1))


def test_initial_scales_standardise_outputs_after_residual_addition():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (
                nn.Conv2d(2, 4, 3, padding=1),
                nn.Conv2d(4, 4, 1),
                nn.Linear(4, 3),
            )

        def forward(self, x):
            h = torch.relu(self.a(x))
            return self.c((h + self.b(h)).mean((2, 3)))

    network = DrawnNetwork(Residual(), Stochastic("scales"), SHAPE).double().eval()
    x = 5 + 2 * torch.randn(50, 84, dtype=torch.float64)
    theta = network.initialise(x)
    outputs = network(x, theta[None, None])[0]
    torch.testing.assert_close(outputs.mean(0), torch.zeros(3).double(), atol=1e-9, rtol=0)
    torch.testing.assert_close(outputs.var(0), torch.ones(3).double())


def test_masks_replace_dropout_layers_at_their_rates():
    network = DrawnNetwork(gal_cnn((1, 12, 12), 3), Stochastic("masks", rate=0.9), (1, 12, 12))
    assert [(slot.shape, slot.keep) for slot in network.slots] == [((32,), 0.75), ((128,), 0.5)]


def test_networks_from_papers_have_published_sizes():
    def sizes(module):
        return [tuple(p.shape) for p in module.parameters() if p.ndim > 1]

    convolutions = [(64, 3, 3, 3), (64, 64, 3, 3), (128, 64, 3, 3), (128, 128, 3, 3)]
    assert sizes(papers_cnn((3, 32, 32), 10)) == [*convolutions, (512, 128 * 8 * 8), (10, 512)]
    assert sizes(gal_cnn((1, 28, 28), 10)) == [
        (32, 1, 4, 4),
        (32, 32, 4, 4),
        (128, 32 * 11 * 11),
        (10, 128),
    ]


class AttentionWithDropout(nn.Module):
    def __init__(self, rate):
        super().__init__()
        self.qkv, self.drop, self.out = nn.Linear(4, 12), nn.Dropout(rate), nn.Linear(20, 3)

    def forward(self, x):
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        rate = self.drop.p if self.training or self.drop.p > 1 else 0.0
        h = functional.scaled_dot_product_attention(query, key, value, dropout_p=rate)
        return self.out(h.flatten(1))


def test_forward_can_read_the_rate_of_a_removed_dropout():
    for samples, rate in (("scales", 0.5), ("weights", 0.5), ("masks", 0.0)):
        stochastic = Stochastic(samples, rate=0.1 if samples == "masks" else 0.0)
        network = DrawnNetwork(AttentionWithDropout(rate), stochastic, (5, 4))
        assert network.module.drop.p == 0
        network.initialise(torch.randn(9, 20))
        theta = torch.ones(2, 1, network.theta_dimension)
        first, repeated = (network.train()(torch.ones(3, 20), theta)[0] for _ in range(2))
        assert torch.equal(first, repeated)


def test_dropout_that_never_runs_is_rejected_for_masks():
    with pytest.raises(
        InvalidInput, match=r"layer drop: Dropout: it never runs; .* with network.bayesian"
    ):
        DrawnNetwork(AttentionWithDropout(0.5), Stochastic("masks"), (5, 4))


@pytest.mark.parametrize("kind", ["scales", "weights"])
def test_rounding_of_large_outputs_does_not_count_as_mixing_rows(kind):
    module = nn.Sequential(nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 40))
    with torch.no_grad():
        module[2].weight.mul_(1e6)
    DrawnNetwork(module, Stochastic(kind), (300,), is_trained=True)


def test_theta_selects_ensemble_members():
    members = [nn.Linear(4, 3) for _ in range(3)]
    network = MemberNetwork(members, (4,))
    x = torch.randn(5, 4)
    outputs = network(x, torch.tensor([2.0, 0.0])[:, None, None])
    torch.testing.assert_close(outputs, torch.stack([members[2](x), members[0](x)]))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_package:make", "No module named 'no_such_package'"),
        ("a_users_factories:absent", "has no attribute 'absent'"),
        ("a_users_factories:fails", "ZeroDivisionError"),
        ("a_users_factories:gives_a_number", "a int"),
    ],
)
def test_factory_that_fails_or_returns_no_module_is_rejected(tmp_path, monkeypatch, path, message):
    lines = [
        "def fails(shape, classes):",
        "    return 1 / 0",
        "def gives_a_number(shape, classes):",
        "    return 3",
    ]
    (tmp_path / "a_users_factories.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InvalidInput, match=r"network\.factory: ") as error:
        call_factory("network.factory", path, (4,), 3)
    assert message in str(error.value)
    sys.modules.pop("a_users_factories", None)


@pytest.mark.parametrize("method", ["bbb-gaussian", "ensemble"])
@pytest.mark.parametrize(
    ("name", "noise", "expected", "received"),
    [
        ("wide", None, "3 outputs per row (one for each class)", "5 after layer 2: Linear"),
        ("wide", "homoscedastic", "1 outputs per row (the mean)", "5 after layer 2: Linear"),
        (
            "wide",
            "heteroscedastic",
            "2 outputs per row (mean and log variance)",
            "5 after layer 2: Linear",
        ),
        (
            "flat",
            None,
            "3 outputs per row (one for each class)",
            "shape (160,) for 32 rows after layer 1: Flatten",
        ),
    ],
)
def test_wrong_output_width_is_rejected_with_factory_and_layer(
    tmp_path, monkeypatch, method, name, noise, expected, received
):
    lines = [
        "from torch import nn",
        "def wide(shape, outputs):",
        "    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5))",
        "def flat(shape, outputs):",
        "    return nn.Sequential(nn.Linear(4, 5), nn.Flatten(0))",
    ]
    (tmp_path / "users_of_widths.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    factory = f"users_of_widths:{name}"
    regression = {} if noise is None else {"task": "regression", "likelihood": {"noise": noise}}
    content = content_with(method=method, network={"factory": factory}, **regression)
    recipe = Recipe.model_validate({**content, "posterior": {}})
    with pytest.raises(InvalidInput) as error:
        build(recipe, (4,), 0 if noise else 3)
    assert (
        str(error.value)
        == f"network.factory: expected {factory} to return a module with {expected}, got {received}"
    )
    sys.modules.pop("users_of_widths", None)


def softmax_module(shape, outputs):
    return nn.Sequential(nn.Linear(*shape, outputs), nn.Softmax(-1))


def test_probabilities_instead_of_logits_are_rejected():
    content = content_with(network={"factory": f"{__name__}:softmax_module", "start": "trained"})
    with pytest.raises(InvalidInput, match="to return a module without a final softmax"):
        build(Recipe.model_validate(content), (4,), 3)
    regression = {"task": "regression", "likelihood": {"noise": "heteroscedastic"}}
    build(Recipe.model_validate({**content, **regression, "serving": {}}), (4,), 0)


# Errors during export


class ValueBranch(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        h = self.layer(x)
        return h if float(x.abs().max()) < 1e9 else -h


class LogGamma(nn.Module):
    def forward(self, x):
        return torch.lgamma(x)


@pytest.mark.usefixtures("fits")
@pytest.mark.parametrize(
    ("module", "message"),
    [
        (
            ValueBranch(),
            "network: expected a forward pass without control flow that depends on values (use "
            "torch.where), got one with if, while, int(), float() or .item() of a tensor",
        ),
        (
            nn.Sequential(nn.Linear(4, 4), LogGamma(), nn.Linear(4, 3)),
            "network: expected operators that ONNX supports, got lgamma (layer 1: LogGamma)",
        ),
    ],
)
def test_modules_that_cannot_be_exported_are_rejected_in_plain_words(module, message):
    network = DrawnNetwork(module, Stochastic("masks", input_rate=0.5), (4,))
    with pytest.raises(InvalidInput) as error:
        check_exports(
            BayesianModel(network, MaskPosterior(network.slots, is_served=True), Categorical(3))
        )
    assert str(error.value) == message


def test_unsupported_operators_are_rejected_by_name(monkeypatch):
    def raise_error(*_, **__):
        raise GraphError("network.onnx", "expected supported operators, got Bernoulli")

    monkeypatch.setattr(graphs, "export", raise_error)
    network = DrawnNetwork(nn.Linear(4, 3), Stochastic("masks", input_rate=0.5), (4,))
    with pytest.raises(InvalidInput) as error:
        check_exports(
            BayesianModel(network, MaskPosterior(network.slots, is_served=True), Categorical(3))
        )
    expected = "a module of operators that the service supports (docs/networks.md)"
    assert str(error.value) == (
        f"network: expected {expected}, got network.onnx: expected supported operators, "
        "got Bernoulli"
    )


# Attention, normalisation and recurrence


class Sequence(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.query, self.key, self.value = (nn.Linear(4, 4) for _ in range(3))
        self.norm = (
            nn.LayerNorm(4)
            if kind == "layer norm"
            else nn.GroupNorm(5, 5)
            if kind == "group norm"
            else None
        )
        self.steps = nn.GRU(4, 4, batch_first=True) if kind == "gru" else None
        self.out = nn.Linear(20, 3)

    def forward(self, x):
        query, key, value = self.query(x), self.key(x), self.value(x)
        if self.kind == "fused attention":
            h = functional.scaled_dot_product_attention(query, key, value)
        else:
            h = torch.softmax(query @ key.transpose(1, 2) / 2, dim=-1) @ value
        h = h if self.norm is None else self.norm(h)
        h = h if self.steps is None else self.steps(h)[0]
        return self.out(h.flatten(1))


@pytest.mark.usefixtures("fits")
@pytest.mark.parametrize(
    "kind", ["attention", "fused attention", "layer norm", "group norm", "gru"]
)
@pytest.mark.parametrize("method", ["bhn-realnvp", "bbb-gaussian", "dropout", "mle"])
def test_attention_norms_and_recurrent_layers_can_be_trained(monkeypatch, method, kind):
    monkeypatch.setattr(models, "call_factory", lambda *_: Sequence(kind))
    monkeypatch.setattr(models, "channels_first", tuple)
    posterior = {"couplings": 1, "hidden": 4} if method == "bhn-realnvp" else {}
    content = content_with(method=method, network={"factory": "a.users:module"})
    model = build(Recipe.model_validate({**content, "posterior": posterior}), (5, 4), 3)
    x = torch.randn(30, 20, generator=torch.Generator().manual_seed(0))
    models.initialise(model, x)
    outputs, kl = model.sample(x, noise(model.posterior, model.posterior.max_draws or 2, 0, 0))
    (kl.mean() - model.likelihood.log_likelihood(outputs, torch.arange(30) % 3).mean()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.network.parameters())


def test_source_digest_depends_on_the_source_of_the_factory(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    source = "from torch import nn\ndef build(*_): return nn.Linear(1, 1)"
    (tmp_path / "users_net.py").write_text(source)
    before = source_digest("users_net:build")
    assert source_digest("users_net:build") == before
    (tmp_path / "users_net.py").write_text(source + "\n")
    assert source_digest("users_net:build") != before
