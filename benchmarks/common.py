"""Options, models, rows and services for benchmarks."""

import argparse
import http.client
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.figure import Figure
from safetensors.torch import load as load_weights

from model_store.artifacts.store import ModelStore
from model_store.inference.model import NEEDED, Model
from training import recipe as recipes
from training.bayes.hypernetwork import HypernetworkPosterior
from training.bayes.network import BayesianModel
from training.data import load
from training.data.rows import Dataset, Rows, SplitSizes, split, split_sizes
from training.fit import Fitted, publish, temper
from training.fitting.laplace import fit_laplace
from training.methods import Laplace
from training.model import build, initialise
from training.scoring import draw_counts
from training.versions import Provenance, read_recipe

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"
NOTES = "<!-- written by hand -->\n"
NAME = "mnist"
TRAINED_LOG_STD = -0.7
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def bare_parser(description: str | None, written: str) -> argparse.ArgumentParser:
    """Create a parser with `--write`, which saves results under the name `written`."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help=f"write docs/results/{written}")
    return parser


def model_parser(description: str | None, written: str) -> argparse.ArgumentParser:
    """Create a parser with `--store` and the name of a published model."""
    parser = bare_parser(description, written)
    parser.add_argument("name")
    default = Path(os.environ.get("DUBITO_STORE", "models"))
    parser.add_argument("--store", type=Path, default=default)
    return parser


def size_parser(description: str | None, written: str) -> argparse.ArgumentParser:
    """Create a parser with `--store`; by default a store with an untrained model."""
    parser = bare_parser(description, written)
    parser.add_argument("--store", type=Path, help="by default one with a model of MNIST's size")
    return parser


@contextmanager
def open_or_publish(options: argparse.Namespace) -> Iterator[ModelStore]:
    with tempfile.TemporaryDirectory() as folder:
        store = ModelStore(options.store or Path(folder))
        if options.store is None:
            publish_untrained(store)
        yield store


def report(
    options: argparse.Namespace, stem: str, text: str, draw: Callable[[], Figure] | None = None
) -> None:
    """Print a page. With `--write`, save it and its figure to docs/results.

    The page keeps its hand-written part, which starts at `NOTES`.
    """
    print(text)
    if options.write:
        page = RESULTS / f"{stem}.md"
        previous = page.read_text() if page.exists() else ""
        _, marker, notes = previous.partition(NOTES)
        page.write_text(f"{text}\n{marker}{notes}" if marker else text)
        if draw is not None:
            plt.switch_backend("Agg")
            figure = draw()
            figure.savefig(RESULTS / f"{stem}.png", dpi=100)
            plt.close(figure)


def spread(values: list[float], digits: int = 2) -> str:
    """Format the median, minimum and maximum of values."""
    numbers = (statistics.median(values), min(values), max(values))
    median, smallest, largest = (f"{number:.{digits}f}" for number in numbers)
    return f"{median} ({smallest}–{largest})"


@dataclass(frozen=True)
class Service:
    """A running service, with its startup time in seconds."""

    port: int
    process: subprocess.Popen[bytes]
    seconds: float

    def ask(self, method: str, path: str, body: str | bytes | None = None) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(method, path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        assert answer.status in (200, 202), content[:300]
        return content

    def processor_seconds(self) -> float:
        """Processor time used so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:13])) / TICKS_PER_SECOND


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def serve(store: Path, **settings: str) -> Iterator[Service]:
    """Run the service in a separate process, with only the given settings."""
    port = free_port()
    retained = {name: value for name, value in os.environ.items() if not name.startswith("DUBITO_")}
    options = {"DUBITO_STORE": str(store), "DUBITO_PORT": str(port), "DUBITO_SHUTDOWN_GRACE_S": "0"}
    started_at = time.perf_counter()
    command = [sys.executable, "-m", "service"]
    environment = retained | options | settings
    process = subprocess.Popen(command, env=environment, cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        while not _is_ready(port):
            assert process.poll() is None, "the service ended"
            time.sleep(0.01)
        yield Service(port, process, time.perf_counter() - started_at)
    finally:
        process.terminate()
        process.wait()


def _is_ready(port: int) -> bool:
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        connection.request("GET", "/health/ready")
        return connection.getresponse().status == 200
    except OSError:
        return False


def data_root() -> Path:
    return Path(os.environ.get("DUBITO_DATA", "data"))


def open_model(options: argparse.Namespace) -> Model:
    store = ModelStore(options.store)
    return Model.load(store.open(options.name, store.resolve(options.name), files=NEEDED))


def unseen_rows(model: Model) -> Rows:
    """Return the rows that were used neither for the fit nor for selecting its checkpoint."""
    recipe = read_recipe(model.manifest, "name")
    data = load(recipe, data_root(), model.manifest.input.columns)
    splits = split(data, split_sizes(recipe))
    parts = (splits.reference, splits.ranking, splits.test)
    return Rows(
        np.concatenate([rows.x for rows in parts]), np.concatenate([rows.y for rows in parts])
    )


def publish_untrained(
    store: ModelStore, precision: str | None = None, method: str | None = None, name: str = NAME
) -> None:
    """Publish an untrained MNIST model, by default with the method of its recipe.

    The posterior is as wide as after training, so that the check of integer arithmetic passes.
    """
    recipe = recipes.load(ROOT / "recipes" / "mnist.toml")
    if precision is not None:
        recipe = recipe.model_copy(
            update={"serving": recipe.serving.model_copy(update={"precision": precision})}
        )
    if method is not None:
        sections = {"method": method, "posterior": {}}
        recipe = recipes.Recipe.model_validate(recipe.model_dump(mode="json") | sections)
    generator = np.random.default_rng(0)
    rows = Rows(
        generator.uniform(0, 255, (4000, 784)).astype(np.float32),
        np.arange(4000, dtype=np.int64) % 10,
    )
    data = Dataset(rows, rows.take(np.arange(32)), (28, 28), tuple("0123456789"), 0.0, 255.0)
    splits = split(data, SplitSizes(64, 64, 64, seed=0))
    model = build(recipe, (28, 28), 10)
    initialise(model, torch.from_numpy(splits.train.x))
    if isinstance(model.posterior, HypernetworkPosterior):
        with torch.no_grad():
            model.posterior.output.log_scale.fill_(TRAINED_LOG_STD)
    elif isinstance(recipe.posterior, Laplace):
        x, y = torch.from_numpy(splits.train.x), torch.from_numpy(splits.train.y)
        fit_laplace(model, recipe.posterior, (x, y), (x[:64], y[:64]), 0, 6)
    assert draw_counts(recipe.serving.draws)[-1] == 100
    temper(model, recipe, splits.validation)
    provenance = Provenance(recipe=recipe.model_dump(mode="json"))
    publish(Fitted(model, recipe, data, splits, provenance), store, name=name)
    assert store.manifest(name, "1").precision == recipe.serving.precision


def torch_model(store: ModelStore, name: str) -> BayesianModel:
    artifact = store.open(name, store.resolve(name), files=("weights.safetensors",))
    manifest = artifact.manifest
    recipe = recipes.Recipe.model_validate(manifest.training["recipe"])
    model = build(recipe, manifest.input.shape, manifest.num_labels)
    model.load_state_dict(load_weights(artifact.files["weights.safetensors"]))
    return model.eval()
