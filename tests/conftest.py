"""What tests share: a small real artifact in a store, and the service over real HTTP."""

import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
SOON = {"DUBITO_POLL_INTERVAL_S": "0.05", "DUBITO_THREADS": "1"}  # what is published is seen at once
QUICK_RECIPE = """
name = "digits"
method = "bhn-realnvp"
seed = 0
[data]
source = "digits"
validation_rows = 120
reference_rows = 140
ranking_rows = 220
[network]
hidden = [64, 64]
[posterior]
couplings = 2
hidden = 50
initial_log_std = -4.0
[training]
epochs = 30
batch_rows = 64
[serving]
draws = 100
"""


@pytest.fixture(scope="session")
def quick_recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe for digits that fits in seconds."""
    path = tmp_path_factory.mktemp("recipes") / "quick.toml"
    path.write_text(QUICK_RECIPE)
    return path


@pytest.fixture(scope="session")
def digits_store(tmp_path_factory: pytest.TempPathFactory, quick_recipe: Path) -> Path:
    """A model store with one real model, `digits` version 1, fitted by the command that users run. Do not change it:
    copy it (`shutil.copytree`) where a test writes."""
    root = tmp_path_factory.mktemp("fitted")
    environment = environment_with(DUBITO_STORE=str(root / "models"), DUBITO_RUNS=str(root / "runs"))
    command = [sys.executable, "-m", "training", "fit", str(quick_recipe), "--quiet", "--device", "cpu"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return root / "models"


def publish_again(store: object, source: Path, name: str = "digits", **files: bytes) -> str:
    """Publish `digits` version 1 of another store, some files replaced, as a new version; return its number."""
    from model_store.artifacts.manifest import FILES, Description
    from model_store.artifacts.store import ModelStore

    artifact = ModelStore(source).open("digits", "1")
    description = Description(**{field: getattr(artifact.manifest, field) for field in Description.model_fields})
    replaced = {f"{stem}.onnx": content for stem, content in files.items()}
    return store.publish(name, description, {file: artifact.files[file] for file in FILES} | replaced).version


@pytest.fixture
def own_store(digits_store: Path, tmp_path: Path) -> object:
    """A store of a test's own, with `digits` version 1."""
    from model_store.artifacts.store import ModelStore

    shutil.copytree(digits_store, tmp_path / "models")
    return ModelStore(tmp_path / "models")


def predict_blank(client: httpx.Client, **fields: object) -> httpx.Response:
    """The answer to a request of one row, a blank digit."""
    return client.post("/predict", json={"inputs": [[0.0] * 64], **fields})


@pytest.fixture(scope="session")
def evaluated_store(tmp_path_factory: pytest.TempPathFactory, digits_store: Path) -> Path:
    """A copy of `digits_store` whose model has an evaluation report, with attacks and an npz file of other rows,
    written by the command that users run. Do not change it."""
    root = tmp_path_factory.mktemp("evaluated")
    shutil.copytree(digits_store, root / "models")
    np.savez(root / "odd.npz", x=np.tile(np.array([0, 16], dtype=np.float32), (20, 32)))
    environment = environment_with(DUBITO_STORE=str(root / "models"), DUBITO_DATA=str(root))
    options = ["--attacks", "--rows", "32", "--outliers", "odd=npz:odd.npz", "--quiet"]
    command = [sys.executable, "-m", "training", "evaluate", "digits", *options]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return root / "models"


@pytest.fixture(scope="session")
def digits_rows() -> np.ndarray:
    """The 359 test rows of digits, (N, 64) float32 from 0 to 16."""
    from training.data import digits

    return digits().test.x


@pytest.fixture(scope="session")
def service_url(digits_store: Path) -> Iterator[str]:
    """The base URL of a service that serves `digits_store`."""
    with serving(digits_store) as (url, _):
        yield url


@pytest.fixture
def client(service_url: str) -> Iterator[httpx.Client]:
    """A client of the shared service."""
    with httpx.Client(base_url=service_url, timeout=60) as client:
        yield client


@pytest.fixture
def serve() -> Callable[..., object]:
    """`with serve(store, DUBITO_...=...) as (url, process)`: a service of a test's own."""
    return serving


def tiny_files() -> dict[str, bytes]:
    """The files of a version that only a store can read."""
    from model_store.artifacts.manifest import FILES

    return {file: f"the bytes of {file}".encode() for file in FILES}


def tiny_description() -> object:
    """What goes with `tiny_files`."""
    from model_store.artifacts.manifest import Description

    return Description.model_validate(
        {
            "method": "test",
            "task": "classification",
            "input": {"shape": [2, 3], "minimum": 0, "maximum": 1},
            "output": {"classes": ["no", "yes"]},
            "noise": {
                "algorithm": "none",
                "dimension": 1,
                "theta_dimension": 1,
                "paired": True,
                "default_draws": 3,
            },
            "detectors": {
                "density": [],
                "combined": ["bald"],
                "draw_counts": [1, 3],
                "reference_rows": 10,
                "ranking_rows": 10,
                "smallest_fpr": 1 / 11,
            },
            "abstention": {"confidence": 0.95, "smallest_risk": 0.4},
            "training": {"note": "Ünïcode", "nested": {"steps": [1, 2.5, None]}},
            "quality": {"test_accuracy": 0.5},
            "parity": {"theta": 0.0},
        }
    )


@pytest.fixture
def store(tmp_path: Path) -> object:
    """An empty store."""
    from model_store.artifacts.store import ModelStore

    return ModelStore(tmp_path / "models")


@pytest.fixture
def published(store: object) -> object:
    """A store with one version of `m`, of `tiny_files`."""
    store.publish("m", tiny_description(), tiny_files())
    return store


def environment_with(**settings: str) -> dict[str, str]:
    """The environment without any DUBITO_ variable but these."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DUBITO_")}
    return kept | settings


def scale_mlp(*sizes: int, seed: int = 0):
    """A multilayer perceptron whose weight-norm scales are drawn, of layer sizes (inputs, hidden ..., classes)."""
    import torch

    from training.nn.architectures import mlp
    from training.nn.networks import DrawnNetwork, Stochastic

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return DrawnNetwork(mlp(sizes[0], sizes[1:-1], sizes[-1]), Stochastic("scales"), (sizes[0],))


def scale_model(flow, *sizes: int, couplings: int = 2, hidden: int = 8, log_scale: float = -2.0):
    """A Bayesian hypernetwork over the scales of a multilayer perceptron, its parameters as they start."""
    import torch

    from training.nn.likelihoods import Categorical
    from training.nn.model import BayesianModel
    from training.nn.posteriors.hypernetwork import HypernetworkPosterior

    network = scale_mlp(*sizes)
    dimension = network.theta_dimension
    made = flow(dimension, couplings, hidden, log_scale, torch.Generator().manual_seed(0))
    return BayesianModel(network, HypernetworkPosterior(made, dimension, 1.0), Categorical(sizes[-1]))


SMALL_RECIPE = """
name = "{name}"
method = "{method}"
[data]
source = "digits"
validation_rows = 60
reference_rows = 60
ranking_rows = 60
[network]
{network}
[posterior]
{posterior}
[training]
epochs = {epochs}
batch_rows = 64
learning_rate = 5e-3
[serving]
draws = 20
"""


def small_recipe(folder: Path, name: str, method: str, network: str, posterior: str = "", epochs: int = 40) -> str:
    """The path of a recipe for digits, NAME.toml in a folder, that fits in about a second."""
    path = folder / f"{name}.toml"
    text = SMALL_RECIPE.format(name=name, method=method, network=network, posterior=posterior, epochs=epochs)
    path.write_text(text)
    return str(path)


@contextmanager
def working_in(folder: Path) -> Iterator[None]:
    """Commands find a user's modules and data in a folder, and put runs and models below it."""
    with pytest.MonkeyPatch.context() as settings:
        settings.syspath_prepend(folder)
        settings.setenv("DUBITO_DATA", str(folder))
        settings.setenv("DUBITO_RUNS", str(folder / "runs"))
        settings.setenv("DUBITO_STORE", str(folder / "models"))
        yield


@contextmanager
def serving(store: Path, **settings: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run `python -m service` on a free port of the loopback interface; it is live when the block begins."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    basics = {"DUBITO_STORE": str(store), "DUBITO_PORT": str(port), "DUBITO_NOTICE_S": "0"}
    environment = environment_with(**basics | settings)
    process = subprocess.Popen(
        [sys.executable, "-m", "service"], env=environment, cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: process.poll() is not None or answers(f"{url}/health/live"))
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        yield url, process
    finally:
        process.terminate()
        try:
            process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def answers(url: str) -> bool:
    """Whether a URL answers 200."""
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def wait_until(condition: Callable[[], bool], seconds: float = 30) -> None:
    """Wait for a condition, or fail."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.05)


def metric(text: str, name: str, **labels: str) -> float:
    """The value of a Prometheus sample, 0 where there is none."""
    for line in text.splitlines():
        match = re.fullmatch(rf"{name}(?:\{{(.*)\}})? (\S+)", line)
        if match and dict(re.findall(r'(\w+)="([^"]*)"', match[1] or "")) == labels:
            return float(match[2])
    return 0.0


def recipe_of(source: str, task: str = "classification", **data: object) -> object:
    """A recipe for a data source, with what else its `[data]` says."""
    from training.recipe import Recipe

    sizes = {"validation_rows": 1, "reference_rows": 1, "ranking_rows": 1}
    return Recipe(
        name="a",
        method="bhn-realnvp",
        task=task,
        data={"source": source, **sizes, **data},
        network={"hidden": [4]},
        training={"epochs": 1},
    )


def png_file(header: tuple[int, ...], data: bytes) -> bytes:
    """A PNG file of a header (width, height, bits, colour type, 0, 0, interlace) and rows before compression."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    compressed = zlib.compress(data)
    parts = [(b"IHDR", struct.pack(">IIBBBBB", *header)), (b"IDAT", compressed[:9]), (b"IDAT", compressed[9:])]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in [*parts, (b"IEND", b"")])


def refused(call: Callable[[], object], *says: str) -> None:
    """Assert that a call refuses its input in one line that says these things."""
    from model_store.errors import InvalidInput

    with pytest.raises(InvalidInput) as error:
        call()
    for text in says:
        assert text in str(error.value)
    assert "\n" not in str(error.value)
