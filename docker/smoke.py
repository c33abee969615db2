"""Check a running service: readiness, predictions, a job and the web page.

Run `python docker/smoke.py [URL]`. It needs only the standard library, and exits with 0 on success.
"""

import json
import re
import sys
import time
from typing import Any
from urllib.request import ProxyHandler, Request, build_opener

JOB_S = 60.0  # maximum for a job with one row, on a busy machine

direct = build_opener(ProxyHandler({}))


def call(url: str, body: object = None) -> Any:
    """Send a POST request if there is a body, otherwise GET, and return the JSON response."""
    data = None if body is None else json.dumps(body).encode()
    with direct.open(
        Request(url, data, {"Content-Type": "application/json"}), timeout=30
    ) as response:
        return json.load(response)


def main() -> None:
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    print("ready:", call(f"{url}/health/ready")["models"])
    operation = call(f"{url}/openapi.json")["paths"]["/predict"]["post"]
    for example in operation["requestBody"]["content"]["application/json"]["examples"].values():
        answer = call(f"{url}/predict", example["value"])
        rows = answer["predictions"]
        print("answers:", [(row["label"], row["flag"], round(row["p_value"], 3)) for row in rows])
        if rows[0]["label"] != "3":
            sys.exit(f"expected the example's first row to be a 3, got {rows[0]['label']!r}")
        if (
            call(f"{url}/predict", {**example["value"], "seed": answer["seed"]})["predictions"]
            != rows
        ):
            sys.exit("expected equal predictions for equal seeds, got different ones")
    row = next(iter(operation["requestBody"]["content"]["application/json"]["examples"].values()))[
        "value"
    ]["inputs"]
    job = call(f"{url}/predict/jobs", {"inputs": row, "format": "parquet"})
    end = time.monotonic() + JOB_S
    while job["state"] in ("queued", "running") and time.monotonic() < end:
        time.sleep(0.2)
        job = call(f"{url}/jobs/{job['id']}")
    print("job:", job["state"], job["error"] or "")
    if job["state"] != "done":
        sys.exit(
            f"expected the job to be done within {JOB_S:.0f} s, got the state {job['state']}: "
            f"{job['error']}"
        )
    with direct.open(f"{url}{job['result']}", timeout=30) as response:
        if response.read(4) != b"PAR1":
            sys.exit("expected a Parquet file as the job's result")
    with direct.open(f"{url}/", timeout=30) as response:
        files = re.findall(r'(?:src|href)="(page/[^"]+)"', response.read().decode())
    for file in files:
        with direct.open(f"{url}/{file}", timeout=30) as response:
            response.read()
    print("page:", len(files), "files")
    if not files:
        sys.exit("expected links to page files in the web page")


if __name__ == "__main__":
    main()
