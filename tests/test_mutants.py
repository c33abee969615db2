"""Mutation testing that is stopped goes on where it was: what the last run planned and left behind
is taken up.

cosmic-ray, which makes and runs the mutants, is in an environment of its own, so only its names are
here.
"""

import argparse
import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

pytestmark = pytest.mark.slow

MODULE = "part/module.py"
OPTIONS = argparse.Namespace(share=1.0, seed=0, python="python")


@pytest.fixture
def mutants(tmp_path, monkeypatch):
    """The tool, in a repository of one module, and what it was to run."""
    for name, names in (
        ("work_db", ("WorkDB", "use_db")),
        ("work_item", ("WorkerOutcome", "WorkResult")),
    ):
        stub = ModuleType(f"cosmic_ray.{name}")
        stub.__dict__.update(dict.fromkeys(names))
        monkeypatch.setitem(sys.modules, f"cosmic_ray.{name}", stub)
    monkeypatch.setitem(sys.modules, "cosmic_ray", ModuleType("cosmic_ray"))
    monkeypatch.delitem(sys.modules, "tests.support.mutants", raising=False)
    tool = importlib.import_module("tests.support.mutants")
    monkeypatch.delitem(sys.modules, "tests.support.mutants")
    root = tmp_path / "repository"
    (root / "part").mkdir(parents=True)
    (root / MODULE).write_text("ONE = 1\n")
    git(root, "init")
    commit(root)
    monkeypatch.setattr(tool, "ROOT", root)
    monkeypatch.setattr(tool, "TESTS", {"part/": "tests/part"})
    return SimpleNamespace(tool=tool, root=root, folder=tmp_path / "build")


def git(root, *arguments):
    named = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", *named, *arguments], cwd=root, check=True, capture_output=True)


def commit(root):
    git(root, "add", "-A")
    git(root, "commit", "-m", "one")


def test_a_mutant_that_a_stopped_run_left_is_gone_when_the_next_begins(mutants):
    mutants.folder.mkdir()
    mutants.tool.checked_out(mutants.folder)
    left = mutants.folder / "checkout" / MODULE
    left.write_text("ONE = 2\n")
    mutants.tool.checked_out(mutants.folder)
    assert left.read_text() == "ONE = 1\n"
    (mutants.root / MODULE).write_text("ONE = 3\n")
    commit(mutants.root)
    mutants.tool.checked_out(mutants.folder)
    assert left.read_text() == "ONE = 3\n"


def test_a_plan_is_made_once_whole_or_not_at_all_and_anew_for_another_module(mutants, monkeypatch):
    planned = []

    def plan(program, *arguments, cwd):
        planned.append(arguments)
        with Path(arguments[-1]).open(
            "x"
        ) as draft:  # what an earlier planning left would stop this one
            draft.write(f"plan {len(planned)}")

    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(mutants.tool, "run", plan)
    monkeypatch.setattr(mutants.tool, "choose", stopped)
    mutants.folder.mkdir()
    with pytest.raises(KeyboardInterrupt):
        mutants.tool.session(mutants.folder, MODULE, OPTIONS)
    assert not mutants.tool.session_path(mutants.folder, MODULE).exists()
    monkeypatch.setattr(mutants.tool, "choose", lambda *_: None)
    first = mutants.tool.session(mutants.folder, MODULE, OPTIONS)
    assert first.read_text() == "plan 2"
    assert mutants.tool.session(mutants.folder, MODULE, OPTIONS) == first
    assert len(planned) == 2
    (mutants.root / MODULE).write_text("ONE = 3\n")
    commit(mutants.root)
    assert mutants.tool.session(mutants.folder, MODULE, OPTIONS) != first
