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


def list_paths(server):
    return sorted(entry["path"] for entry in server.memory.list().collect())


# Layout


def test_bucket_has_same_layout_as_folder(server, store):
    store.publish("m", DESCRIPTION, CONTENT)
    publish_report(store, "m", "1", {"seed": 1}, b"page")
    expected = ["m/aliases/latest", "m/reports/1/report.json", "m/reports/1/report.html"]
    assert list_paths(server) == sorted(
        [*expected, *(f"m/1/{file}" for file in [*CONTENT, "manifest.json"])]
    )
    assert bytes(server.memory.get("m/aliases/latest").bytes()) == b"1"
    store.delete("m", "1", force=True)
    assert list_paths(server) == ["m/aliases/.last-deleted"]


# Conditional writes


@pytest.mark.parametrize(
    ("condition", "reason"), [("create", "ignores If-None-Match"), ("e_tag", "ignores If-Match")]
)
def test_server_that_ignores_conditions_is_read_only(server, store, tmp_path, condition, reason):
    store.publish("m", DESCRIPTION, CONTENT)
    before = list_paths(server)
    server.conditions = {"create", "e_tag"} - {condition}
    unsafe_store = server.store(tmp_path / "other")
    assert unsafe_store.open("m", "1").files == CONTENT
    changes = [
        lambda: unsafe_store.publish("m", DESCRIPTION, CONTENT),
        lambda: unsafe_store.set_alias("m", "champion", "1"),
        lambda: unsafe_store.keep("m", 1),
        lambda: unsafe_store.delete("m", force=True),
        lambda: publish_report(unsafe_store, "m", "1", {}, b""),
        unsafe_store.storage.check_writable,
    ]
    for change in changes:
        with pytest.raises(
            InvalidInput,
            match=rf"DUBITO_STORE: expected a bucket with conditional writes, .*{reason}",
        ):
            change()
    assert list_paths(server) == before


# Killed writers


def test_leftovers_of_killed_writer_are_deleted_after_a_day(server, store):
    store.publish("m", DESCRIPTION, CONTENT)
    server.memory.put(f"m/2/{CLAIM}", b"")
    server.memory.put("m/2/network.onnx", b"half")
    server.memory.put("m/reports/1/report.html", b"half")
    server.memory.put("m/reports/7/report.json", b"of a version that is gone")
    before = list_paths(server)
    assert store.publish("m", DESCRIPTION, CONTENT).version == "3"
    assert {*before} <= {*list_paths(server)}
    store.storage._clear("m", datetime.now(UTC) + timedelta(hours=23))
    assert {*before} <= {*list_paths(server)}
    store.storage._clear("m", datetime.now(UTC) + timedelta(hours=25))
    assert not [path for path in list_paths(server) if path.startswith(("m/2/", "m/reports/"))]
    assert store.versions("m") == ["1", "3"]
    assert store.open("m", "3").files == CONTENT


def test_number_of_version_deleted_meanwhile_is_not_reused(server, store, tmp_path):
    store.publish("m", DESCRIPTION, CONTENT)
    second_store = server.store(tmp_path / "other")
    files = {**CONTENT, "manifest.json": b"{}"}
    assert store.storage.next_number("m") == 2
    second_store.publish("m", DESCRIPTION, CONTENT, alias="candidate")
    second_store.delete("m", "2", force=True)
    assert not store.storage.create("m", 2, files)
    assert store.storage.next_number("m") == 3
    second_store.publish("m", DESCRIPTION, CONTENT)
    second_store.publish("m", DESCRIPTION, CONTENT)
    second_store.keep("m", 1)
    assert not store.storage.create("m", 3, files)
    assert store.storage.next_number("m") == 5
    assert store.storage.create("m", 5, files)
    assert store.versions("m") == ["4", "5"]
    assert not [path for path in list_paths(server) if path.startswith(("m/2/", "m/3/"))]


# Refresh


def test_refresh_takes_one_list_request(server, store):
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


def test_refresh_follows_alias_moved_between_list_and_read(server, store, tmp_path):
    """Roll `latest` back to 1, then publish version 4 between list and read."""
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


def test_objects_outside_the_layout_are_ignored(server, store):
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


# Unreachable bucket


def test_cached_versions_stay_available_without_the_bucket(server, store, tmp_path):
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
    new_reader = server.store(tmp_path / "empty")
    with pytest.raises(StoreUnreachable):
        new_reader.storage.refresh()
    assert not new_reader.storage.has_listing
    server.is_reachable = True
    reader.storage.refresh()
    assert (reader.versions("m"), reader.aliases("m")) == (
        ["1", "2"],
        {"latest": "2", "champion": "1"},
    )


def test_error_does_not_contain_library_message(server, store):
    server.is_reachable = False
    for operation in (
        store.names,
        lambda: store.open("m", "1"),
        lambda: store.publish("m", DESCRIPTION, CONTENT),
    ):
        with pytest.raises(StoreUnreachable) as exc_info:
            operation()
        assert SECRET not in f"{exc_info.value!r}"
        assert exc_info.value.__cause__ is None and exc_info.value.__suppress_context__


# Local copies


def test_version_is_downloaded_once_and_verified(server, store, tmp_path):
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


def test_closing_the_storage_stops_a_download(server, store, tmp_path):
    store.publish("m", DESCRIPTION, CONTENT)
    reader = server.store(tmp_path / "reader")
    server.before_get = lambda path: reader.storage.close() if path.endswith(".onnx") else None
    with pytest.raises(StoreUnreachable):
        reader.open("m", "1")
    assert [*(tmp_path / "reader").rglob("*.onnx")] == []


def test_versions_download_concurrently_within_the_size_limit(server, store, tmp_path):
    for _ in range(2):
        store.publish("m", DESCRIPTION, CONTENT)
    errors = []

    def open_second_version(path):
        if path == "m/1/network.onnx":
            for cache_bytes in (1 << 30, 2 * SIZE - 1):
                reader = server.store(tmp_path / "reader", cache_bytes)
                errors.append(pool.submit(reader.open, "m", "2").exception(timeout=10))
                reader.storage.cache._delete(reader.storage.scratch / "m" / "2", even_locked=True)

    server.before_get = open_second_version
    with ThreadPoolExecutor() as pool:
        assert server.store(tmp_path / "reader").open("m", "1").files == CONTENT
    assert errors[0] is None
    assert "DUBITO_CACHE_BYTES" in str(errors[1])


def test_replacement_passes_object_version_with_e_tag(store, server):
    """Google buckets detect changes by version number, so replacements pass it."""
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
def test_damaged_copy_is_downloaded_again(server, store, tmp_path, damage, is_known):
    store.publish("m", DESCRIPTION, CONTENT)
    (copy,) = (store.open("m", "1").folder.parent / "1").glob("network.onnx")
    copy.unlink()
    if damage is not None:
        copy.write_bytes(damage)
    reader = store if is_known else server.store(tmp_path / "cache")
    assert reader.open("m", "1").files == CONTENT
    assert copy.read_bytes() == CONTENT["network.onnx"]


def test_recreated_version_with_same_number_does_not_reuse_copy(server, store, tmp_path):
    store.publish("m", DESCRIPTION, CONTENT)
    stored = store.open("m", "1")
    store.delete("m", force=True)
    server.memory.delete("m/aliases/.last-deleted")
    server.store(tmp_path / "other").publish("m", DESCRIPTION, CONTENT | {"network.onnx": b"other"})
    assert store.open("m", "1").files["network.onnx"] == b"other"
    assert stored.files == CONTENT


def test_cache_is_bounded_and_retains_open_and_aliased_versions(server, tmp_path):
    for _ in range(6):
        manifest = server.store(tmp_path / "cache").publish("m", DESCRIPTION, CONTENT)
    store = server.store(
        tmp_path / "cache", 3 * (SIZE + len(manifest.model_dump_json(indent=2)) + 100)
    )
    store.set_alias("m", "champion", "2")
    store.storage.refresh()
    copies = tmp_path / "cache" / store.storage.scratch.name / "m"

    def list_versions():
        return sorted(entry.name for entry in copies.iterdir() if entry.name.isdigit())

    stored = store.open("m", "1")
    for number, version in enumerate(["2", "3", "4", "5"]):
        folder = store.open("m", version).folder
        os.utime(folder, (number, number))
        assert (
            sum(file.stat().st_size for file in copies.rglob("*") if file.is_file())
            <= store.storage.cache.max_bytes
        )
        assert "1" in list_versions() and version in list_versions()
    assert list_versions() == ["1", "2", "5"]
    del stored
    store.open("m", "6")
    assert "6" in list_versions() and len(list_versions()) == 3
    with pytest.raises(StoreError, match="DUBITO_CACHE_BYTES: expected room for"):
        server.store(tmp_path / "small", SIZE - 1).open("m", "6")
    assert [*(tmp_path / "small").rglob("network.onnx")] == []


def test_leftovers_of_killed_download_are_deleted(server, store, tmp_path):
    store.publish("m", DESCRIPTION, CONTENT)
    draft = store.storage.scratch / "m" / ".draft-abc"
    draft.mkdir(parents=True)
    (draft / "network.onnx").write_bytes(b"half")
    store.open("m", "1")
    assert not draft.exists()


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"{", b'{"versions": 3}', b'{"versions": {"../x": ["1"]}, "aliases": {}}']
)
def test_damaged_listing_file_is_ignored(server, store, tmp_path, text):
    store.publish("m", DESCRIPTION, CONTENT)
    store.storage.refresh()
    store.open("m", "1")
    (store.storage.scratch / ".lists.json").write_bytes(text)
    server.is_reachable = False
    reader = server.store(tmp_path / "cache")
    with pytest.raises(StoreUnreachable):
        reader.storage.refresh()
    assert not reader.storage.has_listing or reader.names() == []


def test_cache_write_errors_name_the_setting(server, store, tmp_path, monkeypatch):
    store.publish("m", DESCRIPTION, CONTENT)
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(
        StoreError, match="DUBITO_CACHE: expected a folder with room for m version 1, got: "
    ):
        server.store(tmp_path / "file").open("m", "1")

    def raise_disk_full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("model_store.artifacts.cache.write_synced", raise_disk_full)
        with pytest.raises(StoreError, match="got: No space left on device"):
            store.open("m", "1")
    assert [*(tmp_path / "cache").rglob("network.onnx")] == []
    assert store.open("m", "1").files == CONTENT


def test_buckets_have_separate_caches(tmp_path):
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
def test_invalid_bucket_url_is_refused_without_repeating_secrets(url):
    with pytest.raises(
        InvalidInput, match="DUBITO_STORE: expected a folder, or a URL such as"
    ) as exc_info:
        open_store(url)
    assert "secret" not in str(exc_info.value)


def test_error_names_missing_extra(monkeypatch):
    original_import = builtins.__import__

    def import_without_obstore(name, *args, **kwargs):
        if name.startswith("obstore"):
            raise ImportError(name)
        return original_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", import_without_obstore)
    with pytest.raises(InvalidInput, match="the package of the extra `bucket`"):
        Objects.from_url("s3://bucket/prefix")


def test_plain_http_requires_aws_allow_http(monkeypatch, tmp_path):
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


def test_reports_are_unavailable_without_the_bucket(server, store):
    store.publish("m", DESCRIPTION, CONTENT)
    publish_report(store, "m", "1", {"seed": 1}, b"page")
    store.storage.refresh()
    assert evaluation_report(store, "m", "1").report["seed"] == 1
    server.is_reachable = False
    report = evaluation_report(store, "m", "1")
    with pytest.raises(StoreUnreachable):
        report.read("report.html")
    with pytest.raises(NotFound):
        report.read("other")


def test_folder_size_is_measured_during_renames(tmp_path):
    for n in range(20):
        (tmp_path / f"draft-{n}").mkdir()
        (tmp_path / f"draft-{n}" / "network.onnx").write_bytes(bytes(10))

    def rename():
        for source, target in [("draft", "copy"), ("copy", "draft")] * 100:
            for n in range(20):
                (tmp_path / f"{source}-{n}").rename(tmp_path / f"{target}-{n}")

    with ThreadPoolExecutor(1) as pool:
        renames = pool.submit(rename)
        while not renames.done():
            assert folder_bytes(tmp_path) % 10 == 0
        renames.result()
    assert folder_bytes(tmp_path) == 200
