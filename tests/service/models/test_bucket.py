import logging
import threading

import pytest
from obstore.exceptions import GenericError
from prometheus_client import CollectorRegistry, generate_latest

from model_store.artifacts.objects import Objects
from model_store.errors import StoreUnreachable
from service.models.models import Models
from service.models.preflights import Preflights
from service.models.watcher import Watcher
from service.settings import Settings
from service.telemetry.metrics import LoadedCollector
from tests.support import tiny
from tests.support.faulty_bucket import SECRET, URL, FaultyBucket
from tests.support.serving import metric


@pytest.fixture
def bucket(monkeypatch):
    faulty = FaultyBucket()
    monkeypatch.setattr(Objects, "from_url", classmethod(lambda cls, url: Objects(url, faulty)))
    return faulty


@pytest.fixture
def writer(bucket, tmp_path):
    return bucket.store(tmp_path / "of-a-writer")


@pytest.fixture
def start(tmp_path):
    """Return a function that starts a watcher; all watchers share a cache."""

    def create_watcher(**options):
        settings = Settings(
            store=URL, cache=tmp_path / "cache", threads=1, **{"preflight_timeout_s": 0, **options}
        )
        ending = threading.Event()
        models = Models(settings, threading.Event(), Preflights(settings, ending))
        watcher = Watcher(models, ending)
        watcher.refresh()
        return watcher

    return create_watcher


def reachability(watcher):
    registry = CollectorRegistry()
    registry.register(LoadedCollector(watcher))
    return metric(generate_latest(registry).decode(), "dubito_store_reachable")


def test_bucket_publications_and_alias_moves_are_followed(writer, start):
    tiny.publish(writer)
    watcher = start()
    models = watcher.models
    assert models.get("tiny").version == "1"
    tiny.publish(writer)
    watcher.refresh()
    assert models.get("tiny").version == "2"
    writer.set_alias("tiny", "latest", "1")
    watcher.refresh()
    assert models.get("tiny").version == "1"
    writer.delete("tiny", "2")
    watcher.refresh()
    assert models.store.versions("tiny") == ["1"]


def test_unreachable_bucket_is_logged_once_and_models_keep_serving(bucket, writer, start, caplog):
    caplog.set_level(logging.INFO, "dubito")
    tiny.publish(writer)
    watcher = start()
    models = watcher.models
    assert reachability(watcher) == 1
    bucket.is_reachable = False
    last_read = watcher.last_read
    for _ in range(3):
        watcher.refresh()
    assert reachability(watcher) == 0
    assert watcher.last_read == last_read
    loaded = models.get("tiny")
    models._unload("tiny", "1")
    reloaded = models.get("tiny")
    assert reloaded is not loaded and reloaded.version == "1"
    assert models.errors("tiny") == {}
    bucket.is_reachable = True
    tiny.publish(writer)
    watcher.refresh()
    assert (reachability(watcher), models.get("tiny").version) == (1, "2")
    messages = [record.getMessage() for record in caplog.records if "reach" in record.getMessage()]
    assert len(messages) == 2
    assert messages[0].startswith(
        "cannot list in s3://bucket/prefix: it cannot be reached; "
        "serving the versions of the last read"
    )
    assert messages[1] == "the store is reachable again"
    assert SECRET not in caplog.text


def test_failed_download_is_retried_and_does_not_break_the_version(bucket, writer, start):
    tiny.publish(writer)
    watcher = start()
    models = watcher.models
    tiny.publish(writer)

    def fail_for_network(path):
        if "network" in path:
            raise GenericError("error sending request")

    bucket.before_get = fail_for_network
    watcher.refresh()
    assert (models.get("tiny").version, models.errors("tiny")) == ("1", {})
    bucket.before_get = lambda path: None
    watcher.refresh()
    assert models.get("tiny").version == "2"


def test_start_without_the_bucket_serves_cached_versions(bucket, writer, start, caplog):
    tiny.publish(writer)
    start()
    bucket.is_reachable = False
    watcher = start()
    models = watcher.models
    assert models.get("tiny").version == "1"
    assert (reachability(watcher), watcher.last_read) == (0, 0)
    assert "serving the versions of the last read" in caplog.text


def test_start_without_bucket_or_cached_versions_waits(bucket, writer, start):
    tiny.publish(writer)
    bucket.is_reachable = False
    watcher = start()
    models = watcher.models
    assert models.names() == []
    with pytest.raises(StoreUnreachable):
        models.store.names()
    bucket.is_reachable = True
    watcher.refresh()
    assert models.get("tiny").version == "1"


def test_hung_bucket_delays_startup_only_briefly(bucket, writer, start, monkeypatch):
    tiny.publish(writer)
    watcher, answers = start(), threading.Event()
    stuck = Watcher(watcher.models, threading.Event())
    monkeypatch.setattr("service.models.watcher.MAX_BUCKET_WAIT_S", 0.1)
    monkeypatch.setattr(stuck.store.storage, "refresh", lambda: answers.wait(60))
    stuck.start()
    assert not stuck._has_started.is_set()
    assert stuck.has_pending_preflights  # so readiness does not report an empty store
    answers.set()
    assert stuck._has_started.wait(60)
    stuck._ending.set()
    stuck.stop()


def test_denied_bucket_access_is_reported_and_cached_versions_are_served(bucket, writer, start):
    tiny.publish(writer)
    start()

    def refuse(*_):
        raise GenericError("Client error with status code: 403 Forbidden")

    bucket.before_get = bucket.list = refuse
    watcher = start()
    assert watcher.models.get("tiny").version == "1"
    (problem,) = watcher.all_problems()
    assert problem.startswith("cannot list in s3://") and "403" in problem


def test_preflight_runs_on_the_cached_copy(bucket, writer, start):
    tiny.publish(writer)
    watcher = start(preflight_timeout_s=60)
    models = watcher.models
    watcher.refresh(max_wait_s=60)
    assert models.get("tiny").version == "1"
    models.preflights.close()
