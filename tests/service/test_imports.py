import json
import subprocess
import sys

from tests.support.environment import ROOT, environment_with

TEXT_PACKAGES = {"tokenizers", "huggingface_hub"}
CLUSTER_PACKAGES = {"obstore", "ray"}
TRAINING_PACKAGES = {"torch", "training", "sklearn", "matplotlib", "onnxscript", "scipy", "tqdm"}
TABLE_PACKAGES = {"pyarrow"}
CREATE_APP = """
import json, sys
import service.__main__
from service.app import create_app
from service.settings import read_settings
create_app(read_settings())
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def test_service_starts_without_training_and_optional_packages():
    completed = subprocess.run(
        [sys.executable, "-c", CREATE_APP],
        env=environment_with(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    loaded = set(json.loads(completed.stdout))
    assert {"service", "model_store", "fastapi", "onnxruntime"} <= loaded
    assert not loaded & (TRAINING_PACKAGES | TABLE_PACKAGES | TEXT_PACKAGES | CLUSTER_PACKAGES)
