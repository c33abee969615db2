"""A service for the client's tests: digits, a table to classify, a table to predict numbers of, and
pictures."""

import numpy as np
import pytest

from tests.support.serving import serving

KEY = "the-key-of-the-client-s-tests"


@pytest.fixture(scope="session")
def url(tables, tmp_path_factory, digits_rows):
    """The URL of a service that serves `tables`, and wants `KEY`."""
    pools = tmp_path_factory.mktemp("pools")
    np.save(pools / "digits.npy", digits_rows)
    settings = {
        "DUBITO_API_KEYS": KEY,
        "DUBITO_DEFAULT_MODEL": "digits",
        "DUBITO_POOLS": str(pools),
    }
    with serving(tables, **settings) as (url, _):
        yield url


@pytest.fixture
def key():
    """The key that the service wants."""
    return KEY
