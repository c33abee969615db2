import builtins
import os
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest

from model_store.artifacts.bucket import CLAIM
from model_store.artifacts.disk import folder_bytes
from model_store.artifacts.objects import Objects
from model_store.artifacts.report import evaluation_report, publish_report
from model_store.artifacts.store import open_store
from model_store.errors import BrokenArtifact, InvalidInput, NotFound, StoreError, StoreUnreachable
from tests.support.faulty_bucket import SECRET, FaultyBucket
from tests.support.stores import tiny_description, tiny_files

CONTENT, DESCRIPTION = tiny_files(), tiny_description()
SIZE = sum(map(len, CONTENT.values()))


@pytest.fixture
def server():
    return FaultyBucket()


@pytest.fixture
def store(server, tmp_path):
    return server.store(tmp_path / "cache")


def paths(server):
    return sorted(entry["path"] for entry in server.memory.list().collect())


# What lies where


def test_a_bucket_has_the_layout_of_a_folder(server, store):
    store.publish("m", DESCRIPTION, CONTENT)
    publish_report(store, "m", "1", {"seed": 1}, b"page")
    expected = ["m/aliases/latest", "m/reports/1/report.json", "m/reports/1/report.html"]
    assert paths(server) == sorted(
        [*expected, *(f"m/1/{file}" for file in [*CONTENT, "manifest.json"])]
    )
    assert bytes(server.memory.get("m/aliases/latest").bytes()) == b"1"
    store.delete("m", "1", force=True)
    assert paths(server) == ["m/aliases/.last-deleted"]


# Conditions


@pytest.mark.parametrize(
    ("ignored", "reason"), [("create", "ignores If-None-Match"), ("e_tag", "ignores If-Match")]
)
def test_a_server_that_ignores_conditions_is_read_but_not_written_to(
    server, store, tmp_path, ignored, reason
):
    store.publish("m", DESCRIPTION, CONTENT)
    before = paths(server)
    server.heeds = {"create", "e_tag"} - {ignored}
    careless = server.store(tmp_path / "other")
    assert careless.open("m", "1").files == CONTENT
    changes = [
        lambda: careless.publish("m", DESCRIPTION, CONTENT),
        lambda: careless.set_alias("m", "champion", "1"),
        lambda: careless.keep("m", 1),
        lambda: careless.delete("m", force=True),
        lambda: publish_report(careless, "m", "1", {}, b""),
        careless.storage.check_writable,
    ]
    for change in changes:
        with pytest.raises(
            InvalidInput,
            match=rf"DUBITO_STORE: expected a bucket with conditional writes, .*{reason}",
        ):
            change()
    assert paths(server) == before


# Writers that are killed


def test_what_a_killed_writer_left_is_deleted_a_day_later_and_not_before(server, store):
    store.publish("m", DESCRIPTION, CONTENT)
    server.memory.put(f"m/2/{CLAIM}", b"")
    server.memory.put("m/2/network.onnx", b"half")
    server.memory.put("m/reports/1/report.html", b"half")
    server.memory.put("m/reports/7/report.json", b"of a version that is gone")
    before = paths(server)
    assert store.publish("m", DESCRIPTION, CONTENT).version == "3"
    assert {*before} <= {*paths(server)}
    store.storage._clear("m", datetime.now(UTC) + timedelta(hours=23))
    assert {*before} <= {*paths(server)}
    store.storage._clear("m", datetime.now(UTC) + timedelta(hours=25))
    assert not [path for path in paths(server) if path.startswith(("m/2/", "m/reports/"))]
    assert store.versions("m") == ["1", "3"]
    assert store.open("m", "3").files == CONTENT


def test_a_number_that_was_given_and_taken_back_meanwhile_is_not_given_again(
    server, store, tmp_path
):
    store.publish("m", DESCRIPTION, CONTENT)
    other = server.store(tmp_path / "other")
    files = {**CONTENT, "manifest.json": b"{}"}
    assert store.storage.next_number("m") == 2
    other.publish("m", DESCRIPTION, CONTENT, alias="candidate")
    other.delete("m", "2", force=True)
    assert not store.storage.create("m", 2, files)
    assert store.storage.next_number("m") == 3
    other.publish("m", DESCRIPTION, CONTENT)
    other.publish("m", DESCRIPTION, CONTENT)
    other.keep("m", 1)
    assert not store.storage.create("m", 3, files)
    assert store.storage.next_number("m") == 5
    assert store.storage.create("m", 5, files)
    assert store.versions("m") == ["4", "5"]
    assert not [path for path in paths(server) if path.startswith(("m/2/", "m/3/"))]


# Looking


def test_a_look_is_one_request_whatever_there_is(server, store):
    for name in ("a", "b", "c"):
        for _ in range(3):
            store.publish(name, DESCRIPTION, CONTENT)
    server.memory.put("b/aliases/dangling", b"9")
    for number in range(300):
        server.memory.put(f"c/aliases/a{number}", b"1")
    reader = store.storage
    reader.refresh()
    server.requests.clear()
    for _ in range(5):
        reader.refresh()
        assert store.names() == ["a", "b", "c"]
        assert all(store.versions(name) == ["1", "2", "3"] for name in store.names())
        assert store.aliases("a") == store.aliases("b") == {"latest": "3"}
        assert len(store.aliases("c")) == 301
    assert server.requests == {"list": 5}


def test_an_alias_that_moves_while_it_is_looked_at_names_what_it_named(server, store, tmp_path):
    """`latest` of versions 1 to 3 was rolled back to 1; version 4 is published between the list and
    the read."""
    for _ in range(3):
        store.publish("m", DESCRIPTION, CONTENT)
    store.set_alias("m", "latest", "1")
    reader = server.store(tmp_path / "reader")

    def publish(path):
        server.before_get = lambda path: None
        server.store(tmp_path / "writer").publish("m", DESCRIPTION, CONTENT)

    server.before_get = publish
    reader.storage.refresh()
    assert reader.aliases("m") == {"latest": "4"}


def test_objects_that_are_not_of_the_layout_are_passed_over(server, store):
    store.publish("m", DESCRIPTION, CONTENT)
    for path in (
        "readme",
        "m/7",
        "m/x/manifest.json",
        ".hidden/1/manifest.json",
        "m/8/network.onnx",
        "m/a/b/c/d/e",
    ):
        server.memory.put(path, b"1")
    assert (store.names(), store.versions("m")) == (["m"], ["1"])


# Without the bucket


def test_without_the_bucket_what_was_seen_and_copied_goes_on(server, store, tmp_path):
    store.publish("m", DESCRIPTION, CONTENT)
    store.publish("m", DESCRIPTION, CONTENT)
    store.set_alias("m", "champion", "1")
    store.storage.refresh()
    store.open("m", "2")
    server.is_reachable = False
    for reader in (
        store,
        server.store(tmp_path / "cache"),
    ):
        with pytest.raises(
            StoreUnreachable, match="cannot list in s3://bucket/prefix: it cannot be reached"
        ):
            reader.storage.refresh()
        assert reader.open("m", "2").files == CONTENT
        assert reader.resolve("m") == "2"
        with pytest.raises(StoreError):
            reader.open("m", "1")
    assert reader.versions("m") == ["2"]
    other = server.store(tmp_path / "empty")
    with pytest.raises(StoreUnreachable):
        other.storage.refresh()
    assert not other.storage.has_listing
    server.is_reachable = True
    reader.storage.refresh()
    assert (reader.versions("m"), reader.aliases("m")) == (
        ["1", "2"],
        {"latest": "2", "champion": "1"},
    )


def test_an_error_holds_nothing_that_the_library_said(server, store):
    server.is_reachable = False
    for use in (
        store.names,
        lambda: store.open("m", "1"),
        lambda: store.publish("m", DESCRIPTION, CONTENT),
    ):
        with pytest.raises(StoreUnreachable) as raised:
            use()
        assert SECRET not in f"{raised.value!r}"
        assert raised.value.__cause__ is None and raised.value.__suppress_context__


# Copies


def test_a_version_is_downloaded_once_and_verified(server, store, tmp_path):
    store.publish("m", DESCRIPTION, CONTENT)
    store.open("m", "1")
    server.requests.clear()
    assert server.store(tmp_path / "cache").open("m", "1").files == CONTENT
    assert server.requests == {"get": 1}  # the manifest
    server.memory.put("m/1/network.onnx", b"the bytes of network.ONNX")
    assert store.open("m", "1").files == CONTENT
    with pytest.raises(BrokenArtifact, match=r"network\.onnx: its SHA-256 is not the manifest's"):
        server.store(tmp_path / "other").open("m", "1")
    assert not [*(tmp_path / "other").rglob("*.onnx")]


def test_a_download_ends_when_the_process_is_about_to(server, store, tmp_path):
    store.publish("m", DESCRIPTION, CONTENT)
    reader = server.store(tmp_path / "reader")
    server.before_get = lambda path: reader.storage.close() if path.endswith(".onnx") else None
    with pytest.raises(StoreUnreachable):
        reader.open("m", "1")
    assert [*(tmp_path / "reader").rglob("*.onnx")] == []


def test_versions_are_downloaded_at_the_same_time_within_the_size_limit(server, store, tmp_path):
    for _ in range(2):
        store.publish("m", DESCRIPTION, CONTENT)
    opened = []

    def open_other(path):
        if path == "m/1/network.onnx":
            for cache_bytes in (1 << 30, 2 * SIZE - 1):
                other = server.store(tmp_path / "reader", cache_bytes)
                opened.append(pool.submit(other.open, "m", "2").exception(timeout=10))
                other.storage.cache._delete(other.storage.scratch / "m" / "2", even_locked=True)

    server.before_get = open_other
    with ThreadPoolExecutor() as pool:
        assert server.store(tmp_path / "reader").open("m", "1").files == CONTENT
    assert opened[0] is None
    assert "DUBITO_CACHE_BYTES" in str(opened[1])


def test_versions_of_objects_go_with_their_tags(store, server):
    """Google's buckets tell what has changed by numbered versions, which a replacement must
    name."""
    modes, put = [], server.put
    server.put = lambda path, content, mode="overwrite": (
        modes.append(mode) or put(path, content, mode)
    )
    server.memory.put("m/x", b"1")
    objects = store.storage.objects
    content = objects.get("m/x", 1)
    assert objects.replace("m/x", b"2", content._replace(version=None))
    assert not objects.replace("m/x", b"3", content._replace(version="7"))
    assert modes == [{"e_tag": content.tag}, {"e_tag": content.tag, "version": "7"}]


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("damage", [b"other", b"the bytes of network.ONNX", None])
def test_a_damaged_copy_is_fetched_again(server, store, tmp_path, damage, is_known):
    store.publish("m", DESCRIPTION, CONTENT)
    (copy,) = (store.open("m", "1").folder.parent / "1").glob("network.onnx")
    copy.unlink()
    if damage is not None:
        copy.write_bytes(damage)
    reader = store if is_known else server.store(tmp_path / "cache")
    assert reader.open("m", "1").files == CONTENT
    assert copy.read_bytes() == CONTENT["network.onnx"]


def test_another_version_of_the_same_number_is_no_copy(server, store, tmp_path):
    store.publish("m", DESCRIPTION, CONTENT)
    stored = store.open("m", "1")
    store.delete("m", force=True)
    server.memory.delete("m/aliases/.last-deleted")
    server.store(tmp_path / "other").publish("m", DESCRIPTION, CONTENT | {"network.onnx": b"other"})
    assert store.open("m", "1").files["network.onnx"] == b"other"
    assert stored.files == CONTENT


def test_copies_are_bounded_and_what_is_held_or_named_stays(server, tmp_path):
    for _ in range(6):
        manifest = server.store(tmp_path / "cache").publish("m", DESCRIPTION, CONTENT)
    store = server.store(
        tmp_path / "cache", 3 * (SIZE + len(manifest.model_dump_json(indent=2)) + 100)
    )
    store.set_alias("m", "champion", "2")
    store.storage.refresh()
    copies = tmp_path / "cache" / store.storage.scratch.name / "m"

    def list_keys():
        return sorted(entry.name for entry in copies.iterdir() if entry.name.isdigit())

    stored = store.open("m", "1")
    for number, version in enumerate(["2", "3", "4", "5"]):
        folder = store.open("m", version).folder
        os.utime(folder, (number, number))
        assert (
            sum(file.stat().st_size for file in copies.rglob("*") if file.is_file())
            <= store.storage.cache.max_bytes
        )
        assert "1" in list_keys() and version in list_keys()
    assert list_keys() == ["1", "2", "5"]
    del stored
    store.open("m", "6")
    assert "6" in list_keys() and len(list_keys()) == 3
    with pytest.raises(StoreError, match="DUBITO_CACHE_BYTES: expected room for"):
        server.store(tmp_path / "small", SIZE - 1).open("m", "6")
    assert [*(tmp_path / "small").rglob("network.onnx")] == []


def test_what_a_killed_download_left_is_cleared(server, store, tmp_path):
    store.publish("m", DESCRIPTION, CONTENT)
    left = store.storage.scratch / "m" / ".draft-abc"
    left.mkdir(parents=True)
    (left / "network.onnx").write_bytes(b"half")
    store.open("m", "1")
    assert not left.exists()


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"{", b'{"versions": 3}', b'{"versions": {"../x": ["1"]}, "aliases": {}}']
)
def test_lists_that_are_damaged_are_as_if_there_were_none(server, store, tmp_path, text):
    store.publish("m", DESCRIPTION, CONTENT)
    store.storage.refresh()
    store.open("m", "1")
    (store.storage.scratch / ".lists.json").write_bytes(text)
    server.is_reachable = False
    reader = server.store(tmp_path / "cache")
    with pytest.raises(StoreUnreachable):
        reader.storage.refresh()
    assert not reader.storage.has_listing or reader.names() == []


def test_a_disk_that_takes_no_copy_is_named_by_its_setting(server, store, tmp_path, monkeypatch):
    store.publish("m", DESCRIPTION, CONTENT)
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(
        StoreError, match="DUBITO_CACHE: expected a folder with room for m version 1, got: "
    ):
        server.store(tmp_path / "file").open("m", "1")

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as changes:
        changes.setattr("model_store.artifacts.cache.write_synced", full)
        with pytest.raises(StoreError, match="got: No space left on device"):
            store.open("m", "1")
    assert [*(tmp_path / "cache").rglob("network.onnx")] == []
    assert store.open("m", "1").files == CONTENT


def test_copies_of_two_buckets_are_apart(tmp_path):
    first, second = (
        open_store(url, cache=tmp_path).storage.scratch for url in ("s3://a/x", "s3://b/x")
    )
    assert first != second and first.parent == second.parent == tmp_path


# URLs


@pytest.mark.parametrize(
    "url",
    [
        "s3://",
        "s3:///prefix",
        "ftp://bucket/x",
        "http://bucket/x",
        "s3://key:secret@bucket/x",
        "az://b/x?sig=secret",
    ],
)
def test_what_is_no_url_of_a_bucket_is_refused_and_what_is_secret_in_it_not_repeated(url):
    with pytest.raises(
        InvalidInput, match="DUBITO_STORE: expected a folder, or a URL such as"
    ) as raised:
        open_store(url)
    assert "secret" not in str(raised.value)


def test_a_missing_extra_is_named(monkeypatch):
    real = builtins.__import__

    def without(name, *rest, **more):
        if name.startswith("obstore"):
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InvalidInput, match="the package of the extra `bucket`"):
        Objects.from_url("s3://bucket/prefix")


def test_plain_http_is_refused_unless_it_is_allowed(monkeypatch, tmp_path):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.delenv("AWS_ALLOW_HTTP", raising=False)
    with pytest.raises(
        StoreUnreachable, match="the endpoint is http://, which AWS_ALLOW_HTTP=true must allow"
    ):
        open_store("s3://bucket/x", cache=tmp_path).names()
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    with pytest.raises(StoreUnreachable, match="it cannot be reached"):
        open_store("s3://bucket/x", cache=tmp_path).names()


def test_reports_without_the_bucket_are_not_there(server, store):
    store.publish("m", DESCRIPTION, CONTENT)
    publish_report(store, "m", "1", {"seed": 1}, b"page")
    store.storage.refresh()
    assert evaluation_report(store, "m", "1").report["seed"] == 1
    server.is_reachable = False
    actual = evaluation_report(store, "m", "1")
    with pytest.raises(StoreUnreachable):
        actual.read("report.html")
    with pytest.raises(NotFound):
        actual.read("other")


def test_a_folder_is_measured_while_its_folders_are_renamed(tmp_path):
    for n in range(20):
        (tmp_path / f"draft-{n}").mkdir()
        (tmp_path / f"draft-{n}" / "network.onnx").write_bytes(bytes(10))

    def rename():
        for source, target in [("draft", "copy"), ("copy", "draft")] * 100:
            for n in range(20):
                (tmp_path / f"{source}-{n}").rename(tmp_path / f"{target}-{n}")

    with ThreadPoolExecutor(1) as pool:
        renaming = pool.submit(rename)
        while not renaming.done():
            assert folder_bytes(tmp_path) % 10 == 0
        renaming.result()
    assert folder_bytes(tmp_path) == 200
