import json
import subprocess
import sys
from io import StringIO

import numpy as np
import pandas as pd
import pytest

from integrations.mlflow.pyfunc import PyfuncModel
from model_store.artifacts.store import ModelStore
from model_store.inference.model import Model
from service.__main__ import main
from tests.support import tiny

LOAD_SCRIPT = """
import sys
sys.path.insert(0, "code")
import numpy as np
from integrations.mlflow.pyfunc import _load_pyfunc
model = _load_pyfunc("store")
assert not {"torch", "training", "service"} & {*sys.modules}
assert "/code/" in sys.modules["model_store"].__file__
print(model.predict(np.zeros((2, 3)), {"seed": 7}).to_json(double_precision=15))
"""


@pytest.fixture
def exported_model(store, tmp_path, capsys):
    tiny.publish(store, "tiny")
    folder = tmp_path / "written"
    assert main(["mlflow", "--store", str(store.root), "tiny", str(folder)]) == 0
    assert f"mlflow models serve -m {folder}" in capsys.readouterr().out
    return folder


def test_exported_model_predicts_the_same_with_exported_code(store, exported_model):
    metadata = json.loads((exported_model / "MLmodel").read_text())
    assert metadata["flavors"]["python_function"]["loader_module"] == "integrations.mlflow.pyfunc"
    assert not [*exported_model.rglob("*.pkl"), *exported_model.rglob("*.pyc")]
    output = subprocess.run(
        [sys.executable, "-I", "-c", LOAD_SCRIPT],
        cwd=exported_model,
        capture_output=True,
        text=True,
    )
    assert output.returncode == 0, output.stderr
    result = PyfuncModel(Model.load(store.open("tiny", "1")))
    expected = result.predict(np.zeros((2, 3)), {"seed": 7})
    pd.testing.assert_frame_equal(
        pd.read_json(StringIO(output.stdout), precise_float=True), expected, check_dtype=False
    )
    fresh = [result.predict(np.zeros((1, 3))).seed[0] for _ in range(2)]
    assert fresh[0] != fresh[1]


def test_existing_folder_is_not_overwritten(store, exported_model, capsys):
    before = sorted(exported_model.rglob("*"))
    assert main(["mlflow", "--store", str(store.root), "tiny:1", str(exported_model)]) == 2
    assert "folder: expected a folder that does not exist yet" in capsys.readouterr().err
    assert sorted(exported_model.rglob("*")) == before


def test_modified_graph_is_not_loaded(exported_model):
    graph = exported_model / "store" / "tiny" / "1" / "network.onnx"
    graph.write_bytes(graph.read_bytes()[:-1])
    with pytest.raises(Exception, match=r"network\.onnx"):
        ModelStore(exported_model / "store").open("tiny", "1")
