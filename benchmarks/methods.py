"""Every method's quality on MNIST against its paper's: fit the recipes, then this.

    for m in mnist mnist-mle ...; do python -m training fit recipes/$m.toml; done
    python -m benchmarks.methods [--write]

reads the manifests of the store's models whose names begin with `mnist` and tabulates what each
measured when it was published. Several seeds of a recipe are summed up by their mean and standard
deviation.
"""

import statistics

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from benchmarks.common import parser_of, report
from benchmarks.quality import comparable
from model_store.artifacts.store import ModelStore

# Test error in %, and where it stands.
PAPERS = {
    "mnist": (1.53, "Krueger et al. 2017, Table 1, 4 couplings"),
    "mnist-bhn-realnvp": (1.37, "Krueger et al. 2017, Table 1, 8 couplings"),
    "mnist-bhn-iaf": (1.40, "the project's own goal"),
    "mnist-bbb-gaussian": (1.99, "Blundell et al. 2015, Table 1, 800 units"),
    "mnist-bbb-mixture": (1.34, "Blundell et al. 2015, Table 1, 800 units"),
    "mnist-dropout": (1.27, "Krueger et al. 2017, Table 1"),
    "mnist-mle-dropout": (1.33, "Blundell et al. 2015, Table 1, 800 units"),
    "mnist-mle": (1.84, "Blundell et al. 2015, Table 1, SGD, 800 units"),
}


def main() -> None:
    parser = parser_of(__doc__, "methods-mnist.{md,png}", name=None)
    options = parser.parse_args()
    store = ModelStore(options.store)
    lines = [
        "# Methods on MNIST",
        "",
        "`python -m training fit recipes/NAME.toml [--seed N]` for each, then `python -m "
        "benchmarks.methods`.",
        "Test error of the mean prediction over the recipe's draws; a single seed has no spread.",
        "",
        "| recipe | hidden units | seeds | test error % | paper's | log-likelihood | ECE | epochs "
        "| training s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    errors: dict[str, list[float]] = {}
    for name in sorted(n for n in store.names() if n.startswith("mnist")):
        manifests = comparable([store.manifest(name, version) for version in store.versions(name)])
        errors[name] = [100.0 * (1.0 - m.quality["test_accuracy"]) for m in manifests]
        spread = f" ± {statistics.stdev(errors[name]):.2f}" if len(manifests) > 1 else ""
        paper = f"{PAPERS[name][0]} ({PAPERS[name][1]})" if name in PAPERS else ""
        mean = {
            key: statistics.mean(m.quality[key] for m in manifests)
            for key in ("test_log_likelihood", "test_expected_calibration_error")
        }
        recipe = manifests[0].training["recipe"]
        lines.append(
            f"| {name} | {' x '.join(map(str, recipe['network']['hidden']))} | {len(manifests)} "
            f"| {statistics.mean(errors[name]):.2f}{spread} | {paper} "
            f"| {mean['test_log_likelihood']:.4f} | {mean['test_expected_calibration_error']:.4f} "
            f"| {recipe['training']['epochs']} | "
            f"{statistics.mean(m.training['seconds'] for m in manifests):.0f} |"
        )
    lines += ["", "![test errors against the papers'](methods-mnist.png)"]
    text = "\n".join(lines) + "\n"
    report(options, "methods-mnist", text, lambda: plot(errors))


def plot(errors: dict[str, list[float]]) -> Figure:
    figure, axis = plt.subplots(figsize=(7, 0.4 * len(errors) + 1.2), layout="constrained")
    for position, (name, values) in enumerate(errors.items()):
        axis.plot(
            values,
            [position] * len(values),
            "o",
            color="C0",
            label="measured" if position == 0 else None,
        )
        if name in PAPERS:
            axis.plot(
                PAPERS[name][0], position, "x", color="C3", label="paper" if position == 0 else None
            )
    axis.set(xlabel="test error, %", yticks=range(len(errors)), yticklabels=list(errors))
    axis.grid(axis="x", alpha=0.3)
    axis.legend()
    return figure


if __name__ == "__main__":
    main()
