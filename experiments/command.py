"""Define the commands `dubito reproduce`, `certify`, `attack` and `active`."""

import argparse
import fnmatch
import importlib
import pkgutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from experiments import certify, tables
from model_store.commands import Commands
from model_store.errors import InvalidInput
from training.commands import VERSION, add_command, add_options

if TYPE_CHECKING:
    from experiments.cells import Target

OUT = Path("docs/results/reproduce")
REPRODUCE = "experiments.command:reproduce"
CERTIFYING = ("exact", "gap", "moons")  # targets with a known posterior


def add_commands(commands: Commands) -> None:
    _add_active(commands)
    _add_attack(commands)
    _add_certify(commands)
    _add_reproduce(commands)


def _add_active(commands: Commands) -> None:
    summary = "simulate active learning, and count the labels that it needs and saves"
    parser = add_command(commands, "active", "experiments.active.command:active", summary)
    add = parser.add_argument
    add("recipes", type=Path, nargs="+", metavar="RECIPE", help="TOML files for the same data")
    add("--data", metavar="SRC", help="instead of the recipes' source: digits, csv:FILE, ...")
    add_options(parser, "--target")
    acquisition_help = "acquisition of POST /acquire; can be repeated"
    add("--acquisition", metavar="NAME", action="append", help=acquisition_help)
    start_help = "start fits from scratch (cold), or from the last fit (warm)"
    add("--start", default="cold", choices=["cold", "warm", "both"], help=start_help)
    add("--initial", type=int, default=20, help="labels before the first acquisition")
    add("--batch", type=int, default=10, help="labels per acquisition")
    add("--until", type=int, default=200, metavar="LABELS", help="maximum number of labels")
    add("--target-accuracy", type=float, metavar="A", help="in (0, 1), for classifications")
    add("--target-rmse", type=float, metavar="R", help="in the target's units, for regressions")
    rows_help = "random unlabelled rows scored per acquisition"
    add("--candidates", type=int, default=2000, help=rows_help)
    add("--draws", type=int, default=100, help="draws for candidates")
    add("--test-draws", type=int, default=100, help="draws for test rows")
    race_help = "race the acquisitions that support it, with this error probability"
    add("--race", type=float, metavar="P", help=race_help)
    add("--beta", type=float, metavar="B", help="for power_bald: rows have weights BALD^B (1)")
    add("--epochs", type=int, default=50, help="epochs per fit, instead of the recipe's")
    add("--seeds", type=int, default=5, help="number of seeds, starting with the recipe's")
    add_options(parser, "--device", "--quiet")
    add("--report", action="store_true", help="only report rounds that were already simulated")


def _add_attack(commands: Commands) -> None:
    summary = "attack the test rows of a classifier, and measure how many attacks are flagged"
    parser = add_command(commands, "attack", "experiments.command:attack", summary)
    parser.add_argument("model", **VERSION)
    parser.add_argument("--rows", type=int, default=1000, help="maximum number of test rows")


def _add_reproduce(commands: Commands) -> None:
    summary = "measure the papers' tables and figures, and write their pages"
    parser = add_command(commands, "reproduce", REPRODUCE, summary)
    parser.add_argument(
        "targets",
        nargs="*",
        metavar="TARGET[/ROWS]",
        help="default: all targets of `--list`; ROWS is a pattern such as 'yacht-*'",
    )
    _add_options(parser)


def _add_certify(commands: Commands) -> None:
    summary = "compare every method with exact posteriors and Hamiltonian Monte Carlo"
    parser = add_command(commands, "certify", REPRODUCE, summary)
    parser.set_defaults(targets=list(CERTIFYING))
    _add_options(parser)


def _add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--list", action="store_true", help="list the targets and their measured cells")
    add("--pages", action="store_true", help="only write the pages of measured cells")
    add("--again", action="store_true", help="also measure cells of earlier revisions again")
    add("--budget", type=float, metavar="MINUTES", help="start no cell after this time")
    add("--out", type=Path, default=OUT, help=f"folder of cells and pages (default: {OUT})")
    add_options(parser, "--quiet")


def load_targets() -> "dict[str, Target]":
    targets: dict[str, Target] = {}
    for package in (tables, certify):
        for info in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            module = importlib.import_module(info.name)
            targets |= {target.name: target for target in getattr(module, "TARGETS", ())}
    # Publishing discards the fit's checkpoint, so targets that only share the fit run first.
    return dict(sorted(targets.items(), key=lambda item: item[1].publishes))


def attack(options: argparse.Namespace) -> None:
    from training.folders import data_root, open_store
    from training.versions import Provenance, open_parent

    store = open_store()
    version = open_parent(store, options.model, "model")
    manifest = version.manifest
    is_changed = manifest.encoder or Provenance.of(manifest).pruned
    if manifest.task != "classification" or is_changed or manifest.input.takes_ids:
        expected = "an unpruned classifier of numbers without an encoder"
        raise InvalidInput("model", expected, f"{manifest.label} ({manifest.task})")

    from experiments.attacks import measure_attacks
    from model_store.inference.model import Model

    model = Model.load(store.open(manifest.name, manifest.version))
    print(f"{'attack':24} {'accuracy':>9} {'flagged':>9} {'wrong, not flagged':>19}")
    for name, values in measure_attacks(version, model, data_root(), options.rows).items():
        flagged, accuracy, hits = values["flagged"]["0.05"], values["accuracy"], values["hits"]
        print(f"{name:24} {accuracy:9.3f} {flagged:9.3f} {hits:19.3f}")


def reproduce(options: argparse.Namespace) -> None:
    from experiments.cells import measure_missing
    from experiments.findings import findings_page, read_claims
    from experiments.pages import write_pages

    all_targets = load_targets()
    targets = [_select(all_targets, name) for name in options.targets or all_targets]
    if options.list:
        for target in targets:
            cells = target.num_cells
            left = len([*target.missing(options.out, options.again)])
            print(f"{target.name:20} {cells - left:4} of {cells:4}  {target.title}")
        return
    left = 0
    if not options.pages:
        from training.folders import runs_folder

        runs = runs_folder()
        limits = (options.budget, options.quiet, options.again)
        left = measure_missing(targets, options.out, runs, *limits)
    findings = (options.out.parent if options.out == OUT else options.out) / "findings.md"
    write_pages([*all_targets.values()], options.out, findings)
    findings.write_text(findings_page(all_targets, options.out, findings.parent, read_claims()))
    print(f"{options.out / 'README.md'}: {left} cells left" if left else options.out / "README.md")


def _select(targets: "dict[str, Target]", text: str) -> "Target":
    name, _, pattern = text.partition("/")
    if name not in targets:
        raise InvalidInput("TARGET", f"one of {', '.join(targets)}", name)
    target = targets[name]
    rows = {row: target.rows[row] for row in fnmatch.filter(target.rows, pattern or "*")}
    if not rows:
        raise InvalidInput("ROWS", f"some of {', '.join(target.rows)}", pattern)
    return replace(target, rows=rows)
