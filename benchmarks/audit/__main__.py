"""Our numbers beside those of other people's implementations, on random inputs.

    make audit [AUDIT="--seeds 5 --write"]

Each row draws inputs with each of `--seeds` seeds and computes a quantity twice: by the code that
serves or evaluates, and by another package. The exit status is 1 where they part by more than
rounding.
"""

import argparse
import sys
from pathlib import Path

import matplotlib.pyplot as plt

from benchmarks.audit import of_conformal, of_graphs, of_metrics, of_scores
from benchmarks.audit.check import CHECKS, Finding, installed, run
from benchmarks.options import RESULTS

MODULES = {
    "Scores of draws": of_scores,
    "Measures": of_metrics,
    "Conformal": of_conformal,
    "Graphs": of_graphs,
}


NONE = 1e-18  # where a difference of 0 is drawn


def main() -> None:
    """Print the tables, and with `--write` keep them in docs/results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", default="", help="checks whose quantity holds this")
    parser.add_argument(
        "--write", action="store_true", help="write docs/results/audit.md and its plot"
    )
    options = parser.parse_args()
    found = []
    for one in CHECKS:
        if options.only in one.quantity:
            found.append(run(one, options.seeds))
            print(row(found[-1], ""), file=sys.stderr, flush=True)
    text = page(found, options.seeds)
    print(text)
    if options.write:
        (RESULTS / "audit.md").write_text(text)
        plot(found, RESULTS / "audit.png")
    if not all(one.agrees for one in found if not one.check.why):
        sys.exit(1)


def page(found: list[Finding], seeds: int) -> str:
    """Return the results page."""
    packages = sorted(
        {one.check.package for one in found} - set(sys.stdlib_module_names), key=str.lower
    )
    lines = [
        "# Audit: the same numbers by other implementations",
        "",
        f'`make audit AUDIT="--seeds {seeds} --write"`: random inputs of {seeds} seeds (graphs: '
        "of one), with ties,",
        "probabilities of 0 and 1, one draw, one row and one class among them. Each case is an "
        "array of numbers that",
        "is computed twice. The largest difference is absolute, of all numbers of all cases; of "
        "sets, ranks and",
        "flags 0 says that they are the same. Differences above 1e-9 are those of packages that "
        "compute in float32,",
        "of roots of numbers near 0, of noise made by a table of lines, and of a temperature that "
        "is searched",
        "for to .001 of its logarithm.",
        "",
        "The first run found one fault of ours, now mended: (n + 1) coverage was rounded up in "
        "binary, so that a",
        "coverage of .55 with 99 rows took the 56th of them rather than the 55th; sets were that "
        "much too large.",
        "",
        "Of these no other implementation was found: early stopping, the drift monitor's urn, "
        "Tango's interval of a",
        "difference and Newcombe's of an AUROC.",
        "",
        f"Packages: {', '.join(installed(package) for package in packages)}.",
        "",
        "![largest difference of each check, and what it may be](audit.png)",
        "",
    ]
    for title, module in MODULES.items():
        of_module = [
            one
            for one in found
            if one.check.compare.__module__ == module.__name__ and not one.check.why
        ]
        if of_module:
            lines += [
                f"## {title}",
                "",
                "| quantity | package | function | cases | numbers | largest difference |",
            ]
            lines += ["|---|---|---|---|---|---|", *(row(one, "") for one in of_module), ""]
    parted = [one for one in found if one.check.why]
    if parted:
        lines += ["## Where definitions part", ""]
        lines += [
            "| quantity | package | function | cases | numbers | largest difference | why |",
            "|---|---|---|---|---|---|---|",
        ]
        lines += [row(one, f" {one.check.why} |") for one in parted]
    return "\n".join(lines).rstrip() + "\n"


def plot(found: list[Finding], path: Path) -> None:
    """Draw the largest difference of each check, and what it may be; no difference at all stands at
    the left edge."""
    plt.switch_backend("Agg")
    shown = sorted(found, key=lambda one: (bool(one.check.why), one.largest), reverse=True)
    figure, axis = plt.subplots(figsize=(9, 0.19 * len(shown) + 1.2), layout="constrained")
    for position, one in enumerate(shown):
        color = "C7" if one.check.why else "C0" if one.agrees else "C3"
        axis.plot(max(one.largest, NONE), position, "o", color=color, markersize=4)
        if not one.check.why:
            axis.plot(one.check.tolerance, position, "|", color="0.5")
    axis.plot([], [], "o", color="C0", label="largest difference")
    axis.plot([], [], "o", color="C7", label="where definitions part")
    axis.plot([], [], "|", color="0.5", label="what is allowed for rounding")
    axis.set(
        xscale="log",
        xlim=(NONE / 3, 30),
        ylim=(-1, len(shown)),
        xlabel="absolute difference of any number",
    )
    ticks = [NONE, 1e-15, 1e-12, 1e-9, 1e-6, 1e-3, 1]
    axis.set_xticks(ticks, ["0", *(f"{tick:g}" for tick in ticks[1:])])
    axis.minorticks_off()
    axis.set_yticks(
        range(len(shown)),
        [f"{one.check.quantity}: {one.check.package}" for one in shown],
        fontsize="x-small",
    )
    axis.grid(axis="x", alpha=0.3)
    axis.legend(loc="upper right", fontsize="small")
    figure.savefig(path, dpi=100)
    plt.close(figure)


def row(found: Finding, last: str) -> str:
    """Return a row of a table."""
    largest = f"{found.largest:.1g}" + ("" if found.agrees or found.check.why else " **too much**")
    one = found.check
    return f"| {one.quantity} | {one.package} | `{one.function}` | {found.cases} | {found.numbers} | {largest} |{last}"


if __name__ == "__main__":
    main()
