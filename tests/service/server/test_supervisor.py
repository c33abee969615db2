import os
import signal
import subprocess
import sys
import threading

import pytest

from service.server import supervisor
from service.settings import Settings


@pytest.fixture
def _restore_signals():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_restore_signals")
def test_worker_that_cannot_start_is_retried(monkeypatch, caplog):
    commands = []

    def start(command, **options):
        commands.append(command)
        if len(commands) == 1:
            raise OSError(12, "Cannot allocate memory")
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        return popen([sys.executable, "-c", "import time; time.sleep(60)"], **options)

    popen = subprocess.Popen
    monkeypatch.setattr(supervisor.subprocess, "Popen", start)
    monkeypatch.setattr(supervisor, "RESTART_S", 0.1)
    assert supervisor.supervise(Settings(port=0, workers=1)) == 0
    assert len(commands) == 2
    assert "cannot start worker 0: Cannot allocate memory; trying again" in caplog.text
