"""Run the measurements for the papers' tables, and store the results in cells.

A cell is one seed of one row. It is measured once, and again only with `--again`. It records the
commit and its target's `revision`. Raise the revision if a change affects the measurements.
"""

import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from matplotlib.figure import Figure

from model_store.artifacts.disk import replace_file
from model_store.errors import DubitoError
from training import log
from training.folders import RunLockedError, hold
from training.progress import Bar

ROOT = Path(__file__).parent.parent
MIN_SEEDS = 3  # per row with figures


@dataclass(frozen=True)
class Measured:
    values: dict[str, Any]
    data: str  # digest
    moving: list[str] = field(default_factory=list)  # validation curves still changing


@dataclass(frozen=True)
class Cell:
    row: str
    seed: int
    measured: Measured
    seconds: float  # processor time, excluding earlier runs and shared fits
    commit: str
    revision: int
    versions: dict[str, str]


Results = Mapping[str, list[Cell]]  # by row, sorted by seed
Measure = Callable[[int, Path], Measured]  # from the seed and the folder of runs


@dataclass(frozen=True)
class Column:
    title: str
    digits: int = 2
    summary: Callable[[list[float]], str] | None = None  # instead of mean ± deviation


@dataclass(frozen=True)
class Target:
    """A table or figure of a paper."""

    name: str
    title: str
    protocol: str
    rows: Mapping[str, Measure]
    columns: Mapping[str, Column]
    draw: Callable[["Target", Results], Figure] | None = None
    caption: str = ""  # below the figure
    papers: Mapping[str, Mapping[str, float | str]] = field(default_factory=dict)  # by row, column
    kl_weights: Mapping[str, str] = field(default_factory=dict)  # relative to the ELBO, by row
    seeds: int = MIN_SEEDS  # maximum of all rows
    row_seeds: Mapping[str, int] = field(default_factory=dict)  # of rows with fewer seeds
    conclude: Callable[[Results], str] | None = None  # a text about all rows
    remarks: str = ""  # reasons for differences from the paper
    revision: int = 1  # of code and settings
    publishes: bool = False  # publishes its fits

    @property
    def num_cells(self) -> int:
        return sum(len(self._seeds(row)) for row in self.rows)

    def _seeds(self, row: str) -> range:
        return range(self.row_seeds.get(row, self.seeds))

    def path(self, out: Path, row: str, seed: int) -> Path:
        return out / self.name / f"{row}-{seed}.json"

    def results(self, out: Path) -> Results:
        paths = {row: [self.path(out, row, seed) for seed in self._seeds(row)] for row in self.rows}
        return {
            row: [read(path) for path in files if path.exists()] for row, files in paths.items()
        }

    def missing(self, out: Path, again: bool = False) -> Iterator[tuple[str, int]]:
        """Yield the row and seed of each missing cell.

        If `again`, outdated cells are included.
        """
        first = min(MIN_SEEDS, self.seeds)  # every row gets these seeds before any row gets more
        for seeds in (range(first), range(first, self.seeds)):
            for row, seed in product(self.rows, seeds):
                path = self.path(out, row, seed)
                if seed not in self._seeds(row):
                    continue
                if not path.exists() or (again and read(path).revision != self.revision):
                    yield row, seed


def read(path: Path) -> Cell:
    content = json.loads(path.read_text())
    return Cell(**{**content, "measured": Measured(**content["measured"])})


def measure_missing(
    targets: list[Target],
    out: Path,
    runs: Path,
    minutes: float | None,
    quiet: bool,
    again: bool = False,
) -> int:
    """Run missing measurements for up to `minutes`, and return how many cells remain.

    A stopped cell resumes from its fit's checkpoint. Targets with the same recipe and rows share
    the fit. Several processes can work at once: each skips cells that another process has locked.
    """
    missing = [
        (target, row, seed) for target in targets for row, seed in target.missing(out, again)
    ]
    until = None if minutes is None else time.monotonic() + 60 * minutes
    skipped = 0
    with Bar(len(missing), "cell", quiet) as bar:
        for position, (target, row, seed) in enumerate(missing):
            if until is not None and time.monotonic() > until:
                return skipped + len(missing) - position
            bar.report(f"{target.name}: {row}, seed {seed}")
            folder = runs / "reproduce" / "cells" / f"{target.name}-{row}-{seed}"
            try:
                with hold(folder):
                    if (row, seed) in target.missing(out, again):
                        _measure(target, row, seed, out, runs)
            except RunLockedError:
                skipped += 1
            except DubitoError as error:  # such as missing data; other cells can succeed
                log.warning("%s: %s, seed %s was not measured: %s", target.name, row, seed, error)
                skipped += 1
            else:
                bar.update()
    return skipped


def _measure(target: Target, row: str, seed: int, out: Path, runs: Path) -> None:
    start_s = time.process_time()
    measured = target.rows[row](seed, runs / "reproduce")
    seconds = round(time.process_time() - start_s, 1)
    cell = Cell(row, seed, measured, seconds, commit(), target.revision, versions())
    path = target.path(out, row, seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, (json.dumps(asdict(cell)) + "\n").encode())


def mean_and_spread(values: list[float]) -> tuple[float, float]:
    """Compute the mean and standard deviation (0 for a single value)."""
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0


@cache
def commit() -> str:
    """Return the current commit, with the suffix "-dirty" if the code has changed."""

    def git(*options: str) -> str:
        command = ["git", "-C", str(ROOT), *options]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    changed = git("status", "--porcelain", "--", "*.py", "*.toml")
    return (git("rev-parse", "--short=12", "HEAD") or "unknown") + ("-dirty" if changed else "")


def versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "onnxruntime": onnxruntime.__version__,
        "numpy": np.__version__,
    }
