"""scikit-learn's logistic regression on what a version's encoder says, beside the version itself,
on the same rows.

`python -m benchmarks.regression NAME [--each]`, with the environment of the fit (DUBITO_STORE,
DUBITO_DATA, DUBITO_RUNS): C is chosen by the log-likelihood of the validation rows. Numbers are
divided by one deviation, or with `--each` each by its own. The version's figures are those of its
manifest, of 100 draws.
"""

import argparse

import numpy as np
from sklearn.linear_model import LogisticRegression

from model_store.artifacts.manifest import ENCODER
from model_store.inference.encoder import Encoder
from training.commands import open_store
from training.data import load, split, split_sizes
from training.fitting.encoding import FOLDER, SUFFIX, CachedEncoder
from training.folders import data_root, runs_folder
from training.versions import open_parent

STRENGTHS = [1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0]
ITERATIONS = 500


def main() -> None:
    """Fit for every C, and print both versions' figures on the test rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", metavar="NAME[:VERSION]")
    parser.add_argument("--each", action="store_true", help="standardise each number by itself")
    options = parser.parse_args()
    parent = open_parent(open_store(), options.name, "NAME")
    spec, digest = parent.manifest.encoder, parent.manifest.files[ENCODER].sha256
    assert spec is not None
    kept = runs_folder() / FOLDER
    size = int(np.prod(parent.manifest.input.shape))
    rows_file = kept / f"{digest}-{spec.rows_at_once}{SUFFIX}"
    encoder = CachedEncoder(Encoder(kept / f"{digest}.onnx", spec, size), spec.outputs, rows_file)
    splits = split(load(parent.recipe, data_root()), split_sizes(parent.recipe))
    parts = [splits.train, splits.validation, splits.test]
    x = [np.array(encoder.rows(rows.x)) for rows in parts]
    mean, std = (x[0].mean(0), x[0].std(0) + 1e-12) if options.each else (x[0].mean(), x[0].std())
    train, validation, test = ((part - mean) / std for part in x)
    found = []
    for strength in STRENGTHS:
        model = LogisticRegression(C=strength, max_iter=ITERATIONS).fit(train, splits.train.y)
        found.append(
            (figures(model, validation, splits.validation.y)["log_likelihood"], strength, model)
        )
        print(f"C = {strength:g}: validation log-likelihood {found[-1][0]:.4f}")
    _, strength, model = max(found, key=lambda one: one[0])
    print(f"logistic regression, C = {strength:g}:", figures(model, test, splits.test.y))
    quality = parent.manifest.quality
    print(
        f"{parent.label}:",
        {
            name: round(quality[f"test_{name}"], 4)
            for name in ("accuracy", "log_likelihood", "brier")
        },
    )


def figures(model: LogisticRegression, x: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """Return accuracy, log-likelihood in nats, and Brier score."""
    probs = model.predict_proba(x)
    told = np.log(np.maximum(probs[np.arange(len(y)), y], 1e-300)).mean()
    brier = np.square(probs - np.eye(probs.shape[1])[y]).sum(1).mean()
    found = {"accuracy": (probs.argmax(1) == y).mean(), "log_likelihood": told, "brier": brier}
    return {name: round(float(value), 4) for name, value in found.items()}


if __name__ == "__main__":
    main()
