"""The commands `dubito reproduce`, `certify` and `active`."""

import argparse
import fnmatch
import importlib
import pkgutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from experiments import certify, tables
from model_store.errors import InvalidInput
from training.commands import Commands, add_command, add_device, add_target
from training.folders import runs_folder

if TYPE_CHECKING:
    from experiments.cells import Target

GUIDES = Path("docs")
OUT = GUIDES / "results" / "reproduce"
REPRODUCE = "experiments.command:reproduce"
CERTIFYING = ("exact", "gap", "moons")  # targets with a known posterior


def add_commands(commands: Commands) -> None:
    _add_active(commands)
    _add_certify(commands)
    _add_reproduce(commands)


def _add_active(commands: Commands) -> None:
    about = "simulate active learning: how many labels are needed, and how many are saved"
    parser = add_command(commands, "active", "experiments.active.command:active", about)
    add = parser.add_argument
    add("recipes", type=Path, nargs="+", metavar="RECIPE", help="TOML files, all of the same data")
    add("--data", metavar="SRC", help="in place of the recipes' source: digits, csv:FILE, ...")
    add_target(parser)
    add(
        "--acquisition",
        metavar="NAME",
        action="append",
        help="as of POST /acquire; may be given several times",
    )
    add(
        "--start",
        default="cold",
        choices=["cold", "warm", "both"],
        help="whether a fit begins from scratch, or where the last one ended",
    )
    add("--initial", type=int, default=20, help="labels before the first acquisition")
    add("--batch", type=int, default=10, help="labels of an acquisition")
    add("--until", type=int, default=200, metavar="LABELS", help="labels of an arm, at most")
    add("--target-accuracy", type=float, metavar="A", help="in (0, 1): of a classification")
    add("--target-rmse", type=float, metavar="R", help="of a regression, in the target's units")
    add(
        "--candidates",
        type=int,
        default=2000,
        help="random rows that an acquisition looks at",
    )
    add("--draws", type=int, default=100, help="that score candidates")
    add("--test-draws", type=int, default=100, help="that predict test rows")
    add(
        "--race",
        type=float,
        metavar="P",
        help="acquisitions that /acquire can race are, and may go wrong so often",
    )
    add("--beta", type=float, metavar="B", help="of power_bald: BALD^B are the weights of rows (1)")
    add("--epochs", type=int, default=50, help="of each fit, whatever the recipe says")
    add("--seeds", type=int, default=5, help="how many, from the recipe's on")
    add_device(parser)
    add("--quiet", action="store_true", help="no progress bar")
    add("--report", action="store_true", help="simulate nothing: report what there is")


def _add_reproduce(commands: Commands) -> None:
    about = "measure the papers' tables and figures, and write their pages"
    parser = add_command(commands, "reproduce", REPRODUCE, about)
    parser.add_argument(
        "targets",
        nargs="*",
        metavar="TARGET[/ROWS]",
        help="by default all; `--list` names them; ROWS such as 'yacht-*' are some of its rows",
    )
    _add_options(parser)


def _add_certify(commands: Commands) -> None:
    about = "compare every method with exact posteriors and Hamiltonian Monte Carlo"
    parser = add_command(commands, "certify", REPRODUCE, about)
    parser.set_defaults(targets=list(CERTIFYING))
    _add_options(parser)


def _add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--list", action="store_true", help="say what there is, and how much of it is measured")
    add("--pages", action="store_true", help="measure nothing, write pages of what is there")
    add("--again", action="store_true", help="also what an earlier revision measured")
    add("--budget", type=float, metavar="MINUTES", help="begin no cell after that time")
    add("--out", type=Path, default=OUT, help=f"folder of cells and pages (by default {OUT})")
    add("--quiet", action="store_true", help="no progress bar")


def known_targets() -> "dict[str, Target]":
    known: dict[str, Target] = {}
    for package in (tables, certify):
        for found in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            module = importlib.import_module(found.name)
            known |= {target.name: target for target in getattr(module, "TARGETS", ())}
    # Publishing a fit discards its checkpoint, so targets that share the fit come first.
    return dict(sorted(known.items(), key=lambda item: item[1].publishes))


def reproduce(options: argparse.Namespace) -> None:
    from experiments.cells import measure_missing
    from experiments.findings import findings_page, read_claims
    from experiments.pages import write_pages

    known = known_targets()
    targets = [_chosen(known, name) for name in options.targets or known]
    if options.list:
        for target in targets:
            cells = len(target.rows) * target.seeds
            left = len([*target.missing(options.out, options.again)])
            print(f"{target.name:20} {cells - left:4} of {cells:4}  {target.title}")
        return
    left = 0
    if not options.pages:
        runs = runs_folder()
        limits = (options.budget, options.quiet, options.again)
        left = measure_missing(targets, options.out, runs, *limits)
    guides = GUIDES if options.out == OUT else options.out
    write_pages([*known.values()], options.out, guides)
    (guides / "findings.md").write_text(findings_page(known, options.out, guides, read_claims()))
    print(f"{options.out / 'README.md'}: {left} cells left" if left else options.out / "README.md")


def _chosen(known: "dict[str, Target]", text: str) -> "Target":
    name, _, pattern = text.partition("/")
    if name not in known:
        raise InvalidInput("TARGET", f"one of {', '.join(known)}", name)
    target = known[name]
    rows = {row: target.rows[row] for row in fnmatch.filter(target.rows, pattern or "*")}
    if not rows:
        raise InvalidInput("ROWS", f"some of {', '.join(target.rows)}", pattern)
    return replace(target, rows=rows)
