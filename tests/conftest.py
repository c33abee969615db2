"""Shared fixtures: a fitted model in a store, and the service over HTTP.

This module must not import the packages: `make check` installs jaxtyping's import hook first.
"""

import functools
import gc
import os
import shutil
import signal
import ssl
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace

import httpx
import hypothesis
import numpy as np
import pytest

# The time of an example depends on the machine's load and on the checks of `make check`.
hypothesis.settings.register_profile(
    "untimed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("untimed")

pytest.register_assert_rewrite("tests.support")

from tests.support.environment import run_training_in_process  # noqa: E402
from tests.support.once import create_once  # noqa: E402
from tests.support.serving import WITH_PREFLIGHTS, open_client, serving  # noqa: E402

# With torch in several processes, threads would wait for each other.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell starts background commands with SIGINT ignored, and their children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Each client reads all certificates, which takes 40 ms, although tests use plain HTTP.
ssl.create_default_context = functools.cache(ssl.create_default_context)

FITS = {"fits", "digits_store", "evaluated_store"}
SHARED = {"digits_store", "evaluated_store", "tables", "kinds"}
SERVES = {"serve", "open_client", "service_url"}


def pytest_configure() -> None:
    gc.disable()  # until all modules are imported
    if not entry_points(group="dubito.integrations"):
        command = ".venv/bin/uv pip install --no-deps --no-build-isolation -e ."
        raise pytest.UsageError(f"entry points are missing: run `{command}` (or `make install`)")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by their fixtures, and sort their files.

    One process creates all shared stores in the first file. Meanwhile, the other runs files with
    fits that need no shared store.
    """
    fitting, stores = set(), dict[Path, int]()  # stores that a file needs
    for item in items:
        used = set(getattr(item, "fixturenames", ()))
        if "fits" in used:
            fitting.add(item.path)
        stores[item.path] = max(stores.get(item.path, 0), len(used & SHARED))
        if used & FITS:
            item.add_marker("fits")
        if used & SERVES:
            item.add_marker("serves")
    first = max(stores, key=lambda path: stores[path], default=None)
    items.sort(key=lambda item: (item.path != first, item.path not in fitting, stores[item.path]))
    gc.enable()
    gc.collect()
    gc.freeze()  # torch and the tests stay in memory


@pytest.fixture(scope="session")
def fits() -> Iterator[None]:
    """Speed up fits and exports in tests, and mark the tests as `fits`.

    Garbage collection is off during exports. Fits draw no plots, write no reports and do not check
    first that a network can be exported. Preflights share a process.
    """
    from tests.support.preflights import SharedPreflight
    from training.export.exporter import export_program

    with pytest.MonkeyPatch.context() as changes:
        changes.setattr("training.export.exporter.export_program", _without_gc(export_program))
        empty = SimpleNamespace(report={})
        changes.setattr("training.evaluation.evaluate.write_report", lambda *_: empty)
        changes.setattr("training.fitting.run.check_exports", lambda *_: None)
        changes.setattr("training.fitting.run.plot_run", lambda history, path, title: path.touch())
        changes.setattr("training.publishing.draft.PreflightProcess", SharedPreflight)
        yield
        SharedPreflight.end()


def _without_gc(work: Callable[..., object]) -> Callable[..., object]:
    """Disable garbage collection during a call."""

    @functools.wraps(work)
    def run(*args: object) -> object:
        gc.disable()
        try:
            return work(*args)
        finally:
            gc.enable()

    return run


@pytest.fixture(scope="session", autouse=True)
def _cache_graphs(pytestconfig: pytest.Config) -> None:
    """Cache exported graphs between test runs."""
    assert pytestconfig.cache is not None
    os.environ["DUBITO_GRAPHS"] = str(pytestconfig.cache.mkdir("graphs"))


@pytest.fixture(scope="session", autouse=True)
def _disable_fsync() -> Iterator[None]:
    """Disable `fsync` in this process."""
    with pytest.MonkeyPatch.context() as changes:
        changes.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(scope="session")
def quick_recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe for digits that fits in seconds."""
    from tests.support.recipes import QUICK, write_recipe

    return write_recipe(tmp_path_factory.mktemp("recipes"), **QUICK)


@pytest.fixture(scope="session")
def digits_store(
    tmp_path_factory: pytest.TempPathFactory, quick_recipe: Path, request: pytest.FixtureRequest
) -> Path:
    """A read-only store with `digits` version 1, fitted by `dubito fit`."""

    def fit(root: Path) -> None:
        request.getfixturevalue("fits")
        run_training_in_process(root, "fit", str(quick_recipe), "--quiet", "--device", "cpu")

    return create_once(tmp_path_factory, "fitted", fit) / "models"


@pytest.fixture
def writable_store(digits_store: Path, tmp_path: Path) -> object:
    """A writable copy of `digits_store`."""
    from model_store.artifacts.store import ModelStore

    shutil.copytree(digits_store, tmp_path / "models")
    return ModelStore(tmp_path / "models")


@pytest.fixture(scope="session")
def evaluated_store(
    tmp_path_factory: pytest.TempPathFactory, digits_store: Path, request: pytest.FixtureRequest
) -> Path:
    """A read-only copy of `digits_store` with an evaluation report."""

    def evaluate(root: Path) -> None:
        request.getfixturevalue("fits")
        shutil.copytree(digits_store, root / "models")
        np.savez(root / "odd.npz", x=np.tile(np.array([0, 16], dtype=np.float32), (20, 32)))
        options = ["--rows", "32", "--outliers", "odd=npz:odd.npz", "--quiet"]
        run_training_in_process(root, "evaluate", "digits", *options)

    return create_once(tmp_path_factory, "evaluated", evaluate) / "models"


@pytest.fixture(scope="session")
def tables(tmp_path_factory: pytest.TempPathFactory, digits_store: Path, fits: None) -> Path:
    """A read-only store with `digits`, a table, images and a regression. See `publish_tables`."""
    from tests.support.kinds import publish_tables

    return (
        create_once(tmp_path_factory, "tables", lambda root: publish_tables(root, digits_store))
        / "models"
    )


@pytest.fixture(scope="session")
def kinds(tmp_path_factory: pytest.TempPathFactory, tables: Path) -> Path:
    """A read-only store with a model for each kind of input. See `publish_kinds`."""
    from tests.support.kinds import publish_kinds

    return (
        create_once(tmp_path_factory, "kinds", lambda root: publish_kinds(root, tables)) / "models"
    )


@pytest.fixture(scope="session")
def digits_rows() -> np.ndarray:
    """The 359 test rows of digits, (N, 64) float32 from 0 to 16."""
    from training.data.arrays import digits

    return digits().test.x


@pytest.fixture(scope="session")
def service_url(digits_store: Path) -> Iterator[str]:
    """The base URL of a service with `digits_store`."""
    with serving(digits_store, **WITH_PREFLIGHTS) as (url, _):
        yield url


@pytest.fixture
def client(service_url: str) -> Iterator[httpx.Client]:
    """A client of the shared service."""
    with httpx.Client(base_url=service_url, timeout=60) as client:
        yield client


@pytest.fixture
def serve() -> Callable[..., object]:
    """Start a service: `with serve(store, DUBITO_...=...) as (url, process)`."""
    return serving


@pytest.fixture(name="open_client")
def _open_client() -> Callable[..., object]:
    """Start a service and a client: `with open_client(store, DUBITO_...=...) as client`."""
    return open_client


@pytest.fixture
def store(tmp_path: Path) -> object:
    """An empty store."""
    from model_store.artifacts.store import ModelStore

    return ModelStore(tmp_path / "models")


@pytest.fixture
def published(store: object) -> object:
    """A store with one version of `m`. See `tiny_files`."""
    from tests.support.stores import tiny_description, tiny_files

    store.publish("m", tiny_description(), tiny_files())
    return store
