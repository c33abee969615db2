"""`python -m model_store`: list, verify, alias, keep."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from model_store.artifacts.manifest import FILES, Description, Manifest
from model_store.artifacts.store import ModelStore

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def store(tmp_path, digits_store):
    """Three versions of `digits`, the first one real, and one of `other`."""
    root = tmp_path / "models"
    shutil.copytree(digits_store, root)
    store = ModelStore(root)
    manifest = store.manifest("digits", "1")
    own = set(Manifest.model_fields) - set(Description.model_fields)
    description = Description.model_validate(manifest.model_dump(exclude=own))
    for name in ("digits", "digits", "other"):
        store.publish(name, description, dict.fromkeys(FILES, b"content"))
    return store


def test_list_shows_models_versions_and_aliases(store):
    store.set_alias("digits", "champion", "1")
    done = run(store, "list")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "digits: versions 1, 2, 3 (champion -> 1, latest -> 3)",
        "other: versions 1 (latest -> 1)",
    ]


def test_list_of_an_empty_store_says_nothing(tmp_path):
    done = run(ModelStore(tmp_path / "none"), "list")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_store_may_come_from_the_environment(store):
    command = [sys.executable, "-m", "model_store", "list"]
    environment = {"DUBITO_STORE": str(store.root), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("digits: versions 1, 2, 3")


def test_verify_says_that_every_version_is_whole(store):
    done = run(store, "verify")
    assert done.returncode == 0
    assert done.stdout.splitlines() == [
        *(f"digits version {version}: whole" for version in (1, 2, 3)),
        "other version 1: whole",
    ]


def test_verify_names_what_is_broken_and_exits_1(store):
    path = store.root / "digits" / "1" / "weights.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    (store.root / "other" / "1" / "manifest.json").unlink()
    done = run(store, "verify")
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        "error: model digits version 1: weights.safetensors: its SHA-256 is not the manifest's",
        "digits version 2: whole",
        "digits version 3: whole",
        "error: model other version 1: manifest.json: No such file or directory",
    ]


def test_alias_moves_latest_back(store):
    done = run(store, "alias", "digits", "latest", "2")
    assert (done.returncode, done.stderr) == (0, "")
    assert store.resolve("digits") == "2"


def test_keep_deletes_and_says_what(store):
    store.set_alias("digits", "champion", "1")
    assert run(store, "keep", "digits", "1").stdout == "deleted: 2\n"
    assert run(store, "keep", "digits", "1").stdout == "deleted: nothing\n"
    assert store.versions("digits") == ["1", "3"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("alias", "digits", "champion", "9"), "error: version: expected one of"),
        (("alias", "nothing", "champion", "1"), "error: model: expected one of ['digits', 'other'], got 'nothing'"),
        (("alias", "digits", "7", "1"), "error: alias: expected a name"),
        (("keep", "digits", "0"), "error: newest: expected at least 1, got 0"),
        (("keep", "../digits", "1"), "error: model: expected a name"),
        (("keep", "digits", "many"), "invalid int value: 'many'"),
        (("destroy",), "invalid choice: 'destroy'"),
        ((), "the following arguments are required"),
    ],
)
def test_a_wrong_call_says_why_and_exits_2(store, arguments, complaint):
    done = run(store, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr
    assert store.versions("digits") == ["1", "2", "3"]


def run(store, *arguments):
    command = [sys.executable, "-m", "model_store", "--store", str(store.root), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
