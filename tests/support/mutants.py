"""Mutation testing, a part at a time: `.venv-mutants/bin/python tests/support/mutants.py model_store/scores`.

Mutants are made by cosmic-ray rather than mutmut: it keeps plan and results in a file for each
module, so that a run which is stopped goes on where it was, and new tests can be tried on what
survived (`--again`); it mutates decorated methods and constants too; and its tests are a command,
so that each part has its own. It changes files in place: here in a clone of the last commit, next to
the sessions in `build/`.

Of cosmic-ray's replacements those are made that a test may well miss: of comparisons the
neighbouring and the opposite one, of arithmetic the inverse, numbers by one, conditions, constants
and decorators. Type annotations are left alone. `--share` runs a random sample of a part's mutants,
drawn with `--seed`.
"""

import argparse
import ast
import fcntl
import random
import re
import shlex
import sqlite3
import subprocess
import sys
from pathlib import Path

from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import WorkerOutcome, WorkResult

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "mutants"
TIMEOUT_S = 300
PYTEST = (
    "-q -x -p no:cacheprovider -p no:xdist -m 'not slow and not fits and not serves and not real'"
)

# Modules by what their path begins with, and the tests that run for each; the longest that fits
# counts.
TESTS = {
    "model_store/scores/": "tests/model_store/scores",
    "model_store/conformal/abstention.py": "tests/model_store/conformal/test_abstention.py "
    "tests/model_store/conformal/test_calibration.py",
    "model_store/conformal/calibration.py": "tests/model_store/conformal",
    "model_store/conformal/detectors.py": "tests/model_store/conformal/test_detectors.py",
    "model_store/conformal/rank_tables.py": "tests/model_store/conformal/test_calibration.py "
    "tests/model_store/conformal/test_false_discovery.py",
    "model_store/conformal/sets.py": "tests/model_store/conformal/test_sets.py",
    "model_store/conformal/stopping.py": "tests/model_store/conformal/test_stopping.py",
    "model_store/inference/": "tests/model_store/inference tests/model_store/conformal/test_stopping.py",
    "model_store/sources/": "tests/model_store/sources",
    "model_store/artifacts/": "tests/model_store/artifacts",
    "service/engine/": "tests/service/engine",
}

OPERATORS = (
    "Add_Sub",
    "Sub_Add",
    "Mul_Div",
    "Div_Mul",
    "FloorDiv_Mul",
    "Mod_Mul",
    "Pow_Mul",
    "LShift_RShift",
    "RShift_LShift",
    "BitOr_BitAnd",
    "BitAnd_BitOr",
    "BitXor_BitAnd",
    "Eq_NotEq",
    "NotEq_Eq",
    "Lt_LtE",
    "Lt_GtE",
    "LtE_Lt",
    "LtE_Gt",
    "Gt_GtE",
    "Gt_LtE",
    "GtE_Gt",
    "GtE_Lt",
    "Is_IsNot",
    "IsNot_Is",
    "USub_UAdd",
    "Delete_Not",
    "Delete_Invert",
    "AddNot",
    "ReplaceTrueWithFalse",
    "ReplaceFalseWithTrue",
    "ReplaceAndWithOr",
    "ReplaceOrWithAnd",
    "ReplaceBreakWithContinue",
    "ReplaceContinueWithBreak",
    "ExceptionReplacer",
    "NumberReplacer",
    "RemoveDecorator",
    "ZeroIterationForLoop",
)


def main() -> None:
    """Run what is left of a part's mutants, then say which were killed and which survived."""
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    arguments.add_argument("part", help="a folder or a module, such as model_store/scores")
    arguments.add_argument("--share", type=float, default=1.0, help="share of the mutants to run")
    arguments.add_argument("--seed", type=int, default=0, help="of the sample")
    arguments.add_argument(
        "--python", default=str(ROOT / ".venv" / "bin" / "python"), help="what runs the tests"
    )
    arguments.add_argument("--report", action="store_true", help="only say what is known so far")
    arguments.add_argument(
        "--again", action="store_true", help="try today's tests on those that survived too"
    )
    options = arguments.parse_args()
    modules = [path for path in tracked(options.part) if tests_of(path)]
    if not modules:
        arguments.error(
            f"part: expected one with modules below {sorted(TESTS)}, got {options.part!r}"
        )
    folder = BUILD / f"{options.share:g}-{options.seed}"
    if options.report:
        report([path for module in modules if (path := session_path(folder, module)).exists()])
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: another run is at it
        checked_out(folder)
        sessions = [session(folder, module, options) for module in modules]
        for module, path in zip(modules, sessions, strict=True):
            execute(module, path, options.again)
    report(sessions)


def tracked(part: str) -> list[str]:
    """Return the modules of a part that git knows, but for those without code."""
    found = subprocess.run(
        ["git", "ls-files", part], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    return [
        path for path in found.split() if path.endswith(".py") and not path.endswith("__init__.py")
    ]


def tests_of(module: str) -> str | None:
    """Return the tests that run for a module."""
    fitting = [prefix for prefix in TESTS if module.startswith(prefix)]
    return TESTS[max(fitting, key=len)] if fitting else None


def session_path(folder: Path, module: str) -> Path:
    """Return where the session of a module is kept, by what the last commit holds of it."""
    content = git("rev-parse", "--short", f"HEAD:{module}", cwd=ROOT)
    return folder / f"{module.removesuffix('.py').replace('/', '.')}-{content}.sqlite"


def session(folder: Path, module: str, options: argparse.Namespace) -> Path:
    """Return the session of a module, planned if there is none."""
    path = session_path(folder, module)
    # `timeout` ends tests that hang also where the run was stopped, which leaves them behind.
    python = f"timeout {TIMEOUT_S} {shlex.quote(options.python)}"
    command = f"{python} -m pytest {PYTEST} --basetemp ../pytest {tests_of(module)}"
    path.with_suffix(".toml").write_text(
        f'[cosmic-ray]\nmodule-path = "{module}"\ntimeout = {TIMEOUT_S}\nexcluded-modules = []\n'
        f'test-command = """{command}"""\n[cosmic-ray.distributor]\nname = "local"\n'
    )
    if path.exists():
        return path
    draft = path.with_suffix(".draft")
    draft.unlink(missing_ok=True)
    run("cosmic-ray", "init", str(path.with_suffix(".toml")), str(draft), cwd=folder / "checkout")
    choose(draft, folder / "checkout" / module, options)
    draft.rename(path)
    return path


def checked_out(folder: Path) -> None:
    """Bring the clone in a folder to the last commit; a run that was stopped may have left a mutant
    there."""
    checkout = folder / "checkout"
    if not checkout.exists():
        git("clone", "--quiet", str(ROOT), str(checkout), cwd=folder)
    git("fetch", "--quiet", "origin", "HEAD", cwd=checkout)
    git("checkout", "--quiet", "--force", "--detach", "FETCH_HEAD", cwd=checkout)


def choose(path: Path, module: Path, options: argparse.Namespace) -> None:
    """Mark the mutants that are not to be run as skipped."""
    annotated = annotations(module)
    wanted = re.compile(rf"core/(Replace\w+Operator_)?({'|'.join(OPERATORS)})")
    with use_db(path, WorkDB.Mode.open) as db:
        kept = []
        for item in sorted(db.work_items, key=lambda item: key(item.mutations[0])):
            (mutation,) = item.mutations
            if wanted.fullmatch(mutation.operator_name) and mutation.start_pos not in annotated:
                kept.append(item.job_id)
        chosen = set(random.Random(options.seed).sample(kept, round(options.share * len(kept))))
        skipped = [item.job_id for item in db.work_items if item.job_id not in chosen]
        db.set_multiple_results(skipped, WorkResult(WorkerOutcome.SKIPPED))


def key(mutation) -> tuple:
    """Return what mutants are ordered by: cosmic-ray numbers them differently each time."""
    return (mutation.start_pos, mutation.operator_name, mutation.occurrence)


def annotations(module: Path) -> set[tuple[int, int]]:
    """Return the places of a module, line and column, that lie in type annotations."""
    text = module.read_text(encoding="utf-8")
    lines, places = text.splitlines(), set()
    for node in ast.walk(ast.parse(text)):
        for name in ("annotation", "returns"):
            part = getattr(node, name, None)
            if part is not None:
                for line in range(part.lineno, part.end_lineno + 1):
                    first = part.col_offset if line == part.lineno else 0
                    last = part.end_col_offset if line == part.end_lineno else len(lines[line - 1])
                    places |= {(line, column) for column in range(first, last)}
    return places


def execute(module: str, path: Path, again: bool) -> None:
    """Run a session's mutants that have no result yet, or survived and are tried `again`."""
    if again:
        with sqlite3.connect(path) as connection:
            connection.execute("DELETE FROM work_results WHERE test_outcome = 'SURVIVED'")
    checkout = path.parent / "checkout"
    with use_db(path, WorkDB.Mode.open) as db:
        left = db.num_work_items - db.num_results
    print(f"{module}: {left} mutants to run", flush=True)
    if left == 0:
        return
    config = path.with_suffix(".toml")
    run("cosmic-ray", "baseline", str(config), cwd=checkout)  # the tests must pass as it is
    run("cosmic-ray", "exec", str(config), str(path), cwd=checkout)


def report(sessions: list[Path]) -> None:
    """Print what survived, and the numbers."""
    for path in sessions:
        with use_db(path, WorkDB.Mode.open) as db:
            results = [
                (item.mutations[0], result)
                for item, result in db.completed_work_items
                if result.worker_outcome != WorkerOutcome.SKIPPED
            ]
            left = db.num_work_items - db.num_results
        survived = [(mutation, result) for mutation, result in results if not result.is_killed]
        for mutation, result in sorted(survived, key=lambda one: key(one[0])):
            print(f"\n{mutation.module_path}:{mutation.start_pos[0]} {mutation.operator_name}")
            print(
                "\n".join(
                    line
                    for line in (result.diff or "").splitlines()
                    if re.match(r"[-+](?![-+])", line)
                )
            )
        share = f", {1 - len(survived) / len(results):.1%} killed" if results else ""
        print(f"{path.stem}: {len(results)} run, {len(survived)} survived{share}; {left} left")


def run(program: str, *arguments: str, cwd: Path) -> None:
    """Run a program of this environment; its output is shown where it fails."""
    command = [str(Path(sys.executable).parent / program), *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{shlex.join(command)} failed:\n{done.stdout}{done.stderr}")


def git(*arguments: str, cwd: Path) -> str:
    """Run git, and return what it prints."""
    return subprocess.run(
        ["git", *arguments], cwd=cwd, check=True, capture_output=True, text=True
    ).stdout.strip()


if __name__ == "__main__":
    main()
