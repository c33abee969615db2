import json
import subprocess
import sys

from tests.support.environment import ROOT, environment_with
from tests.support.ports import free_port

MAX_MODULES, MAX_MOVES = 26, 86
TRIES = 3


def test_prediction_passes_through_few_modules_and_module_changes(digits_store, tmp_path):
    environment = environment_with(
        DUBITO_STORE=str(digits_store),
        DUBITO_PORT=str(free_port()),
        DUBITO_STATE=str(tmp_path),
        DUBITO_SHUTDOWN_GRACE_S="0",
        DUBITO_PREFLIGHT_TIMEOUT_S="0",
    )
    command = [sys.executable, "-m", "tests.support.call_path"]
    for _ in range(TRIES):
        completed = subprocess.run(
            command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120
        )
        path = json.loads(completed.stdout)
        if path["moves"] <= MAX_MOVES and len(path["modules"]) <= MAX_MODULES:
            break
    assert 0 < len(path["modules"]) <= MAX_MODULES, path
    assert 0 < path["moves"] <= MAX_MOVES, path
