import signal
import subprocess
import sys

import pytest

from tests.support.environment import ROOT, environment_in

pytestmark = pytest.mark.serves

COMMANDS = {
    "candidate": (["training", "candidate", "digits", "--watch"], "no labels yet"),
    "label-studio": (
        [
            "service",
            "label-studio",
            "sync",
            "digits",
            "--project",
            "1",
            "--watch",
            "--service",
            "http://127.0.0.1:9",
        ],
        "error: ",
    ),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_watching_command_exits_cleanly_on_interrupt(name, tmp_path):
    arguments, message = COMMANDS[name]
    environment = environment_in(tmp_path) | {
        "DUBITO_STATE": str(tmp_path / "state"),
        "DUBITO_LABEL_STUDIO_URL": "http://127.0.0.1:9",
        "DUBITO_LABEL_STUDIO_TOKEN": "a-token-of-nobody",
    }
    if name == "candidate":
        del environment["DUBITO_LABEL_STUDIO_URL"], environment["DUBITO_LABEL_STUDIO_TOKEN"]
    process = subprocess.Popen(
        [sys.executable, "-m", *arguments],
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert message in process.stdout.readline()
        assert "repeating every 60 s" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=30)
        assert (process.returncode, output) == (0, "")
    finally:
        process.kill()
