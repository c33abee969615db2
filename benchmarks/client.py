"""The client beside raw httpx, in turns, over one kept-alive connection each.

`python -m benchmarks.client NAME [--store DIR] [--rounds 7] [--write]` predicts rows of the model's
own shape, random within its range, with 100 draws: 1, 100 and 1,000 at a time. Raw httpx sends the
same npy and reads the npz answer's arrays with numpy, which is what a program without the client
would do. A figure is the client's time over raw httpx's in the same round, of the fastest call of
each.
"""

import io
import statistics
import time
from collections.abc import Callable

import httpx
import numpy as np
from jaxtyping import Float32

from benchmarks.options import RESULTS, opened, parser_of
from benchmarks.predict import server
from dubito import Client

ROWS = (1, 100, 1000)
CALLS = {1: 100, 100: 20, 1000: 5}  # a round, by rows
DRAWS = 100


def main() -> None:
    """Measure and print a table; with `--write` keep it."""
    parser = parser_of(__doc__, "client.md")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    spec = opened(options).manifest.input
    most = np.random.default_rng(0).uniform(spec.minimum, spec.maximum, (max(ROWS), *spec.shape))
    with server(options.store, DUBITO_DEFAULT_MODEL=options.name) as running:
        url = f"http://127.0.0.1:{running.port}"
        with Client(url) as client, httpx.Client(base_url=url, timeout=60) as raw:
            found = {
                n: ratios(client, raw, most[:n].astype(np.float32), options.rounds) for n in ROWS
            }
    text = table(found, options.name, options.rounds)
    print(text)
    if options.write:
        (RESULTS / "client.md").write_text(text)


def ratios(
    client: Client, raw: httpx.Client, x: Float32[np.ndarray, "N *shape"], rounds: int
) -> list[tuple[float, float]]:
    """Return milliseconds of the client and of raw httpx, a pair a round."""

    def by_client() -> None:
        client.predict(x, num_samples=DRAWS)

    def by_httpx() -> None:
        body = io.BytesIO()
        np.save(body, x)
        headers = {"Content-Type": "application/x-npy", "Accept": "application/x-npz"}
        answer = raw.post(f"/predict?num_samples={DRAWS}", content=body.getvalue(), headers=headers)
        answer.raise_for_status()
        with np.load(io.BytesIO(answer.content)) as arrays:
            dict(arrays)

    by_client()
    return [
        (fastest(by_client, CALLS[len(x)]), fastest(by_httpx, CALLS[len(x)])) for _ in range(rounds)
    ]


def fastest(work: Callable[[], None], calls: int) -> float:
    """Return the least milliseconds of some calls."""
    times = []
    for _ in range(calls):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return 1e3 * min(times)


def table(found: dict[int, list[tuple[float, float]]], name: str, rounds: int) -> str:
    """Return the page."""
    lines = [
        "# The client beside raw httpx",
        "",
        f"`python -m benchmarks.client {name} --rounds {rounds} --write`; {DRAWS} draws; median "
        "over rounds "
        "(least - most).",
        "",
        "| rows | client, ms | raw httpx, ms | times |",
        "|---|---|---|---|",
    ]
    for rows, pairs in found.items():
        columns = [
            [mine for mine, _ in pairs],
            [its for _, its in pairs],
            [mine / its for mine, its in pairs],
        ]
        cells = [
            f"{statistics.median(one):.2f} ({min(one):.2f} - {max(one):.2f})" for one in columns
        ]
        lines.append(f"| {rows} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
