"""Fit and publish: `python -m training fit RECIPE`; of what is published: `prune`, `calibrate`, `evaluate`."""

import argparse
import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

from model_store.artifacts.manifest import FILES, Manifest
from model_store.artifacts.store import ModelStore
from model_store.errors import DubitoError, InvalidInput, NotFound, StoreError
from model_store.inference.model import NEEDED, Model
from training import recipe as recipes
from training.data import load, split, split_sizes, with_classes_of
from training.publishing.recalibrate import load_like, recalibrate, split_rows
from training.versions import WEIGHTS, Parent, fitted_data, open_parent, open_version, recipe_of

FAILED = 1
WRONG_INPUT = 2
INTERRUPTED = 130


def main(arguments: list[str] | None = None) -> int:
    """Run a command; return the exit code: 0 done, 1 failed, 2 wrong input, 130 interrupted."""
    parser = argparse.ArgumentParser(prog="python -m training", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    fit = commands.add_parser("fit", help="fit a recipe on its data and publish the model")
    fit.add_argument("recipe", type=Path, help="a TOML file, such as recipes/digits.toml")
    fit.add_argument("--data", metavar="SRC", help="in place of the recipe's source: digits, csv:FILE, ...")
    fit.add_argument("--target", metavar="COLUMN", help="what to predict of csv: and parquet: data")
    fit.add_argument(
        "--leave-out", metavar="CLASS", action="append", help="fit without a class; may be given several times"
    )
    fit.add_argument("--name", help="publish under this name in place of the recipe's")
    fit.add_argument("--seed", type=int, help="in place of the recipe's seed")
    fit.add_argument("--warm-start", metavar="NAME[:VERSION]", help="go on from a published version's weights")
    fit.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    fit.add_argument("--quiet", action="store_true", help="no progress bar")
    prune = commands.add_parser("prune", help="publish a Bayes by Backprop model without its least certain weights")
    prune.add_argument("model", metavar="NAME[:VERSION]", help="VERSION is a number or an alias, by default latest")
    prune.add_argument(
        "--fraction", type=float, required=True, help="of all weights, how many are removed, such as .75"
    )
    prune.add_argument("--as", dest="name", metavar="NEWNAME", help="publish under this name in place of its own")
    prune.add_argument(
        "--data", metavar="SRC", help="where the data of its fit are now, if no longer where they were"
    )
    calibrate = commands.add_parser("calibrate", help="publish a model anew, calibrated on other data")
    calibrate.add_argument(
        "model", metavar="NAME[:VERSION]", help="VERSION is a number or an alias, by default latest"
    )
    calibrate.add_argument(
        "--data", metavar="SRC", required=True, help="rows that the model was not fitted on, with labels or targets"
    )
    calibrate.add_argument("--target", metavar="COLUMN", help="what is predicted, of csv: and parquet: data")
    calibrate.add_argument("--as", dest="name", metavar="NEWNAME", help="publish under this name in place of its own")
    for part in ("reference", "ranking"):
        calibrate.add_argument(
            f"--{part}-rows", type=int, metavar="N", help="by default as many as now, at most a third of the rows"
        )
    calibrate.add_argument("--seed", type=int, default=0, help="of how the rows are parts, and of the draws")
    calibrate.add_argument("--quiet", action="store_true", help="no progress, only what was published")
    evaluate = commands.add_parser("evaluate", help="measure a published version, and keep the evidence beside it")
    evaluate.add_argument(
        "model", metavar="NAME[:VERSION]", help="VERSION is a number or an alias, by default latest"
    )
    evaluate.add_argument("--data", metavar="SRC", help="test rows of other data than those of its fit")
    evaluate.add_argument(
        "--outliers",
        metavar="NAME=SRC",
        action="append",
        default=[],
        help="rows unlike the data: images:PATH, npz:FILE or idx:DIR; may be given several times",
    )
    evaluate.add_argument("--attacks", action="store_true", help="attack the test rows of a classification")
    evaluate.add_argument("--draws", type=int, help="of each row, by default the version's own number")
    evaluate.add_argument("--rows", type=int, default=1000, help="of each set, at most")
    evaluate.add_argument("--seed", type=int, default=0, help="of which rows and draws")
    evaluate.add_argument("--quiet", action="store_true", help="no progress bar")
    options = parser.parse_args(arguments)
    run = {"fit": _fit, "prune": _prune, "calibrate": _calibrate, "evaluate": _evaluate}[options.command]
    try:
        return run(options)
    except (InvalidInput, NotFound) as error:
        print(f"error: {error}", file=sys.stderr)
        return WRONG_INPUT
    except (DubitoError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("\nstopped; run the same command again to go on from the last checkpoint", file=sys.stderr)
        return INTERRUPTED


def _fit(options: argparse.Namespace) -> int:
    recipe = recipes.load(options.recipe)
    recipe = recipes.override(
        recipe,
        name=options.name,
        seed=options.seed,
        source=options.data,
        target=options.target,
        leave_out=options.leave_out,
    )
    store = _store()
    parent = None if options.warm_start is None else open_parent(store, options.warm_start, "--warm-start")
    if parent is not None and parent.recipe.task != recipe.task:
        raise InvalidInput("task", f"{parent.recipe.task}, as of {parent.label}", recipe.task)
    data = load(recipe, _data_root(), () if parent is None else parent.manifest.input.columns)
    if parent is not None:
        data = with_classes_of(data, parent.classes)
    splits = split(data, split_sizes(recipe))

    from training.fitting.memory import keep_freed_memory
    from training.fitting.run import (  # wrong recipes and data are answered before torch is imported
        Run,
        training_facts,
    )
    from training.fitting.warm_start import check_compatible
    from training.publishing.publish import device_named, publish

    if parent is not None:
        check_compatible(recipe, data, parent)
    device = device_named(options.device)
    keep_freed_memory()
    begins_at = "" if parent is None else f" {parent.label} {sha256(parent.weights).hexdigest()}"
    run_id = sha256(f"{recipe.digest()} {data.digest()} {device.type}{begins_at}".encode()).hexdigest()[:12]
    folder = _runs() / f"{recipe.name}-{run_id}"
    with _locked(folder):
        run = Run(recipe, splits, data.shape, len(data.classes), folder, device, parent)
        begun = f"going on from step {run.progress.step}" if run.resumed else f"{run.steps} steps"
        print(f"{recipe.name}: {len(splits.train)} training rows, {begun} on {device.type}; run in {folder}")
        if parent is not None and not run.resumed:
            print(f"warm start from {parent.label}")
        manifest = _published(store, recipe.name, run.progress.token)
        if manifest is None:  # else the run was killed between its publication and its end
            model = run.fit(quiet=options.quiet)
            facts = training_facts(run, splits)
            if "convergence" in facts:
                print(facts["convergence"]["says"])
            manifest = publish(store, recipe.name, model, recipe, data, splits, facts, print)
        run.checkpoint.unlink()
    for key, value in manifest.quality.items():
        print(f"  {key:32} {value:.4f}")
    print(f"published {manifest.name} version {manifest.version}; plot: {folder / 'progress.png'}")
    return 0


def _prune(options: argparse.Namespace) -> int:
    store = _store()
    parent = open_parent(store, options.model, "model")
    data = fitted_data(parent, _data_root(), options.data)

    from training.publishing.prune import prune_version

    name = options.name or parent.manifest.name
    manifest, plot = prune_version(store, parent, data, options.fraction, name, _runs(), print)
    facts = manifest.training["pruned"]
    for key, before, after in (
        ("weights", facts["weights"], facts["kept_weights"]),
        ("bytes of graphs and weights", facts["parent_bytes"], facts["bytes"]),
        ("ms a request, one row, fresh draws", facts["parent_request_ms"], facts["request_ms"]),
        *((key, parent.manifest.quality[key], manifest.quality[key]) for key in manifest.quality),
    ):
        print(f"  {key:36} {before:>12,.6g} -> {after:,.6g}")
    print(f"published {manifest.name} version {manifest.version}; plot: {plot}")
    return 0


def _calibrate(options: argparse.Namespace) -> int:
    store = _store()
    parent = open_version(store, options.model, FILES)
    if options.seed < 0:
        raise InvalidInput("--seed", "0 or more", f"{options.seed}")
    data = load_like(parent.manifest, _data_root(), options.data, options.target)
    third = (len(data.train) + len(data.test)) // 3
    now = parent.manifest.detectors
    reference_rows = min(now.reference_rows, third) if options.reference_rows is None else options.reference_rows
    ranking_rows = min(now.ranking_rows, third) if options.ranking_rows is None else options.ranking_rows
    parts = split_rows(data, reference_rows, ranking_rows, options.seed)
    facts = {"source": options.data, **({} if options.target is None else {"target": options.target})}
    say = _silent if options.quiet else print
    name = options.name or parent.manifest.name
    manifest = recalibrate(store, parent, data, parts, options.seed, name, facts, say)
    for key, value in manifest.quality.items():
        print(f"  {key:32} {value:.4f}")
    print(f"published {manifest.name} version {manifest.version}")
    return 0


def _evaluate(options: argparse.Namespace) -> int:
    store = _store()
    artifact = open_version(store, options.model, (WEIGHTS, *NEEDED))
    version = Parent(artifact.manifest, recipe_of(artifact.manifest, "model"), artifact.files[WEIGHTS])

    from training.evaluation.outliers import OutlierSource
    from training.evaluation.report import Wanted, evaluate_version

    sources = tuple(OutlierSource.parse(text, _data_root()) for text in options.outliers)
    wanted = Wanted(sources, options.attacks, options.rows, options.draws, options.seed, options.data)
    model = Model.load(artifact)
    evidence = evaluate_version(store, version, model, _data_root(), wanted, print, options.quiet)
    for key, value in evidence.report["summary"].items():
        print(f"  {key:40} {value:.4f}")
    print(f"evidence of {version.label}: {evidence.folder / 'evidence.md'}")
    return 0


def _silent(_: str) -> None:
    pass


def _store() -> ModelStore:
    return ModelStore(Path(os.environ.get("DUBITO_STORE", "models")))


def _runs() -> Path:
    return Path(os.environ.get("DUBITO_RUNS", "runs"))


def _data_root() -> Path:
    return Path(os.environ.get("DUBITO_DATA", "data"))


def _published(store: ModelStore, name: str, token: str) -> Manifest | None:
    """Return the manifest of the version that a run has published, if it has."""
    for version in reversed(store.versions(name)):
        with suppress(StoreError):
            manifest = store.manifest(name, version)
            if manifest.training.get("run") == token:
                return manifest
    return None


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a run's folder, so that two processes never write one run."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InvalidInput("run", "a run that no other process works on", f"{folder}, which one does") from None
        yield


if __name__ == "__main__":
    sys.exit(main())
