import argparse
import ast
import importlib
import importlib.util
import io
import json
import re
import shlex
import sys
import tomllib
from contextlib import redirect_stdout
from itertools import groupby, pairwise

import httpx
import pytest

from service.app import create_app
from service.settings import Settings
from tests.support.environment import ROOT
from training.recipe import validate

PAGES = [ROOT / "README.md", ROOT / "client" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
TUTORIAL = ROOT / "docs" / "tutorial.md"
MODULES = {
    "training": "training.__main__",
    "service": "service.__main__",
    "model_store": "model_store.__main__",
    "dubito": "dubito.command",
}
OURS = ("dubito", "integrations", "model_store", "service", "training")
OF_OTHERS = {"kserve", "mlflow", "mlserver", "tritonclient"}  # the reader has them
RECIPE = {
    "name": "guide",
    "method": "mle",
    "data": {
        "source": "csv:guide.csv",
        "target": "y",
        "validation": 10,
        "reference": 10,
        "ranking": 20,
    },
    "network": {"hidden": [8]},
}


class Parsed(Exception):
    """A command has parsed its arguments."""


def blocks(*languages):
    """Return the pages' blocks of code in these languages, each as a test's parameter."""
    return [
        pytest.param(block[2], id=f"{page.relative_to(ROOT)}-{number}")
        for page in PAGES
        for number, block in enumerate(BLOCK.finditer(page.read_text()), start=1)
        if block[1] in languages
    ]


def commands(block):
    lines = iter(block.splitlines())
    for line in lines:
        if not line.startswith("$ "):
            continue
        command = line[2:]
        while not (words := get_words(command)):
            command = command.removesuffix("\\") + "\n" + next(lines)
        for is_operator, group in groupby(words, lambda word: set(word) <= set("|&;<>")):
            if not is_operator:
                yield list(group)


def get_words(command):
    if command.endswith("\\"):
        return []
    parts = shlex.shlex(command, posix=True, punctuation_chars="|&;<>")
    parts.whitespace_split = True
    try:
        return list(parts)
    except ValueError:
        return []


@pytest.mark.parametrize("block", blocks("toml"))
def test_recipes_are_valid(block):
    content = tomllib.loads(block)
    if "keys" in content:
        return
    if RECIPE.keys() <= content.keys():
        validate(content, "guide")
        return
    full = RECIPE | content
    full["data"] = RECIPE["data"] | content.get("data", {})
    if "image_size" in full["data"] or "text" in full["data"]:
        del full["data"]["target"]
        full["data"] |= {"target": "label"} if "text" in full["data"] else {}
    if full["data"]["source"] == "digits":
        del full["data"]["target"]
    assert validate(full, "guide").name == full["name"]


@pytest.mark.parametrize("block", blocks("json"))
def test_json_parses(block):
    json.loads(block)


@pytest.mark.parametrize("block", blocks("python"))
def test_python_compiles_and_its_imports_are_there(block):
    tree = ast.parse(block)
    compile(tree, "block", "exec")
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            expected = [(name.name, None) for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            expected = [(node.module, name.name) for name in node.names]
        else:
            continue
        for module, name in expected:
            package = module.partition(".")[0]
            if package in OURS:
                actual = importlib.import_module(module)
                assert name is None or hasattr(actual, name), f"{module}.{name}"
            elif package not in OF_OTHERS | SHOWN:
                assert importlib.util.find_spec(package), package


# Modules whose content a guide shows, as the first line of a block says.
SHOWN = {
    name
    for page in PAGES
    for name in re.findall(r"^```python\n# (\w+)\.py$", page.read_text(), re.MULTILINE)
}


@pytest.mark.parametrize("block", blocks("console", "bash"))
def test_commands_take_their_options(block, monkeypatch):
    parse = argparse.ArgumentParser.parse_args

    def parse_only(self, args=None, namespace=None):
        parse(self, args, namespace)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    for words in commands(block):
        while words and re.match(r"[A-Z_]+=", words[0]):  # the environment of the command
            words = words[1:]
        if not words:
            continue
        if "-m" in words:
            name, *arguments = words[words.index("-m") + 1 :]
        elif words[0] == "dubito":
            name, *arguments = words
        else:
            continue
        if name in MODULES:
            monkeypatch.setattr(sys, "argv", [name, *arguments])
            assert_parses(name, arguments)
        else:
            assert importlib.util.find_spec(name), name


def assert_parses(name, arguments):
    main = importlib.import_module(MODULES[name])
    try:
        main.main(arguments)
    except Parsed:
        return
    except SystemExit as stopped:
        pytest.fail(f"{name} {shlex.join(arguments)}: exit {stopped.code}")
    pytest.fail(f"{name} parsed nothing")


def requests(block):
    """Yield the method, path, headers and body of each request that a block makes by curl."""
    for words in commands(block):
        if words[0] != "curl":
            continue
        url = next(word for word in words if word.startswith(("http://", "https://")))
        pairs = list(pairwise(words))
        bodies = [value for word, value in pairs if word in ("-d", "--data-binary", "-F")]
        method = next((value for word, value in pairs if word == "-X"), None)
        headers = dict(value.split(": ", 1) for word, value in pairs if word == "-H")
        yield method or ("POST" if bodies else "GET"), httpx.URL(url), headers, bodies


@pytest.fixture(scope="module")
def routes(tmp_path_factory):
    """The methods and patterns of paths that the service answers."""
    key = "a-key-of-an-administrator"
    app = create_app(Settings(store=tmp_path_factory.mktemp("empty"), admin_key=key))
    return [(method, route.path_regex) for route in app.state.routes for method in route.methods]


@pytest.mark.parametrize("block", blocks("console", "bash"))
def test_requests_go_to_routes_and_are_json(block, routes):
    for method, url, headers, bodies in requests(block):
        if url.port != 8000:
            continue
        assert any(position == method and path.match(url.path) for position, path in routes), (
            url.path
        )
        if headers.get("Content-Type") == "application/json" and not bodies[0].startswith("@"):
            json.loads(bodies[0].replace("...", "0"))


def test_the_tutorial_ends_as_it_says(service_url):
    text = TUTORIAL.read_text()
    displayed = re.findall(r"^```console\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    body = [request for block in displayed for request in requests(block)]
    base = httpx.URL(service_url)
    answers = [
        httpx.request(
            method,
            url.copy_with(host=base.host, port=base.port),
            headers=headers,
            content="".join(bodies),
        ).json()
        for method, url, headers, bodies in body
    ]
    ordinary, strange = (answer["predictions"][0] for answer in answers[:2])
    assert (ordinary["label"], ordinary["flag"]) == ("3", False)
    assert strange["flag"] is True
    (program,) = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(program.replace("http://127.0.0.1:8000", service_url), {})
    assert "[False  True]" in printed.getvalue()
