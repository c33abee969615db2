from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from tests.support.recipes import recipe_with
from training.fitting.steps import WARMUP_CALLS, GraphedFunction, Steps, adam, decay_rates
from training.methods import METHODS
from training.model import build, initialise

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
ROWS, STEPS, CLASSES = 32, 20, 3


def run_steps(method, network, is_captured):
    settings = recipe_with(method=method, network=network, posterior={})
    x = torch.randn(ROWS, 64, generator=torch.Generator().manual_seed(0)).cuda()
    y = (torch.arange(ROWS) % CLASSES).cuda()
    model = build(settings, (8, 8), CLASSES).cuda()
    initialise(model, x)
    steps = Steps(model, settings, (8, 8), adam(model, settings), ROWS)
    if not is_captured:
        assert isinstance(steps.compute, GraphedFunction)
        steps.compute = steps.compute.compute
    results = []
    for step in range(STEPS):
        decay_rates(steps.optimizer, step / STEPS)
        rows = ROWS - step % 2 * (step > WARMUP_CALLS + 5)
        results.append(steps.take(x[:rows], y[:rows], 1e-2 / (1 + step), step))
    return torch.stack(results), [p.detach() for p in model.parameters()]


@on_gpu
@pytest.mark.parametrize("network", [{"hidden": [12]}, {"kind": "gal-cnn"}])
def test_captured_step_matches_plain_step_for_each_method(network):
    mlp_methods = {"variational-hypernet", "batch-ensemble"} if "kind" in network else set()
    for method in METHODS.keys() - mlp_methods:
        results, parameters = run_steps(method, network, is_captured=True)
        expected, expected_parameters = run_steps(method, network, is_captured=False)
        torch.testing.assert_close(results, expected, rtol=1e-4, atol=1e-5)
        for parameter, expected_parameter in zip(parameters, expected_parameters, strict=True):
            torch.testing.assert_close(parameter, expected_parameter, rtol=1e-3, atol=1e-3)


class FakeGraph:
    def replay(self):
        self.result.copy_(self.compute(*self.inputs))


def test_each_shape_is_captured_once_and_then_replayed(monkeypatch):
    captures, calls = [], []

    def compute(x, weight):
        calls.append((len(x), bool(captures and captures[-1].is_open)))
        return (x * weight).sum(0)

    @contextmanager
    def graph(fake, pool):
        assert pool == "pool"
        captures.append(fake)
        fake.is_open = True
        yield
        fake.is_open = False

    def capture(self, inputs):
        instance = original(self, inputs)
        fake = instance.cuda_graph
        fake.inputs, fake.result = instance.inputs, instance.result
        fake.compute = lambda x, weight: (x * weight).sum(0)
        return instance

    original = GraphedFunction._capture
    monkeypatch.setattr(GraphedFunction, "_capture", capture)
    stream = SimpleNamespace(wait_stream=lambda _: None)
    fakes = {
        "CUDAGraph": FakeGraph,
        "graph": graph,
        "graph_pool_handle": lambda: "pool",
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": lambda _: nullcontext(),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    captured = GraphedFunction(compute)
    actual = []
    for step in range(9):
        x, weight = torch.full((2 if step % 3 == 2 else 4, 3), float(step)), torch.tensor(0.5)
        actual.append(captured(x, weight))
        torch.testing.assert_close(actual[-1], (x * weight).sum(0))
    torch.testing.assert_close(actual[3], torch.full((3,), 6.0))  # not overwritten by the next call
    warm_up = [(4, False), (4, False), (2, False)]
    assert calls == [*warm_up, (4, True), (2, True)]  # one capture per shape


@pytest.mark.parametrize("factory", [None, "training.networks.architectures:gal_cnn", "mine:cnn"])
def test_only_networks_outside_this_package_are_custom(factory):
    network = {"kind": "gal-cnn"} if factory is None else {"factory": factory}
    assert recipe_with(network=network).network.is_custom == (factory == "mine:cnn")
