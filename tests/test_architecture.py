import ast
import re
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.support.environment import ROOT

PACKAGES = ("integrations", "model_store", "service", "training", "experiments")
FOLDERS = {
    **{package: ROOT / package for package in PACKAGES},
    "dubito": ROOT / "client" / "dubito",
}
PAGE = (ROOT / "ARCHITECTURE.md").read_text()


def rooms(package):
    modules = [*(ROOT / package).rglob("*.py"), *(ROOT / package).rglob("index.html")]
    folders = {path.parent for path in modules} - {ROOT / package}
    return {f"{folder.relative_to(ROOT)}/" for folder in folders}


@pytest.mark.parametrize("package", PACKAGES)
def test_every_room_is_on_the_page(package):
    on_page = set(re.findall(rf"^\| `({package}/[\w/]+/)` \| \S", PAGE, re.MULTILINE))
    assert on_page == rooms(package)


def test_every_file_and_folder_on_the_page_exists():
    names = re.findall(r"`([\w./-]+/[\w./-]*|[\w-]+\.(?:py|md|yml))`", PAGE)
    assert len(names) > 30
    assert [path for path in names if not (ROOT / path).exists()] == []


def test_every_test_on_the_page_exists():
    names = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)
    assert len(names) > 15
    for file, test in names:
        assert f"def {test}(" in (ROOT / file).read_text(), test


def imported_modules(path):
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


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
def test_packages_import_one_way(package, may_import):
    of_others = set(FOLDERS) - {package} - may_import
    for path in FOLDERS[package].rglob("*.py"):
        assert not {module.partition(".")[0] for module in imported_modules(path)} & of_others, path


def test_the_mathematics_know_neither_recipes_nor_the_store():
    for path in (ROOT / "training" / "bayes").rglob("*.py"):
        for name in imported_modules(path):
            assert not name.startswith("model_store.artifacts"), path
            if name.startswith("training."):
                assert name.startswith(("training.bayes", "training.seeds")), path


def get_room(module):
    """The first two names of a module."""
    return ".".join(module.split(".")[:2])


def imports_between_rooms(package):
    graph = {}
    for path in FOLDERS[package].rglob("*.py"):
        names = path.relative_to(FOLDERS[package].parent).with_suffix("").parts
        room = get_room(".".join(names).removesuffix(".__init__"))
        expected = {
            get_room(module)
            for module in imported_modules(path)
            if module.startswith(f"{package}.")
        }
        graph.setdefault(room, set()).update(expected - {room})
    return graph


def imports_between_modules(package):
    """For each module of a package the others that it imports, for the type checker alone aside."""
    root = FOLDERS[package]
    modules = {
        ".".join(path.relative_to(root.parent).with_suffix("").parts).removesuffix(
            ".__init__"
        ): path
        for path in root.rglob("*.py")
    }
    return {
        module: {name for name in imported_modules(path) if name in modules} - {module}
        for module, path in modules.items()
    }


@pytest.mark.parametrize("package", ["model_store", "dubito"])
def test_imports_between_rooms_form_no_circle(package):
    assert_no_circle(imports_between_rooms(package))


@pytest.mark.parametrize("package", ["integrations", "service", "training", "experiments"])
def test_imports_between_modules_form_no_circle(package):
    assert_no_circle(imports_between_modules(package))


def assert_no_circle(graph):
    assert sum(map(len, graph.values())) > 10
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))
