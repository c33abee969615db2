import os
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
    store_fields = set(Manifest.model_fields) - set(Description.model_fields)
    description = Description.model_validate(manifest.model_dump(exclude=store_fields))
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


def test_list_of_empty_store_prints_nothing(tmp_path):
    completed = run_store(ModelStore(tmp_path), "list")
    assert (completed.returncode, completed.stdout, completed.stderr) == (0, "", "")


def test_store_can_be_set_in_the_environment(store):
    command = [sys.executable, "-m", "model_store", "list"]
    environment = {"DUBITO_STORE": str(store.root), "PYTHONPATH": str(ROOT)}
    completed = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
    )
    assert completed.stdout.startswith("digits: versions 1, 2, 3")


def test_command_ends_quietly_if_nobody_reads_its_output(store):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "model_store", "--store", str(store.root), "list"]
    completed = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, timeout=60)
    os.close(writer)
    assert (completed.returncode, completed.stderr) == (1, b"")


def test_verify_lists_intact_versions(store):
    completed = run_store(store, "verify")
    assert completed.returncode == 0
    assert completed.stdout.splitlines() == [
        *(f"digits version {version}: intact" for version in (1, 2, 3)),
        "other version 1: intact",
    ]


@pytest.mark.parametrize("command", [["verify"], ["list"], ["delete", "digits:1"]])
def test_missing_store_is_an_error(tmp_path, command):
    completed = run_store(ModelStore(tmp_path / "absent"), *command)
    assert completed.returncode == 2
    assert "DUBITO_STORE: expected an existing folder, got" in completed.stderr
    assert not (tmp_path / "absent").exists()


def test_verify_names_broken_versions_and_exits_1(store):
    path = store.root / "digits" / "1" / "weights.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    (store.root / "other" / "1" / "manifest.json").unlink()
    completed = run_store(store, "verify")
    assert completed.returncode == 1
    assert completed.stdout.splitlines() == [
        "error: model digits version 1: weights.safetensors: its SHA-256 is not the manifest's",
        "digits version 2: intact",
        "digits version 3: intact",
        "error: model other version 1: manifest.json: No such file or directory",
    ]


def test_alias_rolls_latest_back(store):
    completed = run_store(store, "alias", "digits", "latest", "1")
    assert (completed.returncode, completed.stderr) == (0, "")
    assert store.resolve("digits") == "1"


def test_alias_moves_to_unservable_version_only_with_anyway(store):
    completed = run_store(store, "alias", "digits", "latest", "2")
    assert (completed.returncode, store.resolve("digits")) == (2, "3")
    assert completed.stderr.startswith("error: model digits version 2: ")
    completed = run_store(store, "alias", "digits", "latest", "2", "--anyway")
    assert (completed.returncode, completed.stderr, store.resolve("digits")) == (0, "", "2")


def test_keep_prints_deleted_versions(store):
    store.set_alias("digits", "champion", "1")
    assert run_store(store, "keep", "digits", "1").stdout == "deleted: 2\n"
    assert run_store(store, "keep", "digits", "1").stdout == "deleted: nothing\n"
    assert store.versions("digits") == ["1", "3"]


def test_delete_accepts_only_versions_without_alias(store):
    store.set_alias("digits", "champion", "1")
    failure = run_store(store, "delete", "digits:1")
    assert failure.returncode == 2
    expected = "one that no alias names (--force deletes others too)"
    assert (
        failure.stderr
        == f"error: version: expected {expected}, got version 1, with the aliases champion\n"
    )
    assert run_store(store, "delete", "digits:2").stdout == "deleted: digits version 2\n"
    assert store.versions("digits") == ["1", "3"]


def test_forced_delete_removes_aliases_but_never_moves_latest(store):
    store.set_alias("digits", "champion", "2")
    completed = run_store(store, "delete", "digits:2", "--force")
    assert (completed.returncode, completed.stderr) == (0, "")
    assert completed.stdout.splitlines() == ["deleted: digits version 2", "champion: removed"]
    failure = run_store(store, "delete", "digits:3", "--force")
    assert failure.returncode == 2
    assert "move latest first" in failure.stderr
    assert store.aliases("digits") == {"latest": "3"}


def test_all_versions_of_a_model_are_deleted_only_by_force(store):
    failure = run_store(store, "delete", "digits")
    assert (failure.returncode, store.versions("digits")) == (2, ["1", "2", "3"])
    assert "got all versions, with the aliases latest" in failure.stderr
    assert run_store(store, "delete", "digits", "--force").stdout.splitlines() == [
        "deleted: digits version 1, 2, 3",
        "latest: removed",
    ]
    assert store.names() == ["other"]


def test_removing_an_alias_retains_its_version(store):
    store.set_alias("digits", "champion", "1")
    completed = run_store(store, "alias", "digits", "champion", "--remove")
    assert (completed.returncode, completed.stderr, store.aliases("digits")) == (
        0,
        "",
        {"latest": "3"},
    )
    assert store.versions("digits") == ["1", "2", "3"]


def test_show_prints_fields_of_a_version(store):
    manifest = store.manifest("digits", "1")
    completed = run_store(store, "show", "digits:1")
    assert (completed.returncode, completed.stderr) == (0, "")
    title, *lines = completed.stdout.splitlines()
    assert title == "digits version 1"
    fields = dict(line.strip().split("  ", 1) for line in lines)
    fields = {key: text.strip() for key, text in fields.items()}
    assert fields["method"] == manifest.method
    assert fields["input.shape"] == "8, 8"
    assert fields["output.classes"] == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9"
    assert fields["detectors.ranking_rows"] == str(manifest.detectors.ranking_rows)
    assert fields["quality.test_accuracy"] == f"{manifest.quality['test_accuracy']:.6g}"
    assert fields["training.data"] == "digits"
    assert fields["size"].startswith(
        f"{sum(file.size for file in manifest.files.values()):,} bytes"
    )
    assert (fields["digest"], fields["signature"]) == (manifest.digest, "none")
    assert run_store(store, "show", "digits").stdout.startswith("digits version 3 (latest)\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
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
        (
            ("alias", "digits", "latest", "--remove"),
            "error: alias: expected an alias other than latest",
        ),
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
def test_invalid_call_prints_reason_and_exits_2(store, arguments, message):
    completed = run_store(store, *arguments)
    assert (completed.returncode, completed.stdout) == (2, "")
    assert message in completed.stderr
    assert "Traceback" not in completed.stderr
    assert store.versions("digits") == ["1", "2", "3"]
