import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from model_store.errors import NoSpace, NotFound, OverQuota
from model_store.state.database import Database
from model_store.state.jobs import MAX_DEATHS, STRAY_S, Jobs, TooManyJobs


@pytest.fixture
def jobs(tmp_path):
    database = Database(tmp_path / "state")
    yield Jobs(database)
    database.close()


PLENTY = 1 << 30  # bytes


def added(jobs, owner="me", most=10, work=100, size=0, most_bytes=PLENTY):
    name, folder = jobs.new_folder()
    (folder / "rows.npy").write_bytes(bytes(size))

    def may_wait(queued):
        return sum(queued.values()) < most

    request = name, "acquire", owner, owner, {"model": "m"}, work
    return jobs.add(*request, may_wait, most_bytes)


def test_jobs_are_claimed_in_their_turn_and_each_once(jobs):
    names = [added(jobs).id for _ in range(8)]
    with ThreadPoolExecutor(4) as threads:
        claimed = [job.id for job in threads.map(jobs.claim, range(8))]
    assert sorted(claimed) == sorted(names)
    assert jobs.claim(0) is None
    assert added(jobs).id == jobs.claim(0).id


def test_clients_take_turns_whatever_each_has_queued_and_whatever_the_clock_says(jobs, monkeypatch):
    clock = iter(range(1000, 0, -1))
    monkeypatch.setattr(time, "time", lambda: next(clock) + 0.5)
    large = [added(jobs, "many").id for _ in range(4)]
    assert jobs.claim(0).id == large[0]
    small = [added(jobs, "few", work=60).id for _ in range(2)]
    third = added(jobs, "third").id
    turns = [jobs.claim(slot).id for slot in range(1, 7)]
    assert turns == [small[0], third, small[1], *large[1:]]
    assert [job.id for job in jobs.all("many")] == large[::-1]


def test_a_long_job_gives_way_to_other_clients_whose_turn_it_is_by_what_was_done(jobs):
    long = added(jobs, "long", work=1000)
    assert jobs.claim(0).id == long.id
    custom, short, later = added(jobs, "long"), added(jobs, "short"), added(jobs, "later", work=400)
    assert not jobs.should_yield(long.id)
    jobs.progress(long.id, 1000, 300, 1.0, PLENTY)
    assert jobs.should_yield(long.id)
    jobs.requeue(long.id)
    assert [jobs.claim(0).id for _ in range(3)] == [short.id, later.id, long.id]
    assert not jobs.should_yield(long.id)  # its client's own job waits for it
    newest = added(jobs, "newest")
    jobs.progress(long.id, 1000, 600, 1.0, PLENTY)
    assert jobs.should_yield(long.id)
    jobs.cancel(long.id)
    assert not jobs.should_yield(long.id)
    assert [jobs.claim(0).id for _ in range(2)] == [newest.id, custom.id]


def test_files_of_an_owner_s_jobs_take_no_more_than_they_may(jobs):
    first = added(jobs, size=600, most_bytes=1000)
    with pytest.raises(OverQuota, match=r"up to 1000 bytes .* got 1200"):
        added(jobs, size=600, most_bytes=1000)
    assert [job.id for job in jobs.all("me")] == [first.id]
    added(jobs, "you", size=600, most_bytes=1000)
    assert jobs.claim(0).id == first.id
    (jobs.folder / first.id / "scores").mkdir()
    (jobs.folder / first.id / "scores" / "0.bin").write_bytes(bytes(600))
    with pytest.raises(OverQuota):
        jobs.progress(first.id, 100, 10, 1.0, 1000)


@pytest.mark.parametrize("state", ["done", "failed", "cancelled"])
def test_a_job_that_is_over_keeps_its_result_alone(jobs, state):
    job = added(jobs, size=600, most_bytes=1000)
    folder = jobs.folder / job.id
    jobs.claim(0)
    (folder / "scores").mkdir()
    (folder / "scores" / "0.bin").write_bytes(bytes(600))
    (folder / "answer.json").write_bytes(bytes(100))
    jobs.clear_ended()
    assert len(list(folder.iterdir())) == 3
    if state == "cancelled":
        jobs.cancel(job.id)
    jobs.finish(job.id, "failed" if state == "failed" else "done", "answer.json")
    jobs.clear_ended()
    assert [file.name for file in folder.iterdir()] == ["answer.json"] * (state == "done")
    added(jobs, size=900, most_bytes=1000)  # there is room again


def test_a_job_s_folder_is_on_the_disk_before_the_job_is(jobs, monkeypatch):
    synced = []

    def fsync(handle, sync=os.fsync):
        synced.append(Path(f"/proc/self/fd/{handle}").readlink())
        sync(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    job = added(jobs)
    assert synced[-2:] == [jobs.folder / job.id, jobs.folder]


def test_a_result_of_a_clock_that_was_ahead_is_kept_as_long_as_others(jobs, monkeypatch):
    now, year = time.time(), 365 * 86400.0
    monkeypatch.setattr(time, "time", lambda: now + year)
    ahead = added(jobs)
    jobs.claim(0)
    jobs.finish(ahead.id, "done", "answer.json")
    monkeypatch.setattr(time, "time", lambda: now)
    jobs.delete_old(60.0)
    assert jobs.get(ahead.id).ended == now
    monkeypatch.setattr(time, "time", lambda: now + 61.0)
    jobs.delete_old(60.0)
    assert jobs.all("me") == []


def test_a_job_can_be_deleted_on_a_full_disk_and_its_files_make_room(jobs, monkeypatch):
    job = added(jobs)
    jobs.claim(0)
    jobs.finish(job.id, "done", "answer.json")

    @contextmanager
    def writing(database):
        if any((database.folder / "jobs").iterdir()):
            raise NoSpace("full")
        with write(database) as connection:
            yield connection

    write = Database.writing
    monkeypatch.setattr(Database, "writing", writing)
    jobs.forget(job.id)
    assert jobs.all("me") == []


def test_only_who_asked_for_a_job_finds_it(jobs):
    job = added(jobs)
    assert jobs.get(job.id, "me").request == {"model": "m"}
    assert [actual.id for actual in jobs.all("me")] == [job.id]
    assert jobs.all("you") == []
    for expected in ((job.id, "you"), ("another", "me")):
        with pytest.raises(NotFound, match="job: expected the id of one of your jobs"):
            jobs.get(*expected)


def test_no_more_are_queued_than_may_wait(jobs):
    added(jobs, most=1)
    with pytest.raises(TooManyJobs):
        added(jobs, most=1)
    jobs.claim(0)
    added(jobs, most=1)


def test_a_job_whose_process_was_killed_is_queued_again_and_one_that_is_held_is_not(jobs, tmp_path):
    killed, stored = added(jobs), added(jobs)
    dying = f"""
import os, signal
from pathlib import Path
from model_store.state.database import FILE, Database
from model_store.state.jobs import Jobs
jobs = Jobs(Database(Path({str(tmp_path / "state")!r})))
with jobs.slot(0) as handle:
    assert handle is not None
    jobs.claim(0)
    jobs.requeue_orphans()
    assert jobs.get({killed.id!r}).state == "running"
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", dying], timeout=60, check=False).returncode == -9
    assert jobs.get(killed.id).state == "running"
    with jobs.slot(1) as handle:
        assert handle is not None
        with jobs.slot(1) as other:
            assert other is None
        assert jobs.claim(1).id == stored.id
        jobs.requeue_orphans()
        assert [jobs.get(job.id).state for job in (killed, stored)] == ["queued", "running"]


@pytest.mark.parametrize("orphan_slot", [None, 0])
def test_a_job_that_gets_no_further_fails_in_the_end_and_one_that_does_goes_on(jobs, orphan_slot):
    most = MAX_DEATHS
    stuck = added(jobs)
    for _ in range(most):
        assert jobs.claim(0).id == stuck.id
        jobs.requeue(stuck.id, "its process ended", orphan_slot)
    job = jobs.get(stuck.id)
    assert job.state == "failed"
    assert (
        job.outcome
        == f"its process ended, {most} times without getting further than 0 rows x draws"
    )
    moving = added(jobs)
    for completed in range(2 * most):
        assert jobs.claim(0).id == moving.id
        assert jobs.progress(moving.id, 100, completed + 1, 1.0, PLENTY)
        jobs.requeue(moving.id, "its process ended", orphan_slot)
    assert jobs.get(moving.id).state == "queued"


def test_putting_back_in_order_is_no_death(jobs):
    job = added(jobs)
    for _ in range(2 * MAX_DEATHS):
        jobs.claim(0)
        jobs.requeue(job.id)
    assert jobs.get(job.id).deaths == 0


def test_a_queued_job_is_cancelled_at_once_and_one_that_runs_is_told_so(jobs):
    running, queued = added(jobs), added(jobs)
    jobs.claim(0)
    assert jobs.cancel(queued.id).state == "cancelled"
    assert jobs.progress(running.id, 100, 10, 1.0, PLENTY)
    assert jobs.cancel(running.id).state == "running"
    assert not jobs.progress(running.id, 100, 20, 1.0, PLENTY)
    jobs.finish(running.id, "done", "answer.json")
    assert jobs.get(running.id).state == "cancelled"
    completed = added(jobs)
    jobs.claim(0)
    jobs.finish(completed.id, "done", "answer.json")
    assert jobs.cancel(completed.id).state == "done"


def test_a_job_that_was_cancelled_while_its_process_died_is_cancelled(jobs):
    job = added(jobs)
    jobs.claim(0)
    jobs.cancel(job.id)
    jobs.requeue_orphans()
    assert jobs.get(job.id).state == "cancelled"


def test_what_ended_long_ago_goes_with_its_files_and_so_do_strays(jobs, monkeypatch):
    old, running = added(jobs), added(jobs)
    _, folder = jobs.new_folder()
    jobs.claim(0)
    jobs.claim(0)
    jobs.finish(old.id, "done", "answer.json")
    jobs.delete_old(60.0)
    assert (jobs.folder / old.id).exists()
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + STRAY_S + 61.0)
    jobs.delete_old(60.0)
    assert not (jobs.folder / old.id).exists()
    assert not folder.exists()
    assert (jobs.folder / running.id).exists()
    jobs.forget(running.id)  # it is not over
    assert jobs.get(running.id).state == "running"
