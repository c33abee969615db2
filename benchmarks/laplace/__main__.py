"""`laplace` beside laplace-torch on the same weights, rows and structures; a wide last layer;
MNIST's `mle` network.

    make laplace [LAPLACE="--only beside wide mnist --write"]

Each side of each case has a process of its own, on one thread. `mnist` reads what
these commands have left in `DUBITO_STORE` and `DUBITO_RUNS`:

    for r in mnist-mle "mnist-laplace --warm-start mnist-mle" "mnist-bhn-from-mle --warm-start
    mnist-mle"; do
        python -m training fit recipes/${r/ /.toml }   # mnist-mle.toml without more
    done
    python -m training evaluate NAME --outliers notmnist=idx:notmnist   # for each of the three
    python -m training compare mnist-mle NAME --rows 10000              # for the other two

What was measured is kept in docs/results/laplace.json with `--write`, and the page is made of all
that is there.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from benchmarks.laplace import wide
from benchmarks.laplace.cases import CASES
from benchmarks.options import RESULTS
from model_store.artifacts.report import evaluation_report
from model_store.artifacts.store import ModelStore

KEPT = RESULTS / "laplace.json"
OF_MNIST = ("mnist-mle", "mnist-laplace", "mnist-bhn-from-mle")
Facts = dict[str, Any]


def side(name: str, index: int, precision: float) -> Facts:
    """Return what one side measures of a case."""
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/found.npz"
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.laplace.sides"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run(
            [*command, name, str(index), file, str(precision)], check=True, env=environment
        )
        with np.load(file) as found:
            return {key: found[key] for key in found.files}


def beside(repeats: int, numbers: list[int], before: list[Facts]) -> list[Facts]:
    """Return the differences and ratios of the cases of these numbers, and of others what was
    measured before."""
    rows = []
    for index, case in enumerate(CASES):
        if index not in numbers:
            rows += [row for row in before if row["case"] == case.name]
            continue
        if case.of_mnist and "mnist-mle" not in ModelStore(_store()).names():
            continue
        pairs = []
        for _ in range(repeats):
            own = side("ours", index, 1.0)
            pairs.append((own, side("theirs", index, float(own["best"]))))
        own, other = pairs[0]
        error = np.sqrt(own["variance"] + other["variance"])
        z = np.abs(own["mean"] - other["mean"])[error > 1e-9] / error[error > 1e-9]
        least = {
            f"{name}_{key}": min(float(pair[i][key]) for pair in pairs)
            for i, name in enumerate(("ours", "theirs"))
            for key in ("fit", "predict", "memory")
        }
        rows.append(
            {
                "case": case.name,
                "evidence": float(own["evidence"]),
                "difference": float(own["evidence"] - other["evidence"]),
                "difference_at_1": float(own["evidence_at_1"] - other["evidence_at_1"]),
                "precision": float(own["best"]),
                "their_precision": float(other["chosen"]),
                "largest": float(np.abs(own["mean"] - other["mean"]).max()),
                "root_mean_square_z": float(np.sqrt((z**2).mean())),
                "largest_z": float(z.max()),
                "numbers": len(z),
                **least,
            }
        )
        print(rows[-1], flush=True)
    return rows


def mnist() -> list[Facts]:
    """Return what was measured of MNIST's versions."""
    store = ModelStore(_store())
    runs = Path(os.environ.get("DUBITO_RUNS", "runs"))
    rows = []
    for name in OF_MNIST:
        version = store.resolve(name)
        manifest = store.manifest(name, version)
        found = evaluation_report(store, name, version)
        facts: Facts = {
            "name": name,
            "accuracy": manifest.quality["test_accuracy"],
            "log_likelihood": manifest.quality["test_log_likelihood"],
            "calibration_error": manifest.quality["test_expected_calibration_error"],
        }
        if found is not None and name != "mnist-mle":  # a single draw has no BALD
            facts["auroc"] = found.report["outliers"]["notmnist"]["scores"]["bald"]["auroc"]
        if found is not None:
            facts["auroc_entropy"] = found.report["outliers"]["notmnist"]["scores"]["entropy"][
                "auroc"
            ]
        compared = runs / f"mnist-mle-1-{name}-{version}-compared" / "comparison.json"
        if compared.exists():
            differences = json.loads(compared.read_text())["differences"]
            facts["differences"] = {key: differences[key] for key in ("accuracy", "log_likelihood")}
        rows.append(facts)
    return rows


def page(kept: Facts) -> list[str]:
    """Return the page's lines."""
    lines = [
        "# `laplace` beside laplace-torch",
        "",
        "`make laplace`: the same weights, rows and structures in Dubito and in laplace-torch 0.3 "
        "(BackPACK, its "
        "default for last layers), each side in a process of its own on one thread of a shared "
        "machine.",
        "",
    ]
    if "beside" in kept:
        lines += _beside_lines(kept["beside"])
    if "wide" in kept:
        lines += _wide_lines(kept["wide"])
    if "mnist" in kept:
        lines += _mnist_lines(kept["mnist"])
    return lines


def _beside_lines(rows: list[Facts]) -> list[str]:
    return [
        "Evidence is the log marginal likelihood in nats, under the prior's precision of its "
        "maximum as Dubito finds "
        "it (laplace-torch's 100 steps of gradient ascent end near it). Probabilities, of a "
        "regression means, are "
        "those of 1,000 draws of each side for 200 rows: z is their difference over its Monte "
        "Carlo error, whose "
        "root mean square is 1 where only chance differs. Kronecker factors here have a bias as "
        "one more input, so "
        "laplace-torch gets a layer without bias and an input of 1: of a bias it makes a block of "
        "its own.",
        "",
        "| structure, layers | evidence | difference | precision, theirs | root mean square of z, "
        "largest (of) "
        "| fit, s | theirs | 100 draws, s | theirs | memory, MB | theirs |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
        *(
            f"| {row['case']} | {row['evidence']:.2f} | {row['difference']:+.1g} "
            f"| {row['precision']:.4g}, {row['their_precision']:.4g} "
            f"| {row['root_mean_square_z']:.2f}, {row['largest_z']:.1f} ({row['numbers']}) "
            f"| {row['ours_fit']:.2f} | {row['theirs_fit']:.2f} "
            f"| {row['ours_predict']:.3f} | {row['theirs_predict']:.3f} "
            f"| {row['ours_memory']:.0f} | {row['theirs_memory']:.0f} |"
            for row in rows
        ),
        "",
        "Fit: the pass over all rows and the choice of the precision. Memory: the most that the "
        "process held in fit "
        "and draws, over what it held before. Both compute in float32, but for the evidence of "
        "laplace-torch, of a "
        "further fit in float64: in float32 thousands of nats are rounded. Memory 0: no more than "
        "it took to load "
        "MNIST. Times and memory are the least of one or two runs.",
        "",
        "![Time and memory](laplace.png)",
        "",
    ]


def _wide_lines(row: Facts) -> list[str]:
    return [
        "## A wide last layer",
        "",
        f"{wide.UNITS} to {wide.CLASSES} units, diagonal, {row['weights']} weights a draw. The "
        "pass over "
        f"{row['rows']} made rows takes {row['pass_s']:.1f} s and {row['pass_mb']:.0f} MB. The "
        "service takes up to "
        "1,000 classes, so its runtime is measured alone, in a process: it holds "
        f"{row['loaded_mb']:.0f} MB when it is loaded and {row['peak_mb']:.0f} MB at most while "
        "it answers rows one "
        f"by one, each with {wide.DRAWS} draws of its own, in {row['row_s']:.2f} s (median of "
        f"{wide.REQUESTS}, one "
        "thread). Users of laplace-torch report 15 GB and 10 s a row for such a posterior (its "
        "issue 138): a "
        "Jacobian of all outputs by all weights of one row has 1.2 billion numbers. Draws need "
        "none.",
        "",
    ]


def _mnist_lines(rows: list[Facts]) -> list[str]:
    table = [
        "## MNIST's `mle` network",
        "",
        "`recipes/mnist-mle.toml`, and its network made Bayesian by `recipes/mnist-laplace.toml` "
        "(last layer, "
        "Kronecker, no training) and by `recipes/mnist-bhn-from-mle.toml` (all scales, one "
        "epoch), both with "
        "`--warm-start mnist-mle`. 10,000 test rows as served, each version with its own "
        "temperature. Differences to "
        "`mnist-mle` are of the same rows, with 95 % intervals (`training compare --rows 10000`). "
        "AUROC of telling "
        "notMNIST from test rows, 1,000 each (`training evaluate`).",
        "",
        "| version | accuracy % | difference | log-likelihood | difference | ECE | AUROC % of "
        "BALD | of entropy |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        accuracy, likelihood = (_difference(row, name) for name in ("accuracy", "log_likelihood"))
        bald, entropy = (
            f"{100 * row[key]:.1f}" if key in row else "" for key in ("auroc", "auroc_entropy")
        )
        table.append(
            f"| `{row['name']}` | {100 * row['accuracy']:.2f} | {accuracy} "
            f"| {row['log_likelihood']:.4f} | {likelihood} "
            f"| {row['calibration_error']:.4f} | {bald} | {entropy} |"
        )
    return [*table, ""]


def _difference(row: Facts, name: str) -> str:
    """Return a figure's difference to `mnist-mle` with its interval."""
    if name not in row.get("differences", {}):
        return ""
    figure = row["differences"][name]
    low, high = figure["interval"]
    return f"{figure['second'] - figure['first']:+.4f} ({low:+.4f} to {high:+.4f})"


def plot(rows: list[Facts], path: Path) -> None:
    """Draw their time and memory over ours."""
    plt.switch_backend("Agg")
    figure, axis = plt.subplots(figsize=(8, 0.45 * len(rows) + 1.2), layout="constrained")
    marks = {"fit": "o", "predict": "s", "memory": "^"}
    labels = {"fit": "fit and precision, s", "predict": "100 draws, s", "memory": "memory, MB"}
    for key, mark in marks.items():
        ratios = [row[f"theirs_{key}"] / max(row[f"ours_{key}"], 1e-3) for row in rows]
        axis.plot(ratios, range(len(rows)), mark, label=labels[key], alpha=0.8)
    axis.axvline(1.0, color="black", linewidth=0.8)
    axis.set(xscale="log", xlabel="laplace-torch over Dubito", yticks=range(len(rows)))
    axis.set_yticklabels([row["case"] for row in rows])
    axis.invert_yaxis()
    axis.grid(axis="x", alpha=0.3)
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _store() -> Path:
    return Path(os.environ.get("DUBITO_STORE", "models"))


def main() -> None:
    """Measure, print, and with `--write` keep."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=["beside", "wide", "mnist"],
        default=["beside", "wide", "mnist"],
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--cases",
        type=int,
        nargs="+",
        default=list(range(len(CASES))),
        help="numbers of cases beside",
    )
    parser.add_argument(
        "--write", action="store_true", help="write docs/results/laplace.{json,md,png}"
    )
    options = parser.parse_args()
    kept: Facts = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    if "beside" in options.only:
        kept["beside"] = beside(options.repeats, options.cases, kept.get("beside", []))
    if "wide" in options.only:
        kept["wide"] = wide.measure()
    if "mnist" in options.only:
        kept["mnist"] = mnist()
    print("\n".join(page(kept)))
    if options.write:
        KEPT.write_text(json.dumps(kept, indent=1) + "\n")
        (RESULTS / "laplace.md").write_text("\n".join(page(kept)))
        if "beside" in kept:
            plot([row for row in kept["beside"] if row["ours_memory"] > 0], RESULTS / "laplace.png")


if __name__ == "__main__":
    main()
