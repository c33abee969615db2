from itertools import pairwise

import numpy as np
import pytest

from model_store.acquisition.choice import power_scores
from service.engine.admission import BATCH_ROW_DRAWS
from tests.support.files import npy_bytes

BATCH = ("batchbald", "power_bald")
SCORES = ("entropy", "bald", "bald_corrected", "mean_std", "variation_ratio")
CHUNK_ROWS = BATCH_ROW_DRAWS // 10  # at 10 draws per row


def acquire(client, pool, **fields):
    """Send a JSON request and return the answer."""
    answer = client.post("/acquire", json={"pool": pool, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def get_ranking(answer):
    """Return the ranking by id, without positions in the pool."""
    return [(row["rank"], row["id"], row["score"]) for row in answer["ranking"]]


def test_answer_has_the_documented_fields(client, digits_rows):
    answer = acquire(client, digits_rows[:30].tolist(), k=5, seed=7)
    ranking = answer.pop("ranking")
    assert answer == {
        "model": "digits",
        "version": "1",
        "acquisition": "bald",
        "num_samples": 100,
        "seed": 7,
        "pool_size": 30,
        "excluded": 0,
        "priors": None,
        "race": None,
        "beta": None,
        "finalists": None,
        "unknown_categories": {},
    }
    assert [row["rank"] for row in ranking] == [1, 2, 3, 4, 5]
    for row in ranking:
        assert set(row) == {"rank", "index", "id", "score", "control"}
        assert row["id"] == str(row["index"])


@pytest.mark.parametrize("acquisition", SCORES)
def test_ranking_uses_the_scores_of_predict(client, digits_rows, acquisition):
    request = {"seed": 3, "num_samples": 20}
    answer = acquire(client, digits_rows.tolist(), acquisition=acquisition, k=359, **request)
    predictions = client.post("/predict", json={"inputs": digits_rows.tolist(), **request}).json()[
        "predictions"
    ]
    scores = [prediction[acquisition] for prediction in predictions]
    assert [row["score"] for row in answer["ranking"]] == sorted(scores, reverse=True)
    assert sorted(row["index"] for row in answer["ranking"]) == list(range(359))
    assert all(row["score"] == scores[row["index"]] for row in answer["ranking"])


def test_shorter_ranking_is_a_prefix_of_longer_ranking(client, digits_rows):
    pool = digits_rows[:60].tolist()
    full_ranking = acquire(client, pool, k=60, seed=3)["ranking"]
    for k in (1, 2, 10, 59):
        assert acquire(client, pool, k=k, seed=3)["ranking"] == full_ranking[:k]


@pytest.mark.parametrize("acquisition", ["bald", *BATCH])
@pytest.mark.parametrize("k", [3, 4, 10**9])
def test_all_rows_are_ranked_if_k_covers_the_pool(client, digits_rows, k, acquisition):
    ranking = acquire(client, digits_rows[:3].tolist(), k=k, acquisition=acquisition)["ranking"]
    assert sorted(row["index"] for row in ranking) == [0, 1, 2]


def test_batchbald_refuses_k_above_its_limit(client, digits_rows):
    request = {"pool": np.tile(digits_rows, (3, 1))[:1001].tolist(), "num_samples": 2, "k": 1001}
    assert len(acquire(client, **request)["ranking"]) == 1001
    response = client.post("/acquire", json={**request, "acquisition": "batchbald"})
    assert response.status_code == 422
    expected = "k: expected up to 1000 rows of this pool for batchbald with 2 draws, got 1001"
    assert response.json()["detail"] == expected


@pytest.mark.parametrize("acquisition", ["bald", "entropy", "mean_std", "variation_ratio"])
def test_race_returns_the_same_ranking_as_all_draws(client, digits_rows, acquisition):
    request = {"acquisition": acquisition, "k": 5, "seed": 3, "num_samples": 100}
    expected = acquire(client, digits_rows.tolist(), **request)
    actual = acquire(client, digits_rows.tolist(), race=0.01, **request)
    assert actual["ranking"] == expected["ranking"]
    assert 5 <= actual["finalists"] < 359
    assert (expected["finalists"], expected["race"], actual["race"]) == (None, None, 0.01)


def test_race_needs_enough_draws_supported_score_and_valid_probability(client, digits_rows):
    request = {"pool": digits_rows[:20].tolist(), "seed": 1, "num_samples": 39}
    answer = client.post("/acquire", json={**request, "race": 0.01}).json()
    assert answer["finalists"] is None
    assert answer["ranking"] == client.post("/acquire", json=request).json()["ranking"]
    for name in ("random", "batchbald", "power_bald", "bald_corrected"):
        response = client.post("/acquire", json={**request, "race": 0.01, "acquisition": name})
        assert response.status_code == 422
        assert response.json()["detail"].startswith("race: expected one of entropy, bald, ")
    for probability, status in (
        (1.0, 422),
        (0.0, 422),
        (1e-7, 422),
        (1e-6, 200),
        (0.9999999999999999, 200),
    ):
        body = {**request, "race": probability, "num_samples": 50}
        assert client.post("/acquire", json=body).status_code == status


def test_power_bald_samples_rows_in_proportion_to_powers_of_bald(client, digits_rows):
    pool, ids = digits_rows[:60].tolist(), [str(i) for i in range(60)]
    bald = {row["id"]: row["score"] for row in acquire(client, pool, seed=1, k=60)["ranking"]}
    balds = np.array([bald[name] for name in ids])
    for beta in (0.25, 1.0, 4.0):
        top_rows = np.argmax([power_scores(balds, ids, seed, beta) for seed in range(2000)], axis=1)
        shares = balds**beta / (balds**beta).sum()
        assert (
            np.abs(np.bincount(top_rows, minlength=60) / 2000 - shares).max() < 0.05
        )  # four standard errors
        request = {} if beta == 1.0 else {"beta": beta}
        answer = acquire(client, pool, acquisition="power_bald", seed=1, k=60, **request)
        ranking = answer["ranking"]
        expected = power_scores(
            np.array([bald[row["id"]] for row in ranking]), [r["id"] for r in ranking], 1, beta
        )
        assert [row["score"] for row in ranking] == pytest.approx(expected.tolist(), abs=1e-9)
        assert all(a["score"] >= b["score"] for a, b in pairwise(ranking))
        assert answer["beta"] == beta
    ranking = acquire(client, pool, acquisition="power_bald", seed=1, k=60, beta=1e6)["ranking"]
    assert [row["id"] for row in ranking] == [
        row["id"] for row in acquire(client, pool, seed=1, k=60)["ranking"]
    ]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"beta": 0.0, "acquisition": "power_bald"}, "beta: "),
        ({"beta": 1e7, "acquisition": "power_bald"}, "beta: "),
        ({"beta": "2", "acquisition": "power_bald"}, "beta: "),
        ({"beta": 2.0}, "beta: expected the acquisition power_bald, got 'bald'"),
    ],
)
def test_beta_must_be_valid_and_requires_power_bald(client, digits_rows, fields, expected):
    response = client.post("/acquire", json={"pool": digits_rows[:5].tolist(), **fields})
    assert response.status_code == 422
    assert response.json()["detail"].startswith(expected)


@pytest.mark.parametrize("acquisition", [*SCORES, *BATCH, "random"])
def test_permuting_the_pool_permutes_the_ranking(client, digits_rows, acquisition):
    # Each row is repeated four times, so every cut of the ranking can fall between ties.
    pool = np.tile(digits_rows[:40], (4, 1))
    ids = [f"row {i}" for i in range(160)]
    request = {"acquisition": acquisition, "seed": 5, "num_samples": 10, "k": 50}
    expected = acquire(client, pool.tolist(), ids=ids, **request)
    rng = np.random.default_rng(0)
    for _ in range(3):
        order = rng.permutation(160)
        permuted = acquire(client, pool[order].tolist(), ids=[ids[i] for i in order], **request)
        assert get_ranking(permuted) == get_ranking(expected)
        assert [order[row["index"]] for row in permuted["ranking"]] == [
            row["index"] for row in expected["ranking"]
        ]


def test_ties_are_broken_by_seed(client, digits_rows):
    pool = np.tile(digits_rows[:1], (50, 1)).tolist()
    orders = [
        [row["id"] for row in acquire(client, pool, k=50, seed=seed)["ranking"]]
        for seed in (1, 1, 2)
    ]
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]  # equal with probability 1 / 50!
    assert orders[0] != sorted(orders[0], key=int)


@pytest.mark.parametrize(
    "options", [*({"acquisition": name} for name in ("bald", "random", *BATCH)), {"race": 0.1}]
)
def test_returned_seed_reproduces_an_unseeded_ranking(client, digits_rows, options):
    request = {"pool": digits_rows[:40].tolist(), "k": 7, "num_samples": 40, **options}
    answer = client.post("/acquire", json=request)
    assert (
        client.post("/acquire", json={**request, "seed": answer.json()["seed"]}).content
        == answer.content
    )


@pytest.mark.parametrize("acquisition", SCORES)
def test_scores_do_not_depend_on_chunks_of_the_pool(client, digits_rows, acquisition):
    rng = np.random.default_rng(0)
    pool = np.clip(np.tile(digits_rows, (4, 1)) + rng.integers(-2, 3, (1436, 64)), 0, 16)[
        : 2 * CHUNK_ROWS + 1
    ]
    request = {"acquisition": acquisition, "seed": 2, "num_samples": 10, "k": 2 * CHUNK_ROWS + 1}
    scores = {
        row["index"]: row["score"] for row in acquire(client, pool.tolist(), **request)["ranking"]
    }
    assert len(scores) == len(pool)
    for start in range(0, len(pool), 300):  # differs from the service's chunk size
        part = acquire(client, pool[start : start + 300].tolist(), **request)["ranking"]
        assert {start + row["index"]: row["score"] for row in part}.items() <= scores.items()


def test_npy_pool_ranks_like_json_pool(client, digits_rows):
    query = {"k": 5, "seed": 7, "acquisition": "entropy", "num_samples": 20}
    headers = {"Content-Type": "application/x-npy"}
    answer = client.post(
        "/acquire", params=query, content=npy_bytes(digits_rows[:30]), headers=headers
    )
    assert (
        answer.content
        == client.post("/acquire", json={"pool": digits_rows[:30].tolist(), **query}).content
    )


@pytest.mark.parametrize(
    ("ids", "field", "message"),
    [
        (["a", "b", "a"], "ids", "duplicates such as"),
        (["a", "b"], "ids", "an id for each of the 3 pool rows, got 2"),
        ([], "ids", "an id for each of the 3 pool rows, got 0"),
        (["a", "b", 3], "ids.2", "a valid string, got 3"),
        (["a", None, "c"], "ids.1", "a valid string, got null"),
        ("abc", "ids", "a valid list, got a string of 3 characters"),
    ],
)
def test_invalid_ids_are_refused(client, digits_rows, ids, field, message):
    answer = client.post("/acquire", json={"pool": digits_rows[:3].tolist(), "ids": ids})
    assert answer.status_code == 422
    assert answer.json()["detail"].startswith(f"{field}: expected ")
    assert message in answer.json()["detail"]


def test_ids_can_be_any_text(client, digits_rows):
    ids = ["", "\x00", "é 𝄞", "x" * 10_000]
    answer = acquire(client, digits_rows[:4].tolist(), ids=ids)
    assert sorted(row["id"] for row in answer["ranking"]) == sorted(ids)
    assert all(row["id"] == ids[row["index"]] for row in answer["ranking"])
