import shutil
import subprocess
import sys

import pytest

from model_store.artifacts.manifest import FILES, Description, Manifest
from model_store.artifacts.store import ModelStore
from tests.support.environment import ROOT, run_store


@pytest.fixture
def store(tmp_path, digits_store):
    root = tmp_path / "models"
    shutil.copytree(digits_store, root)
    store = ModelStore(root)
    manifest = store.manifest("digits", "1")
    custom = set(Manifest.model_fields) - set(Description.model_fields)
    description = Description.model_validate(manifest.model_dump(exclude=custom))
    for name in ("digits", "digits", "other"):
        store.publish(name, description, dict.fromkeys(FILES, b"content"))
    return store


def test_list_shows_models_versions_and_aliases(store):
    store.set_alias("digits", "champion", "1")
    completed = run_store(store, "list")
    assert (completed.returncode, completed.stderr) == (0, "")
    assert completed.stdout.splitlines() == [
        "digits: versions 1, 2, 3 (champion -> 1, latest -> 3)",
        "other: versions 1 (latest -> 1)",
    ]


def test_list_of_an_empty_store_says_nothing(tmp_path):
    completed = run_store(ModelStore(tmp_path), "list")
    assert (completed.returncode, completed.stdout, completed.stderr) == (0, "", "")


def test_the_store_may_come_from_the_environment(store):
    command = [sys.executable, "-m", "model_store", "list"]
    environment = {"DUBITO_STORE": str(store.root), "PYTHONPATH": str(ROOT)}
    completed = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
    )
    assert completed.stdout.startswith("digits: versions 1, 2, 3")


def test_verify_says_that_every_version_is_whole(store):
    completed = run_store(store, "verify")
    assert completed.returncode == 0
    assert completed.stdout.splitlines() == [
        *(f"digits version {version}: whole" for version in (1, 2, 3)),
        "other version 1: whole",
    ]


@pytest.mark.parametrize("command", [["verify"], ["list"], ["delete", "digits:1"]])
def test_a_missing_store_is_an_error(tmp_path, command):
    completed = run_store(ModelStore(tmp_path / "absent"), *command)
    assert completed.returncode == 2
    assert "DUBITO_STORE: expected an existing folder, got" in completed.stderr
    assert not (tmp_path / "absent").exists()


def test_verify_names_what_is_broken_and_exits_1(store):
    path = store.root / "digits" / "1" / "weights.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    (store.root / "other" / "1" / "manifest.json").unlink()
    completed = run_store(store, "verify")
    assert completed.returncode == 1
    assert completed.stdout.splitlines() == [
        "error: model digits version 1: weights.safetensors: its SHA-256 is not the manifest's",
        "digits version 2: whole",
        "digits version 3: whole",
        "error: model other version 1: manifest.json: No such file or directory",
    ]


def test_alias_moves_latest_back(store):
    completed = run_store(store, "alias", "digits", "latest", "1")
    assert (completed.returncode, completed.stderr) == (0, "")
    assert store.resolve("digits") == "1"


def test_an_alias_moves_to_a_version_that_cannot_be_served_only_if_told_to(store):
    completed = run_store(store, "alias", "digits", "latest", "2")
    assert (completed.returncode, store.resolve("digits")) == (2, "3")
    assert completed.stderr.startswith("error: model digits version 2: ")
    completed = run_store(store, "alias", "digits", "latest", "2", "--anyway")
    assert (completed.returncode, completed.stderr, store.resolve("digits")) == (0, "", "2")


def test_keep_deletes_and_says_what(store):
    store.set_alias("digits", "champion", "1")
    assert run_store(store, "keep", "digits", "1").stdout == "deleted: 2\n"
    assert run_store(store, "keep", "digits", "1").stdout == "deleted: nothing\n"
    assert store.versions("digits") == ["1", "3"]


def test_delete_takes_what_no_alias_names(store):
    store.set_alias("digits", "champion", "1")
    refused = run_store(store, "delete", "digits:1")
    assert refused.returncode == 2
    expected = "one that no alias names (--force deletes others too)"
    assert (
        refused.stderr
        == f"error: version: expected {expected}, got version 1, with the aliases champion\n"
    )
    assert run_store(store, "delete", "digits:2").stdout == "deleted: digits version 2\n"
    assert store.versions("digits") == ["1", "3"]


def test_delete_by_force_removes_aliases_but_never_moves_latest(store):
    store.set_alias("digits", "champion", "2")
    completed = run_store(store, "delete", "digits:2", "--force")
    assert (completed.returncode, completed.stderr) == (0, "")
    assert completed.stdout.splitlines() == ["deleted: digits version 2", "champion: removed"]
    refused = run_store(store, "delete", "digits:3", "--force")
    assert refused.returncode == 2
    assert "move latest first" in refused.stderr
    assert store.aliases("digits") == {"latest": "3"}


def test_a_whole_model_is_deleted_by_force(store):
    refused = run_store(store, "delete", "digits")
    assert (refused.returncode, store.versions("digits")) == (2, ["1", "2", "3"])
    assert "got all versions, with the aliases latest" in refused.stderr
    assert run_store(store, "delete", "digits", "--force").stdout.splitlines() == [
        "deleted: digits version 1, 2, 3",
        "latest: removed",
    ]
    assert store.names() == ["other"]


def test_an_alias_is_removed_and_its_version_stays(store):
    store.set_alias("digits", "champion", "1")
    completed = run_store(store, "alias", "digits", "champion", "--remove")
    assert (completed.returncode, completed.stderr, store.aliases("digits")) == (
        0,
        "",
        {"latest": "3"},
    )
    assert store.versions("digits") == ["1", "2", "3"]


def test_show_says_what_a_version_is(store):
    manifest = store.manifest("digits", "1")
    completed = run_store(store, "show", "digits:1")
    assert (completed.returncode, completed.stderr) == (0, "")
    title, *lines = completed.stdout.splitlines()
    assert title == "digits version 1"
    message = dict(line.strip().split("  ", 1) for line in lines)
    message = {key: text.strip() for key, text in message.items()}
    assert message["method"] == manifest.method
    assert message["input.shape"] == "8, 8"
    assert message["output.classes"] == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9"
    assert message["detectors.ranking_rows"] == str(manifest.detectors.ranking_rows)
    assert message["quality.test_accuracy"] == f"{manifest.quality['test_accuracy']:.6g}"
    assert message["training.data"] == "digits"
    assert message["size"].startswith(
        f"{sum(file.size for file in manifest.files.values()):,} bytes"
    )
    assert (message["digest"], message["signature"]) == (manifest.digest, "none")
    assert run_store(store, "show", "digits").stdout.startswith("digits version 3 (latest)\n")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (
            ("delete", "digits:9"),
            "error: version: expected one of 1, 2, 3, latest of model digits, got '9'",
        ),
        (
            ("delete", "digits:latest"),
            "error: version: expected NAME, or NAME:VERSION with a number",
        ),
        (
            ("delete", "nothing", "--force"),
            "error: model: expected one of digits, other, got 'nothing'",
        ),
        (("show", "digits:9"), "error: version: expected one of"),
        (
            ("alias", "digits", "champion"),
            "error: alias: expected a version or --remove, got neither",
        ),
        (
            ("alias", "digits", "champion", "1", "--remove"),
            "error: alias: expected a version or --remove, got both",
        ),
        (
            ("alias", "digits", "champion", "--remove"),
            "error: alias: expected one of latest of model digits",
        ),
        (("alias", "digits", "latest", "--remove"), "error: alias: expected another than latest"),
        (("alias", "digits", "champion", "9"), "error: version: expected one of"),
        (
            ("alias", "nothing", "champion", "1"),
            "error: model: expected one of digits, other, got 'nothing'",
        ),
        (("alias", "digits", "7", "1"), "error: alias: expected a name"),
        (("keep", "digits", "0"), "error: newest: expected at least 1, got 0"),
        (("keep", "../digits", "1"), "error: model: expected a name"),
        (("keep", "digits", "many"), "invalid int value: 'many'"),
        (("destroy",), "invalid choice: 'destroy'"),
        ((), "the following arguments are required"),
    ],
)
def test_a_wrong_call_says_why_and_exits_2(store, arguments, complaint):
    completed = run_store(store, *arguments)
    assert (completed.returncode, completed.stdout) == (2, "")
    assert complaint in completed.stderr
    assert "Traceback" not in completed.stderr
    assert store.versions("digits") == ["1", "2", "3"]
