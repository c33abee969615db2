import re

import pytest

from docs.reference import SETTINGS, settings_table, with_table
from model_store.errors import InvalidInput
from service.integrations import integration_variables
from service.settings import CLIENT_VARIABLES, TRAINING_VARIABLES, Settings, read_settings
from tests.support.environment import run_service


def test_every_setting_is_documented():
    text = SETTINGS.read_text()
    assert with_table(text, "settings", settings_table()) == text, "python -m docs.reference"
    documented = set(re.findall(r"^\| `(DUBITO_\w+)`", text, re.MULTILINE))
    settings = {f"DUBITO_{name.upper()}" for name in Settings.model_fields}
    assert documented - TRAINING_VARIABLES - CLIENT_VARIABLES == settings | integration_variables()


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("DUBITO_PORT", "eighty", "a valid integer"),
        ("DUBITO_PORT", "65536", "less than or equal to 65535"),
        ("DUBITO_PORT", "", "a valid integer"),
        ("DUBITO_THREADS", "-1", "greater than or equal to 0"),
        ("DUBITO_POLL_INTERVAL_S", "0", "greater than 0"),
        ("DUBITO_POLL_INTERVAL_S", "nan", "got 'nan'"),
        ("DUBITO_POLL_INTERVAL_S", "inf", "less than or equal to 86400"),
        ("DUBITO_MAX_SAMPLES", "1.5", "a valid integer"),
        ("DUBITO_MAX_BODY_BYTES", "64M", "a valid integer"),
        ("DUBITO_SHUTDOWN_TIMEOUT_S", "0", "greater than or equal to 1"),
        ("DUBITO_STOER", "models", "one of"),
        ("dubito_stoer", "models", "one of"),
    ],
)
def test_invalid_setting_is_named(monkeypatch, variable, value, expected):
    monkeypatch.setenv(variable, value)
    with pytest.raises(InvalidInput, match=rf"({variable}: |got {variable})") as raised:
        read_settings()
    assert expected in str(raised.value)


def test_environment_variables_are_case_insensitive(monkeypatch):
    monkeypatch.setenv("DUBITO_PORT", "1234")
    monkeypatch.setenv("dubito_max_rows", "7")
    monkeypatch.setenv("DUBITO_DATA", "read by training")
    monkeypatch.setenv("DUBITO_CLIENT_URL", "read by the client")
    settings = read_settings()
    assert (settings.port, settings.max_rows) == (1234, 7)


@pytest.mark.parametrize("variables", [{"DUBITO_PORT": "eighty"}, {"DUBITO_STOER": "models"}])
def test_invalid_settings_end_the_service_with_one_line_and_exit_code_2(variables):
    completed = run_service(**variables)
    assert completed.returncode == 2
    assert completed.stdout == ""
    assert len(completed.stderr.splitlines()) == 1
    assert completed.stderr.startswith("error: ")
    assert next(iter(variables)) in completed.stderr
