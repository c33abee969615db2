"""Test an example with pretrained weights. Requires `make test-real`."""

import json
import re
import shutil
import subprocess

import httpx
import pytest

from tests.support.environment import ROOT, environment_with
from tests.support.serving import serving

PYTHON = ROOT / ".venv-examples" / "bin" / "python"
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        not PYTHON.exists(), reason="the examples' environment is missing: make test-real"
    ),
]


def test_file_types_are_classified_and_left_out_type_is_flagged(tmp_path):
    folder = tmp_path / "files"
    shutil.copytree(ROOT / "examples" / "files", folder)
    (folder / "data").mkdir(exist_ok=True)
    environment = environment_with(
        DUBITO_STORE=str(tmp_path / "models"),
        DUBITO_RUNS=str(tmp_path / "runs"),
        DUBITO_DATA="data",
    )
    environment["PYTHONPATH"] = str(ROOT)

    def run(*command):
        completed = subprocess.run(
            [PYTHON, *command],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert completed.returncode == 0, completed.stderr
        return completed.stdout

    run("kinds.py")
    output = run("-m", "training", "fit", "recipe.toml", "--quiet", "--leave-out", "svg")
    assert "published files version 1" in output
    script = "import json, sys, kinds; print(json.dumps([kinds.row(open(p, 'rb').read()) for p in sys.argv[1:]]))"
    rows = run("-c", script, str(ROOT / "service" / "app.py"), str(ROOT / "docs" / "api.md"))
    with serving(tmp_path / "models") as (url, _):
        answer = httpx.post(
            f"{url}/predict", json={"inputs": json.loads(rows), "seed": 1}, timeout=60
        ).json()
    assert answer["predictions"][0]["label"] == "py"
    output = run("-m", "training", "evaluate", "files", "--rows", "300", "--quiet")
    assert float(re.search(r"left-out_flag_auroc +([\d.]+)", output)[1]) > 0.9
