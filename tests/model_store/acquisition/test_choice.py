import asyncio
from dataclasses import replace
from hashlib import blake2b

import numpy as np
import pytest
from scipy import stats

from model_store.acquisition.choice import (
    Choice,
    check_acquisition,
    id_hashes,
    joint_ranking,
    random_scores,
    ranking,
)
from model_store.acquisition.ranking import (
    DROPPED_SCORE,
    Pool,
    race,
    race_stages,
    rank_pool,
    student_quantile,
)
from model_store.errors import InvalidInput
from model_store.inference.prediction import check_computed
from model_store.scores.joint import BatchBald
from model_store.scores.tasks import PREDICTIVES, race_scores
from service.engine.pool_ranking import TopCandidates

DRAWS, ROWS = 8, 60
IDS = [f"row {i}" for i in range(40)]
SCORES = np.random.default_rng(0).integers(0, 6, 40) / 4.0  # many ties


@pytest.mark.parametrize("k", [1, 7, 40, 100])
def test_the_rows_of_the_largest_scores_come_first_and_ties_by_the_hash_of_their_id(k):
    ranked = ranking(SCORES, IDS, 5, k)
    hashes = id_hashes(IDS, 5)
    expected = sorted(range(40), key=lambda i: (-SCORES[i], hashes[i]))[:k]
    assert [row["index"] for row in ranked] == expected
    assert [row["rank"] for row in ranked] == list(range(1, len(expected) + 1))
    assert all(
        (row["id"], row["score"]) == (IDS[row["index"]], SCORES[row["index"]]) for row in ranked
    )


@pytest.mark.parametrize("scores", [SCORES, None], ids=["scores", "random"])
def test_a_pool_in_another_order_has_the_same_ranking(scores):
    order = np.random.default_rng(1).permutation(40)
    updated = ranking(None if scores is None else scores[order], [IDS[i] for i in order], 5, 9)
    assert [row["id"] for row in updated] == [row["id"] for row in ranking(scores, IDS, 5, 9)]


def test_without_scores_rows_are_in_the_order_of_numbers_that_seed_and_id_decide():
    ranked = ranking(None, IDS, 5, 40)
    scores = [row["score"] for row in ranked]
    assert scores == sorted(scores, reverse=True)
    assert sorted(scores) == sorted(random_scores(id_hashes(IDS, 5)).tolist())
    assert [row["id"] for row in ranked] != [row["id"] for row in ranking(None, IDS, 6, 40)]


def test_random_scores_are_uniform_from_0_to_below_1():
    ends = random_scores(np.array([0, 2**63, 2**64 - 1], dtype=np.uint64))
    assert ends.tolist() == [0.0, 0.5, 1.0 - 2.0**-53]


@pytest.mark.parametrize("seed", [0, 7, 2**53 - 1])
def test_a_hash_is_that_of_the_id_keyed_by_the_eight_bytes_of_the_seed(seed):
    expected = blake2b(b"row 3", digest_size=8, key=seed.to_bytes(8, "little")).digest()
    assert id_hashes(["row 1", "row 3"], seed)[1].tobytes() == expected


def test_an_acquisition_of_another_task_is_refused_and_none_is_the_default():
    assert check_acquisition("entropy", "classification") == "entropy"
    assert check_acquisition("random", "regression") == "random"
    assert check_acquisition(None, "classification") == "bald"
    with pytest.raises(
        InvalidInput, match=r"acquisition: expected one of .* for a model of regression, got 'bald'"
    ):
        check_acquisition("bald", "regression")


def test_a_row_without_a_score_is_named():
    with pytest.raises(InvalidInput, match=r"pool\.3"):
        ranking(np.where(np.arange(40) == 3, np.nan, SCORES), IDS, 5, 2)


def sample_probs(seed):
    """Class probabilities of draws that disagree about few of the rows."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(DRAWS, ROWS, 3)) * rng.gamma(0.5, 2.0, size=(ROWS, 1))
    probs = np.exp(logits)
    return (probs / probs.sum(axis=2, keepdims=True)).astype(np.float32)


def get_best(probs, most, part):
    best = TopCandidates(most)
    for first in range(0, ROWS, part):
        best.add(BatchBald.from_probs(probs[:, first : first + part]), first)
    return best


@pytest.mark.parametrize("most", [60, 20])
def test_what_is_kept_of_parts_are_the_rows_that_gain_most_alone(most):
    probs = sample_probs(0)
    full = BatchBald.from_probs(probs)
    for part in (1, 7, 25, 60):
        best = get_best(probs, most, part)
        assert set(best.rows) == set(np.argsort(-full.gain)[:most])
        assert best.candidates.gain.tolist() == full.gain[best.rows].tolist()
        assert best.candidates.noise.tolist() == full.noise[best.rows].tolist()
        assert best.candidates.outputs.tolist() == full.outputs[best.rows].tolist()


@pytest.mark.parametrize("seed", range(3))
def test_a_choice_from_the_rows_that_gain_most_alone_is_that_from_all(seed):
    probs = sample_probs(seed)
    ids = [str(i) for i in range(ROWS)]

    def chosen(most):
        best = get_best(probs, most, 7)
        joint = BatchBald(best.candidates, DRAWS, seed)
        ranked = joint_ranking(joint, best.rows, ids, seed, 3)
        return [row["index"] for row in ranked], [row["score"] for row in ranked]

    rows, gains = chosen(ROWS)
    enough = int((BatchBald.from_probs(probs).gain >= gains[-1]).sum())
    assert enough < ROWS
    assert chosen(enough)[0] == rows


class ScriptedPool(Pool):
    """A pool that records what is requested and returns the answers in turn."""

    def __init__(self, rows, answers):
        self.ids, self.answers, self.requests = range(rows), iter(answers), []

    async def scores_with_errors(self, rows, num_draws):
        self.requests.append((rows.tolist(), num_draws))
        return next(self.answers, (np.zeros(len(rows)), None))

    async def candidates(self):
        raise NotImplementedError


class MeansPool(ScriptedPool):
    """A pool whose scores are means of draws (K, N)."""

    def __init__(self, draws):
        super().__init__(draws.shape[1], ())
        self.draws, self.work = draws, 0

    async def scores_with_errors(self, rows, num_draws):
        self.work += len(rows) * num_draws
        assert (np.diff(rows) > 0).all()
        part = self.draws[:num_draws, rows]
        return part.mean(axis=0), part.std(axis=0, ddof=1) / np.sqrt(num_draws)


def run_race(pool, k, stages, num_samples, probability):
    choice = Choice("classification", "bald", k, num_samples, probability)
    return asyncio.run(race(pool, choice, stages))


def raced(draws, k, stages, probability):
    pool = MeansPool(draws)
    return run_race(pool, k, stages, len(draws), probability), pool.work


def test_a_race_finds_the_best_of_all_draws_and_looks_at_few_of_the_others():
    """In 200 races of a probability of .2 to go wrong, all of normal errors; the bound of all rows
    is cautious."""
    rng, wrong, share = np.random.default_rng(0), 0, []
    for _ in range(200):
        draws = rng.gamma(0.3, 1.0, 500) + rng.normal(size=(100, 500)) * rng.uniform(0.1, 1.0, 500)
        (scores, finalists), looked = raced(draws, 5, (10, 25), 0.2)
        full = draws.mean(axis=0)
        reference = scores > DROPPED_SCORE
        assert np.allclose(scores[reference], full[reference])
        assert finalists == reference.sum()
        wrong += set(np.argsort(-full)[:5]) != set(np.argsort(-scores)[:5])
        share.append(looked / draws.size)
    assert wrong <= 40 + 3 * 6  # three standard deviations of a count of .2
    assert np.mean(share) < 0.5


def test_a_row_stays_in_a_race_as_long_as_its_bound_is_not_below_k_scores_of_all_draws():
    """Student's t of 9 degrees is exceeded with probability .01 / 8 above 4.15."""
    actual = np.array([1.0, 0.9, 0.8, 0.7, 0.1, 0.5, 0.55, 0.6])
    errors = np.full(8, 0.1)  # 4.15 * sqrt(.9) * .1 = .393
    full = np.array([0.91, 0.94, 0.5]), np.array([0.95, 0.1, 0.2])
    pool = ScriptedPool(8, [(actual, errors), (full[0], None), (full[1], None)])
    scores, finalists = run_race(pool, 1, (10,), 100, 0.01)
    first, best, rest = pool.requests
    assert first == (list(range(8)), 10)
    assert best == ([0, 1, 2], 100)
    assert rest == ([3, 6, 7], 100)  # .55 + .393 is above .94, .5 + .393 below
    assert scores.tolist() == [0.91, 0.94, 0.5, 0.95, DROPPED_SCORE, DROPPED_SCORE, 0.1, 0.2]
    assert finalists == 6


def test_a_row_whose_few_draws_agree_is_as_uncertain_as_rows_like_it():
    actual, errors = np.linspace(0.0, 1.0, 60), np.full(60, 0.1)
    errors[50] = 0.0
    pool = ScriptedPool(60, [(actual, errors), (np.array([0.9, 0.95, 1.0]), None)])
    run_race(pool, 1, (10,), 100, 0.05)
    _, (best, _), (rest, _) = pool.requests
    assert 50 not in best
    assert 50 in rest
    assert 0 not in rest


class DrawnPool(Pool):
    """Rows of a regression whose outputs are known."""

    def __init__(self, outputs):
        self.ids, self.seed = [str(i) for i in range(outputs.shape[1])], 3
        self.outputs, self.predictive = outputs, PREDICTIVES["regression"]

    async def scores(self):
        return self.predictive.acquisition(self.scored(self.outputs), "variance")

    async def scores_with_errors(self, rows, num_draws):
        return race_scores(self.scored(self.outputs[:num_draws, rows]), "std")

    def scored(self, outputs):
        return self.predictive.scores(self.predictive.sums(outputs))

    async def candidates(self):
        raise NotImplementedError


@pytest.mark.parametrize("unit", [0.1, 1.0, 100.0])
def test_a_race_does_not_depend_on_the_unit_of_the_target(unit):
    rng = np.random.default_rng(0)
    outputs = np.stack([rng.normal(size=(100, 500)), rng.normal(size=500) + np.zeros((100, 1))], -1)
    outputs[..., 0] *= unit
    outputs[..., 1] += 2.0 * np.log(unit)
    pool, choice = DrawnPool(outputs), Choice("regression", "variance", 10, 100)
    raced = asyncio.run(rank_pool(pool, replace(choice, race=0.05)))
    assert raced.rows == asyncio.run(rank_pool(pool, choice)).rows
    of_unit_one = np.stack([outputs[..., 0] / unit, outputs[..., 1] - 2.0 * np.log(unit)], -1)
    again = asyncio.run(rank_pool(DrawnPool(of_unit_one), replace(choice, race=0.05)))
    assert raced.finalists == again.finalists
    assert raced.finalists < 100


def test_all_rows_take_all_draws_where_k_is_as_many_and_one_without_a_score_is_named():
    (_, finalists), _ = raced(np.random.default_rng(0).normal(size=(40, 6)), 9, (10,), 0.05)
    assert finalists == 6
    pool = ScriptedPool(3, [(np.array([1.0, np.nan, 0.0]), np.zeros(3))])
    with pytest.raises(InvalidInput, match=r"pool\.1"):
        run_race(pool, 1, (10,), 100, 0.05)


@pytest.mark.parametrize("degrees", [9, 24, 99])
@pytest.mark.parametrize("tail", [1e-3, 1e-5, 1e-7, 5e-9])
def test_the_width_of_races_is_students_quantile(degrees, tail):
    assert student_quantile(degrees, tail) == pytest.approx(stats.t.isf(tail, degrees), rel=0.03)


def test_a_race_has_stages_of_draws_enough_for_their_errors():
    def stages(race, name, num_samples):
        return race_stages(Choice("classification", name, 1, num_samples, race))

    assert stages(None, "entropy", 100) == ()
    assert stages(0.05, "bald", 100) == (10, 25)
    assert stages(0.05, "bald", 40) == (10,)
    assert stages(0.05, "bald", 39) == ()
    with pytest.raises(InvalidInput, match="race: expected one of entropy, bald"):
        stages(0.05, "random", 100)


def test_a_row_without_a_score_is_named_by_its_place_among_all():
    with pytest.raises(InvalidInput, match=r"pool_file\.70"):
        check_computed(np.array([1.0, np.inf, np.nan]), "pool_file", np.array([3, 70, 90]))
