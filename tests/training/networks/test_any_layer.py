import httpx
import numpy as np
import pytest
import torch
from torch import nn

from model_store.artifacts.store import ModelStore
from model_store.inference.noise import noise
from tests.support.recipes import write_recipe
from training.__main__ import main
from training.export.graphs import ExportSubstitutes
from training.versions import open_parent


class Embedded(nn.Module):
    """Attention between the pixels of a row of each image, each an id."""

    def __init__(self, shape, outputs):
        super().__init__()
        self.embedding = nn.Embedding(17, 8)
        self.place = nn.Parameter(torch.randn(8, 8))
        self.mix = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
        self.head = nn.Linear(8, outputs)

    def forward(self, x):
        return self.head(self.mix(self.embedding(x[:, 0, 2].long()) + self.place).mean(1))


class Recurrent(nn.Module):
    """A GRU over the pixels' rows."""

    def __init__(self, shape, outputs):
        super().__init__()
        self.steps, self.head = nn.GRU(8, 12, batch_first=True), nn.Linear(12, outputs)

    def forward(self, x):
        return self.head(self.steps(x[:, 0])[0][:, -1])


class Depthwise(nn.Module):
    """Depthwise and pointwise convolutions."""

    def __init__(self, shape, outputs):
        super().__init__()
        self.stem = nn.Conv2d(1, 6, 3, padding=1)
        self.depth, self.point = nn.Conv2d(6, 6, 3, padding=1, groups=6), nn.Conv2d(6, 8, 1)
        self.head = nn.Linear(8, outputs)

    def forward(self, x):
        h = torch.relu(self.stem(x))
        return self.head(torch.relu(self.point(self.depth(h))).mean((2, 3)))


class UShaped(nn.Module):
    def __init__(self, shape, outputs):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.down, self.up = nn.Conv2d(4, 8, 2, stride=2), nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.head = nn.Linear(8, outputs)

    def forward(self, x):
        h = torch.relu(self.norm(self.stem(x)))
        up = self.up(torch.relu(self.down(h)))
        return self.head(torch.relu(torch.cat([h, up], 1)).mean((2, 3)))


NETWORKS = {
    "embedded": (Embedded, {"standardise": False}, "bhn-realnvp"),
    "recurrent": (Recurrent, {}, "bbb-gaussian"),
    "depthwise": (Depthwise, {"bayesian": ["depth", "head"]}, "bbb-gaussian"),
    "u-shaped": (UShaped, {}, "dropout"),
}


@pytest.mark.usefixtures("fits")
@pytest.mark.parametrize(
    "name",
    [
        "u-shaped",
        *(pytest.param(name, marks=pytest.mark.slow) for name in NETWORKS if name != "u-shaped"),
    ],
)
def test_it_is_served_as_torch_computes_it_and_replayed(
    name, serve, digits_rows, tmp_path, monkeypatch
):
    module, keys, method = NETWORKS[name]
    monkeypatch.setenv("DUBITO_STORE", str(tmp_path / "models"))
    monkeypatch.setenv("DUBITO_RUNS", str(tmp_path / "runs"))
    network = {"factory": f"{__name__}:{module.__name__}", **keys}
    changes = {"training": {"epochs": 2}, "serving": {"temperature": False}}
    recipe = write_recipe(tmp_path, name=name, method=method, network=network, **changes)
    assert main(["fit", str(recipe), "--quiet"]) == 0
    rows = digits_rows[:3]
    with serve(tmp_path / "models") as (url, _), httpx.Client(base_url=url, timeout=30) as client:
        request = {"inputs": rows.tolist(), "num_samples": 4, "seed": 3, "return_samples": True}
        answer = client.post("/predict", json=request)
        assert answer.status_code == 200
        assert client.post("/predict", json=request).content == answer.content
    samples = np.array([row["samples"] for row in answer.json()["predictions"]]).swapaxes(0, 1)
    parent = open_parent(ModelStore(tmp_path / "models"), name, "model")
    spec = parent.manifest.noise
    eps = torch.from_numpy(noise(spec.algorithm, 3, 0, 4, spec.dimension))
    expected = parent.model().eval().predict(torch.from_numpy(rows).float(), eps).exp()
    np.testing.assert_allclose(samples, expected.numpy(), atol=2e-3)


@pytest.mark.parametrize("reduced", [torch.mean, torch.sum, torch.Tensor.mean])
@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("axes", [1, (1,), (0, 2), [-4, 2], -1, (2, 3), (0, 1, 2, 3)])
def test_sums_written_over_the_last_axes_are_the_same(reduced, axes, keepdim):
    x = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    expected = reduced(x, axes, keepdim), reduced(x, dim=axes, keepdim=keepdim, dtype=torch.float64)
    with ExportSubstitutes():
        actual = (
            reduced(x, axes, keepdim),
            reduced(x, dim=axes, keepdim=keepdim, dtype=torch.float64),
        )
        assert torch.equal(x.mean(), torch.mean(x))
        assert x.sum(dtype=torch.float64).dtype == torch.float64
    for item, other in zip(actual, expected, strict=True):
        assert item.dtype == other.dtype
        torch.testing.assert_close(item, other)
