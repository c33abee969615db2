"""What tests share: a small real artifact in a store, and the service over real HTTP. Helpers are in `tests/support`.

Nothing of the three packages is imported when this module is: jaxtyping's checks are put into them after that.
"""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

pytest.register_assert_rewrite("tests.support")

from tests.support.environment import run_training  # noqa: E402
from tests.support.serving import serving  # noqa: E402


@pytest.fixture(scope="session")
def quick_recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe for digits that fits in seconds."""
    from tests.support.recipes import QUICK, write_recipe

    return write_recipe(tmp_path_factory.mktemp("recipes"), **QUICK)


@pytest.fixture(scope="session")
def digits_store(tmp_path_factory: pytest.TempPathFactory, quick_recipe: Path) -> Path:
    """A model store with one real model, `digits` version 1, fitted by the command that users run. Do not change it:
    copy it (`shutil.copytree`) where a test writes."""
    root = tmp_path_factory.mktemp("fitted")
    run_training(root, "fit", str(quick_recipe), "--quiet", "--device", "cpu")
    return root / "models"


@pytest.fixture
def own_store(digits_store: Path, tmp_path: Path) -> object:
    """A store of a test's own, with `digits` version 1."""
    from model_store.artifacts.store import ModelStore

    shutil.copytree(digits_store, tmp_path / "models")
    return ModelStore(tmp_path / "models")


@pytest.fixture(scope="session")
def evaluated_store(tmp_path_factory: pytest.TempPathFactory, digits_store: Path) -> Path:
    """A copy of `digits_store` whose model has an evaluation report, with attacks and an npz file of other rows,
    written by the command that users run. Do not change it."""
    root = tmp_path_factory.mktemp("evaluated")
    shutil.copytree(digits_store, root / "models")
    np.savez(root / "odd.npz", x=np.tile(np.array([0, 16], dtype=np.float32), (20, 32)))
    options = ["--attacks", "--rows", "32", "--outliers", "odd=npz:odd.npz", "--quiet"]
    run_training(root, "evaluate", "digits", *options)
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


@pytest.fixture
def store(tmp_path: Path) -> object:
    """An empty store."""
    from model_store.artifacts.store import ModelStore

    return ModelStore(tmp_path / "models")


@pytest.fixture
def published(store: object) -> object:
    """A store with one version of `m`, of `tiny_files`."""
    from tests.support.stores import tiny_description, tiny_files

    store.publish("m", tiny_description(), tiny_files())
    return store
