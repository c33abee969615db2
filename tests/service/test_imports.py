import ast
import json
import subprocess
import sys

import pytest

from tests.support.environment import ROOT, environment_with

OF_TEXT = {"tokenizers", "huggingface_hub"}
OF_CLUSTERS = {"obstore", "ray"}
TRAINING_VARIABLES = {"torch", "training", "sklearn", "matplotlib", "onnxscript", "scipy", "tqdm"}
OF_TABLES = {"pyarrow"}
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
    assert not loaded & (TRAINING_VARIABLES | OF_TABLES | OF_TEXT | OF_CLUSTERS)


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("service", TRAINING_VARIABLES | {"tests", "benchmarks", "dubito"}),
        (
            "model_store",
            TRAINING_VARIABLES
            | {"service", "fastapi", "starlette", "tests", "benchmarks", "dubito"},
        ),
        ("training", {"service", "fastapi", "starlette", "tests", "benchmarks", "dubito"}),
    ],
)
def test_a_package_imports_nothing_that_it_must_not(package, forbidden):
    modules = list((ROOT / package).rglob("*.py"))
    assert modules
    assert {
        path.name: sorted(imported(path) & forbidden)
        for path in modules
        if imported(path) & forbidden
    } == {}


def test_the_client_imports_httpx_numpy_and_the_standard_library_alone():
    modules = list((ROOT / "client" / "dubito").glob("*.py"))
    assert len(modules) > 5
    frames = {"pandas", "polars"}  # users' own, imported by the functions that make them
    optional = {
        "predictions.py": frames,
        "results.py": frames,
        "actions.py": {"rich"},
        "files.py": {"pyarrow"},
        "command.py": {"shtab"},
    }
    for path in modules:
        rest = imported(path) - sys.stdlib_module_names - {"dubito", "httpx", "numpy"}
        assert rest <= optional.get(path.name, set()), path


@pytest.mark.parametrize(
    "package", ["integrations", "service", "model_store", "training", "client"]
)
def test_nothing_is_ever_unpickled(package):
    for path in (ROOT / package).rglob("*.py"):
        assert not imported(path) & {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
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
