import numpy as np
import pytest

from model_store.acquisition.choice import select

IDS = [f"row {i}" for i in range(2000)]


def get_ids(indices):
    return {IDS[i] for i in indices.tolist()}


def test_share_of_zero_selects_no_control_rows():
    selection = select(IDS, {"row 3"}, 0.0, 10, 1)
    assert get_ids(selection.ranked) == {*IDS} - {"row 3"}
    assert len(selection.control) == 0 and selection.excluded == 1


@pytest.mark.parametrize(("share", "k"), [(0.1, 100), (0.5, 7), (1.0, 5), (0.25, 1)])
def test_control_share_is_right_on_average_and_excludes_ranked_rows(share, k):
    counts, control_ids, ranked_ids = [], set(), set()
    for seed in range(200):
        selection = select(IDS, set(), share, k, seed)
        counts.append(len(selection.control))
        control_ids |= get_ids(selection.control)
        ranked_ids |= get_ids(selection.ranked)
    assert {*counts} <= {int(share * k), int(share * k) + 1}
    assert np.mean(counts) == pytest.approx(share * k, abs=4 * 0.5 / np.sqrt(200))
    assert control_ids and not control_ids & ranked_ids


def test_repeated_acquisition_collects_uniform_control_sample():
    labelled_ids = set()
    values = np.arange(2000) / 2000
    control = []
    for seed in range(12):
        selection = select(IDS, labelled_ids, 0.2, 50, seed)
        control += selection.control.tolist()
        best = selection.ranked[np.argsort(-values[selection.ranked])][
            : 50 - len(selection.control)
        ]
        labelled_ids |= get_ids(best) | get_ids(selection.control)
    assert len(control) == len({*control}) == 120
    assert np.mean(values[control]) == pytest.approx(0.5, abs=4 * np.sqrt(1 / 12 / 120))
    stratum = 2000 - len(select(IDS, set(), 0.2, 50, 0).ranked)
    assert stratum == pytest.approx(400, abs=4 * np.sqrt(2000 * 0.2 * 0.8))


def test_selection_can_cover_the_pool_and_ignores_its_order():
    selection = select(IDS, set(), 0.3, len(IDS), 1)
    assert sorted([*selection.ranked, *selection.control]) == list(range(len(IDS)))
    order = np.random.default_rng(0).permutation(len(IDS))
    shuffled = select([IDS[i] for i in order], set(), 0.3, 40, 1)
    assert {IDS[order[i]] for i in shuffled.control.tolist()} == get_ids(
        select(IDS, set(), 0.3, 40, 1).control
    )
    assert (
        len(select([], set(), 0.3, 3, 1).control)
        == len(select(IDS[:1], {IDS[0]}, 0.3, 3, 1).ranked)
        == 0
    )
