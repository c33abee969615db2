"""The `dubito active` command."""

import argparse
from contextlib import ExitStack
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path

from experiments.active.protocol import Arm, End, Protocol, Start
from model_store.acquisition.choice import RANDOM, check_acquisition, check_beta
from model_store.errors import InvalidInput
from model_store.scores.tasks import PREDICTIVES
from model_store.types import Task
from training import log
from training import recipe as recipes
from training.data import load
from training.data.rows import Dataset
from training.folders import data_root, hold, runs_folder
from training.methods import Laplace
from training.recipe import Recipe

FOLDER = "active"  # among the runs


def active(options: argparse.Namespace) -> None:
    loaded = [
        recipes.override(recipes.load(path), source=options.data, target=options.target)
        for path in options.recipes
    ]
    data = _data(loaded)
    rows = len(data[loaded[0].name].train)
    protocol, end = _protocol(options, loaded[0].task), _end(options, loaded[0].task, rows)
    arms = [arm for recipe in loaded for arm in _arms(options, recipe)]

    # These imports load torch, so they follow the checks of recipes and data.
    from experiments.active.report import report
    from experiments.active.simulation import Work, load_curves, simulate_all
    from training.fit import check_pixels, find_device, weights_digest
    from training.fitting.steps import check_augmentation

    for recipe in loaded:
        check_augmentation(recipe.augmentation, data[recipe.name].shape)
        check_pixels(recipe, data[recipe.name])
    device = find_device(options.device)
    runs = {}
    for recipe in loaded:
        digests = [recipe.digest(), data[recipe.name].digest(), device.type]
        if recipe.network.weights is not None:
            digests.append(weights_digest(Path(recipe.network.weights)))
        digest = sha256(f"{digests} {asdict(protocol)}".encode()).hexdigest()[:12]
        runs[recipe.name] = runs_folder() / FOLDER / f"{recipe.name}-{digest}"
    work = [
        Work(arm, data[arm.recipe.name], seed, runs[arm.recipe.name])
        for arm in arms
        for seed in range(arm.recipe.seed, arm.recipe.seed + options.seeds)
    ]
    with ExitStack() as locks:
        if not options.report:
            for folder in runs.values():
                locks.enter_context(hold(folder))
            simulate_all(work, protocol, end, device, options.quiet)
        result = report(load_curves(work), loaded[0].data.source, protocol, end)
    folder = runs_folder() / FOLDER / "-".join(runs)
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in result.files().items():
        (folder / file).write_bytes(content)
    print(result.text())
    print(f"report: {folder / 'active.md'}")


def _data(loaded: list[Recipe]) -> dict[str, Dataset]:
    data: dict[str, Dataset] = {}
    for recipe in loaded:
        if recipe.name in data:
            raise InvalidInput("name", "recipes with different names", f"{recipe.name!r} twice")
        if isinstance(recipe.posterior, Laplace):
            expected = "a method fitted by steps alone"
            raise InvalidInput("method", expected, repr(recipe.method))
        transform, encoder = recipe.data.target_transform, recipe.network.encoder
        if transform != "none":
            expected = "'none' (the choice of a transform needs all labels)"
            raise InvalidInput("data.target_transform", expected, repr(transform))
        if recipe.network.encoder is not None:
            expected = "no encoder (encode the rows once, and use them as npz: data)"
            raise InvalidInput("network.encoder", expected, repr(encoder))
        data[recipe.name] = load(recipe, data_root())
        first = loaded[0]
        if (recipe.task, data[recipe.name].digest()) != (first.task, data[first.name].digest()):
            expected = f"the task and rows of {first.name}"
            raise InvalidInput("data", expected, f"those of {recipe.name}")
    return data


def _protocol(options: argparse.Namespace, task: Task) -> Protocol:
    for name in ("initial", "batch", "candidates", "draws", "test_draws", "epochs", "seeds"):
        number = getattr(options, name)
        if number < 1:
            raise InvalidInput(f"--{name.replace('_', '-')}", "at least 1", str(number))
    for name, limit in (("candidates", "batch"), ("until", "initial")):
        number, minimum = getattr(options, name), getattr(options, limit)
        if number < minimum:
            raise InvalidInput(f"--{name}", f"at least {minimum} (--{limit})", str(number))
    if options.race is not None and not 0 < options.race < 1:
        raise InvalidInput("--race", "a number in (0, 1)", str(options.race))
    sampled = [
        name
        for name in options.acquisition or []
        if name in PREDICTIVES[task].sampling_acquisitions
    ]
    names = sampled or options.acquisition or [PREDICTIVES[task].default_acquisition]
    return Protocol(
        options.initial,
        options.batch,
        options.candidates,
        options.draws,
        options.test_draws,
        options.epochs,
        options.race,
        check_beta(options.beta, names[0], task),
    )


def _end(options: argparse.Namespace, task: Task, rows: int) -> End:
    accuracy, rmse = options.target_accuracy, options.target_rmse
    if task == "regression" and accuracy is not None:
        expected = "--target-rmse for a regression"
        raise InvalidInput("--target-accuracy", expected, str(accuracy))
    if task == "classification" and rmse is not None:
        expected = "--target-accuracy for a classification"
        raise InvalidInput("--target-rmse", expected, str(rmse))
    if accuracy is not None and not 0 < accuracy < 1:
        raise InvalidInput("--target-accuracy", "a number in (0, 1)", str(accuracy))
    if rmse is not None and not rmse > 0:
        raise InvalidInput("--target-rmse", "a number above 0", str(rmse))
    if options.until > rows:
        message = "arms end at %d labels, the number of training rows (--until %d)"
        log.info(message, rows, options.until)
    return End(min(options.until, rows), rmse if accuracy is None else accuracy)


def _arms(options: argparse.Namespace, recipe: Recipe) -> list[Arm]:
    names = [check_acquisition(name, recipe.task) for name in options.acquisition or [None]]
    starts: list[Start] = ["warm", "cold"] if options.start == "both" else [options.start]
    names = list(dict.fromkeys([*names, RANDOM]))
    return [Arm(recipe, name, start) for start in starts for name in names]
