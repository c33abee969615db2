import ast
import functools
import re
import sys
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.support.environment import ROOT

PACKAGES = ("integrations", "model_store", "service", "training", "experiments")
FOLDERS = {
    **{package: ROOT / package for package in PACKAGES},
    "dubito": ROOT / "client" / "dubito",
}
FOR_TRAINING = {"torch", "sklearn", "matplotlib", "onnxscript", "scipy", "tqdm"}
FOR_HTTP = {"fastapi", "starlette"}
FOR_DEVELOPERS = {"tests", "benchmarks", "dubito"}
CLIENTS = {"urllib.request", "http.client", "httpx", "requests", "aiohttp", "ftplib", "urllib3"}
PICKLES = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
PAGE = (ROOT / "ARCHITECTURE.md").read_text()


def find_folders(package):
    modules = [*(ROOT / package).rglob("*.py"), *(ROOT / package).rglob("index.html")]
    folders = {path.parent for path in modules} - {ROOT / package}
    return {f"{folder.relative_to(ROOT)}/" for folder in folders}


@pytest.mark.parametrize("package", PACKAGES)
def test_every_folder_is_on_page(package):
    on_page = set(re.findall(rf"^\| `({package}/[\w/]+/)` \| \S", PAGE, re.MULTILINE))
    assert on_page == find_folders(package)


def test_every_file_and_folder_on_page_exists():
    names = re.findall(r"`([\w./-]+/[\w./-]*|[\w-]+\.(?:py|md|yml))`", PAGE)
    assert len(names) > 30
    assert [path for path in names if not (ROOT / path).exists()] == []


def test_every_test_on_page_exists():
    names = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)
    assert len(names) > 15
    for file, test in names:
        assert f"def {test}(" in (ROOT / file).read_text(), test


@functools.cache
def find_imports(path, for_typing=True):
    """Return the full names of all modules that a file imports, at any depth."""
    tree = ast.parse(path.read_text())
    nodes = [*ast.walk(tree)]
    if not for_typing:
        blocks = [node for node in nodes if isinstance(node, ast.If)]
        for block in blocks:
            if ast.unparse(block.test) == "TYPE_CHECKING":
                block.body = []
        nodes = [*ast.walk(tree)]
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def find_packages(path, for_typing=True):
    return {name.partition(".")[0] for name in find_imports(path, for_typing)}


@pytest.mark.parametrize(
    ("package", "may_import"),
    [
        ("integrations", {"service", "model_store", "dubito"}),
        ("model_store", set()),
        ("service", {"model_store"}),
        ("training", {"model_store"}),
        ("experiments", {"model_store", "training"}),
        ("dubito", set()),
    ],
)
def test_packages_import_in_one_direction(package, may_import):
    forbidden = {*FOLDERS, "tests", "benchmarks"} - {package} - may_import
    for path in FOLDERS[package].rglob("*.py"):
        assert not find_packages(path, for_typing=False) & forbidden, path


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("service", FOR_TRAINING | FOR_DEVELOPERS | {"training"}),
        ("model_store", FOR_TRAINING | FOR_HTTP | FOR_DEVELOPERS | {"training", "service"}),
        ("training", FOR_HTTP | FOR_DEVELOPERS | {"service"}),
    ],
)
def test_packages_have_no_forbidden_requirements(package, forbidden):
    for path in FOLDERS[package].rglob("*.py"):
        assert not find_packages(path) & forbidden, path


def test_client_requires_only_httpx_and_numpy():
    frames = {"pandas", "polars"}  # imported by the functions that return them
    optional = {
        "predictions.py": frames,
        "results.py": frames,
        "actions.py": {"rich"},
        "files.py": {"pyarrow"},
        "command.py": {"shtab"},
    }
    for path in FOLDERS["dubito"].glob("*.py"):
        extra = find_packages(path) - sys.stdlib_module_names - {"dubito", "httpx", "numpy"}
        assert extra <= optional.get(path.name, set()), path


@pytest.mark.parametrize("package", ["integrations", "service", "model_store"])
def test_packages_do_not_import_network_clients(package):
    for path in FOLDERS[package].rglob("*.py"):
        assert path.parent.name == "label_studio" or not CLIENTS & find_imports(path), path


@pytest.mark.parametrize("package", FOLDERS)
def test_no_package_unpickles(package):
    for path in FOLDERS[package].rglob("*.py"):
        assert not find_packages(path) & PICKLES, path
        code = path.read_text()
        assert not re.search(r"allow_pickle=(?!False)", code), path
        assert "torch.load(" not in code, path


def test_bayes_imports_neither_recipes_nor_store():
    for path in (ROOT / "training" / "bayes").rglob("*.py"):
        for name in find_imports(path, for_typing=False):
            assert not name.startswith("model_store.artifacts"), path
            if name.startswith("training."):
                assert name.startswith(("training.bayes", "training.seeds")), path


def get_subpackage(module):
    """Return the first two parts of a module's name."""
    return ".".join(module.split(".")[:2])


def map_subpackage_imports(package):
    graph = {}
    for path in FOLDERS[package].rglob("*.py"):
        names = path.relative_to(FOLDERS[package].parent).with_suffix("").parts
        subpackage = get_subpackage(".".join(names).removesuffix(".__init__"))
        imports = {
            get_subpackage(module)
            for module in find_imports(path, for_typing=False)
            if module.startswith(f"{package}.")
        }
        graph.setdefault(subpackage, set()).update(imports - {subpackage})
    return graph


def map_module_imports(package):
    """Map each module to its imports within the package, except imports for type checking."""
    root = FOLDERS[package]
    modules = {
        ".".join(path.relative_to(root.parent).with_suffix("").parts).removesuffix(
            ".__init__"
        ): path
        for path in root.rglob("*.py")
    }
    return {
        module: {name for name in find_imports(path, for_typing=False) if name in modules}
        - {module}
        for module, path in modules.items()
    }


@pytest.mark.parametrize("package", ["model_store", "dubito"])
def test_imports_between_subpackages_have_no_cycle(package):
    assert_no_cycle(map_subpackage_imports(package))


@pytest.mark.parametrize("package", ["integrations", "service", "training", "experiments"])
def test_imports_between_modules_have_no_cycle(package):
    assert_no_cycle(map_module_imports(package))


def assert_no_cycle(graph):
    assert sum(map(len, graph.values())) > 10
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))
