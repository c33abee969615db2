"""What labels that come back are worth, over HTTP: acquired, labelled, fitted, compared, promoted
and served.

    python -m benchmarks.labels [--seeds N] [--write]

fits a small hypernetwork on 180 of scikit-learn's digits, of which 300 stand in its data, and 500
test it. The other 997 are the pool. From it 120 rows are acquired twice, a half of them as control,
and labelled by their true classes. `python -m training candidate digits --control-arm` does the
rest. Another seed is another split of the digits, and another fit. Two minutes of two cores for a
seed.
"""

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from sklearn.datasets import load_digits

from benchmarks.options import RESULTS

KEY = "the-key-of-the-benchmark"
K, TIMES, SHARE = 120, 2, 0.5
DATA, TEST = 300, 500  # rows of the data, and test rows among them
RECIPE = """
name = "digits"
method = "bhn-realnvp"
seed = {seed}
[data]
source = "npz:few.npz"
validation_rows = 40
reference_rows = 40
ranking_rows = 40
[network]
hidden = [64, 64]
[posterior]
couplings = 2
hidden = 50
initial_log_std = -4.0
[training]
epochs = 60
batch_rows = 64
learning_rate = 1e-2
"""


def main(arguments: list[str] | None = None) -> None:
    """Run the loop for each seed, and print what came of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="0 to N - 1")
    parser.add_argument("--write", action="store_true", help=f"keep the table in {RESULTS}")
    options = parser.parse_args(arguments)
    pages = []
    for seed in range(options.seeds):
        with tempfile.TemporaryDirectory() as folder:
            pages.append(looped(Path(folder), seed))
            print(row_of(seed, pages[-1]), flush=True)
    text = table(pages)
    print(text)
    if options.write:
        (RESULTS / "labels-digits.md").write_text(text)


def looped(folder: Path, seed: int) -> dict[str, Any]:
    """Go once round the loop in an empty folder, and return what GET /models/digits/labels then
    says."""
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(x))
    x, y = x[order].astype(np.float32), y[order]
    data, rest = slice(DATA), slice(DATA + TEST, None)
    test = slice(DATA, DATA + TEST)
    np.savez(folder / "few.npz", x_train=x[data], y_train=y[data], x_test=x[test], y_test=y[test])
    (folder / "digits.toml").write_text(RECIPE.format(seed=seed))
    (folder / "keys.toml").write_text(
        f'[[keys]]\nname = "team"\nkey = "{KEY}"\nscopes = ["read", "acquire", "label"]\n'
    )
    port = free_port()
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("DUBITO_")
    } | {
        **{f"DUBITO_{name.upper()}": str(folder / name) for name in ("store", "state", "runs")},
        "DUBITO_DATA": str(folder),
    }
    training = [sys.executable, "-m", "training"]
    run = {"env": environment, "check": True, "stdout": subprocess.DEVNULL}
    subprocess.run(
        [*training, "fit", str(folder / "digits.toml"), "--device", "cpu", "--quiet"], **run
    )
    settings = {"DUBITO_PORT": str(port), "DUBITO_KEYS_FILE": str(folder / "keys.toml")}
    service = subprocess.Popen(
        [sys.executable, "-m", "service"], env=environment | settings, stderr=subprocess.DEVNULL
    )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_ready(url)
        with httpx.Client(base_url=url, headers={"X-API-Key": KEY}, timeout=60) as client:
            label(client, x[rest], y[rest], seed)
            subprocess.run(
                [*training, "candidate", "digits", "--device", "cpu", "--control-arm"], **run
            )
            page: dict[str, Any] = client.get("/models/digits/labels").raise_for_status().json()
            return page
    finally:
        service.terminate()
        service.wait()


def label(client: httpx.Client, pool: np.ndarray, truth: np.ndarray, seed: int) -> None:
    """Acquire rows of the pool, and label them by their true classes."""
    for turn in range(TIMES):
        ids = [str(i) for i in range(len(pool))]
        request = {
            "pool": pool.tolist(),
            "ids": ids,
            "k": K,
            "keep": True,
            "control": SHARE,
            "seed": 2 * seed + turn,
        }
        ranking = client.post("/acquire", json=request).raise_for_status().json()["ranking"]
        labels = [{"id": row["id"], "label": str(truth[row["index"]])} for row in ranking]
        client.post("/labels", json={"labels": labels}).raise_for_status()


def free_port() -> int:
    """Return a port of this machine that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_until_ready(url: str) -> None:
    """Wait for a service that was started."""
    for _ in range(600):
        try:
            if httpx.get(f"{url}/health/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise RuntimeError("the service did not get ready")


def row_of(seed: int, page: dict[str, Any]) -> str:
    """Return the line of a seed."""
    live = next(row for row in page["live"] if row["version"] == "1")["figures"]["accuracy"]
    candidate = page["candidates"][0]
    figures, saved = candidate["control"]["figures"], page["labels_saved"]
    gain = figures["log_likelihood"]
    cells = [
        str(seed),
        f"{live['value']:.3f} ({live['interval'][0]:.3f} to {live['interval'][1]:.3f})",
        f"{figures['accuracy']['against']:.3f}, {figures['accuracy']['candidate']:.3f}",
        f"{gain['difference']:+.3f} ({gain['interval'][0]:+.3f} to {gain['interval'][1]:+.3f})",
        "yes" if candidate["promoted"] else "no",
        f"{saved['value']:.0f} of {saved['control_labels']} "
        f"({saved['interval'][0]:.0f} to {saved['interval'][1]:.0f})",
    ]
    return f"| {' | '.join(cells)} |"


def table(pages: list[dict[str, Any]]) -> str:
    """Return the results as Markdown."""
    lines = [
        "# Labels that come back: digits",
        "",
        f"`python -m benchmarks.labels --seeds {len(pages)} --write`: a hypernetwork fitted on "
        "180 digits, a pool of "
        f"997, {K * TIMES} of them acquired by BALD in {TIMES} turns with `control` {SHARE:g}, "
        "labelled over HTTP. "
        "`python -m training candidate digits --control-arm` fits, compares and promotes; all "
        "figures are those of "
        "`GET /models/digits/labels`. Intervals are of 95 %. Each seed is another split and "
        "another fit.",
        "",
        "| seed | accuracy on control rows, live | the same rows: version 1, candidate | "
        "log-likelihood gained there, nats | promoted | labels saved |",
        "|---|---|---|---|---|---|",
        *(row_of(seed, page) for seed, page in enumerate(pages)),
        "",
        "Intervals of labels saved are over test rows alone; the spread between seeds is what "
        "another split, fit and "
        "choice of labels change.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
