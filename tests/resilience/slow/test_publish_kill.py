"""Fifty kills of `fit` while it publishes, half of them aimed at the writing of files (some minutes):
every version that the store lists is whole, and is published once."""

import os
import random
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from model_store.artifacts.store import ModelStore
from tests.support.environment import ROOT, environment_with
from tests.support.recipes import write_recipe

pytestmark = pytest.mark.slow


def test_fifty_killed_publications_leave_no_partial_version(tmp_path):
    killed, published = kill_publications(tmp_path, attempts=50)
    print(f"{killed} of 50 were killed before their end; {published} attempts published")
    assert killed >= 25


def kill_publications(folder, attempts):
    """Train once, then kill that many publications of it, each from a copy of the trained run;
    publish at last.

    Every second kill is at any moment of the publication. Every other one aims at the writing of
        files: at a random
    delay after the draft appears, whose range grows while kills come before the version is there
    and shrinks while they come after. A version that is there is taken away before the next
    attempt. Returns how many processes were killed, and how many of the attempts published.
    """
    posterior = {"couplings": 1, "hidden": 8, "initial_log_std": -4.0}
    recipe = write_recipe(
        folder, name="killed", network={"hidden": [16]}, posterior=posterior, serving={"draws": 2}
    )
    runs, trained = folder / "runs", folder / "trained"
    store = ModelStore(folder / "models")
    with fitting(
        folder, recipe
    ) as process:  # trained, and killed as soon as it has begun to publish
        begin_publication(process)
    assert process.returncode == -9
    assert list(runs.glob("killed-*/checkpoint.safetensors"))
    runs.rename(trained)

    killed, published, seconds, delay = 0, 0, 4.0, 0.01
    for attempt in range(attempts):
        shutil.rmtree(runs, ignore_errors=True)
        shutil.copytree(trained, runs)
        with fitting(folder, recipe) as process:
            begin_publication(process)
            begun = time.monotonic()
            if attempt % 2:
                wait_for(random.uniform(0, seconds), process)
            else:
                while process.poll() is None and not drafts(folder):
                    time.sleep(1e-4)
                seconds = time.monotonic() - begun  # what a publication takes, nearly
                time.sleep(random.uniform(0, delay))
        killed += process.returncode == -9
        assert process.returncode in (0, -9)
        assert_whole(store, folder)
        if attempt % 2 == 0:
            delay *= 0.5 if store.versions("killed") else 2.0
        if store.versions("killed"):
            published += 1
            shutil.rmtree(folder / "models" / "killed")

    # a run that has published and was killed before it said so does not publish again
    for _ in range(2):
        shutil.rmtree(runs, ignore_errors=True)
        shutil.copytree(trained, runs)
        with fitting(folder, recipe) as process:
            process.communicate(timeout=120)
        assert process.returncode == 0
        assert store.versions("killed") == ["1"]
        assert store.resolve("killed") == "1"
        assert_whole(store, folder)
        assert not drafts(folder)
        assert not list(runs.glob("killed-*/checkpoint.safetensors"))
    return killed, published


def assert_whole(store, folder):
    """Every version opens, with every digest verified; nothing else is visible; a process adds one
    at most."""
    versions = store.versions("killed")
    assert len(versions) <= 1
    for version in versions:
        store.open("killed", version)
    root = folder / "models" / "killed"
    visible = (
        {entry.name for entry in os.scandir(root) if not entry.name.startswith(".")}
        if root.is_dir()
        else set()
    )
    assert visible - {"aliases"} == set(versions)
    if versions:
        assert store.resolve("killed") in versions


def drafts(folder):
    """Half-written versions."""
    return list((folder / "models" / "killed").glob(".draft-*"))


@contextmanager
def fitting(folder, recipe):
    """`python -m training fit RECIPE` as a process; when the block ends it is killed, if it has not
    ended."""
    environment = environment_with(
        DUBITO_STORE=str(folder / "models"),
        DUBITO_RUNS=str(folder / "runs"),
        PYTHONUNBUFFERED="1",
        OMP_NUM_THREADS="1",
    )
    command = [sys.executable, "-m", "training", "fit", str(recipe), "--quiet", "--device", "cpu"]
    process = subprocess.Popen(
        command,
        env=environment,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def begin_publication(process):
    """Read what a process says until it exports."""
    for line in process.stderr:
        if line.startswith("exporting"):
            return
    raise AssertionError(f"it ended with {process.wait()} before it published")


def wait_for(seconds, process):
    """Wait for some seconds or the process's end."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        time.sleep(1e-3)
