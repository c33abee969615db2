"""Measured quality over seeds: `for s in 0 1 2; do python -m training fit RECIPE --seed $s; done`,
then this.

`python -m benchmarks.quality NAME [--write]` reads the manifests of all versions of a model and
tabulates what each measured when it was published, with mean and standard deviation over versions
of the same recipe but for the seed.
"""

import statistics

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from benchmarks.common import parser_of, report
from model_store.artifacts.manifest import Manifest
from model_store.artifacts.store import ModelStore


def comparable(manifests: list[Manifest]) -> list[Manifest]:
    """Return the versions of the newest one's recipe, whatever their seeds, the newest of each
    seed."""

    def apart_from_seed(manifest: Manifest) -> dict[str, object]:
        return {**manifest.training["recipe"], "seed": None}

    by_seed = {
        m.training["recipe"]["seed"]: m
        for m in manifests
        if apart_from_seed(m) == apart_from_seed(manifests[-1])
    }
    return [by_seed[seed] for seed in sorted(by_seed)]


def main() -> None:
    parser = parser_of(__doc__, "quality-NAME.{md,png}")
    options = parser.parse_args()
    store = ModelStore(options.store)
    manifests = comparable(
        [store.manifest(options.name, version) for version in store.versions(options.name)]
    )
    seeds = [m.training["recipe"]["seed"] for m in manifests]
    rows = {key: [m.quality[key] for m in manifests] for key in manifests[0].quality}
    rows["training seconds"] = [m.training["seconds"] for m in manifests]
    rows["kept epoch"] = [m.training["best_epoch"] for m in manifests]
    first, seed_list = manifests[0], " ".join(map(str, seeds))
    lines = [
        f"# Quality of `recipes/{options.name}.toml` over seeds",
        "",
        f"`for s in {seed_list}; do python -m training fit recipes/{options.name}.toml --seed $s; "
        "done`",
        f"then `python -m benchmarks.quality {options.name} --write`.",
        f"{first.training['parameters']:,} parameters, {first.training['rows']['train']:,} "
        f"training rows, {first.training['rows']['test']:,} test rows, "
        f"{first.noise.default_draws} draws. The seed decides the split, the initial values, the "
        "order of rows and the noise.",
        "",
        f"| | {' | '.join(f'seed {seed}' for seed in seeds)} | mean | std |",
        f"|---|{'---|' * (len(seeds) + 2)}",
    ]
    for key, values in rows.items():
        spread = statistics.stdev(values) if len(values) > 1 else float("nan")
        cells = [f"{value:.4g}" for value in [*values, statistics.mean(values), spread]]
        lines.append(f"| {key.replace('_', ' ')} | {' | '.join(cells)} |")
    text = "\n".join(lines) + "\n"
    report(options, f"quality-{options.name}", text, lambda: plot(rows, seeds, options.name))


def plot(rows: dict[str, list[float]], seeds: list[int], title: str) -> Figure:
    panels = {
        "test accuracy (%)": [100 * value for value in rows["test_accuracy"]],
        "test log-likelihood (nats)": rows["test_log_likelihood"],
        "flagged at fpr .05, test rows (%)": [100 * value for value in rows["flag_rate_at_05"]],
        "flagged at fpr .05, uniform noise (%)": [
            100 * value for value in rows["uniform_noise_flagged_at_05"]
        ],
    }
    figure, axes = plt.subplots(1, len(panels), figsize=(13, 2.8), layout="constrained")
    for axis, (label, values) in zip(axes, panels.items(), strict=True):
        axis.plot(seeds, values, "o")
        axis.axhline(statistics.mean(values), color="0.5", linewidth=1)
        axis.set(xlabel="seed", title=label, xticks=seeds)
        axis.grid(alpha=0.3)
    figure.suptitle(title)
    return figure


if __name__ == "__main__":
    main()
