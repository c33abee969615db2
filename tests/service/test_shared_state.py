from functools import partial

from service.shared_state import FolderBackend, SharedState


def backends(folder, count):
    return [FolderBackend(str(worker), folder) for worker in range(count)]


def test_resets_reach_all_processes_once(tmp_path):
    reset = []
    states = [
        SharedState(backend, bytes, lambda *key, name=backend.name: reset.append((name, *key)))
        for backend in backends(tmp_path, 2)
    ]
    states[0].reset_drift("digits", "2")
    for state in states * 2:
        state._follow_resets(state.backend)
    assert sorted(reset) == [("0", "digits", "2"), ("1", "digits", "2")]


def test_metrics_are_merged(tmp_path):
    page = b"# HELP a What.\n# TYPE a gauge\na %d\n"
    item, other = (
        SharedState(backend, partial(page.__mod__, value), print)
        for value, backend in enumerate(backends(tmp_path, 2), start=1)
    )
    other.metrics()
    expected = b'# HELP a What.\n# TYPE a gauge\na{worker="0"} 1\na{worker="1"} 2\n'
    assert item.metrics() == other.metrics() == expected


def test_no_counter_goes_back_from_one_scrape_to_the_next_whichever_process_answers(tmp_path):
    counted = [0, 0]

    def page(worker):
        return b"# HELP a_total What.\n# TYPE a_total counter\na_total %d\n" % counted[worker]

    states = [
        SharedState(backend, partial(page, worker), print)
        for worker, backend in enumerate(backends(tmp_path, 2))
    ]
    for state in states:
        state.metrics()
    for request in (0, 1, 0, 0, 1, 1):
        counted[request] += 1
        here, there = (states[worker].metrics() for worker in (request, 1 - request))
        assert here == there
        assert b'a_total{worker="%d"} %d' % (request, counted[request]) in there
