"""Count the calls, modules and moves between modules of a one-row `POST /predict`."""

import http.client
import itertools
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path

from service.__main__ import main
from tests.support.environment import ROOT

PACKAGES = tuple(str(ROOT / package) + os.sep for package in ("service", "model_store"))
BODY = json.dumps({"inputs": [[0.0] * 64]}).encode()
WARM_UP, REQUESTS = 5, 15

calls: list[str] | None = None  # files of the calls during a counted request


def profile(frame, event, _):
    if calls is not None and event == "call" and frame.f_code.co_filename.startswith(PACKAGES):
        calls.append(frame.f_code.co_filename)


def count(port):
    global calls
    paths = []
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    for i in range(WARM_UP + REQUESTS):
        time.sleep(0.05)  # the service prepares draws meanwhile
        calls = [] if i >= WARM_UP else None
        connection.request("POST", "/predict", BODY, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 200
        if calls is not None:
            paths.append(calls)
    calls = None
    path = min(paths, key=len)
    moves = sum(before != after for before, after in itertools.pairwise(path))
    modules = Counter(str(Path(file).relative_to(ROOT)) for file in path)
    print(json.dumps({"calls": len(path), "moves": moves, "modules": modules}, indent=1))


def client():
    port = int(os.environ["DUBITO_PORT"])
    while True:
        try:
            probe = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            probe.request("GET", "/health/ready")
            if probe.getresponse().status == 200:
                break
        except OSError:
            time.sleep(0.1)
    try:
        count(port)
    finally:
        os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=client, daemon=True).start()
    threading.setprofile(profile)
    sys.setprofile(profile)
    sys.exit(main())
