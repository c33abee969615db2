import ast
import json
import subprocess
import sys

import pytest

from tests.support.environment import ROOT, environment_with

TEXT_PACKAGES = {"tokenizers", "huggingface_hub"}
CLUSTER_PACKAGES = {"obstore", "ray"}
TRAINING_PACKAGES = {"torch", "training", "sklearn", "matplotlib", "onnxscript", "scipy", "tqdm"}
TABLE_PACKAGES = {"pyarrow"}
CREATE_APP = """
import json, sys
import service.__main__
from service.app import create_app
from service.settings import read_settings
create_app(read_settings())
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def imports(path):
    """Return the top-level packages that a module imports, at any depth."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} imports relatively"
            names.add(node.module.partition(".")[0])
    return names


def test_service_starts_without_training_and_optional_packages():
    completed = subprocess.run(
        [sys.executable, "-c", CREATE_APP],
        env=environment_with(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    loaded = set(json.loads(completed.stdout))
    assert {"service", "model_store", "fastapi", "onnxruntime"} <= loaded
    assert not loaded & (TRAINING_PACKAGES | TABLE_PACKAGES | TEXT_PACKAGES | CLUSTER_PACKAGES)


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("service", TRAINING_PACKAGES | {"tests", "benchmarks", "dubito"}),
        (
            "model_store",
            TRAINING_PACKAGES
            | {"service", "fastapi", "starlette", "tests", "benchmarks", "dubito"},
        ),
        ("training", {"service", "fastapi", "starlette", "tests", "benchmarks", "dubito"}),
    ],
)
def test_package_has_no_forbidden_imports(package, forbidden):
    modules = list((ROOT / package).rglob("*.py"))
    assert modules
    assert {
        path.name: sorted(imports(path) & forbidden)
        for path in modules
        if imports(path) & forbidden
    } == {}


def test_client_requires_only_httpx_and_numpy():
    modules = list((ROOT / "client" / "dubito").glob("*.py"))
    assert len(modules) > 5
    frames = {"pandas", "polars"}  # imported by the functions that return them
    optional = {
        "predictions.py": frames,
        "results.py": frames,
        "actions.py": {"rich"},
        "files.py": {"pyarrow"},
        "command.py": {"shtab"},
    }
    for path in modules:
        extra = imports(path) - sys.stdlib_module_names - {"dubito", "httpx", "numpy"}
        assert extra <= optional.get(path.name, set()), path


@pytest.mark.parametrize(
    "package", ["integrations", "service", "model_store", "training", "client"]
)
def test_no_package_unpickles(package):
    for path in (ROOT / package).rglob("*.py"):
        assert not imports(path) & {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                assert isinstance(node.value, ast.Constant)
                assert node.value.value is False
            if (
                isinstance(node, ast.Attribute)
                and node.attr == "load"
                and isinstance(node.value, ast.Name)
            ):
                assert node.value.id != "torch", f"{path.name} uses torch.load"
