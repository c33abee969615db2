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
def test_ranking_sorts_by_score_and_breaks_ties_by_id_hash(k):
    rows = ranking(SCORES, IDS, 5, k)
    hashes = id_hashes(IDS, 5)
    expected = sorted(range(40), key=lambda i: (-SCORES[i], hashes[i]))[:k]
    assert [row["index"] for row in rows] == expected
    assert [row["rank"] for row in rows] == list(range(1, len(expected) + 1))
    assert all(
        (row["id"], row["score"]) == (IDS[row["index"]], SCORES[row["index"]]) for row in rows
    )


@pytest.mark.parametrize("scores", [SCORES, None], ids=["scores", "random"])
def test_ranking_does_not_depend_on_pool_order(scores):
    order = np.random.default_rng(1).permutation(40)
    shuffled = ranking(None if scores is None else scores[order], [IDS[i] for i in order], 5, 9)
    assert [row["id"] for row in shuffled] == [row["id"] for row in ranking(scores, IDS, 5, 9)]


def test_ranking_without_scores_uses_random_scores_from_seed_and_id():
    rows = ranking(None, IDS, 5, 40)
    scores = [row["score"] for row in rows]
    assert scores == sorted(scores, reverse=True)
    assert sorted(scores) == sorted(random_scores(id_hashes(IDS, 5)).tolist())
    assert [row["id"] for row in rows] != [row["id"] for row in ranking(None, IDS, 6, 40)]


def test_random_scores_range_from_0_to_just_below_1():
    ends = random_scores(np.array([0, 2**63, 2**64 - 1], dtype=np.uint64))
    assert ends.tolist() == [0.0, 0.5, 1.0 - 2.0**-53]


@pytest.mark.parametrize("seed", [0, 7, 2**53 - 1])
def test_id_hash_is_blake2b_keyed_by_seed_bytes(seed):
    expected = blake2b(b"row 3", digest_size=8, key=seed.to_bytes(8, "little")).digest()
    assert id_hashes(["row 1", "row 3"], seed)[1].tobytes() == expected


def test_acquisition_must_match_task_and_has_a_default():
    assert check_acquisition("entropy", "classification") == "entropy"
    assert check_acquisition("random", "regression") == "random"
    assert check_acquisition(None, "classification") == "bald"
    with pytest.raises(
        InvalidInput, match=r"acquisition: expected one of .* for a model of regression, got 'bald'"
    ):
        check_acquisition("bald", "regression")


def test_error_names_row_with_nan_score():
    with pytest.raises(InvalidInput, match=r"pool\.3"):
        ranking(np.where(np.arange(40) == 3, np.nan, SCORES), IDS, 5, 2)


def sample_probs(seed):
    """Sample class probabilities whose draws disagree on only a few rows."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(DRAWS, ROWS, 3)) * rng.gamma(0.5, 2.0, size=(ROWS, 1))
    probs = np.exp(logits)
    return (probs / probs.sum(axis=2, keepdims=True)).astype(np.float32)


def get_top_candidates(probs, max_rows, chunk_rows):
    top = TopCandidates(max_rows)
    for first in range(0, ROWS, chunk_rows):
        top.add(BatchBald.from_probs(probs[:, first : first + chunk_rows]), first)
    return top


@pytest.mark.parametrize("max_rows", [60, 20])
def test_chunked_candidates_are_the_rows_with_largest_gain(max_rows):
    probs = sample_probs(0)
    full = BatchBald.from_probs(probs)
    for chunk_rows in (1, 7, 25, 60):
        top = get_top_candidates(probs, max_rows, chunk_rows)
        assert set(top.rows) == set(np.argsort(-full.gain)[:max_rows])
        assert top.candidates.gain.tolist() == full.gain[top.rows].tolist()
        assert top.candidates.noise.tolist() == full.noise[top.rows].tolist()
        assert top.candidates.outputs.tolist() == full.outputs[top.rows].tolist()


@pytest.mark.parametrize("seed", range(3))
def test_batch_from_top_candidates_equals_batch_from_all_rows(seed):
    probs = sample_probs(seed)
    ids = [str(i) for i in range(ROWS)]

    def select_batch(max_rows):
        top = get_top_candidates(probs, max_rows, 7)
        joint = BatchBald(top.candidates, DRAWS, seed)
        batch = joint_ranking(joint, top.rows, ids, seed, 3)
        return [row["index"] for row in batch], [row["score"] for row in batch]

    rows, gains = select_batch(ROWS)
    num_candidates = int((BatchBald.from_probs(probs).gain >= gains[-1]).sum())
    assert num_candidates < ROWS
    assert select_batch(num_candidates)[0] == rows


class ScriptedPool(Pool):
    """A pool that records requests and replays scripted answers."""

    def __init__(self, rows, answers):
        self.ids, self.answers, self.requests = range(rows), iter(answers), []

    async def scores_with_errors(self, rows, num_draws):
        self.requests.append((rows.tolist(), num_draws))
        return next(self.answers, (np.zeros(len(rows)), None))

    async def candidates(self):
        raise NotImplementedError


class MeansPool(ScriptedPool):
    """A pool whose scores are means over draws of shape (K, N)."""

    def __init__(self, draws):
        super().__init__(draws.shape[1], ())
        self.draws, self.work = draws, 0

    async def scores_with_errors(self, rows, num_draws):
        self.work += len(rows) * num_draws
        assert (np.diff(rows) > 0).all()
        values = self.draws[:num_draws, rows]
        return values.mean(axis=0), values.std(axis=0, ddof=1) / np.sqrt(num_draws)


def run_race(pool, k, stages, num_samples, probability):
    choice = Choice("classification", "bald", k, num_samples, probability)
    return asyncio.run(race(pool, choice, stages))


def run_means_race(draws, k, stages, probability):
    pool = MeansPool(draws)
    return run_race(pool, k, stages, len(draws), probability), pool.work


def test_race_finds_best_rows_with_less_than_half_the_work():
    """Run 200 races with normal errors and failure probability .2."""
    rng, failures, work_shares = np.random.default_rng(0), 0, []
    for _ in range(200):
        draws = rng.gamma(0.3, 1.0, 500) + rng.normal(size=(100, 500)) * rng.uniform(0.1, 1.0, 500)
        (scores, finalists), work = run_means_race(draws, 5, (10, 25), 0.2)
        means = draws.mean(axis=0)
        is_finalist = scores > DROPPED_SCORE
        assert np.allclose(scores[is_finalist], means[is_finalist])
        assert finalists == is_finalist.sum()
        failures += set(np.argsort(-means)[:5]) != set(np.argsort(-scores)[:5])
        work_shares.append(work / draws.size)
    assert failures <= 40 + 3 * 6  # expected count plus three standard deviations
    assert np.mean(work_shares) < 0.5


def test_race_drops_rows_whose_upper_bound_is_below_k_full_scores():
    """Student's t with 9 degrees of freedom exceeds 4.15 with probability .01 / 8."""
    means = np.array([1.0, 0.9, 0.8, 0.7, 0.1, 0.5, 0.55, 0.6])
    errors = np.full(8, 0.1)  # 4.15 * sqrt(.9) * .1 = .393
    full_scores = np.array([0.91, 0.94, 0.5]), np.array([0.95, 0.1, 0.2])
    pool = ScriptedPool(8, [(means, errors), (full_scores[0], None), (full_scores[1], None)])
    scores, finalists = run_race(pool, 1, (10,), 100, 0.01)
    first_stage, leaders, survivors = pool.requests
    assert first_stage == (list(range(8)), 10)
    assert leaders == ([0, 1, 2], 100)
    assert survivors == ([3, 6, 7], 100)  # .55 + .393 is above .94, .5 + .393 below
    assert scores.tolist() == [0.91, 0.94, 0.5, 0.95, DROPPED_SCORE, DROPPED_SCORE, 0.1, 0.2]
    assert finalists == 6


def test_race_does_not_trust_zero_error_of_a_few_agreeing_draws():
    means, errors = np.linspace(0.0, 1.0, 60), np.full(60, 0.1)
    errors[50] = 0.0
    pool = ScriptedPool(60, [(means, errors), (np.array([0.9, 0.95, 1.0]), None)])
    run_race(pool, 1, (10,), 100, 0.05)
    _, (leaders, _), (survivors, _) = pool.requests
    assert 50 not in leaders
    assert 50 in survivors
    assert 0 not in survivors


class RegressionPool(Pool):
    """A regression pool with known outputs."""

    def __init__(self, outputs):
        self.ids, self.seed = [str(i) for i in range(outputs.shape[1])], 3
        self.outputs, self.predictive = outputs, PREDICTIVES["regression"]

    async def scores(self):
        return self.predictive.acquisition(self.compute_scores(self.outputs), "variance")

    async def scores_with_errors(self, rows, num_draws):
        return race_scores(self.compute_scores(self.outputs[:num_draws, rows]), "std")

    def compute_scores(self, outputs):
        return self.predictive.scores(self.predictive.sums(outputs))

    async def candidates(self):
        raise NotImplementedError


@pytest.mark.parametrize("unit", [0.1, 1.0, 100.0])
def test_race_does_not_depend_on_target_unit(unit):
    rng = np.random.default_rng(0)
    outputs = np.stack([rng.normal(size=(100, 500)), rng.normal(size=500) + np.zeros((100, 1))], -1)
    outputs[..., 0] *= unit
    outputs[..., 1] += 2.0 * np.log(unit)
    pool, choice = RegressionPool(outputs), Choice("regression", "variance", 10, 100)
    result = asyncio.run(rank_pool(pool, replace(choice, race=0.05)))
    assert result.rows == asyncio.run(rank_pool(pool, choice)).rows
    rescaled_outputs = np.stack([outputs[..., 0] / unit, outputs[..., 1] - 2.0 * np.log(unit)], -1)
    rescaled = asyncio.run(rank_pool(RegressionPool(rescaled_outputs), replace(choice, race=0.05)))
    assert result.finalists == rescaled.finalists
    assert result.finalists < 100


def test_race_retains_all_rows_if_k_covers_pool_and_names_nan_rows():
    (_, finalists), _ = run_means_race(
        np.random.default_rng(0).normal(size=(40, 6)), 9, (10,), 0.05
    )
    assert finalists == 6
    pool = ScriptedPool(3, [(np.array([1.0, np.nan, 0.0]), np.zeros(3))])
    with pytest.raises(InvalidInput, match=r"pool\.1"):
        run_race(pool, 1, (10,), 100, 0.05)


@pytest.mark.parametrize("degrees", [9, 24, 99])
@pytest.mark.parametrize("tail", [1e-3, 1e-5, 1e-7, 5e-9])
def test_student_quantile_matches_scipy(degrees, tail):
    assert student_quantile(degrees, tail) == pytest.approx(stats.t.isf(tail, degrees), rel=0.03)


def test_race_stages_depend_on_acquisition_and_num_samples():
    def get_stages(race, name, num_samples):
        return race_stages(Choice("classification", name, 1, num_samples, race))

    assert get_stages(None, "entropy", 100) == ()
    assert get_stages(0.05, "bald", 100) == (10, 25)
    assert get_stages(0.05, "bald", 40) == (10,)
    assert get_stages(0.05, "bald", 39) == ()
    with pytest.raises(InvalidInput, match="race: expected one of entropy, bald"):
        get_stages(0.05, "random", 100)


def test_error_names_row_by_its_index_in_the_pool():
    with pytest.raises(InvalidInput, match=r"pool_file\.70"):
        check_computed(np.array([1.0, np.inf, np.nan]), "pool_file", np.array([3, 70, 90]))
