import json
import subprocess
import sys

import pytest

from model_store.overrides import Override
from tests.support.environment import ROOT, environment_in

PROBE = """
import csv, importlib, json, logging, os, pkgutil, random, sys, warnings
from pathlib import Path

import numpy as np
import onnxscript, sklearn.ensemble, torch
from PIL import Image, ImageFile, PngImagePlugin

LOGGERS = "torch.onnx", "torch.fx.experimental.symbolic_shapes"

def state():
    return {
        "environment": dict(os.environ),
        "csv": csv.field_size_limit(),
        "images": [Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES],
        "texts in images": [PngImagePlugin.MAX_TEXT_MEMORY, PngImagePlugin.MAX_TEXT_CHUNK],
        "attention": torch.backends.mha.get_fastpath_enabled(),
        "threads": torch.get_num_threads(),
        "torch": [torch.initial_seed(), str(torch.get_default_dtype())],
        "random": [str(torch.get_rng_state().sum()), str(random.getstate()), str(np.random.get_state())],
        "numpy": np.geterr(),
        "loggers": [logging.getLogger(name).level for name in LOGGERS],
        "handlers": len(logging.root.handlers),
        "path": sys.path,
    }

before = state()
for package in ("model_store", "training"):
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
imported = state()

from tests.support.recipes import SMALL
from training.fit import fit, publish
from training.recipe import Recipe
from model_store.artifacts.store import ModelStore

table = Path(os.environ["DUBITO_DATA"]) / "table.csv"
rows = [f"{n % 7},{n % 5},{'ab'[n % 2]}" for n in range(600)]
table.write_text("\\n".join(["x,z,y", *rows]))
data = SMALL["data"] | {"source": f"csv:{table}", "target": "y"}
publish(fit(Recipe.model_validate(SMALL | {"data": data}), quiet=True), ModelStore(table.with_name("models")), anyway=True)
print(json.dumps([before, imported, state()]))
"""


@pytest.mark.slow
def test_imports_and_fits_preserve_process_settings(tmp_path):
    environment = environment_in(tmp_path)
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(
        tmp_path
    )  # Torch sets this variable if it is missing.
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        environment.pop(name, None)
    completed = subprocess.run(
        [sys.executable, "-c", PROBE],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert completed.returncode == 0, completed.stderr
    before, after_import, after_fit = json.loads(completed.stdout.splitlines()[-1])
    assert after_import == before
    assert after_fit == before


def test_nested_overrides_restore_value_at_end():
    values = [3]
    override = Override(lambda: values[0], lambda value: values.__setitem__(0, value), 7)
    with override:
        with override:
            pass
        assert values[0] == 7
    assert values[0] == 3
