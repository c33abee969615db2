"""What holds of a store wherever it lies: the property table of folders and buckets.

Each property takes `make`, which returns a store at one place, every time a new one, as another
process would have.
"""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from model_store.artifacts.manifest import ENCODER, FILES, Description
from model_store.artifacts.report import evaluation_report, publish_report
from model_store.artifacts.storage import MANIFEST
from model_store.artifacts.store import ModelStore
from model_store.errors import BrokenArtifact, InvalidInput, NotFound
from tests.support.stores import tiny_description, tiny_files

DESCRIPTION = tiny_description()
RACERS = 16


def publish(store, name="m", content=b"weights", **options):
    """Publish a version with some content of its own, and return its number."""
    return store.publish(
        name, DESCRIPTION, tiny_files() | {"weights.safetensors": content}, **options
    ).version


def what_is_published_is_what_others_read(make):
    manifest = make().publish("m", DESCRIPTION, tiny_files())
    artifact = make().open("m", "1")
    assert artifact.manifest == manifest
    assert artifact.files == tiny_files()
    assert all(
        (artifact.folder / file).read_bytes() == content for file, content in tiny_files().items()
    )
    assert (make().names(), make().versions("m"), make().aliases("m")) == (
        ["m"],
        ["1"],
        {"latest": "1"},
    )


def numbers_grow_and_none_is_given_twice(make):
    assert [publish(make()) for _ in range(11)] == [str(number) for number in range(1, 12)]
    assert make().versions("m") == [str(number) for number in range(1, 12)]
    assert make().keep("m", 2) == [str(number) for number in range(1, 10)]
    make().delete("m", "11", force=True)
    assert (make().versions("m"), make().aliases("m")) == (["10"], {"latest": "10"})
    assert publish(make()) == "12"
    assert make().delete("m", force=True) == ["10", "12"]
    assert (make().names(), make().versions("m"), make().aliases("m")) == ([], [], {})
    assert publish(make()) == "13"


def aliases_move_and_are_removed(make):
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
    with pytest.raises(InvalidInput, match="alias: expected"):
        make().set_alias("m", "../x", "1")


def what_has_an_alias_is_kept_and_deleted_by_force_alone(make):
    for _ in range(5):
        publish(make())
    make().set_alias("m", "champion", "2")
    assert make().keep("m", 1) == ["1", "3", "4"]
    with pytest.raises(InvalidInput, match="one that no alias names"):
        make().delete("m", "2")
    assert make().delete("m", "2", force=True) == ["2"]
    assert make().aliases("m") == {"latest": "5"}
    with pytest.raises(NotFound):
        make().open("m", make().resolve("m", "2"))


def models_are_told_apart_by_their_whole_name(make):
    for name in ("m", "m2", "M", "m.x"):
        publish(make(), name)
    publish(make(), "m2")
    assert make().names() == sorted(["m", "m2", "M", "m.x"])
    assert (make().versions("m"), make().versions("m2")) == (["1"], ["1", "2"])
    make().delete("m", force=True)
    assert make().names() == sorted(["m2", "M", "m.x"])


def bad_names_are_refused(make):
    long = "a" * 65
    for name in ("", ".", "..", "../x", "a/b", "/tmp", ".hidden", "-x", long, "a b", "a\n", "ä"):
        with pytest.raises(InvalidInput, match="name: expected a name matching"):
            publish(make(), name)
        for read in (make().versions, make().aliases, make().resolve):
            with pytest.raises(NotFound, match="model: expected a name matching"):
                read(name)
    assert make().names() == []


def writers_at_once_never_share_a_number(make):
    """Each racer's version is whole and its own; `latest` is one that is there, and none that was
    overtaken."""
    begin = threading.Barrier(RACERS)

    def race(racer):
        store = make()
        begin.wait()
        return publish(store, content=f"of racer {racer}".encode())

    with ThreadPoolExecutor(RACERS) as pool:
        given = list(pool.map(race, range(RACERS)))
    assert len({*given}) == RACERS
    assert sorted(given, key=int) == make().versions("m")
    for racer, version in enumerate(given):
        assert (
            make().open("m", version).files["weights.safetensors"] == f"of racer {racer}".encode()
        )
    assert make().resolve("m") == make().versions("m")[-1]


def one_of_many_replacements_of_the_same_alias_wins(make):
    publish(make())
    for alias in ("latest", "new"):
        before = make().storage.written("m", alias)
        begin = threading.Barrier(RACERS)

        def race(racer, alias=alias, before=before, begin=begin):
            store = make()
            begin.wait()
            with store.storage.writing("m"):
                return store.storage.replace("m", alias, f"{100 + racer}", before)

        with ThreadPoolExecutor(RACERS) as pool:
            won = list(pool.map(race, range(RACERS)))
        assert sum(won) == 1
        assert make().storage.written("m", alias).text == str(100 + won.index(True))


def no_move_is_lost(make):
    """Racers add to what is written: nothing is written over what was not read."""
    publish(make())
    begin = threading.Barrier(4)

    def race(_):
        store = make()
        begin.wait()
        for _ in range(5):
            with store.storage.writing("m"):
                store._move("m", "count", lambda written: str(int(written or 0) + 1))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(race, range(4)))
    assert make().storage.written("m", "count").text == "20"


def a_reader_in_the_middle_sees_whole_versions(make):
    """While versions come and go: what `latest` names opens, unless it is gone by then."""
    publish(make())
    done = threading.Event()

    def write():
        store = make()
        for number in range(8):
            publish(store, content=bytes(10_000 * (number + 1)))
            store.keep("m", 2)
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    looks = 0
    while not done.is_set() or looks < 2:
        store = make()
        version = store.resolve("m")
        try:
            artifact = store.open("m", version)
        except (NotFound, BrokenArtifact):
            assert version not in make().versions("m")
        else:
            assert artifact.manifest.version == version
        looks += 1
    writer.join()
    assert make().versions("m") == ["8", "9"]


def damage_is_found_and_named(make):
    for file in (*FILES, MANIFEST):
        version = publish(make())
        with make().storage.writing("m"):
            make().storage.overwrite(f"m/{version}/{file}", b"other")
        with pytest.raises(BrokenArtifact) as raised:
            make().open("m", version)
        assert raised.value.file == file
    assert make().open("m", publish(make())).files["weights.safetensors"] == b"weights"


def signatures_are_checked(make):
    key = Ed25519PrivateKey.generate()
    publish(make())
    publish(make())
    make().sign("m", "1", key)
    trusting = ModelStore(make().storage, key.public_key())
    assert trusting.open("m", "1").manifest.version == "1"
    with pytest.raises(BrokenArtifact, match="there is none: the version is not signed"):
        trusting.open("m", "2")
    with make().storage.writing("m"):
        make().storage.overwrite("m/2/manifest.sig", bytes(64))
    with pytest.raises(BrokenArtifact, match="no signature of this version"):
        ModelStore(make().storage, key.public_key()).open("m", "2")


def reports_lie_beside_their_version(make):
    publish(make())
    publish(make())
    assert evaluation_report(make(), "m", "1") is None
    for seed in (1, 2):
        publish_report(make(), "m", "1", {"seed": seed}, {f"{seed}.png": b"picture"})
    found = evaluation_report(make(), "m", "1")
    assert (found.report["seed"], found.files, found.read("2.png")) == (
        2,
        ("evidence.json", "2.png"),
        b"picture",
    )
    assert make().storage.numbers("m/evidence/1") == [2]
    with pytest.raises(NotFound):
        found.read("1.png")
    with pytest.raises(NotFound):
        publish_report(make(), "m", "3", {}, {})
    make().keep("m", 1)
    assert make().storage.numbers("m/evidence/1") == []


def a_large_file_is_published_by_its_path(make):
    folder = make().storage.scratch.parent / "originals"
    folder.mkdir(parents=True)
    content = bytes(range(256)) * 50_000
    (folder / ENCODER).write_bytes(content)
    encoder = {"outputs": 4, "rows_at_once": 2, "difference": 0.0}
    described = Description.model_validate({**DESCRIPTION.model_dump(), "encoder": encoder})
    for version in ("1", "2"):
        made = make().publish("m", described, {**tiny_files(), ENCODER: folder / ENCODER})
        assert made.version == version
        artifact = make().open("m", version)
        assert ENCODER not in artifact.files
        assert (artifact.folder / ENCODER).read_bytes() == content


PROPERTIES = [
    what_is_published_is_what_others_read,
    numbers_grow_and_none_is_given_twice,
    aliases_move_and_are_removed,
    what_has_an_alias_is_kept_and_deleted_by_force_alone,
    models_are_told_apart_by_their_whole_name,
    bad_names_are_refused,
    writers_at_once_never_share_a_number,
    one_of_many_replacements_of_the_same_alias_wins,
    no_move_is_lost,
    a_reader_in_the_middle_sees_whole_versions,
    damage_is_found_and_named,
    signatures_are_checked,
    reports_lie_beside_their_version,
    a_large_file_is_published_by_its_path,
]
