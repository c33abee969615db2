import resource

import pytest

from service.server import process


@pytest.mark.parametrize(
    ("limits", "usable"),
    [((1024, 4096), 1000), ((256, 1024), 768), ((100, 100), 50), ((1024, -1), 1000)],
)
def test_connection_limit_leaves_open_files_for_other_uses(monkeypatch, caplog, limits, usable):
    current = [limits]
    monkeypatch.setattr(resource, "getrlimit", lambda _: current[0])
    monkeypatch.setattr(resource, "setrlimit", lambda _, new_limits: current.append(new_limits))
    assert process.allow_open_files(1000) == usable
    assert ("DUBITO_MAX_CONNECTIONS" in caplog.text) == (usable < 1000)
    assert all(hard == limits[1] for _, hard in current)
