"""Claims of the papers, each with its test, written down before the cells are measured."""

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scipy import stats

from experiments.cells import Target, mean_and_spread
from experiments.pages import counts, link_to, values_of
from experiments.tables.uci import PUBLISHED

LEVEL = 0.95
CLAIMS = Path(__file__).parent / "claims.csv"


@dataclass(frozen=True)
class Claim:
    """A claim that a figure is larger in the first row of each pair, up to a margin.

    For one pair, Welch's interval of the difference of means decides. For several, Clopper and
    Pearson's interval of the share of pairs with a larger mean is compared with one half.
    """

    text: str
    source: str
    target: str
    column: str
    pairs: Sequence[tuple[str, str]]
    margin: float = 0.0

    def judge(self, target: Target, out: Path) -> tuple[str, str]:
        """Return the outcome and what it rests on."""
        results = target.results(out)
        means = {row: values_of(of, self.column) for row, of in results.items() if counts(of)}
        known = [pair for pair in self.pairs if {*pair} <= {*means}]
        if not known:
            return "not measured", ""
        if len(self.pairs) == 1:
            first, second = (means[row] for row in known[0])
            low, high = difference_interval(first, second)
            return outcome(low, high, -self.margin), f"a difference of {low:.4g} to {high:.4g}"
        larger = sum(mean_and_spread(means[a])[0] > mean_and_spread(means[b])[0] for a, b in known)
        interval = stats.binomtest(larger, len(known)).proportion_ci(LEVEL)
        left = len(self.pairs) - len(known)
        rest = f", {left} not measured" if left else ""
        return outcome(interval.low, interval.high, 0.5), f"in {larger} of {len(known)}{rest}"


def difference_interval(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """Return Welch's interval of the difference of two means."""
    means, variances = [], []
    for values in (first, second):
        mean, spread = mean_and_spread([*values])
        means.append(mean)
        variances.append(spread**2 / len(values))
    difference, error = means[0] - means[1], math.sqrt(sum(variances))
    if error == 0.0:
        return difference, difference
    degrees = sum(variances) ** 2 / sum(
        variance**2 / (len(values) - 1)
        for variance, values in zip(variances, (first, second), strict=True)
    )
    half = stats.t.ppf(0.5 + LEVEL / 2, degrees) * error
    return difference - half, difference + half


def outcome(low: float, high: float, least: float) -> str:
    if low > least:
        return "holds"
    return "does not hold" if high < least else "cannot be told"


def read_claims(path: Path = CLAIMS) -> list[Claim]:
    """Read claims from a table; `*` in a row's name stands for each UCI set."""
    claims = []
    with path.open(newline="") as file:
        for line in csv.DictReader(file):
            larger, smaller = line["larger"], line["smaller"]
            names = PUBLISHED if "*" in larger else [""]
            pairs = [(larger.replace("*", name), smaller.replace("*", name)) for name in names]
            margin = float(line["margin"] or 0.0)
            where = (line["source"], line["target"], line["column"])
            claims.append(Claim(line["claim"], *where, pairs, margin))
    return claims


def findings_page(
    targets: Mapping[str, Target], out: Path, guides: Path, claims: Sequence[Claim]
) -> str:
    lines = [
        "# What the replication found",
        "",
        "Claims of the papers, each with a test that was written down before its cells were "
        "measured: Welch's interval of a difference of means over seeds, at .95, or in how many "
        "sets the mean is larger, against one half.",
        "",
        "| claim | paper | outcome | by |",
        "|---|---|---|---|",
    ]
    for claim in claims:
        found, rests_on = claim.judge(targets[claim.target], out)
        page = link_to(out / f"{claim.target}.md", guides)
        link = f"[{claim.target}]({page}): {rests_on}" if rests_on else claim.target
        lines.append(f"| {claim.text} | {claim.source} | {found} | {link} |")
    return "\n".join(lines) + "\n"
