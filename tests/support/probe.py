"""Poll `/health/live` and predictions of a service under load.

    python -m tests.support.probe PORT SECONDS BODY_FILE

Prints JSON with latencies, statuses and the number of 429 without a valid Retry-After.
"""

import json
import sys
import time
from collections import Counter
from pathlib import Path

from tests.support.raw import Connection, request

PAUSE_S = 0.02
PREDICT_EVERY = 10


def main():
    port, seconds = int(sys.argv[1]), float(sys.argv[2])
    live = request("GET", "/health/live")
    predict = request("POST", "/predict", Path(sys.argv[3]).read_bytes())
    latencies, health, predicted, missing = [], Counter(), Counter(), 0
    end = time.monotonic() + seconds
    with Connection(port) as connection, Connection(port) as predict_connection:
        while time.monotonic() < end:
            start = time.perf_counter()
            health[connection.ask(live).status] += 1
            latencies.append(time.perf_counter() - start)
            if len(latencies) % PREDICT_EVERY == 0:
                answer = predict_connection.ask(predict)
                predicted[answer.status] += 1
                missing += (
                    answer.status == 429 and int(answer.headers.get(b"retry-after", b"0")) < 1
                )
            time.sleep(PAUSE_S)
    print(
        json.dumps(
            {"latencies_s": latencies, "health": health, "predicted": predicted, "without": missing}
        )
    )


if __name__ == "__main__":
    main()
