"""Stores in buckets of real servers: SeaweedFS, and rclone, which ignores conditions and must be refused.

Where the programs are missing it is skipped: `make test-real` installs them.
"""

import uuid
from itertools import count

import pytest

from model_store.artifacts.place import open_store
from tests.support.buckets import BUCKET, PROGRAMS, SeaweedFS, credentials
from tests.support.storage_properties import PROPERTIES

MISSING = [name for name, path in PROGRAMS.items() if not path.exists()]

pytestmark = [pytest.mark.real, pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    seaweed = SeaweedFS(tmp_path_factory.mktemp("seaweed"))
    try:
        seaweed.start()
        yield seaweed
    finally:
        seaweed.stop()


@pytest.fixture
def url(server, monkeypatch):
    """A place of a test's own in the bucket, with what the environment needs."""
    for name, value in credentials(server.url).items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/{uuid.uuid4().hex}"


@pytest.mark.parametrize("holds", PROPERTIES, ids=lambda property: property.__name__)
def test_a_bucket_has_the_properties_of_a_store(url, tmp_path, holds):
    numbers = count()
    holds(lambda: open_store(url, cache=tmp_path / str(next(numbers))))
