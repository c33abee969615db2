"""Export versions as MLflow models and load them for prediction.

    FOLDER/MLmodel                 flavour `python_function`, with this module as its loader
    FOLDER/requirements.txt        packages
    FOLDER/python_env.yaml         Python's version
    FOLDER/code/                   `model_store` and this module
    FOLDER/store/NAME/VERSION/     the published version, unchanged

The export contains no pickles and needs neither torch nor the service. Loading checks each file of
the version against its manifest.
"""

import json
import platform
import secrets
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime

import model_store
from model_store.artifacts.manifest import Manifest
from model_store.artifacts.signature import SIGNATURE
from model_store.artifacts.storage import MANIFEST
from model_store.artifacts.store import ModelStore
from model_store.conformal.calibration import DEFAULT_COVERAGE, DEFAULT_FPR
from model_store.errors import InvalidInput
from model_store.inference.answers import result_columns
from model_store.inference.frames import decide_as_served, is_frame, predict
from model_store.inference.model import NEEDED, Model
from model_store.inference.noise import MAX_SEED
from model_store.scores.classification import Scores

if TYPE_CHECKING:
    import pandas

NEEDS = (
    *("jaxtyping", "mlflow-skinny>=3", "onnx", "orjson", "pandas", "pillow", "pyarrow"),
    *("pydantic", "safetensors"),
)
PARAMS = {
    "seed": ("long", None),
    "num_samples": ("long", None),
    "fpr": ("double", DEFAULT_FPR),
    "coverage": ("double", DEFAULT_COVERAGE),
}


def export(store: ModelStore, name: str, version: str, folder: Path) -> None:
    """Export a version as an MLflow model. The folder is created atomically."""
    if folder.exists():
        raise InvalidInput("folder", "a folder that does not exist yet", str(folder))
    artifact = store.open(name, version, files=())
    folder.absolute().parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.absolute().parent, prefix=".draft-") as scratch:
        draft = Path(scratch, "model")
        _copy_code(draft / "code")
        copy = draft / "store" / name / version
        copy.mkdir(parents=True)
        for file in (MANIFEST, SIGNATURE, *artifact.manifest.files):
            if (artifact.folder / file).exists():
                shutil.copyfile(artifact.folder / file, copy / file)
        for file, content in _descriptions(artifact.manifest).items():
            (draft / file).write_text(content)
        draft.rename(folder)


def _copy_code(folder: Path) -> None:
    """Copy the code that the exported model needs: `model_store` and this module."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(model_store.__file__).parent, folder / "model_store", ignore=ignored)
    package = folder / "integrations" / "mlflow"
    package.mkdir(parents=True)
    for parent in (package.parent, package):
        (parent / "__init__.py").touch()
    shutil.copy(__file__, package)


def requirements(with_text: bool = True) -> list[str]:
    """Return an exported model's requirements, with numpy and onnxruntime pinned."""
    exact = [f"numpy=={np.__version__}", f"onnxruntime=={onnxruntime.__version__}"]
    return [*exact, *NEEDS, *(["tokenizers"] if with_text else [])]


def _descriptions(manifest: Manifest) -> dict[str, str]:
    """Create an MLflow model's metadata files. They contain JSON, which is valid YAML."""
    python = platform.python_version()
    params = [
        {"name": name, "type": kind, "default": default, "shape": None}
        for name, (kind, default) in PARAMS.items()
    ]
    spec = manifest.input
    names = [column.name for column in spec.columns] if spec.text is None else [spec.text.column]
    columns = [{"type": "any", "name": name, "required": True} for name in names]
    model = {
        "flavors": {
            "python_function": {
                "loader_module": __name__,
                "data": "store",
                "code": "code",
                "env": {"virtualenv": "python_env.yaml"},
                "python_version": python,
            }
        },
        "signature": {
            "inputs": json.dumps(columns) if columns else None,
            "params": json.dumps(params),
        },
        "utc_time_created": manifest.created.strftime("%Y-%m-%d %H:%M:%S.%f"),
        "metadata": {"name": manifest.name, "version": manifest.version},
    }
    environment = {"python": python, "dependencies": ["-r requirements.txt"]}
    return {
        "MLmodel": json.dumps(model, indent=2),
        "python_env.yaml": json.dumps(environment, indent=2),
        "requirements.txt": "\n".join([*requirements(spec.text is not None), ""]),
    }


def _load_pyfunc(path: str) -> "PyfuncModel":  # MLflow calls it by this name
    store = ModelStore(Path(path))
    (name,) = store.names()
    (version,) = store.versions(name)
    return PyfuncModel(Model.load(store.open(name, version, NEEDED)))


class PyfuncModel:
    """An MLflow model that gives the same predictions as the service."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def predict(self, rows: Any, params: dict[str, Any] | None = None) -> "pandas.DataFrame":
        """Predict rows. The result has a column for each `POST /predict` field and the seed."""
        import pandas

        values = {name: default for name, (_, default) in PARAMS.items()} | (params or {})
        seed = secrets.randbelow(MAX_SEED + 1) if values["seed"] is None else values["seed"]
        X: Any = rows if is_frame(rows) else np.asarray(rows)
        names = [str(name) for name in X.columns] if is_frame(X) else None
        prediction = predict(self.model, X, names, values["num_samples"], seed)
        decision = decide_as_served(self.model, prediction, values["fpr"], values["coverage"])
        manifest, labels = self.model.manifest, None
        if isinstance(prediction.scores, Scores):
            labels = np.array(manifest.classes)[prediction.scores.labels]
        columns = result_columns(manifest, prediction, decision, labels)
        index = X.index if is_frame(X) else None
        return pandas.DataFrame({**columns, "seed": seed}, index=index)
