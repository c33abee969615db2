"""Small models for each kind of input."""

import shutil
from pathlib import Path

import numpy as np

from model_store.artifacts.manifest import InputSpec
from model_store.artifacts.store import ModelStore
from tests.support import tiny
from tests.support.models import publish_unfitted
from tests.support.recipes import recipe_with
from tests.support.texts import VOCABULARY, tokenizer

COLUMNS = (
    {
        "kind": "numeric",
        "name": "age",
        "mean": 50.0,
        "std": 20.0,
        "indicator": False,
        "missing": False,
        "usual": 48.0,
    },
    {"kind": "categorical", "name": "city", "categories": ["Rome"]},
)
PEOPLE = {"shape": [3], "columns": COLUMNS}  # age and city
PICTURES = {"shape": [3, 1, 1], "image": {"mode": "RGB"}}
TEXTS = {
    "shape": [3],
    "dtype": "int32",
    "minimum": 0,
    "maximum": VOCABULARY - 1,
    "text": {"column": "text", "max_tokens": 3, "pad_id": 0},
}


def publish_tables(root: Path, digits: Path) -> None:
    """Publish `digits`, tiny models `people` and `pictures`, and the regression `rents`."""
    generator = np.random.default_rng(0)
    age, city = generator.integers(18, 90, 300), generator.choice(["Rome", "Oslo"], 300)
    lines = [
        f"{a if i % 7 else ''},{c if i % 9 else ''},{100 + 5 * a}"
        for i, (a, c) in enumerate(zip(age, city, strict=True))
    ]
    (root / "rents.csv").write_text("\n".join(["age,city,rent", *lines]) + "\n")
    sizes = {"validation": 20, "reference": 40, "ranking": 60}
    data = {"source": "csv:rents.csv", "target": "rent", **sizes}
    store = ModelStore(root / "models")
    shutil.copytree(digits / "digits", root / "models" / "digits")
    publish_unfitted(store, recipe_with(name="rents", task="regression", data=data), root)
    publish_tiny(store, "people", PEOPLE)
    publish_tiny(store, "pictures", PICTURES)


def publish_kinds(root: Path, tables: Path) -> None:
    """Publish the models of `publish_tables`, `texts`, and `groups`, which is calibrated by group."""
    shutil.copytree(tables, root / "models")
    store = ModelStore(root / "models")
    publish_tiny(store, "texts", TEXTS, {"tokenizer.json": tokenizer().to_str().encode()})
    tiny.publish(store, "groups", kind="group")


def publish_tiny(
    store: ModelStore, name: str, spec: dict[str, object], extra: dict[str, bytes] | None = None
) -> None:
    """Publish a tiny classifier."""
    base = tiny.description()
    input_spec = InputSpec.model_validate({**base.input.model_dump(), **spec})
    store.publish(
        name, base.model_copy(update={"input": input_spec}), {**tiny.files(), **(extra or {})}
    )
