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


def parameters_after(method, network, is_captured):
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
def test_a_captured_step_of_each_method_does_what_the_step_does(network):
    of_layers = {"variational-hypernet", "batch-ensemble"} if "kind" in network else set()
    for method in METHODS.keys() - of_layers:
        results, parameters = parameters_after(method, network, is_captured=True)
        expected, rest = parameters_after(method, network, is_captured=False)
        torch.testing.assert_close(results, expected, rtol=1e-4, atol=1e-5)
        for parameter, other in zip(parameters, rest, strict=True):
            torch.testing.assert_close(parameter, other, rtol=1e-3, atol=1e-3)


class FakeGraph:
    def replay(self):
        self.result.copy_(self.compute(*self.inputs))


def test_calls_are_replayed_from_the_first_of_their_shapes_on(monkeypatch):
    captures, ran = [], []

    def compute(x, weight):
        ran.append((len(x), bool(captures and captures[-1].is_open)))
        return (x * weight).sum(0)

    @contextmanager
    def graph(fake, pool):
        assert pool == "pool"
        captures.append(fake)
        fake.is_open = True
        yield
        fake.is_open = False

    def capture(self, given):
        actual = created(self, given)
        fake = actual.cuda_graph
        fake.inputs, fake.result = actual.inputs, actual.result
        fake.compute = lambda x, weight: (x * weight).sum(0)
        return actual

    created = GraphedFunction._capture
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
    torch.testing.assert_close(actual[3], torch.full((3,), 6.0))  # is not overwritten by the next
    before = [(4, False), (4, False), (2, False)]
    assert ran == [*before, (4, True), (2, True)]  # no shape twice; the others were replayed


@pytest.mark.parametrize("factory", [None, "training.networks.architectures:gal_cnn", "mine:cnn"])
def test_networks_of_this_package_may_be_captured(factory):
    network = {"kind": "gal-cnn"} if factory is None else {"factory": factory}
    assert recipe_with(network=network).network.is_custom == (factory == "mine:cnn")
