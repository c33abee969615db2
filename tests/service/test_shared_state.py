from functools import partial

from service.shared_state import FolderBackend, SharedState


def make_backends(folder, count):
    return [FolderBackend(str(worker), folder) for worker in range(count)]


def test_resets_reach_all_processes_once(tmp_path):
    reset = []
    states = [
        SharedState(backend, bytes, lambda *key, name=backend.name: reset.append((name, *key)))
        for backend in make_backends(tmp_path, 2)
    ]
    states[0].reset_drift("digits", "2")
    for state in states * 2:
        state._follow_resets(state.backend)
    assert sorted(reset) == [("0", "digits", "2"), ("1", "digits", "2")]


def test_metrics_of_all_processes_are_merged(tmp_path):
    page = b"# HELP a What.\n# TYPE a gauge\na %d\n"
    first, second = (
        SharedState(backend, partial(page.__mod__, value), print)
        for value, backend in enumerate(make_backends(tmp_path, 2), start=1)
    )
    second.metrics()
    expected = b'# HELP a What.\n# TYPE a gauge\na{worker="0"} 1\na{worker="1"} 2\n'
    assert first.metrics() == second.metrics() == expected


def test_counters_never_decrease_between_scrapes_of_any_processes(tmp_path):
    counts = [0, 0]

    def page(worker):
        return b"# HELP a_total What.\n# TYPE a_total counter\na_total %d\n" % counts[worker]

    states = [
        SharedState(backend, partial(page, worker), print)
        for worker, backend in enumerate(make_backends(tmp_path, 2))
    ]
    for state in states:
        state.metrics()
    for active in (0, 1, 0, 0, 1, 1):
        counts[active] += 1
        local, remote = (states[worker].metrics() for worker in (active, 1 - active))
        assert local == remote
        assert b'a_total{worker="%d"} %d' % (active, counts[active]) in remote
