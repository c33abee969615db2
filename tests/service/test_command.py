import signal
import socket
import subprocess
import sys
import time

import httpx
import pytest

from model_store.state.database import FILE, Database
from model_store.state.jobs import Jobs
from tests.support.environment import ROOT, environment_with, run_service
from tests.support.ports import free_port
from tests.support.serving import is_responding, serving, wait_until

pytestmark = pytest.mark.serves


def test_backup_and_restore_commands_preserve_job_results(digits_store, tmp_path):
    database = Database(tmp_path / "state")
    jobs = Jobs(database)
    name, folder = jobs.new_folder()
    (folder / "answer.json").write_text('{"ranking": []}')
    jobs.add(name, "acquire", "", "me", {}, 1, lambda _: True, 1 << 20)
    jobs.finish(jobs.claim(0).id, "done", "answer.json")
    database.close()
    command = [sys.executable, "-m", "service"]
    settings = environment_with(DUBITO_STATE=str(tmp_path / "state"))
    archive = subprocess.check_output([*command, "backup"], env=settings, cwd=ROOT, timeout=60)
    settings = environment_with(DUBITO_STATE=str(tmp_path / "new"))
    subprocess.run([*command, "restore"], input=archive, env=settings, cwd=ROOT, check=True)
    assert (tmp_path / "new" / FILE).exists()
    with serving(digits_store, DUBITO_STATE=str(tmp_path / "new")) as (url, _):
        assert httpx.get(f"{url}/jobs/{name}/result").json() == {"ranking": []}


def test_help_lists_options_and_names_the_settings_page():
    completed = run_service("--help")
    assert completed.returncode == 0
    assert "--port N" in completed.stdout
    assert "DUBITO_" in completed.stdout
    assert "docs/settings.md" in completed.stdout


@pytest.mark.parametrize("option", [["--prot", "1"], ["--port", "eighty"], ["--port"], ["8000"]])
def test_invalid_option_is_named_in_the_error(option):
    completed = run_service(*option)
    assert completed.returncode == 2
    assert option[0] in completed.stderr.splitlines()[-1]


def test_service_serves_and_stops_cleanly_without_standard_streams(digits_store):
    port = free_port()
    settings = {"DUBITO_STORE": str(digits_store), "DUBITO_PORT": str(port), "DUBITO_LOG": "json"}
    command = [sys.executable, "-m", "service"]
    shell_command = ["/bin/sh", "-c", 'exec "$0" "$@" <&- >&- 2>&-', *command]
    with subprocess.Popen(shell_command, env=environment_with(**settings), cwd=ROOT) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until(
                lambda: process.poll() is not None or is_responding(f"{url}/health/ready"),
                seconds=60,
            )
            request = {"inputs": [[0] * 64], "num_samples": 2}
            assert httpx.post(f"{url}/predict", json=request, timeout=60).status_code == 200
            process.terminate()
            assert process.wait(60) in (0, -signal.SIGTERM)
        finally:
            process.kill()


def test_port_above_65535_is_rejected():
    completed = run_service("--port", "70000")
    assert completed.returncode == 2
    assert completed.stderr.splitlines() == [
        "error: DUBITO_PORT: expected less than or equal to 65535, got '70000'"
    ]


@pytest.mark.parametrize("workers", ["1", "2"])
def test_port_in_use_fails_fast_with_one_line(digits_store, workers):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        start = time.monotonic()
        completed = run_service(
            "--port", str(port), DUBITO_STORE=str(digits_store), DUBITO_WORKERS=workers
        )
        assert time.monotonic() - start < 10
    assert completed.returncode == 3
    assert completed.stderr.splitlines() == [
        f"error: DUBITO_PORT: expected a free port of 127.0.0.1, got {port}, which is in use "
        "(--port N takes another)"
    ]


def test_host_of_another_machine_is_reported():
    completed = run_service(DUBITO_HOST="192.0.2.1")
    assert completed.returncode == 3
    assert completed.stderr.startswith("error: cannot listen on 192.0.2.1 port 8000: ")


@pytest.mark.parametrize("workers", ["1", "2"])
def test_missing_store_is_named_and_port_option_overrides_setting(tmp_path, workers):
    port = free_port()
    command = [sys.executable, "-m", "service", "--port", str(port)]
    settings = {
        "DUBITO_STORE": str(tmp_path / "modles"),
        "DUBITO_SHUTDOWN_GRACE_S": "0",
        "DUBITO_PORT": "1",
    }
    environment = environment_with(**settings, DUBITO_WORKERS=workers)
    process = subprocess.Popen(
        command, env=environment, cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    try:
        wait_until(
            lambda: (
                process.poll() is not None or is_responding(f"http://127.0.0.1:{port}/health/live")
            )
        )
        assert httpx.get(f"http://127.0.0.1:{port}/models").json() == {"models": []}
    finally:
        process.terminate()
        _, message = process.communicate(timeout=30)
    assert message.count(f"DUBITO_STORE: the folder {tmp_path / 'modles'} does not exist") == 1


def test_store_that_is_a_file_is_rejected(tmp_path):
    (tmp_path / "models").write_text("")
    completed = run_service(DUBITO_STORE=str(tmp_path / "models"))
    assert completed.returncode == 2
    assert completed.stderr.splitlines() == [
        f"error: DUBITO_STORE: expected a folder, got {tmp_path / 'models'}"
    ]


def test_invalid_public_key_file_is_rejected(tmp_path):
    (tmp_path / "key").write_text("not a key")
    completed = run_service(DUBITO_VERIFY_KEY_FILE=str(tmp_path / "key"))
    assert completed.returncode == 2
    expected = (
        "error: DUBITO_VERIFY_KEY_FILE: expected public Ed25519 keys in PEM, got another file"
    )
    assert completed.stderr.splitlines() == [expected]
