"""A full disk: nothing partial is published, and the service goes on without it."""

import shutil
from urllib.parse import urlsplit

import httpx
import pytest

from model_store.artifacts.store import ModelStore
from tests.support.crowd import Crowd, references
from tests.support.faults import SOON, assert_right, fill_disk_of, publish_with, reading_log, starts
from tests.support.process import children
from tests.support.serving import wait_until


def full_disk(serve, digits_store, rows, folder, limits, workers="2"):
    """Publish with ever more room on the disk while clients ask workers who can write nothing;
    return figures."""
    shutil.copytree(digits_store, folder / "models")
    store = ModelStore(folder / "models")
    largest = max(file.stat().st_size for file in (store.root / "digits" / "1").iterdir())
    with serve(store.root, **SOON, DUBITO_WORKERS=workers, DUBITO_LOG="json") as (url, process):
        reading_log(process)
        port = urlsplit(url).port
        wait_until(lambda: all(starts(url)))
        made = references(port, rows, version="1")
        fill_disk_of(process.pid, *children(process.pid))
        with Crowd(port, made, clients=4) as crowd:
            for limit in limits(largest):
                failed = publish_with(limit, store.root, digits_store)
                assert failed.returncode == 1
                assert "File too large" in failed.stderr, failed.stderr
                assert store.versions("digits") == ["1"]
                assert store.resolve("digits") == "1"
            wait_until(lambda: crowd.right > 20)
            published = publish_with(largest, store.root, digits_store)
            assert published.returncode == 0, published.stderr
            assert store.versions("digits") == ["1", "2"]
            wait_until(
                lambda: (
                    httpx.get(f"{url}/health/ready", timeout=60).json()["models"] == {"digits": "2"}
                )
            )
            assert httpx.get(f"{url}/metrics", timeout=60).status_code == 200
        told = crowd.whole()
        text = assert_right(told, port)
    drafts = [*(store.root / "digits").glob(".draft*")]
    assert drafts == []
    return f"{len(limits(largest))} publications failed, none partial, and the next went through; {text}"


@pytest.mark.slow
def test_a_full_disk_leaves_no_partial_version_and_no_wrong_answer(
    serve, digits_store, digits_rows, tmp_path
):
    print(
        full_disk(serve, digits_store, digits_rows, tmp_path, limits=lambda largest: [largest - 1])
    )
