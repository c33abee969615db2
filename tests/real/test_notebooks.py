"""Run the notebooks with nbclient. Requires `make test-real`."""

import re
import subprocess

import pytest

from tests.support.environment import ROOT, environment_with

PYTHON = ROOT / ".venv-notebooks" / "bin" / "python"
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not PYTHON.exists(), reason="nbclient is not installed: make test-real"),
]
ROWS = """
import numpy as np
from dubito import Classifier
X = np.random.default_rng(0).normal(size=(120, 2))
y = X[:, 0] > 0
"""


def run(folder, *arguments):
    paths = [str(ROOT), str(ROOT / "client")]
    settings = {"MLFLOW_TRACKING_URI": "file:runs-of-mlflow", "MLFLOW_ALLOW_FILE_STORE": "true"}
    completed = subprocess.run(
        [PYTHON, *arguments],
        cwd=folder,
        env=environment_with(PYTHONPATH=":".join(paths), **settings),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert completed.returncode == 0, completed.stderr[-4000:]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(notebook, tmp_path):
    runner = ROOT / "tests" / "real" / "run_notebook.py"
    run(tmp_path, runner, notebook, tmp_path / notebook.name)


def test_tensorboard_and_mlflow_record_each_epoch(tmp_path):
    section = (ROOT / "docs" / "python.md").read_text().partition("## Each epoch")[2]
    blocks = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert ["SummaryWriter" in block for block in blocks] == [True, False]
    run(tmp_path, "-c", ROWS + "\n".join(blocks).replace("Classifier(", 'Classifier("mle", '))
    assert [*(tmp_path / "tensorboard").glob("events.*")]
    (losses,) = tmp_path.glob("runs-of-mlflow/*/*/metrics/loss")
    assert len(losses.read_text().splitlines()) > 5
