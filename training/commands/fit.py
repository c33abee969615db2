"""`python -m training fit` and `inspect`: fit a recipe, or one made of the data, and say what data
are taken for."""

import argparse
import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from model_store.artifacts.manifest import Manifest
from model_store.errors import InvalidInput
from training import log, silence
from training import recipe as recipes
from training.commands.common import open_store, print_quality
from training.data import load, split, split_sizes
from training.data.findings import Findings, alike_lines, duplicate_lines, findings_of
from training.data.plan import Plan, keep_recipe, plan_lines, plan_of
from training.folders import data_root, runs_folder
from training.recipe import DataSection, Recipe
from training.versions import find_fitted, load_for, open_parent

# What --json says of data, and of each column
OF_FINDINGS = ("source", "rows", "task", "why", "target", "shape", "classes", "notes")
OF_COLUMNS = ("name", "kind", "why", "missing", "notes")


def _data_section(options: argparse.Namespace) -> DataSection:
    given: dict[str, Any] = {
        "source": options.data,
        "target": options.target,
        "group": options.group,
        "time": options.time,
        "missing_values": options.missing_value,
        "date_format": options.date_format,
        "decimal": options.decimal,
        "thousands": options.thousands,
        "columns": dict.fromkeys(options.ignore, "ignored") if options.ignore else None,
    }
    try:
        return DataSection.model_validate({k: v for k, v in given.items() if v is not None})
    except ValidationError as error:
        first = error.errors()[0]
        expected = str(first["msg"]).removeprefix("Value error, ")
        if first["loc"]:
            option = f"--{first['loc'][0]}".replace("_", "-")
            raise InvalidInput(option, expected, repr(first["input"])) from None
        raise InvalidInput("options", expected, "both") from None


def fit(options: argparse.Namespace) -> None:
    plan = _plan(options) if options.recipe is None else None
    recipe = _read_recipe(options) if plan is None else plan.recipe
    store = open_store()
    start = options.warm_start and open_parent(store, options.warm_start, "--warm-start")
    data = load_for(recipe, data_root(), start)
    splits = split(data, split_sizes(recipe))
    for line in alike_lines(data.classes) + duplicate_lines(splits, data.takes_ids):
        log.info("! %s", line)

    # wrong recipes and data are answered before torch is there
    from training.fit import find_device, fit, publish, run_folder
    from training.fitting.run import CHECKPOINT
    from training.publishing.baselines import lines

    device, runs = find_device(options.device), runs_folder()
    if plan is not None:
        _keep(plan, options.recipe_out or Path(f"{recipe.name}.toml"))
    there = None if options.again else find_fitted(store, recipe, data, start)
    if there and not (run_folder(runs, recipe, data, device, start) / CHECKPOINT).exists():
        what = f"{there.label} was fitted by this recipe on these data"
        said = f"{what}, so there is nothing to do; --again fits it again"
        print(_as_json(there, is_new=False) if options.json else said)
        return
    fitted = fit(recipe, data, start=start, device=device, runs=runs, quiet=options.quiet)
    manifest = publish(fitted, store, anyway=options.anyway)
    if options.json:
        print(_as_json(manifest, is_new=True))
        return
    print_quality(manifest.quality)
    for line in lines(manifest):
        print(f"  {line}")
    assert fitted.folder is not None
    plot = fitted.folder / "progress.png"
    end = f"; plot: {plot}" if plot.exists() else ""
    print(f"published {manifest.label}{end}")


def _as_json(manifest: Manifest, is_new: bool) -> str:
    said = {name: getattr(manifest, name) for name in ("name", "version", "quality", "warnings")}
    return json.dumps({**said, "is_new": is_new})


def _read_recipe(options: argparse.Namespace) -> Recipe:
    of_files = ("missing_value", "date_format", "decimal", "thousands", "ignore")
    for name in ("task", "group", "time", *of_files, "recipe_out"):
        if getattr(options, name) is not None:
            option = f"--{name.replace('_', '-')}"
            raise InvalidInput(option, "none with a recipe, which says it", "one")
    return recipes.override(
        recipes.load(options.recipe),
        name=options.name,
        seed=options.seed,
        source=options.data,
        target=options.target,
        leave_out=options.leave_out,
    )


def _plan(options: argparse.Namespace) -> Plan:
    if options.data is None:
        raise InvalidInput("recipe", "a recipe, or --data SRC to make one of", "neither")
    section = _data_section(options)
    if options.leave_out:
        section = section.model_copy(update={"leave_out": options.leave_out})
    found = findings_of(section, data_root(), options.task)
    log.info("%s", "\n".join(found.report(is_full=False)))
    plan = plan_of(found, section, options.name, options.seed)
    log.info("%s", "\n".join(plan_lines(plan)))
    return plan


def _keep(plan: Plan, path: Path) -> None:
    if keep_recipe(plan, path) != plan.recipe:  # whose folder has a file of the data's name
        expected = f"a folder without another {plan.recipe.data.source}"
        raise InvalidInput("--recipe-out", expected, str(path.parent))
    log.info("recipe: %s; `fit %s` fits it again", path, path)


def inspect(options: argparse.Namespace) -> None:
    section = _data_section(options)
    found = findings_of(section, data_root(), options.task)
    lines = alike_lines(found.classes) + _before_fit(found, section)
    if options.json:
        content = {name: getattr(found, name) for name in OF_FINDINGS}
        columns = [{name: getattr(c, name) for name in OF_COLUMNS} for c in found.columns]
        warnings = [*found.warnings, *lines]
        content |= {"columns": columns, "warnings": warnings}
        print(json.dumps(content))
        return
    print("\n".join([*found.report(is_full=True), *(f"! {line}" for line in lines)]))


def _before_fit(found: Findings, section: DataSection) -> list[str]:
    """Return what a fit by default warns of before it trains, or what stops it."""
    if found.task is None:
        return []
    lines: list[str] = []
    try:
        with silence():
            plan = plan_of(found, section, None, None)
            lines += plan.warnings
            splits = split(load(plan.recipe, data_root()), split_sizes(plan.recipe))
        return lines + duplicate_lines(splits)
    except InvalidInput as error:
        return [*lines, f"fit would stop: {error}"]
