"""Start services as forks of a process that has imported them, to save their imports."""

import ctypes
import functools
import importlib
import json
import os
import socket
import subprocess
import sys
import traceback
from typing import Any, NoReturn

from tests.support.environment import ROOT

PR_SET_CHILD_SUBREAPER = 36
MAX_BYTES = 1 << 20  # of a request
PRELOADED = (
    *("anyio._backends._asyncio", "numpy.ma", "numpy.random", "uvicorn"),
    *("service.__main__", "service.app", "service.serve", "service.server.protocol"),
    *("integrations.label_studio.routes", "integrations.open_inference.routes"),
    "integrations.mlflow.scoring",
)


class ForkedService(subprocess.Popen[str]):
    """`python -m service` in a fork of the template process."""

    def __init__(self, environment: dict[str, str]) -> None:
        super().__init__([], env=environment, stderr=subprocess.PIPE, text=True)

    def _execute_child(self, *arguments: Any) -> None:
        """Fork the template process instead of executing a program."""
        environment, pipes = arguments[6], arguments[10:16]
        _, template = _start_template()
        files = [0, 1, pipes[-1]]
        socket.send_fds(template, [json.dumps(environment).encode()], files)
        self.pid = int(template.recv(MAX_BYTES))
        template.recv(MAX_BYTES)  # The service is an orphan now, and thus a child of this process.
        self._child_created = True
        self._close_pipe_fds(*pipes)


@functools.cache
def _start_template() -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start the template. This process becomes the parent of its orphaned grandchildren."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", "tests.support.forking", str(theirs.fileno())]
    process = subprocess.Popen(command, cwd=ROOT, pass_fds=[theirs.fileno()])
    theirs.close()
    return process, ours


def _run_template(requests: socket.socket) -> None:
    for name in PRELOADED:
        importlib.import_module(name)

    while True:
        message, files, *_ = socket.recv_fds(requests, MAX_BYTES, 3)
        if not message:
            return
        if os.fork() == 0:
            pid = os.fork()
            if pid == 0:
                requests.close()
                _serve(json.loads(message), files)
            requests.send(str(pid).encode())
            os._exit(0)
        os.wait()
        requests.send(b"orphaned")
        for file in files:
            os.close(file)


def _serve(environment: dict[str, str], files: list[int]) -> NoReturn:
    from service.__main__ import main

    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    code = 1
    try:
        code = main([])
    except SystemExit as exit:
        code = exit.code if isinstance(exit.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _run_template(socket.socket(fileno=int(sys.argv[1])))
