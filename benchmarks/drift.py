"""How seldom the drift monitor alarms where nothing drifts, how soon where something does, and what
it costs.

`python -m benchmarks.drift [--write]`. Scores are normal: the monitor sees ranks alone, so any
continuous data do.
"""

import argparse
import math
import time
from collections.abc import Callable

import numpy as np

from benchmarks.model import ROOT
from model_store.conformal.rank_tables import conformal_p_value
from service.models.drift import ALARM_AT, Drift, Watched

Scores = Callable[[np.random.Generator, int], np.ndarray]

DRIFTS: dict[str, Scores] = {
    "all strange": lambda g, m: g.normal(size=m) + 6,
    "flag rate .30 (shift 1.12)": lambda g, m: g.normal(size=m) + 1.12,
    "flag rate .15 (shift .61)": lambda g, m: g.normal(size=m) + 0.61,
    "a tenth strange": lambda g, m: g.normal(size=m) + 6 * (g.uniform(size=m) < 0.1),
    "plainer (shift -1)": lambda g, m: g.normal(size=m) - 1,
    "alike (std .3)": lambda g, m: 0.3 * g.normal(size=m),
}
MOST_ROWS = 10_000


def largest_evidence(generator: np.random.Generator, n: int, rows: int) -> float:
    """Return the largest evidence over live rows like a calibration of n rows."""
    ranking = np.sort(generator.normal(size=n))
    drift = Drift(Watched.of_ranking(ranking))
    for _ in range(rows // 16):
        drift.watch(conformal_p_value(generator.normal(size=16), ranking))
    return drift.report().largest_evidence


def delay(generator: np.random.Generator, n: int, rows_before: int, drifted: Scores) -> float:
    """Return the rows of drift until the alarm, after so many rows without; infinite beyond
    `MOST_ROWS`."""
    ranking = np.sort(generator.normal(size=n))
    drift = Drift(Watched.of_ranking(ranking))
    for _ in range(rows_before // 16):
        drift.watch(conformal_p_value(generator.normal(size=16), ranking))
    for rows in range(4, MOST_ROWS + 1, 4):
        drift.watch(conformal_p_value(drifted(generator, 4), ranking))
        if drift.report().alarm:
            return rows
    return math.inf


def microseconds(generator: np.random.Generator, rows: int) -> float:
    """Return the mean time that a request of so many rows costs."""
    ranking = np.sort(generator.normal(size=1000))
    drift, p_values = (
        Drift(Watched.of_ranking(ranking)),
        conformal_p_value(generator.normal(size=rows), ranking),
    )
    begun = time.perf_counter()
    for _ in range(6400):
        drift.watch(p_values)
    return (time.perf_counter() - begun) / 6400 * 1e6


def main() -> None:
    """Simulate, print tables, and with `--write` keep them in docs/results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--calibrations", type=int, default=500, help="for the share of false alarms"
    )
    parser.add_argument("--repeats", type=int, default=21, help="for each delay")
    parser.add_argument("--write", action="store_true", help="write docs/results/drift.md")
    options = parser.parse_args()
    generator = np.random.default_rng(0)
    lines = [
        "# The drift monitor",
        "",
        f"`python -m benchmarks.drift --calibrations {options.calibrations} --repeats "
        f"{options.repeats}`. Scores are "
        "normal; only ranks matter.",
        "",
        f"Nothing drifts: share of {options.calibrations} calibrations whose capital ever reaches "
        "1 / level. At most "
        "the level, by Ville's inequality.",
        "",
        "| calibration rows | live rows | level .3 | .1 | .03 | .01 | .001 (the alarm) |",
        "|---|---|---|---|---|---|---|",
    ]
    for n, rows in ((50, 5000), (220, 5000), (2000, 5000)):
        evidence = np.array(
            [largest_evidence(generator, n, rows) for _ in range(options.calibrations)]
        )
        shares = [float((evidence >= -math.log(level)).mean()) for level in (0.3, 0.1, 0.03, 0.01)]
        alarms = float((evidence >= ALARM_AT).mean())
        lines.append(
            f"| {n} | {rows} | {' | '.join(f'{share:.3f}' for share in (*shares, alarms))} |"
        )
    lines += [
        "",
        f"Rows of drift until the alarm, in requests of 4: median of {options.repeats} "
        "calibrations, and how many "
        f"are not found in {MOST_ROWS:,} rows.",
        "",
        "| drift | n = 220, at once | after 20,000 rows | n = 2,000, at once | after 20,000 rows |",
        "|---|---|---|---|---|",
    ]
    for name, drifted in DRIFTS.items():
        cells = []
        for n in (220, 2000):
            for rows_before in (0, 20_000):
                found = [delay(generator, n, rows_before, drifted) for _ in range(options.repeats)]
                missed = sum(map(math.isinf, found))
                cells.append(f"{np.median(found):.0f}" + (f" ({missed} not)" if missed else ""))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    costs = ", ".join(
        f"{microseconds(generator, m):.1f} us for {m} row{'s' * (m > 1)}" for m in (1, 16, 1000)
    )
    lines += ["", f"A request costs {costs}, on average over requests."]
    text = "\n".join(lines) + "\n"
    print(text)
    if options.write:
        (ROOT / "docs" / "results" / "drift.md").write_text(text)


if __name__ == "__main__":
    main()
