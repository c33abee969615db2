"""Fixtures for tests of the client."""

import numpy as np
import pytest

from dubito.command import KEY_VARIABLE, URL_VARIABLE, main
from tests.support.serving import serving

KEY = "the-key-of-the-client-s-tests"


@pytest.fixture(scope="session")
def url(tables, tmp_path_factory, digits_rows):
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
    """The service's API key."""
    return KEY


@pytest.fixture
def run(url, key, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(URL_VARIABLE, url)
    monkeypatch.setenv(KEY_VARIABLE, key)
    monkeypatch.setattr("dubito.retries.FIRST_PAUSE_S", 0.01)

    def run_main(*arguments):
        status = main([str(argument) for argument in arguments])
        return status, *capsys.readouterr()

    return run_main
