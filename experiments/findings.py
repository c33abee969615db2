"""Tests of the papers' claims."""

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from scipy import stats

from experiments.cells import Target, mean_and_spread
from experiments.pages import column_values, counts, link_to
from experiments.tables.uci import PUBLISHED

LEVEL = 0.95
EARLIER = "[{}](convergence.md#mnist-600-epochs-of-bayes-by-backprop)"
CLAIMS = Path(__file__).parent / "claims.csv"


@dataclass(frozen=True)
class Claim:
    """A claim that a metric is larger for the first row of each pair, up to a margin.

    One pair is tested by Welch's interval for the difference between means. For several pairs, the
    Clopper-Pearson interval for the share of pairs with a larger mean is compared with one half.
    """

    text: str
    source: str
    target: str
    column: str
    pairs: Sequence[tuple[str, str]]
    margin: float = 0.0
    epochs: str = ""  # of the two rows

    def judge(self, target: Target, out: Path) -> tuple[str, str]:
        """Test the claim, and return the outcome with its reason."""
        values = {
            row: column_values(cells, self.column)
            for row, cells in target.results(out).items()
            if counts(cells)
        }
        pairs = [pair for pair in self.pairs if {*pair} <= {*values}]
        if not pairs:
            return "not measured", ""
        if len(self.pairs) == 1:
            first, second = (values[row] for row in pairs[0])
            low, high = difference_interval(first, second)
            return outcome(low, high, -self.margin), f"{low:.3g} to {high:.3g}"
        means = {row: mean_and_spread(values[row])[0] for row in values}
        larger = sum(means[a] > means[b] for a, b in pairs)
        interval = stats.binomtest(larger, len(pairs)).proportion_ci(LEVEL)
        missing = len(self.pairs) - len(pairs)
        rest = f", {missing} not measured" if missing else ""
        return outcome(interval.low, interval.high, 0.5), f"in {larger} of {len(pairs)}{rest}"

    def settings(self, target: Target, out: Path) -> list[str]:
        """Return the temperatures, epochs and seed counts."""
        temperatures = dict.fromkeys(target.kl_weights.get(row, "1") for row in self.pairs[0])
        cells = target.results(out)
        seeds = {len(cells[row]) for pair in self.pairs for row in pair}
        span = " to ".join(map(str, sorted({min(seeds), max(seeds)})))
        return [" / ".join(temperatures), self.epochs, span]


def difference_interval(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """Compute Welch's confidence interval for the difference between two means."""
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


def outcome(low: float, high: float, threshold: float) -> str:
    if low > threshold:
        return "holds"
    return "does not hold" if high < threshold else "inconclusive"


def read_claims(path: Path = CLAIMS) -> list[Claim]:
    """Read claims from a CSV file.

    `*` in a row's name stands for every UCI data set.
    """
    claims = []
    with path.open(newline="") as file:
        for line in csv.DictReader(file):
            larger, smaller = line["larger"], line["smaller"]
            names = PUBLISHED if "*" in larger else [""]
            pairs = [(larger.replace("*", name), smaller.replace("*", name)) for name in names]
            margin = float(line["margin"] or 0.0)
            keys = (line["source"], line["target"], line["column"])
            claims.append(Claim(line["claim"], *keys, pairs, margin, line["epochs"]))
    return claims


def findings_page(
    targets: Mapping[str, Target], out: Path, folder: Path, claims: Sequence[Claim]
) -> str:
    lines = [
        "# Findings of the replication",
        "",
        "`dubito reproduce` writes this page. The evidence is Welch's 95 % interval of a "
        "difference of means over seeds, or the number of data sets with a larger mean. Each test "
        "was recorded before its measurement. For tests marked *, "
        f"{EARLIER.format('earlier fits')} had selected the settings.",
        "",
        "The temperature is the weight of the KL relative to the ELBO's, the papers' objective (1 "
        "for methods without a KL). If the two rows of a test differ, both values are given.",
        "",
        "At temperature 1, our Bayes by Backprop (400 units) errs by 4.3 to 4.5 % after 14 epochs "
        "(`dubito reproduce weight-uncertainty`, 3 seeds), and by "
        f"{EARLIER.format('3.2 to 3.5 %')} after 600 (`weight-uncertainty-600`, seed 0). The "
        "paper's errs by 1.4 to 1.8 %.",
    ]
    for source, group in groupby(claims, lambda claim: claim.source):
        header = "| claim | outcome | temperature | epochs | seeds |"
        lines += ["", f"## {source}", "", header, "|---|---|---|---|---|"]
        for claim in group:
            result, reason = claim.judge(targets[claim.target], out)
            page = link_to(out / f"{claim.target}.md", folder)
            evidence = f"{result}, [{reason}]({page})" if reason else result
            columns = [claim.text, evidence, *claim.settings(targets[claim.target], out)]
            lines.append(f"| {' | '.join(columns)} |")
    return "\n".join(lines) + "\n"
