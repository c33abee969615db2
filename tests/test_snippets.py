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
OUR_PACKAGES = ("dubito", "integrations", "model_store", "service", "training")
READER_PACKAGES = {"kserve", "mlflow", "mlserver", "tritonclient"}  # installed by the reader
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
    """A command parsed its arguments without errors."""


def find_blocks(*languages):
    """Return the pages' code blocks in these languages as test parameters."""
    return [
        pytest.param(block[2], id=f"{page.relative_to(ROOT)}-{number}")
        for page in PAGES
        for number, block in enumerate(BLOCK.finditer(page.read_text()), start=1)
        if block[1] in languages
    ]


def find_commands(block):
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


@pytest.mark.parametrize("block", find_blocks("toml"))
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


@pytest.mark.parametrize("block", find_blocks("json"))
def test_json_parses(block):
    json.loads(block)


@pytest.mark.parametrize("block", find_blocks("python"))
def test_python_compiles_and_its_imports_exist(block):
    tree = ast.parse(block)
    compile(tree, "block", "exec")
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imports = [(name.name, None) for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            imports = [(node.module, name.name) for name in node.names]
        else:
            continue
        for module, name in imports:
            package = module.partition(".")[0]
            if package in OUR_PACKAGES:
                imported = importlib.import_module(module)
                assert name is None or hasattr(imported, name), f"{module}.{name}"
            elif package not in READER_PACKAGES | SHOWN_MODULES:
                assert importlib.util.find_spec(package), package


# Modules shown in a guide, named by the first line of a block.
SHOWN_MODULES = {
    name
    for page in PAGES
    for name in re.findall(r"^```python\n# (\w+)\.py$", page.read_text(), re.MULTILINE)
}


@pytest.mark.parametrize("block", find_blocks("console", "bash"))
def test_command_options_are_valid(block, monkeypatch):
    parse = argparse.ArgumentParser.parse_args

    def parse_only(self, args=None, namespace=None):
        parse(self, args, namespace)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    for words in find_commands(block):
        while words and re.match(r"[A-Z_]+=", words[0]):  # environment variables
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
    except SystemExit as error:
        pytest.fail(f"{name} {shlex.join(arguments)}: exit {error.code}")
    pytest.fail(f"{name} parsed nothing")


def find_requests(block):
    """Yield the method, URL, headers and bodies of each curl request in a block."""
    for words in find_commands(block):
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
    """Return the methods and path patterns of the service's routes."""
    key = "a-key-of-an-administrator"
    app = create_app(Settings(store=tmp_path_factory.mktemp("empty"), admin_key=key))
    return [(method, route.path_regex) for route in app.state.routes for method in route.methods]


@pytest.mark.parametrize("block", find_blocks("console", "bash"))
def test_curl_requests_match_routes_and_contain_valid_json(block, routes):
    for method, url, headers, bodies in find_requests(block):
        if url.port != 8000:
            continue
        assert any(
            route_method == method and path.match(url.path) for route_method, path in routes
        ), url.path
        if headers.get("Content-Type") == "application/json" and not bodies[0].startswith("@"):
            json.loads(bodies[0].replace("...", "0"))


def test_tutorial_commands_and_program_give_shown_results(service_url):
    text = TUTORIAL.read_text()
    blocks = re.findall(r"^```console\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    requests = [request for block in blocks for request in find_requests(block)]
    base = httpx.URL(service_url)
    responses = [
        httpx.request(
            method,
            url.copy_with(host=base.host, port=base.port),
            headers=headers,
            content="".join(bodies),
        ).json()
        for method, url, headers, bodies in requests
    ]
    ordinary, unusual = (response["predictions"][0] for response in responses[:2])
    assert (ordinary["label"], ordinary["flag"]) == ("3", False)
    assert unusual["flag"] is True
    (program,) = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    output = io.StringIO()
    with redirect_stdout(output):
        exec(program.replace("http://127.0.0.1:8000", service_url), {})
    assert "[False  True]" in output.getvalue()
