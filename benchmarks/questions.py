"""An attacker who only asks: wrong answers without a flag, by natural evolution strategies.

    python -m benchmarks.questions NAME[:VERSION] [--images 40] [--steps 100] [--radius 0.2]
    [--write]

The attacker has no gradients, only answers: probabilities and p-values of rows near an image, all
of a request under the same fresh draws. A step estimates the slope from `PAIRS` random directions
and their opposites (Ilyas et al. 2018, "Black-box adversarial attacks with limited queries and
information") and goes along its sign, within the radius in the maximum norm: while the label is
kept, against its lead; once it is lost, towards larger p-values of the detectors. A try succeeds
when an answer to the image of a step has a wrong label and no flag at the default rate; how many
rows had been asked by then is what a limit on rows near each other would have to undercut.
"""

from argparse import Namespace
from dataclasses import dataclass, field

import matplotlib.pyplot as plt
import numpy as np
from jaxtyping import Float32, Float64
from matplotlib.figure import Figure
from scipy.spatial import cKDTree

from benchmarks.common import open_model, parser_of, report, unseen_rows
from model_store.conformal.calibration import DEFAULT_FPR
from model_store.inference.model import Model
from model_store.inference.prediction import Prediction
from model_store.scores.classification import Scores
from training.data import Rows

PAIRS = 25  # of directions in a step
WIDTH = 0.25  # of the directions' deviations, as a part of the radius
STEP_OF_RADIUS = 2.5  # all steps together, in radii, as of the attacks with gradients
LEAD = 0.5  # nats by which another class must lead for the label to count as lost for good
LIMITS = (100, 300, 1000, 3000)  # rows near each other that one client may ask
LEAST_PROBABILITY = 1e-30


@dataclass
class Service:
    """A model that answers requests, each under fresh draws, and counts rows."""

    model: Model
    seed: int
    requests: int = 0
    rows: int = 0

    def ask(self, x: Float32[np.ndarray, "N I"]) -> Prediction:
        self.requests += 1
        self.rows += len(x)
        draws = self.model.manifest.noise.default_draws
        return self.model.predict(x, self.model.runtime.draw(self.seed + self.requests, 0, draws))


@dataclass(frozen=True)
class Try:
    """A try on one image: after how many rows asked a wrong label came at all, and one without a
    flag; None: never."""

    wrong: int | None
    unflagged: int | None
    # of further requests for the row that succeeded, the share that is wrong and unflagged again
    again: float = field(default=0.0)


def lead(prediction: Prediction, label: int) -> Float64[np.ndarray, "N"]:
    """Return by how many nats the label leads the most probable other class."""
    scores = prediction.scores
    assert isinstance(scores, Scores)
    log_probs = np.log(np.maximum(scores.probabilities, LEAST_PROBABILITY))
    others = np.delete(log_probs, label, axis=1)
    lead: np.ndarray = log_probs[:, label] - others.max(axis=1)
    return lead


def strangeness(prediction: Prediction) -> Float64[np.ndarray, "N"]:
    """Return the sum of detectors' -log p-values, and of their log scores, which still tell rows
    apart that all calibration rows rank below."""
    p_values = prediction.p_values.detector_p_values
    total = -sum(np.log(p) for p in p_values.values())
    scores = [np.log(np.abs(prediction.detected[name]) + LEAST_PROBABILITY) for name in p_values]
    return np.asarray(total + np.mean(scores, axis=0))


def is_fooled(prediction: Prediction, label: int) -> tuple[np.ndarray, np.ndarray]:
    assert isinstance(prediction.scores, Scores)
    wrong = prediction.scores.probabilities.argmax(axis=1) != label
    return wrong, wrong & (prediction.p_values.p_value > DEFAULT_FPR)


def attack(
    service: Service, x: Float32[np.ndarray, "I"], label: int, radius: float, steps: int, seed: int
) -> Try:
    spec, random = service.model.manifest.input, np.random.default_rng(seed)
    size = radius * (spec.maximum - spec.minimum)
    low, high = np.maximum(x - size, spec.minimum), np.minimum(x + size, spec.maximum)
    at, begun, first_wrong = x.astype(np.float64), service.rows, None
    for _ in range(steps):
        u = random.normal(size=(PAIRS, len(x)))
        near = at + WIDTH * size * np.concatenate([np.zeros((1, len(x))), u, -u])
        prediction = service.ask(np.clip(near, low, high).astype(np.float32))
        wrong, unflagged = is_fooled(prediction, label)
        if wrong[0] and first_wrong is None:
            first_wrong = service.rows - begun
        if unflagged[0]:
            asked = service.rows - begun
            again = [
                is_fooled(service.ask(at[None].astype(np.float32)), label)[1][0] for _ in range(10)
            ]
            return Try(first_wrong, asked, float(np.mean(again)))
        loss = lead(prediction, label)
        if loss[0] < -LEAD:
            loss = strangeness(prediction)
        slope = (loss[1 : PAIRS + 1] - loss[PAIRS + 1 :]) @ u
        at = np.clip(at - STEP_OF_RADIUS * size / steps * np.sign(slope), low, high)
    return Try(first_wrong, None)


def answered_rightly(service: Service, rows: Rows, count: int) -> Rows:
    """Return the first rows that are answered rightly and without a flag."""
    prediction = service.ask(rows.x.astype(np.float32))
    assert isinstance(prediction.scores, Scores)
    right = prediction.scores.probabilities.argmax(axis=1) == rows.y
    return rows.take(np.flatnonzero(right & (prediction.p_values.p_value > DEFAULT_FPR))[:count])


def near_others(rows: Rows, reach: float) -> float:
    """Return the share of rows that have another one within reach in the maximum norm."""
    distance, _ = cKDTree(rows.x).query(rows.x, k=2, p=np.inf)
    return float((distance[:, 1] <= reach).mean())


def measure(model: Model, images: int, steps: int, radius: float, seed: int) -> list[Try]:
    service = Service(model, seed << 20)
    rows = answered_rightly(service, unseen_rows(model), images)
    return [
        attack(service, x.astype(np.float32), int(label), radius, steps, n)
        for n, (x, label) in enumerate(zip(rows.x, rows.y, strict=True))
    ]


def share(tries: list[Try], limit: float) -> float:
    return float(np.mean([t.unflagged is not None and t.unflagged <= limit for t in tries]))


def page(model: Model, tries: list[Try], options: Namespace) -> str:
    manifest, spec = model.manifest, model.manifest.input
    near = near_others(unseen_rows(model), options.radius * (spec.maximum - spec.minimum))
    most = options.steps * (2 * PAIRS + 1)
    wrong = np.mean([t.wrong is not None for t in tries])
    again = [t.again for t in tries if t.unflagged is not None]
    lines = [
        f"# An attacker who only asks: {manifest.name} version {manifest.version}",
        "",
        f"`python -m benchmarks.questions {options.name} --images {options.images} "
        f"--steps {options.steps} --radius {options.radius:g} --seed {options.seed}`: "
        f"{len(tries)} images that are answered rightly and unflagged, one try each of at most "
        f"{most:,} rows asked, within {options.radius:g} of the data's range, "
        f"{manifest.noise.default_draws} fresh draws a request, flag at {DEFAULT_FPR:g}.",
        "",
        f"* A wrong label: {100 * wrong:.0f} % of tries.",
        f"* A wrong label without a flag: {100 * share(tries, most):.0f} % of tries"
        + (f"; asked again, {100 * np.mean(again):.0f} % of answers." if again else "."),
        f"* Of rows that nobody attacks, {100 * near:.1f} % have another within that radius.",
        "",
        "| rows near each other that a client may ask | wrong and unflagged, % of tries |",
        "|---|---|",
        *(f"| {n:,} | {100 * share(tries, n):.0f} |" for n in (*LIMITS, most) if n <= most),
    ]
    return "\n".join(lines) + "\n"


def plot(tries: list[Try]) -> Figure:
    figure, axis = plt.subplots(figsize=(5, 3.4), layout="constrained")
    for name in ("wrong", "unflagged"):
        found = sorted(n for t in tries if (n := getattr(t, name)) is not None)
        axis.step(found, np.arange(1, len(found) + 1) / len(tries), where="post", label=name)
    axis.set(xlabel="rows asked", ylabel="share of tries", ylim=(0, 1))
    axis.legend()
    return figure


def main() -> None:
    parser = parser_of(__doc__, "questions-NAME.{md,png}")
    parser.add_argument("--images", type=int, default=40)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--radius", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    model = open_model(options)
    tries = measure(model, options.images, options.steps, options.radius, options.seed)
    stem = f"questions-{model.manifest.name}"
    report(options, stem, page(model, tries, options), lambda: plot(tries))


if __name__ == "__main__":
    main()
