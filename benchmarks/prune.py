"""A Bayes by Backprop model with shares of its weights removed: bytes, accuracy and time of each,
in one run.

    python -m benchmarks.prune NAME[:VERSION] [--data SRC] [--fractions 0 0.5 0.75 0.95 0.98]
    [--write]

NAME is a published version of `bbb-gaussian` or `bbb-mixture`; each share is pruned, calibrated and
measured as `python -m training prune` does, in a temporary store. Times are of a request of one row
under fresh draws, in process, the whole model's taken in turns with the pruned one's. With
`--write` the table and a plot go to docs/results/prune-NAME.{md,png}.
"""

import shutil
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from benchmarks.common import data_root, parser_of, report
from model_store.artifacts.manifest import Manifest
from model_store.artifacts.store import ModelStore
from training.publishing.derive import prune_version
from training.publishing.pruning import is_weight, signal_to_noise
from training.versions import fitted_data, open_parent

FRACTIONS = [0.0, 0.5, 0.75, 0.95, 0.98]


def table(whole: Manifest, pruned: list[Manifest]) -> str:
    lines = [
        "| removed | weights left | bytes | of the whole | ms | of the whole | test error | "
        "log-likelihood |",
        "|---|---|---|---|---|---|---|---|",
    ]
    sizes = sum(
        spec.size for file, spec in whole.files.items() if file != "calibration.safetensors"
    )
    lines.append(f"| not pruned | | {sizes:,} | | | | {_quality(whole)} |")
    for manifest in pruned:
        facts = manifest.training["pruned"]
        lines.append(
            f"| {100 * facts['fraction']:g} % | {facts['kept_weights']:,} of {facts['weights']:,} "
            f"| {facts['bytes']:,} | {100 * facts['bytes'] / facts['parent_bytes']:.0f} % "
            f"| {facts['request_ms']:.4g} | "
            f"{100 * facts['request_ms'] / facts['parent_request_ms']:.0f} % "
            f"| {_quality(manifest)} |"
        )
    return "\n".join(lines)


def _quality(manifest: Manifest) -> str:
    quality = manifest.quality
    return f"{100 * (1 - quality['test_accuracy']):.2f} % | {quality['test_log_likelihood']:.4f}"


def plot(ratio: np.ndarray, pruned: list[Manifest], title: str) -> Figure:
    decibels = 20 * np.log10(np.maximum(ratio.astype(np.float64), 1e-6))
    facts = [manifest.training["pruned"] for manifest in pruned]
    removed = [100 * fact["fraction"] for fact in facts]
    figure, (density, cumulative, error, share) = plt.subplots(
        1, 4, figsize=(16, 3.4), layout="constrained"
    )
    density.hist(decibels, bins=200, density=True, histtype="stepfilled")
    cumulative.plot(np.sort(decibels), np.arange(1, len(decibels) + 1) / len(decibels))
    for axis, label in ((density, "density"), (cumulative, "CDF")):
        axis.set(
            xlabel="20 log10 |mu| / sigma (dB)",
            ylabel=label,
            xlim=np.quantile(decibels, [0.001, 1.0]),
        )
    error.plot(
        removed, [100 * (1 - manifest.quality["test_accuracy"]) for manifest in pruned], "o-"
    )
    error.set(xlabel="weights removed (%)", ylabel="test error (%)")
    for key, label in (("bytes", "bytes"), ("request_ms", "ms a request")):
        share.plot(
            removed, [fact[key] / fact[f"parent_{key}"] for fact in facts], "o-", label=label
        )
    share.set(xlabel="weights removed (%)", ylabel="of the whole model", yscale="log")
    share.legend()
    for axis in (density, cumulative, error, share):
        axis.grid(alpha=0.3)
    figure.suptitle(title)
    return figure


def main() -> None:
    parser = parser_of(__doc__, "prune-NAME.{md,png}", name=None)
    parser.add_argument("model", metavar="NAME[:VERSION]")
    parser.add_argument("--data", metavar="SRC")
    parser.add_argument("--fractions", type=float, nargs="+", default=FRACTIONS)
    options = parser.parse_args()
    parent = open_parent(ModelStore(options.store), options.model, "model")
    name, version = parent.manifest.name, parent.manifest.version
    data = fitted_data(parent, data_root(), options.data)
    model = parent.model()
    ratio = signal_to_noise(model)[is_weight(model)].numpy()
    with tempfile.TemporaryDirectory() as folder:
        store = ModelStore(Path(folder) / "models")
        shutil.copytree(options.store / name / version, store.root / name / version)
        runs = Path(folder) / "runs"
        pruned = [
            prune_version(store, parent, data, fraction, f"{name}-pruned", runs).manifest
            for fraction in options.fractions
        ]
    given = f" --data {options.data}" if options.data else ""
    if options.fractions != FRACTIONS:
        given += " --fractions " + " ".join(f"{fraction:g}" for fraction in options.fractions)
    text = "\n".join(
        [
            f"# `{name}` with its weights of lowest |mu| / sigma removed",
            "",
            f"`python -m training fit recipes/{name}.toml`, then `python -m benchmarks.prune "
            f"{name}{given} --write`.",
            f"{parent.manifest.noise.default_draws} draws, {len(data.test):,} test rows, one "
            "seed. Bytes are both graphs' and the weights' file's. Milliseconds are a request's: "
            "one row under fresh draws, in process; the whole model's were taken in turns with "
            "them. Weights left are fewer than the share says where units that lead nowhere were "
            "left out too.",
            "",
            table(parent.manifest, pruned),
            "",
        ]
    )
    report(options, f"prune-{name}", text, lambda: plot(ratio, pruned, name))


if __name__ == "__main__":
    main()
