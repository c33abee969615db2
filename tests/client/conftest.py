"""A service for the client's tests: digits, a table to classify, a table to predict numbers of, and pictures."""

import shutil

import numpy as np
import pytest

from tests.support.once import once_a_run
from tests.support.serving import serving

KEY = "the-key-of-the-client-s-tests"


COLUMNS = (
    {"kind": "numeric", "name": "age", "mean": 50.0, "std": 20.0, "indicator": False},
    {"kind": "categorical", "name": "city", "categories": ["Rome"]},
)
INPUTS = {"people": {"shape": [3], "columns": COLUMNS}, "pictures": {"shape": [3, 1, 1], "image": {"mode": "RGB"}}}


@pytest.fixture(scope="session")
def tables(tmp_path_factory, digits_store, fits):
    """A store with `digits`; tiny models of `people` (age and city) and of `pictures` (of one pixel); and `rents` of
    people, a regression that is not fitted."""
    from model_store.artifacts.store import ModelStore
    from tests.support import tiny
    from tests.support.models import publish_unfitted
    from tests.support.recipes import recipe_with

    def publish(root):
        generator = np.random.default_rng(0)
        age, city = generator.integers(18, 90, 300), generator.choice(["Rome", "Oslo"], 300)
        lines = [f"{a},{c},{100 + 5 * a}" for a, c in zip(age, city, strict=True)]
        (root / "rents.csv").write_text("\n".join(["age,city,rent", *lines]) + "\n")
        sizes = {"validation_rows": 20, "reference_rows": 40, "ranking_rows": 60}
        data = {"source": "csv:rents.csv", "target": "rent", **sizes}
        store = ModelStore(root / "models")
        shutil.copytree(digits_store / "digits", root / "models" / "digits")
        publish_unfitted(store, recipe_with(name="rents", task="regression", data=data), root)
        described = tiny.description()
        for name, spec in INPUTS.items():
            taken = described.input.model_validate({**described.input.model_dump(), **spec})
            store.publish(name, described.model_copy(update={"input": taken}), tiny.files())

    return once_a_run(tmp_path_factory, "client", publish) / "models"


@pytest.fixture(scope="session")
def url(tables, tmp_path_factory, digits_rows):
    """The URL of a service that serves `tables`, and wants `KEY`."""
    pools = tmp_path_factory.mktemp("pools")
    np.save(pools / "digits.npy", digits_rows)
    settings = {"DUBITO_API_KEYS": KEY, "DUBITO_DEFAULT_MODEL": "digits", "DUBITO_POOLS": str(pools)}
    with serving(tables, **settings) as (url, _):
        yield url


@pytest.fixture
def key():
    """The key that the service wants."""
    return KEY
