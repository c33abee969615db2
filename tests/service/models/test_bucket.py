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
def server(monkeypatch):
    faulty = FaultyBucket()
    monkeypatch.setattr(Objects, "from_url", classmethod(lambda cls, url: Objects(url, faulty)))
    return faulty


@pytest.fixture
def writer(server, tmp_path):
    return server.store(tmp_path / "of-a-writer")


@pytest.fixture
def start(tmp_path):
    """Starts of a service's models, each with the same cache."""

    def started(**more):
        settings = Settings(
            store=URL, cache=tmp_path / "cache", threads=1, **{"preflight_timeout_s": 0, **more}
        )
        ending = threading.Event()
        models = Models(settings, threading.Event(), Preflights(settings, ending))
        watcher = Watcher(models, ending)
        watcher.refresh()
        return watcher

    return started


def reachable(watcher):
    registry = CollectorRegistry()
    registry.register(LoadedCollector(watcher))
    return metric(generate_latest(registry).decode(), "dubito_store_reachable")


def test_what_is_published_and_moved_in_a_bucket_is_followed(writer, start):
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


def test_without_its_bucket_the_service_goes_on_and_says_so_once(server, writer, start, caplog):
    caplog.set_level(logging.INFO, "dubito")
    tiny.publish(writer)
    watcher = start()
    models = watcher.models
    assert reachable(watcher) == 1
    server.is_reachable = False
    observed = watcher.last_read
    for _ in range(3):
        watcher.refresh()
    assert reachable(watcher) == 0
    assert watcher.last_read == observed
    result = models.get("tiny")
    models._unload("tiny", "1")
    again = models.get("tiny")
    assert again is not result and again.version == "1"
    assert models.errors("tiny") == {}
    server.is_reachable = True
    tiny.publish(writer)
    watcher.refresh()
    assert (reachable(watcher), models.get("tiny").version) == (1, "2")
    message = [record.getMessage() for record in caplog.records if "reach" in record.getMessage()]
    assert len(message) == 2
    assert message[0].startswith(
        "cannot list in s3://bucket/prefix: it cannot be reached; "
        "serving the versions of the last read"
    )
    assert message[1] == "the store is reachable again"
    assert SECRET not in caplog.text


def test_a_version_that_cannot_be_downloaded_is_not_broken_and_served_once_it_can(
    server, writer, start
):
    tiny.publish(writer)
    watcher = start()
    models = watcher.models
    tiny.publish(writer)

    def goes_away(path):
        if "network" in path:
            raise GenericError("error sending request")

    server.before_get = goes_away
    watcher.refresh()
    assert (models.get("tiny").version, models.errors("tiny")) == ("1", {})
    server.before_get = lambda path: None
    watcher.refresh()
    assert models.get("tiny").version == "2"


def test_a_start_without_the_bucket_serves_what_there_are_copies_of(server, writer, start, caplog):
    tiny.publish(writer)
    start()
    server.is_reachable = False
    watcher = start()
    models = watcher.models
    assert models.get("tiny").version == "1"
    assert (reachable(watcher), watcher.last_read) == (0, 0)
    assert "serving the versions of the last read" in caplog.text


def test_a_start_with_neither_bucket_nor_copies_waits(server, writer, start):
    tiny.publish(writer)
    server.is_reachable = False
    watcher = start()
    models = watcher.models
    assert models.names() == []
    with pytest.raises(StoreUnreachable):
        models.store.names()
    server.is_reachable = True
    watcher.refresh()
    assert models.get("tiny").version == "1"


def test_a_hung_bucket_delays_the_start_only_for_a_moment(server, writer, start, monkeypatch):
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


def test_a_bucket_that_refuses_is_reported_and_copies_are_served(server, writer, start):
    tiny.publish(writer)
    start()

    def refuse(*_):
        raise GenericError("Client error with status code: 403 Forbidden")

    server.before_get = server.list = refuse
    watcher = start()
    assert watcher.models.get("tiny").version == "1"
    (problem,) = watcher.all_problems()
    assert problem.startswith("cannot list in s3://") and "403" in problem


def test_a_version_is_tried_as_the_copy_that_it_is(server, writer, start):
    tiny.publish(writer)
    watcher = start(preflight_timeout_s=60)
    models = watcher.models
    watcher.refresh(max_wait_s=60)
    assert models.get("tiny").version == "1"
    models.preflights.close()
