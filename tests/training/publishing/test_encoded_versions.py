import shutil

import httpx
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import nn

from model_store.artifacts.manifest import ENCODER, Description
from model_store.artifacts.store import ModelStore
from model_store.errors import BrokenArtifact
from model_store.inference.model import NEEDED, Model
from tests.support.recipes import write_recipe
from training.__main__ import main

WIDTH = 16


class Body(nn.Module):
    """Image encoder with deterministic weights."""

    def __init__(self, shape):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.body = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
        )
        self.pool = nn.Linear(64, WIDTH)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))

    def forward(self, x):
        return torch.relu(self.pool(self.body(x / 16)))


class Eigenvalues(nn.Module):
    """Module with an operator that ONNX does not support."""

    def __init__(self, shape):
        super().__init__()

    def forward(self, x):
        return torch.linalg.svdvals(x[:, 0])


NETWORK = {"hidden": [], "encoder": f"{__name__}:Body"}


@pytest.fixture(scope="module")
def published(tmp_path_factory, fits):
    """Create a folder with a fitted version and a second version of the same content."""
    folder = tmp_path_factory.mktemp("encoded")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("DUBITO_STORE", str(folder / "models"))
        monkeypatch.setenv("DUBITO_RUNS", str(folder / "runs"))
        recipe = write_recipe(
            folder, network=NETWORK, training={"epochs": 3}, serving={"temperature": False}
        )
        assert main(["fit", str(recipe), "--quiet"]) == 0
    store = ModelStore(folder / "models")
    artifact = store.open("small", "1")
    description = Description(
        **{field: getattr(artifact.manifest, field) for field in Description.model_fields}
    )
    store.publish("small", description, {**artifact.files, ENCODER: artifact.folder / ENCODER})
    return folder


def get_models(folder):
    store = ModelStore(folder / "models")
    return [Model.load(store.open("small", version, NEEDED)) for version in ("1", "2")]


def test_version_is_fitted_on_encoder_outputs(published, digits_rows):
    manifest = ModelStore(published / "models").manifest("small", "1")
    assert manifest.encoder.model_dump() == {"outputs": WIDTH, "rows_at_once": 8}
    assert manifest.input.shape == (8, 8)
    assert manifest.detectors.attributed == ()
    rows = load_file(published / "models/small/1/training-rows.safetensors")["x"]
    assert rows.shape[1] == WIDTH
    weights = load_file(published / "models/small/1/weights.safetensors")
    assert not any("body" in name for name in weights)
    encoder, (model, _) = Body((1, 8, 8)), get_models(published)
    x = torch.from_numpy(digits_rows[:4].reshape(4, -1)).float()
    expected = encoder(x.unflatten(1, (1, 8, 8))).detach()
    np.testing.assert_allclose(model.runtime.encoded(x.numpy()), expected.numpy(), atol=1e-5)


def test_versions_share_encoder_in_memory(published):
    first, second = get_models(published)
    assert first.encoder is second.encoder


def test_version_with_damaged_or_missing_encoder_cannot_be_opened(published, tmp_path):
    shutil.copytree(published / "models", tmp_path / "models")
    path = tmp_path / "models/small/2/encoder.onnx"
    content = bytearray(path.read_bytes())
    content[-20] ^= 1
    path.write_bytes(bytes(content))
    store = ModelStore(tmp_path / "models")
    with pytest.raises(BrokenArtifact, match=r"encoder\.onnx: its SHA-256"):
        store.open("small", "2", NEEDED)
    path.unlink()
    with pytest.raises(BrokenArtifact, match=r"encoder\.onnx"):
        store.open("small", "2", NEEDED)


def test_service_predicts_explains_and_ranks_with_encoder(published, serve, digits_rows):
    rows = digits_rows[:5].tolist()
    with serve(published / "models") as (url, _), httpx.Client(base_url=url, timeout=30) as client:
        request = {"inputs": rows, "seed": 3, "return_samples": True}
        response = client.post("/predict", json=request)
        assert client.post("/predict", json=request).content == response.content
        batch = response.json()["predictions"]
        single = [
            client.post("/predict", json={**request, "inputs": [row]}).json()["predictions"][0]
            for row in rows
        ]
        assert single == batch
        (prediction,) = client.post("/predict", json={"inputs": rows[:1], "explain": True}).json()[
            "predictions"
        ]
        explanation = prediction["explanation"]
        assert explanation["map"] is None
        assert len(explanation["nearest"]) == 5
        ranked = client.post("/acquire", json={"pool": rows, "k": 2, "seed": 3}).json()["ranking"]
        assert len(ranked) == 2
        models = client.get("/models").json()["models"]
        assert models[0]["encoder"] == {"outputs": WIDTH, "rows_at_once": 8}
    samples = np.array([row["samples"] for row in batch]).swapaxes(0, 1)
    _, model = get_models(published)
    x = digits_rows[:5].reshape(5, -1).astype(np.float32)
    outputs, _ = model.runtime.run_set(x, model.runtime.draw_set(3, response.json()["num_samples"]))
    np.testing.assert_allclose(samples, np.exp(outputs), atol=1e-6)


def test_encoded_version_can_be_evaluated_and_warm_started_but_not_pruned(
    published, monkeypatch, capsys
):
    monkeypatch.setenv("DUBITO_STORE", str(published / "models"))
    monkeypatch.setenv("DUBITO_RUNS", str(published / "runs"))
    assert main(["evaluate", "small:1", "--rows", "20", "--quiet"]) == 0
    recipe = write_recipe(
        published, network=NETWORK, training={"epochs": 1}, serving={"temperature": False}
    )
    assert main(["fit", str(recipe), "--quiet", "--warm-start", "small:1", "--name", "warm"]) == 0
    assert main(["prune", "small:1", "--fraction", "0.5"]) == 2
    assert "expected a version without an encoder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("network", "message"),
    [
        ({"encoder": f"{__name__}:Eigenvalues"}, "expected a module that ONNX can export, got"),
        (
            {"encoder": f"{__name__}:Body", "kind": "gal-cnn", "hidden": None},
            "network.kind: expected no value with encoder",
        ),
        ({"encoder": "no_such_module:encoder"}, "network.encoder: expected an importable"),
    ],
)
@pytest.mark.usefixtures("fits")
def test_invalid_encoder_is_rejected(tmp_path, monkeypatch, capsys, network, message):
    monkeypatch.setenv("DUBITO_STORE", str(tmp_path / "models"))
    monkeypatch.setenv("DUBITO_RUNS", str(tmp_path / "runs"))
    recipe = write_recipe(
        tmp_path, network={k: v for k, v in (NETWORK | network).items() if v is not None}
    )
    assert main(["fit", str(recipe), "--quiet"]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "models").exists()
