"""Folder and bucket hold to the same properties."""

from itertools import count

import pytest
from obstore.store import MemoryStore

from model_store.artifacts.bucket import Bucket
from model_store.artifacts.cache import Cache
from model_store.artifacts.objects import Objects
from model_store.artifacts.store import ModelStore
from tests.support.storage_properties import PROPERTIES


@pytest.fixture(params=["folder", "bucket"])
def make(request, tmp_path):
    """New stores of one place; those in a bucket each with a cache of its own, as on another
    machine."""
    if request.param == "folder":
        return lambda: ModelStore(tmp_path / "models")
    objects, numbers = MemoryStore(), count()
    url = "s3://bucket/prefix"
    return lambda: ModelStore(
        Bucket(Objects(url, objects), Cache(tmp_path / str(next(numbers)), url, 1 << 30))
    )


@pytest.mark.parametrize("holds", PROPERTIES, ids=lambda property: property.__name__)
def test_wherever_a_store_lies(make, holds):
    holds(make)
