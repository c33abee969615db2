"""`python -m training fit [RECIPE]`: fit a recipe, or one made of the data, and publish the model.

The training loop is `training.fitting.run`, the publication `training.publishing.publish`.
"""

import argparse
from contextlib import suppress
from hashlib import file_digest, sha256
from pathlib import Path

from model_store.artifacts.manifest import Manifest
from model_store.artifacts.store import ModelStore
from model_store.errors import InvalidInput, StoreError
from training import recipe as recipes
from training.commands import folders
from training.data import Dataset, load, split, split_sizes, with_classes_of
from training.data.description import plan_lines, short_report
from training.data.findings import findings_of, near_duplicate_lines
from training.data.plan import keep_recipe, plan_of
from training.data.rows import class_weights
from training.data.targets import log_slope_of, transformed
from training.facts import TrainingFacts
from training.recipe import Recipe
from training.versions import Parent, open_parent, recipe_of

HELP = "fit a recipe on its data and publish the model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "recipe",
        type=Path,
        nargs="?",
        help="a TOML file, such as recipes/digits.toml; without one, of the data",
    )
    parser.add_argument(
        "--data", metavar="SRC", help="in place of the recipe's source: digits, csv:FILE, ..."
    )
    folders.add_data(parser)
    parser.add_argument(
        "--recipe-out",
        type=Path,
        metavar="FILE",
        help="without a recipe: where it is kept, by default NAME.toml",
    )
    parser.add_argument(
        "--leave-out",
        metavar="CLASS",
        action="append",
        help="fit without a class; may be given several times",
    )
    parser.add_argument("--name", help="publish under this name in place of the recipe's")
    parser.add_argument("--seed", type=int, help="in place of the recipe's seed")
    parser.add_argument(
        "--warm-start", metavar="NAME[:VERSION]", help="go on from a published version's weights"
    )
    parser.add_argument(
        "--again", action="store_true", help="fit also what a version was fitted from already"
    )
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def run(options: argparse.Namespace) -> None:
    """Fit, publish, and print the quality of what was published."""
    recipe = _planned(options) if options.recipe is None else _given(options)
    store = folders.store()
    parent = (
        None
        if options.warm_start is None
        else open_parent(store, options.warm_start, "--warm-start")
    )
    if parent is not None and parent.recipe.task != recipe.task:
        raise InvalidInput("task", f"{parent.recipe.task}, as of {parent.label}", recipe.task)
    known = () if parent is None else (parent.manifest.input.columns, parent.tokenizer)
    data = load(recipe, folders.data_root(), *known)
    if parent is not None:
        data = with_classes_of(data, parent.classes)
    splits = split(data, split_sizes(recipe))
    for line in near_duplicate_lines(splits, data.takes_ids):
        print(f"! {line}")

    from training.fitting.augmentation import check_augmentation
    from training.fitting.encoding import with_encoder
    from training.fitting.laplace import check_trained
    from training.fitting.memory import (
        keep_freed_memory,
    )  # wrong recipes and data are answered before torch is there
    from training.fitting.run import CHECKPOINT, Run, check_pixels, device_named, training_facts
    from training.fitting.target_choice import forget, target_choice
    from training.fitting.warm_start import check_compatible
    from training.publishing.publish import publish

    check_augmentation(recipe.augmentation, data.shape)
    check_pixels(recipe, data)
    recipe, encoding = with_encoder(recipe, data, splits.train, folders.runs(), parent)
    if parent is not None:
        check_compatible(recipe, data, parent)
    check_trained(recipe, parent)
    device = device_named(options.device)
    keep_freed_memory()
    begins_at = "" if parent is None else f" {parent.label} {sha256(parent.weights).hexdigest()}"
    encoded = None if encoding is None else encoding.spec.outputs
    if recipe.network.weights is not None:
        begins_at += f" {weights_digest(Path(recipe.network.weights))}"
    if encoding is not None:
        begins_at += f" {encoding.digest}"
    run_id = sha256(
        f"{recipe.digest()} {data.digest()} {device.type}{begins_at}".encode()
    ).hexdigest()[:12]
    folder = folders.runs() / f"{recipe.name}-{run_id}"
    if not options.again and not (folder / CHECKPOINT).exists():
        there = _fitted(store, recipe, data, parent)
        if there is not None:
            what = f"{there.name} version {there.version} was fitted by this recipe on these data"
            print(f"{what}, so there is nothing to do; --again fits it again")
            return
    with folders.locked(folder):
        if encoding is not None:
            splits = encoding.of(splits, options.quiet)
        choice = target_choice(recipe, data, splits, folder, device, parent, encoded)
        own_units, splits = splits, transformed(splits, choice.transform)
        weights = None
        if recipe.data.class_weights is not None:
            weights = class_weights(recipe.data.class_weights, data.classes, splits.train.y)
        largest_id = int(data.maximum) if data.takes_ids and encoding is None else None
        counts = len(data.classes)
        run = Run(
            recipe, splits, data.shape, counts, folder, device, parent, weights, encoded, largest_id
        )
        begun = (
            f"going on from step {run.progress.step}"
            if run.resumed
            else f"{run.steps} steps{'' if run.told_epochs is not None else ' at most'}"
        )
        print(
            f"{recipe.name}: {len(splits.train)} training rows, {begun} on {device.type}; run in "
            f"{folder}"
        )
        if parent is not None and not run.resumed:
            print(f"warm start from {parent.label}")
        if recipe.network.is_trained and parent is None and not run.resumed:
            print(f"the trained network, before the first step: {run.at_start()}")
        manifest = _published(store, recipe.name, run.progress.token)
        if manifest is None:  # else the run was killed between its publication and its end
            model = run.fit(quiet=options.quiet)
            facts = training_facts(
                run, splits, log_slope_of(choice.transform, own_units.validation.y)
            )
            if choice.facts is not None:
                facts = facts.model_copy(update={"target_transform": choice.facts})
            print(f"stopped {facts.stopped}")
            if facts.convergence is not None:
                print(facts.convergence["says"])
            if facts.laplace is not None:
                print(facts.laplace["says"])
            root = folders.data_root()
            transform = choice.transform
            manifest = publish(
                store, recipe.name, model, recipe, data, splits, facts, root, transform, encoding
            )
        run.checkpoint.unlink()
        forget(folder)
    for key, value in manifest.quality.items():
        print(f"  {key:32} {value:.4f}")
    plot = folder / "progress.png"
    print(
        f"published {manifest.name} version "
        f"{manifest.version}{f'; plot: {plot}' if plot.exists() else ''}"
    )


def _given(options: argparse.Namespace) -> Recipe:
    """Return the recipe of a file, with what the options say in place of what it says."""
    for name in ("task", "group", "time", "missing_value", "ignore", "recipe_out"):
        if getattr(options, name) is not None:
            raise InvalidInput(
                f"--{name.replace('_', '-')}", "none beside a recipe, which says it", "one"
            )
    return recipes.override(
        recipes.load(options.recipe),
        name=options.name,
        seed=options.seed,
        source=options.data,
        target=options.target,
        leave_out=options.leave_out,
    )


def _planned(options: argparse.Namespace) -> Recipe:
    """Look at the data, say what they are taken for and what follows, and keep it as a recipe."""
    if options.data is None:
        raise InvalidInput("recipe", "a recipe, or --data SRC to make one of", "neither")
    section = folders.data_section(options)
    if options.leave_out:
        section = section.model_copy(update={"leave_out": options.leave_out})
    found = findings_of(section, folders.data_root(), options.task)
    print("\n".join(short_report(found)))
    plan = plan_of(found, section, options.name, options.seed)
    print("\n".join(plan_lines(plan)))
    path = options.recipe_out or Path(f"{plan.recipe.name}.toml")
    recipe = keep_recipe(plan, path)
    print(f"recipe: {path}; `fit {path}` fits it again")
    return recipe


def weights_digest(path: Path) -> str:
    """Return a file's SHA-256.

    Raises:
        InvalidInput: if it cannot be read.
    """
    try:
        with path.open("rb") as file:
            return file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InvalidInput(
            "network.weights", f"a safetensors file at {path}", error.strerror or "an error"
        ) from None


def _fitted(
    store: ModelStore, recipe: Recipe, data: Dataset, parent: Parent | None
) -> Manifest | None:
    """Return the latest whole version that was fitted by a recipe on such data, if there is one.

    None of a factory's network, or one of a file of weights: what these hold does not stand in the
    recipe.
    """
    network = recipe.network
    if (
        network.factory is not None
        or network.weights is not None
        or network.encoder_file is not None
    ):
        return None
    for version in reversed(store.versions(recipe.name)):
        with suppress(StoreError, InvalidInput):
            manifest = store.manifest(recipe.name, version)
            facts = TrainingFacts.of(manifest)
            if (
                facts.data_digest == data.digest()
                and facts.pruned is None
                and facts.labels is None
                and facts.recalibrated is None
                and facts.warm_start == (None if parent is None else parent.facts)
                and recipe_of(manifest, "recipe").digest() == recipe.digest()
            ):
                return store.open(recipe.name, version, wanted=()).manifest
    return None


def _published(store: ModelStore, name: str, token: str) -> Manifest | None:
    """Return the manifest of the version that a run has published, if it has."""
    for version in reversed(store.versions(name)):
        with suppress(StoreError):
            manifest = store.manifest(name, version)
            if TrainingFacts.of(manifest).run == token:
                return manifest
    return None
