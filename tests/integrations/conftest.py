import httpx
import pytest

from tests.support.serving import serving


@pytest.fixture(scope="session")
def url(kinds):
    with serving(kinds, DUBITO_DEFAULT_MODEL="digits") as (url, _):
        yield url


@pytest.fixture
def client(url):
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client
