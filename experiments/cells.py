"""Cells: what one seed of one row of a table measured, a small JSON file each.

A cell that is there is not measured again unless that is asked for: a figure stays one of its
commit, and pages say which are of older code.
"""

import ast
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from matplotlib.figure import Figure

from model_store.errors import DubitoError
from training import log
from training.fitting.checkpoint import write_atomically
from training.folders import Held, hold
from training.progress import Bar

ROOT = Path(__file__).parent.parent
FEWEST_SEEDS = 3  # that a figure counts with
MEASURES = "experiments/measures.py"
OF_FITS = (
    *(f"training/{room}" for room in ("bayes", "networks", "fitting", "calibration")),
    *(f"training/{module}.py" for module in ("fit", "model", "seeds")),
)


@dataclass(frozen=True)
class Measured:
    """What a cell holds: figures by name, the data's digest, and what of the validation curve had
    not levelled off."""

    values: dict[str, Any]
    data: str
    moving: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Cell:
    row: str
    seed: int
    measured: Measured
    seconds: float  # of a processor, without what an earlier run or a shared fit took
    commit: str
    code: str
    versions: dict[str, str]


Results = Mapping[str, list[Cell]]  # by row, in the order of seeds
Measure = Callable[[int, Path], Measured]  # of a seed, and a folder for runs


@dataclass(frozen=True)
class Column:
    title: str
    digits: int = 2
    summary: Callable[[list[float]], str] | None = None  # in place of mean and deviation


@dataclass(frozen=True)
class Target:
    """A table or figure of a paper.

    `papers` are the paper's own figures, by row and column. `code` is what a cell depends on, below
    the checkout's root; what a measurement reaches of the target's own module is always among it.
    """

    name: str
    title: str
    protocol: str
    module: str
    rows: Mapping[str, Measure]
    columns: Mapping[str, Column]
    draw: Callable[["Target", Results], Figure]
    papers: Mapping[str, Mapping[str, float | str]] = field(default_factory=dict)
    seeds: int = FEWEST_SEEDS
    conclude: Callable[[Results], str] | None = None  # a line about all rows
    remarks: str = ""  # why figures differ from the paper's
    is_guide: bool = False  # its page is among the guides
    code: tuple[str, ...] = OF_FITS

    def path(self, out: Path, row: str, seed: int) -> Path:
        return out / self.name / f"{row}-{seed}.json"

    def results(self, out: Path) -> Results:
        found = {
            row: [self.path(out, row, seed) for seed in range(self.seeds)] for row in self.rows
        }
        return {row: [read(path) for path in of if path.exists()] for row, of in found.items()}

    def digest(self, row: str) -> str:
        """Return a digest of what a row's figures depend on: modules of fits, and of the target's
        own what its measurement reaches, so that neither plots nor words make it an older one."""
        functions, settings = _parts(self.rows[row])
        own = ROOT / Path(self.module.replace(".", "/")).with_suffix(".py")
        reached = "".join(_reached(own, functions))
        text = f"{code_digest(self.code)} {reached} {settings}"
        return sha256(text.encode()).hexdigest()[:16]

    def missing(self, out: Path, again: bool = False) -> Iterator[tuple[str, int]]:
        """Name what is not measured, or `again` with what was before its code changed."""
        fewest = min(FEWEST_SEEDS, self.seeds)  # of all rows first, which then count
        for seeds in (range(fewest), range(fewest, self.seeds)):
            for row, seed in product(self.rows, seeds):
                path = self.path(out, row, seed)
                if not path.exists() or (again and read(path).code != self.digest(row)):
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
    """Measure what is missing, and begin no cell after `minutes`; return how many are left.

    A cell that was stopped goes on from its fit's checkpoint. Targets that fit the same recipe to
    the same rows share the fit. Several processes share the cells: what another one works on is
    left to it.
    """
    missing = [
        (target, row, seed) for target in targets for row, seed in target.missing(out, again)
    ]
    until = None if minutes is None else time.monotonic() + 60 * minutes
    skipped = 0
    with Bar(len(missing), "cell", quiet) as bar:
        for done, (target, row, seed) in enumerate(missing):
            if until is not None and time.monotonic() > until:
                return skipped + len(missing) - done
            bar.say(f"{target.name}: {row}, seed {seed}")
            own = runs / "reproduce" / "cells" / f"{target.name}-{row}-{seed}"
            try:
                with hold(own):
                    if (row, seed) in target.missing(out, again):
                        _measure(target, row, seed, out, runs)
            except Held:
                skipped += 1
            except DubitoError as error:  # such as data that are not there: the others go on
                log.warning("%s: %s, seed %s is not measured: %s", target.name, row, seed, error)
                skipped += 1
            else:
                bar.update()
    return skipped


def _measure(target: Target, row: str, seed: int, out: Path, runs: Path) -> None:
    begun = time.process_time()
    measured = target.rows[row](seed, runs / "reproduce")
    seconds = round(time.process_time() - begun, 1)
    cell = Cell(row, seed, measured, seconds, commit(), target.digest(row), versions())
    path = target.path(out, row, seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(asdict(cell)) + "\n").encode())


def mean_and_spread(values: list[float]) -> tuple[float, float]:
    """Return the mean and the standard deviation; of one value 0."""
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0


@cache
def code_digest(paths: tuple[str, ...]) -> str:
    """Return a digest of what modules do, whatever their comments and formatting say."""
    digest = sha256()
    for name in paths:
        path = ROOT / name
        for file in [path] if path.suffix else sorted(path.glob("*.py")):
            digest.update(_dumped(_without_docstrings(file)).encode())
    return digest.hexdigest()[:16]


def _parts(measure: Any) -> tuple[list[str], list[Any]]:
    """Return the names of a measurement's functions, and what else they are given."""
    if callable(measure) and not isinstance(measure, partial):
        return [measure.__name__], []
    if not isinstance(measure, partial):
        return [], [measure]
    parts = [_parts(part) for part in (measure.func, *measure.args, *measure.keywords.values())]
    return [name for of, _ in parts for name in of], [thing for _, of in parts for thing in of]


def _reached(file: Path, names: list[str]) -> list[str]:
    """Return what a module's functions do, and what of the module they name, without words."""
    tree = _without_docstrings(file)
    assert isinstance(tree, ast.Module)
    known: dict[str, ast.AST] = {}
    for node in tree.body:
        for named in getattr(node, "targets", [getattr(node, "target", node)]):
            known[getattr(named, "name", getattr(named, "id", ""))] = node
    found: dict[str, str] = {}
    while names:
        name, *names = names
        if name in known and name not in found:
            found[name] = _dumped(known[name])
            names += [part.id for part in ast.walk(known[name]) if isinstance(part, ast.Name)]
    return [found[name] for name in sorted(found)]


def _dumped(node: object) -> str:
    """Return what `ast.dump` does, but for fields that are empty: newer Pythons have more of
    them."""
    if isinstance(node, list):
        return f"[{', '.join(map(_dumped, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = [(name, value) for name, value in ast.iter_fields(node) if value not in (None, [])]
    return f"{type(node).__name__}({', '.join(f'{n}={_dumped(value)}' for n, value in fields)})"


def _without_docstrings(file: Path) -> ast.AST:
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node, clean=False
        ):
            node.body = node.body[1:]
    return tree


@cache
def commit() -> str:
    """Return the commit that measures, "-dirty" where code has changed since."""

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
