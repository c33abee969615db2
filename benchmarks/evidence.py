"""Evaluation reports over seeds: `python -m training evaluate NAME:VERSION ...` for each version,
then this.

`python -m benchmarks.evidence NAME [--write]` tabulates the reports of all versions of a model:
AUROC of the flag, of each detector alone and of the flag without each, on each set and under each
attack, as mean and standard deviation.
"""

import statistics
from typing import Any

from benchmarks.common import RESULTS, parser_of
from model_store.artifacts.report import evaluation_report
from model_store.artifacts.store import ModelStore


def spread(values: list[float]) -> str:
    mean = f"{100 * statistics.mean(values):.2f}"
    return mean if len(values) == 1 else f"{mean} ± {100 * statistics.stdev(values):.2f}"


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    return [*(f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows)), ""]


def detection(reports: list[dict[str, Any]], kind: str) -> list[str]:
    scores = list(next(iter(reports[0][kind].values()))["scores"])
    rows = [
        [
            name,
            *(
                spread([report[kind][name]["scores"][score]["auroc"] for report in reports])
                for score in scores
            ),
        ]
        for name in reports[0][kind]
    ]
    return table(["AUROC (%)", *scores], rows)


def main() -> None:
    parser = parser_of(__doc__, "evidence-NAME.md and its plots")
    options = parser.parse_args()
    store = ModelStore(options.store)
    found = [
        evaluation_report(store, options.name, version) for version in store.versions(options.name)
    ]
    newest = [item for item in found if item is not None]
    reports = [item.report for item in newest]
    first = reports[0]
    seeds = [
        store.manifest(options.name, report["version"]).training["recipe"]["seed"]
        for report in reports
    ]
    lines = [
        f"# Evidence of `{options.name}` over seeds",
        "",
        f"`python -m training evaluate {options.name}:VERSION --attacks --outliers ...` for each "
        f"of {len(reports)} versions (recipe seeds {', '.join(map(str, seeds))}), then `python -m "
        f"benchmarks.evidence {options.name} --write`. {first['test']['rows']} test rows, at most "
        f"as many of each set, {first['draws']} draws, requests of {first['rows_per_request']} "
        "rows; mean ± standard deviation over versions.",
        "",
        *detection(reports, "outliers"),
    ]
    if first["attacks"]:
        rows = [
            [
                name,
                spread([report["attacks"][name]["accuracy"] for report in reports]),
                spread([report["attacks"][name]["flagged"]["0.05"] for report in reports]),
                spread([report["attacks"][name]["hits"] for report in reports]),
            ]
            for name in first["attacks"]
        ]
        lines += table(
            ["attack", "accuracy (%)", "flagged at .05 (%)", "wrong and not flagged (%)"], rows
        )
        lines += detection(reports, "attacks")
    print("\n".join(lines))
    if options.write:
        path = RESULTS / f"evidence-{options.name}.md"
        for file in (file for file in newest[-1].files if file.endswith(".png")):
            picture = path.with_name(f"{path.stem}-{file}")
            picture.write_bytes(newest[-1].read(file))
            lines += [f"![{file.removesuffix('.png')}]({picture.name})", ""]
        path.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
