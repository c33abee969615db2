"""Properties of stores in folders and buckets.

Each property gets `make`, which reopens the same store like another process.
"""

import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from model_store.artifacts.manifest import ENCODER, FILES, Description
from model_store.artifacts.report import evaluation_report, publish_report
from model_store.artifacts.signature import TrustedKeys
from model_store.artifacts.storage import MANIFEST
from model_store.artifacts.store import ModelStore
from model_store.errors import BrokenArtifact, InvalidInput, NotFound
from tests.support.stores import tiny_description, tiny_files

DESCRIPTION = tiny_description()
RACERS = 16


def publish(store, name="m", content=b"weights", **options):
    return store.publish(
        name, DESCRIPTION, tiny_files() | {"weights.safetensors": content}, **options
    ).version


def published_version_can_be_read(make):
    manifest = make().publish("m", DESCRIPTION, tiny_files())
    artifact = make().open("m", "1")
    assert artifact.manifest == manifest
    assert artifact.files == tiny_files()
    for file, content in tiny_files().items():
        assert (artifact.folder / file).read_bytes() == content
        assert manifest.files[file].sha256 == hashlib.sha256(content).hexdigest()
        assert manifest.files[file].size == len(content)
    description = {field: getattr(manifest, field) for field in Description.model_fields}
    assert Description.model_validate(description) == DESCRIPTION
    assert make().open("m", "1", files=("network.onnx",)).files == {
        "network.onnx": tiny_files()["network.onnx"]
    }
    assert (make().names(), make().versions("m"), make().aliases("m")) == (
        ["m"],
        ["1"],
        {"latest": "1"},
    )


def empty_store_has_no_models(make):
    assert (make().names(), make().versions("m"), make().aliases("m")) == ([], [], {})
    for operation in (lambda: make().resolve("m"), lambda: make().keep("m", 1)):
        with pytest.raises(NotFound, match=r"model: expected one of \(none\), got 'm'"):
            operation()


def missing_or_extra_files_are_rejected(make):
    files = tiny_files()
    missing = {file: files[file] for file in files if file != "sampler.onnx"}
    for invalid in (missing, {**files, "extra.bin": b""}):
        with pytest.raises(InvalidInput, match="files: expected"):
            make().publish("m", DESCRIPTION, invalid)
    assert make().names() == []


def version_numbers_increase_and_are_never_reused(make):
    assert [publish(make()) for _ in range(11)] == [str(number) for number in range(1, 12)]
    assert make().versions("m") == [str(number) for number in range(1, 12)]
    assert make().keep("m", 2) == [str(number) for number in range(1, 10)]
    with pytest.raises(InvalidInput, match="move latest first"):
        make().delete("m", "11", force=True)
    make().set_alias("m", "latest", "10")
    make().delete("m", "11")
    assert (make().versions("m"), make().aliases("m")) == (["10"], {"latest": "10"})
    assert publish(make()) == "12"
    assert not make().was_deleted("m")
    assert make().delete("m", force=True) == ["10", "12"]
    assert (make().names(), make().versions("m"), make().aliases("m")) == ([], [], {})
    assert make().was_deleted("m")
    assert publish(make()) == "13"


def aliases_can_be_moved_and_removed(make):
    for _ in range(3):
        publish(make())
    make().set_alias("m", "champion", "2")
    make().set_alias("m", "candidate", "champion")
    make().set_alias("m", "champion", "1")
    make().set_alias("m", "latest", "1")
    assert make().aliases("m") == {"latest": "1", "champion": "1", "candidate": "2"}
    assert [make().resolve("m", alias) for alias in ("latest", "candidate", "3")] == ["1", "2", "3"]
    make().remove_alias("m", "candidate")
    assert make().aliases("m") == {"latest": "1", "champion": "1"}
    assert publish(make(), alias="candidate") == "4"
    assert make().aliases("m") == {"latest": "1", "champion": "1", "candidate": "4"}
    assert publish(make()) == "5"
    assert make().resolve("m") == "5"
    with pytest.raises(NotFound, match="version: expected one of"):
        make().set_alias("m", "champion", "9")


def versions_with_alias_are_deleted_only_by_force(make):
    for _ in range(5):
        publish(make())
    make().set_alias("m", "champion", "2")
    make().set_alias("m", "latest", "3")  # rolled back
    with pytest.raises(InvalidInput, match="newest: expected at least 1, got 0"):
        make().keep("m", 0)
    assert make().keep("m", 1) == ["1", "4"]
    assert make().keep("m", 1) == []
    make().set_alias("m", "latest", "5")
    assert make().keep("m", 1) == ["3"]
    with pytest.raises(InvalidInput, match="one that no alias names"):
        make().delete("m", "2")
    assert make().delete("m", "2", force=True) == ["2"]
    assert make().aliases("m") == {"latest": "5"}
    with pytest.raises(NotFound):
        make().open("m", make().resolve("m", "2"))


def models_with_similar_names_are_separate(make):
    for name in ("m", "m2", "M", "m.x"):
        publish(make(), name)
    publish(make(), "m2")
    assert make().names() == sorted(["m", "m2", "M", "m.x"])
    assert (make().versions("m"), make().versions("m2")) == (["1"], ["1", "2"])
    make().delete("m", force=True)
    assert make().names() == sorted(["m2", "M", "m.x"])


def invalid_names_are_rejected(make):
    long = "a" * 65
    for name in ("", ".", "..", "../x", "a/b", "/tmp", ".hidden", "-x", long, "a b", "a\n", "ä"):
        with pytest.raises(InvalidInput, match="name: expected a name matching"):
            publish(make(), name)
        for read in (make().versions, make().aliases, make().resolve):
            with pytest.raises(NotFound, match="model: expected a name matching"):
                read(name)
    assert make().names() == []


def concurrent_writers_never_share_a_version_number(make):
    begin = threading.Barrier(RACERS)

    def race(racer):
        store = make()
        begin.wait()
        return publish(store, content=f"of racer {racer}".encode())

    with ThreadPoolExecutor(RACERS) as pool:
        versions = list(pool.map(race, range(RACERS)))
    assert len({*versions}) == RACERS
    assert sorted(versions, key=int) == make().versions("m")
    for racer, version in enumerate(versions):
        assert (
            make().open("m", version).files["weights.safetensors"] == f"of racer {racer}".encode()
        )
    assert make().resolve("m") == make().versions("m")[-1]


def readers_see_complete_versions_during_publication(make):
    """The version that `latest` names can be opened unless it was deleted meanwhile."""
    publish(make())
    is_done = threading.Event()

    def write():
        store = make()
        for number in range(8):
            publish(store, content=bytes(10_000 * (number + 1)))
            store.keep("m", 2)
        is_done.set()

    writer = threading.Thread(target=write)
    writer.start()
    reads = 0
    while not is_done.is_set() or reads < 2:
        store = make()
        version = store.resolve("m")
        try:
            artifact = store.open("m", version)
        except (NotFound, BrokenArtifact):
            assert version not in make().versions("m")
        else:
            assert artifact.manifest.version == version
        reads += 1
    writer.join()
    assert make().versions("m") == ["8", "9"]


def errors_name_the_damaged_file(make):
    for file in (*FILES, MANIFEST):
        version = publish(make())
        with make().storage.writing("m"):
            make().storage.overwrite(f"m/{version}/{file}", b"other")
        with pytest.raises(BrokenArtifact) as error:
            make().open("m", version)
        assert error.value.file == file
    assert make().open("m", publish(make())).files["weights.safetensors"] == b"weights"


def signatures_are_checked(make):
    key = Ed25519PrivateKey.generate()
    publish(make())
    publish(make())
    make().sign("m", "1", key)
    store = ModelStore(make().storage, TrustedKeys((key.public_key(),)))
    assert store.open("m", "1").manifest.version == "1"
    with pytest.raises(BrokenArtifact, match="there is none: the version is not signed"):
        store.open("m", "2")
    with make().storage.writing("m"):
        make().storage.overwrite("m/2/manifest.sig", bytes(64))
    with pytest.raises(BrokenArtifact, match="no signature of this version"):
        ModelStore(make().storage, TrustedKeys((key.public_key(),))).open("m", "2")


def reports_are_stored_and_deleted_with_their_version(make):
    publish(make())
    publish(make())
    assert evaluation_report(make(), "m", "1") is None
    for seed in (1, 2):
        publish_report(make(), "m", "1", {"seed": seed}, b"page %d" % seed)
    evaluation = evaluation_report(make(), "m", "1")
    assert (evaluation.report["seed"], evaluation.read("report.html")) == (2, b"page 2")
    with pytest.raises(NotFound):
        publish_report(make(), "m", "3", {}, b"")
    make().keep("m", 1)
    assert not make().storage.has_file("m/reports/1/report.json")


def large_file_is_published_from_its_path(make):
    folder = make().storage.scratch.parent / "originals"
    folder.mkdir(parents=True)
    content = bytes(range(256)) * 50_000
    (folder / ENCODER).write_bytes(content)
    encoder = {"outputs": 4, "rows_at_once": 2}
    description = Description.model_validate({**DESCRIPTION.model_dump(), "encoder": encoder})
    for version in ("1", "2"):
        created = make().publish("m", description, {**tiny_files(), ENCODER: folder / ENCODER})
        assert created.version == version
        artifact = make().open("m", version)
        assert ENCODER not in artifact.files
        assert (artifact.folder / ENCODER).read_bytes() == content


PROPERTIES = [
    empty_store_has_no_models,
    missing_or_extra_files_are_rejected,
    published_version_can_be_read,
    version_numbers_increase_and_are_never_reused,
    aliases_can_be_moved_and_removed,
    versions_with_alias_are_deleted_only_by_force,
    models_with_similar_names_are_separate,
    invalid_names_are_rejected,
    concurrent_writers_never_share_a_version_number,
    readers_see_complete_versions_during_publication,
    errors_name_the_damaged_file,
    signatures_are_checked,
    reports_are_stored_and_deleted_with_their_version,
    large_file_is_published_from_its_path,
]
