"""Claims of the papers, each with its test, written down before the cells are measured."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scipy import stats

from experiments.cells import Target, mean_and_spread
from experiments.pages import counts, link_to, values_of
from experiments.tables.uci import PUBLISHED

LEVEL = 0.95


@dataclass(frozen=True)
class Claim:
    """That a figure is larger in the first row of each pair than in the second, or at most by a
    margin smaller.

    Of one pair the difference of means is judged by Welch's interval; of several, in how many pairs
    the mean is larger, by Clopper and Pearson's interval against one half.
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


KRUEGER, BLUNDELL = "Krueger et al. 2017", "Blundell et al. 2015"
LI = "Li and Gal 2017"
WIDER = " (a spike wider than the paper's)"
ATTACK = "fgsm-0.1-of-1-draws_bald"
AHEAD = {  # in accuracy
    ("couplings help: 8 are ahead of none", KRUEGER, "table-1"): ("realnvp-8", "realnvp-0"),
    ("8 couplings are ahead of Bayes by Backprop", KRUEGER, "table-1"): ("realnvp-8", "bbb"),
    ("dropout is ahead of 8 couplings", KRUEGER, "table-1"): ("dropout", "realnvp-8"),
    **{
        (
            f"of 5,000 rows 12 couplings of {units:,} units are ahead of dropout",
            KRUEGER,
            f"table-1-few-{units}",
        ): ("realnvp-12", "dropout")
        for units in (800, 1200)
    },
    **{
        (
            f"the scale mixture is ahead of {what}, at 800 units{of}",
            BLUNDELL,
            "weight-uncertainty",
        ): (f"bbb-mixture{kind}-800", row)
        for of, kind in {"": "", WIDER: "-wide"}.items()
        for what, row in {"the Gaussian prior": "bbb-gaussian-800", "SGD": "sgd-800"}.items()
    },
}
DETECTED = {  # by AUROC
    (
        "dropout finds other data better than RealNVP",
        "notmnist_variation_ratio",
    ): "dropout bhn-realnvp",
    ("IAF finds attacks (FGSM, .1) better than RealNVP", ATTACK): "bhn-iaf bhn-realnvp",
    ("IAF finds attacks (FGSM, .1) better than dropout", ATTACK): "bhn-iaf dropout",
}
MEASURED = {  # by a figure that is larger in the first row, or smaller by a margin at most
    (
        "a hypernetwork's posterior has both modes of a product",
        KRUEGER,
        "toy-product",
        "lesser_mode",
    ): ("bhn-weights-8 bbb-gaussian", 0.0),
    (
        "a hypernetwork's parameters are correlated",
        KRUEGER,
        "toy-correlations",
        "correlated",
    ): ("bhn-scales bbb-gaussian", 0.0),
    ("BALD needs fewer labels than random choice", KRUEGER, "figure-4", "labels"): (
        "bhn-warm-random bhn-warm-bald",
        0.0,
    ),
    ("of a digit left out dropout finds more than 4 couplings", KRUEGER, "table-3", "bald"): (
        "dropout bhn-realnvp-4",
        0.0,
    ),
    **{
        (
            f"removing 75 % of the weights costs at most .1 % of accuracy{of}",
            BLUNDELL,
            "pruning",
            "error",
        ): (f"{kind}0 {kind}75", 0.1)
        for of, kind in {"": "", WIDER: "wide-"}.items()
    },
    **{
        (
            f"on MNIST alpha {alpha} is ahead of 0 in likelihood",
            LI,
            "alpha-mnist",
            "log_likelihood",
        ): (f"alpha-{alpha} alpha-0", 0.0)
        for alpha in ("0.5", "1")
    },
    **{
        (
            f"attacked (FGSM, .1), alpha 1 keeps more accuracy than {what}",
            LI,
            "alpha-mnist",
            "attacked_accuracy_0.1",
        ): (f"alpha-1 {row}", 0.0)
        for what, row in {"the network without dropout": "mlp", "alpha 0": "alpha-0"}.items()
    },
    (
        "lambda .01 costs at most .5 % of accuracy",
        "Kristiadi",
        "variational-hypernet",
        "accuracy",
    ): ("1e-2 point", 0.5),
}
CLAIMS = (
    *(Claim(*of, "accuracy", [pair]) for of, pair in AHEAD.items()),
    *(
        Claim(text, KRUEGER, "table-2", column, [(first, second)])
        for (text, column), rows in DETECTED.items()
        for first, second in [rows.split()]
    ),
    *(
        Claim(*of, [(first, second)], margin)
        for of, (rows, margin) in MEASURED.items()
        for first, second in [rows.split()]
    ),
    *(
        Claim(
            f"alpha {alpha} is ahead of 0 in likelihood, on most sets",
            LI,
            "uci",
            "log_likelihood",
            [(f"{name}-alpha-{alpha}", f"{name}-alpha-0") for name in PUBLISHED],
        )
        for alpha in ("0.5", "1")
    ),
)


def findings_page(
    targets: Mapping[str, Target], out: Path, guides: Path, claims: Sequence[Claim] = CLAIMS
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
