"""Imports point one way, service -> model_store <- training; the service needs nothing that only training does."""

import ast
import json
import subprocess
import sys

import pytest

from tests.support.environment import ROOT, environment_with

OF_TEXT = {"tokenizers", "huggingface_hub"}  # which models of text alone need
OF_TRAINING = {"torch", "training", "sklearn", "matplotlib", "onnxscript", "scipy", "tqdm", "pyarrow"}
CREATE_APP = """
import json, sys
import service.__main__
from service.app import create_app
from service.settings import read_settings
create_app(read_settings())
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def imported(path):
    """The top-level packages that a module imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} imports relatively"
            names.add(node.module.partition(".")[0])
    return names


def test_the_service_starts_without_what_only_training_needs():
    done = subprocess.run(
        [sys.executable, "-c", CREATE_APP],
        env=environment_with(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    loaded = set(json.loads(done.stdout))
    assert {"service", "model_store", "fastapi", "onnxruntime"} <= loaded
    assert not loaded & (OF_TRAINING | OF_TEXT)


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("service", (OF_TRAINING - {"pyarrow"}) | {"tests", "benchmarks"}),  # where a request brings Parquet
        ("model_store", OF_TRAINING | {"service", "fastapi", "starlette", "tests", "benchmarks"}),
        ("training", {"service", "fastapi", "starlette", "tests", "benchmarks"}),
    ],
)
def test_a_package_imports_nothing_that_it_must_not(package, forbidden):
    modules = list((ROOT / package).rglob("*.py"))
    assert modules
    assert {path.name: sorted(imported(path) & forbidden) for path in modules if imported(path) & forbidden} == {}


@pytest.mark.parametrize("package", ["service", "model_store", "training"])
def test_nothing_is_ever_unpickled(package):
    for path in (ROOT / package).rglob("*.py"):
        assert not imported(path) & {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                assert isinstance(node.value, ast.Constant)
                assert node.value.value is False
            if isinstance(node, ast.Attribute) and node.attr == "load" and isinstance(node.value, ast.Name):
                assert node.value.id != "torch", f"{path.name} uses torch.load"
