from model_store.inference.noise import MAX_SEED
from service.models.reservoir import fresh_seed


def test_fresh_seeds_are_of_the_whole_range():
    """Each of 53 bits is 0 in some of 200 seeds and 1 in others: by chance one is not once in 1e58
    runs."""
    seeds = [fresh_seed() for _ in range(200)]
    ones, zeros = 0, 0
    for seed in seeds:
        assert 0 <= seed <= MAX_SEED
        ones, zeros = ones | seed, zeros | ~seed
    assert ones == zeros & MAX_SEED == MAX_SEED == 2**53 - 1
    assert len(set(seeds)) == 200
