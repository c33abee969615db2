"""Whether Monte Carlo standard errors are the deviation of scores among seeds.

`python -m benchmarks.standard_errors NAME [--write]` scores a published version's test rows under
each of `--seeds` seeds. A row's ratio is the root mean square of the standard errors that it is
told, over the deviation of its score among seeds. Rows that are all but certain have scores of
float32 rounding: those whose score deviates by less than `LEAST` are left out. Draws' tails are
long, so the mean error is given too: it is less.

A time is that of a request in process: draws, network, detectors and p-values.
"""

import time

import matplotlib.pyplot as plt
import numpy as np
from jaxtyping import Float64

from benchmarks.common import open_model, parser_of, report, splits_of
from model_store.inference.model import Model
from model_store.scores.tasks import PREDICTIVES
from training.scoring import draw_seed

DRAWS = (2, 3, 5, 10, 20, 100)
LEAST = 1e-6  # nats, probabilities or target units
SHOWN = (0.9, 1.1)
ROUNDS = 200
HEAD = 8  # lines before the table's rows
BLANK = 5  # the line before the table


def score_rows(
    model: Model, x: Float64[np.ndarray, "N I"], seeds: int, num_draws: int, seed: int
) -> dict[str, tuple[Float64[np.ndarray, "T N"], Float64[np.ndarray, "T N"] | None]]:
    parts = []
    for number in range(seeds):
        draws = model.runtime.draw_set(draw_seed(seed + num_draws, number), num_draws)
        outputs, _ = model.runtime.run_set(x.astype(np.float32), draws)
        parts.append(
            PREDICTIVES[model.manifest.task].scores(PREDICTIVES[model.manifest.task].sums(outputs))
        )
    found = {}
    for name in parts[0].error_names:
        errors = [(part.standard_error or {}).get(name) for part in parts]
        known = None if errors[0] is None else np.stack(errors)
        found[name] = (np.stack([getattr(part, name) for part in parts]), known)
    return found


def times(
    model: Model, x: Float64[np.ndarray, "N I"], num_draws: int
) -> tuple[float, float, float]:
    """Return the median milliseconds of a request, of scores without standard errors and with,
    taken in turn."""
    rows, task = x.astype(np.float32), model.manifest.task
    taken = []
    for number in range(ROUNDS):
        start = time.perf_counter()
        outputs, density = model.runtime.run_set(rows, model.runtime.draw_set(number, num_draws))
        model.prediction(outputs, density)
        answered = time.perf_counter()
        sums = PREDICTIVES[task].sums(outputs)
        summed = time.perf_counter()
        PREDICTIVES[task].scores(sums, standard_errors=False)
        without = time.perf_counter()
        PREDICTIVES[task].scores(sums)
        taken.append((answered - start, without - summed, time.perf_counter() - without))
    request, without, both = 1e3 * np.median(taken, axis=0)
    return float(request), float(without), float(both)


def main() -> None:
    parser = parser_of(__doc__, "standard-errors-NAME.{md,png}")
    parser.add_argument("--seeds", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, default=200, help="test rows, the first ones")
    options = parser.parse_args()
    model = open_model(options)
    x = splits_of(model).test.x[: options.rows]
    lines = [
        f"# Standard errors against the deviation among seeds: {options.name} version "
        f"{model.manifest.version}",
        "",
        f"`python -m benchmarks.standard_errors {options.name} --seeds {options.seeds} --rows "
        f"{options.rows} --seed {options.seed}`:",
        f"{len(x)} test rows. A row's ratio is the root mean square of its standard errors over "
        "the deviation of its",
        f"score among seeds; rows that deviate by less than {LEAST:g} are left out.",
        "",
        "| score | draws | rows | median ratio | first and last tenth of rows | mean error in its "
        "place, median |",
        "|---|---|---|---|---|---|",
    ]
    ratios: dict[str, dict[int, np.ndarray]] = {}
    for num_draws in DRAWS:
        found = score_rows(model, x, options.seeds, num_draws, options.seed)
        names = list(found)
        for name, (values, errors) in found.items():
            deviation = values.std(axis=0, ddof=1)
            varies = deviation > LEAST
            if errors is None or not varies.any():
                why = "none is given" if errors is None else "it hardly deviates"
                lines.append(f"| {name} | {num_draws} | {varies.sum()} | {why} | | |")
                continue
            ratio = np.sqrt(np.square(errors).mean(axis=0))[varies] / deviation[varies]
            mean = errors.mean(axis=0)[varies] / deviation[varies]
            low, median, high = np.quantile(ratio, [0.1, 0.5, 0.9])
            ratios.setdefault(name, {})[num_draws] = np.array([low, median, high])
            lines.append(
                f"| {name} | {num_draws} | {varies.sum()} | {median:.2f} | {low:.2f} - {high:.2f} "
                f"| {np.median(mean):.2f} |"
            )
    medians = {
        name: {draws: float(values[1]) for draws, values in found.items()}
        for name, found in ratios.items()
    }
    head, rows = (
        lines[:HEAD],
        sorted(lines[HEAD:], key=lambda line: names.index(line.split(" | ")[0][2:])),
    )
    lines = [*head[:BLANK], summary(medians), *head[BLANK:], *rows, "", "## Time", ""]
    lines += [
        "| rows | draws | request in process, ms | scores, ms | with standard errors, ms | share "
        "of the request |",
        "|---|---|---|---|---|---|",
    ]
    for num_rows, num_draws in ((1, 100), (20, 100)):
        request, without, both = times(model, x[:num_rows], num_draws)
        share = (both - without) / request
        lines.append(
            f"| {num_rows} | {num_draws} | {request:.3f} | {without:.3f} | {both:.3f} | "
            f"{share:.3f} |"
        )
    text = "\n".join(lines) + "\n"
    report(options, f"standard-errors-{options.name}", text, lambda: plot(ratios))


def summary(medians: dict[str, dict[int, float]]) -> str:
    """Say from how many draws on each score's median ratio is within a tenth and a fifth of 1."""
    parts = []
    for name, by_draws in medians.items():
        said = []
        for share in (0.1, 0.2):
            off = [draws for draws, ratio in by_draws.items() if abs(ratio - 1.0) > share]
            later = [draws for draws in by_draws if draws > max(off, default=0)]
            said.append(f"{min(later)}" if later else "none")
        parts.append(f"{name} {said[0]} and {said[1]}")
    return (
        f"Draws from which on the median is within 10 % and within 20 % of 1: {', '.join(parts)}."
    )


def plot(ratios: dict[str, dict[int, np.ndarray]]) -> plt.Figure:
    figure, axes = plt.subplots(
        1, len(ratios), figsize=(3.2 * len(ratios), 3.2), sharey=True, layout="constrained"
    )
    for axis, (name, by_draws) in zip(axes, ratios.items(), strict=True):
        low, median, high = np.array(list(by_draws.values())).T
        axis.axhspan(*SHOWN, color="0.9")
        axis.axhline(1.0, color="0.6", linewidth=0.8)
        axis.errorbar(list(by_draws), median, [median - low, high - median], marker="o", capsize=3)
        axis.set(xscale="log", xlabel="draws", title=name, ylim=(0, 1.6))
        axis.set_xticks(DRAWS, [str(count) for count in DRAWS])
        axis.minorticks_off()
    axes[0].set_ylabel("standard error over deviation")
    return figure


if __name__ == "__main__":
    main()
