import numpy as np
import pytest

from model_store.acquisition.choice import select

IDS = [f"row {i}" for i in range(2000)]


def names(places):
    return {IDS[i] for i in places.tolist()}


def test_nothing_is_set_aside_unless_asked_for():
    selected = select(IDS, {"row 3"}, 0.0, 10, 1)
    assert names(selected.ranked) == {*IDS} - {"row 3"}
    assert len(selected.control) == 0 and selected.excluded == 1


@pytest.mark.parametrize(("share", "k"), [(0.1, 100), (0.5, 7), (1.0, 5), (0.25, 1)])
def test_the_share_of_k_is_right_on_average_and_ranked_rows_are_never_set_aside(share, k):
    counts, ever, ranked = [], set(), set()
    for seed in range(200):
        selected = select(IDS, set(), share, k, seed)
        counts.append(len(selected.control))
        ever |= names(selected.control)
        ranked |= names(selected.ranked)
    assert {*counts} <= {int(share * k), int(share * k) + 1}
    assert np.mean(counts) == pytest.approx(share * k, abs=4 * 0.5 / np.sqrt(200))
    assert ever and not ever & ranked


def test_acquiring_again_and_again_sets_a_uniform_sample_aside():
    labelled = set()
    value = np.arange(2000) / 2000
    control = []
    for seed in range(12):
        selected = select(IDS, labelled, 0.2, 50, seed)
        control += selected.control.tolist()
        best = selected.ranked[np.argsort(-value[selected.ranked])][: 50 - len(selected.control)]
        labelled |= names(best) | names(selected.control)
    assert len(control) == len({*control}) == 120
    assert np.mean(value[control]) == pytest.approx(0.5, abs=4 * np.sqrt(1 / 12 / 120))
    stratum = 2000 - len(select(IDS, set(), 0.2, 50, 0).ranked)
    assert stratum == pytest.approx(400, abs=4 * np.sqrt(2000 * 0.2 * 0.8))


def test_a_pool_that_is_asked_for_whole_comes_whole_in_whatever_order():
    selected = select(IDS, set(), 0.3, len(IDS), 1)
    assert sorted([*selected.ranked, *selected.control]) == list(range(len(IDS)))
    order = np.random.default_rng(0).permutation(len(IDS))
    other = select([IDS[i] for i in order], set(), 0.3, 40, 1)
    assert {IDS[order[i]] for i in other.control.tolist()} == names(
        select(IDS, set(), 0.3, 40, 1).control
    )
    assert (
        len(select([], set(), 0.3, 3, 1).control)
        == len(select(IDS[:1], {IDS[0]}, 0.3, 3, 1).ranked)
        == 0
    )
