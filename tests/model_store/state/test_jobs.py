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


def add(jobs, owner="me", max_queued=10, work=100, size=0, max_bytes=PLENTY):
    name, folder = jobs.new_folder()
    (folder / "rows.npy").write_bytes(bytes(size))

    def can_wait(queued):
        return sum(queued.values()) < max_queued

    request = name, "acquire", owner, owner, {"model": "m"}, work
    return jobs.add(*request, can_wait, max_bytes)


def test_each_job_is_claimed_exactly_once(jobs):
    names = [add(jobs).id for _ in range(8)]
    with ThreadPoolExecutor(4) as threads:
        claimed = [job.id for job in threads.map(jobs.claim, range(8))]
    assert sorted(claimed) == sorted(names)
    assert jobs.claim(0) is None
    assert add(jobs).id == jobs.claim(0).id


def test_clients_take_turns_regardless_of_queue_length_and_clock(jobs, monkeypatch):
    clock = iter(range(1000, 0, -1))
    monkeypatch.setattr(time, "time", lambda: next(clock) + 0.5)
    large = [add(jobs, "many").id for _ in range(4)]
    assert jobs.claim(0).id == large[0]
    small = [add(jobs, "few", work=60).id for _ in range(2)]
    third = add(jobs, "third").id
    turns = [jobs.claim(slot).id for slot in range(1, 7)]
    assert turns == [small[0], third, small[1], *large[1:]]
    assert [job.id for job in jobs.all("many")] == large[::-1]


def test_long_job_yields_to_other_clients_by_completed_work(jobs):
    long = add(jobs, "long", work=1000)
    assert jobs.claim(0).id == long.id
    second, short, later = add(jobs, "long"), add(jobs, "short"), add(jobs, "later", work=400)
    assert not jobs.should_yield(long.id)
    jobs.progress(long.id, 1000, 300, 1.0, PLENTY)
    assert jobs.should_yield(long.id)
    jobs.requeue(long.id)
    assert [jobs.claim(0).id for _ in range(3)] == [short.id, later.id, long.id]
    assert not jobs.should_yield(long.id)  # a job of the same client waits for it
    newest = add(jobs, "newest")
    jobs.progress(long.id, 1000, 600, 1.0, PLENTY)
    assert jobs.should_yield(long.id)
    jobs.cancel(long.id)
    assert not jobs.should_yield(long.id)
    assert [jobs.claim(0).id for _ in range(2)] == [newest.id, second.id]


def test_job_files_of_an_owner_stay_within_the_quota(jobs):
    first = add(jobs, size=600, max_bytes=1000)
    with pytest.raises(OverQuota, match=r"up to 1000 bytes .* got 1200"):
        add(jobs, size=600, max_bytes=1000)
    assert [job.id for job in jobs.all("me")] == [first.id]
    add(jobs, "you", size=600, max_bytes=1000)
    assert jobs.claim(0).id == first.id
    (jobs.folder / first.id / "scores").mkdir()
    (jobs.folder / first.id / "scores" / "0.bin").write_bytes(bytes(600))
    with pytest.raises(OverQuota):
        jobs.progress(first.id, 100, 10, 1.0, 1000)


@pytest.mark.parametrize("state", ["done", "failed", "cancelled"])
def test_finished_job_keeps_only_its_result(jobs, state):
    job = add(jobs, size=600, max_bytes=1000)
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
    add(jobs, size=900, max_bytes=1000)  # the quota is free again


def test_adding_a_job_syncs_its_folder_to_disk(jobs, monkeypatch):
    synced = []

    def fsync(fd, sync=os.fsync):
        synced.append(Path(f"/proc/self/fd/{fd}").readlink())
        sync(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    job = add(jobs)
    assert synced[-2:] == [jobs.folder / job.id, jobs.folder]


def test_result_from_a_fast_clock_expires_like_others(jobs, monkeypatch):
    start, year = time.time(), 365 * 86400.0
    monkeypatch.setattr(time, "time", lambda: start + year)
    job = add(jobs)
    jobs.claim(0)
    jobs.finish(job.id, "done", "answer.json")
    monkeypatch.setattr(time, "time", lambda: start)
    jobs.delete_old(60.0)
    assert jobs.get(job.id).ended == start
    monkeypatch.setattr(time, "time", lambda: start + 61.0)
    jobs.delete_old(60.0)
    assert jobs.all("me") == []


def test_job_can_be_deleted_on_a_full_disk_to_free_space(jobs, monkeypatch):
    job = add(jobs)
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


def test_job_is_visible_only_to_its_owner(jobs):
    job = add(jobs)
    assert jobs.get(job.id, "me").request == {"model": "m"}
    assert [actual.id for actual in jobs.all("me")] == [job.id]
    assert jobs.all("you") == []
    for arguments in ((job.id, "you"), ("another", "me")):
        with pytest.raises(NotFound, match="job: expected the id of one of your jobs"):
            jobs.get(*arguments)


def test_number_of_queued_jobs_is_limited(jobs):
    add(jobs, max_queued=1)
    with pytest.raises(TooManyJobs):
        add(jobs, max_queued=1)
    jobs.claim(0)
    add(jobs, max_queued=1)


def test_orphaned_job_is_requeued_and_running_job_is_not(jobs, tmp_path):
    killed, running = add(jobs), add(jobs)
    script = f"""
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
    assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False).returncode == -9
    assert jobs.get(killed.id).state == "running"
    with jobs.slot(1) as handle:
        assert handle is not None
        with jobs.slot(1) as second_handle:
            assert second_handle is None
        assert jobs.claim(1).id == running.id
        jobs.requeue_orphans()
        assert [jobs.get(job.id).state for job in (killed, running)] == ["queued", "running"]


@pytest.mark.parametrize("orphan_slot", [None, 0])
def test_job_without_progress_fails_and_job_with_progress_continues(jobs, orphan_slot):
    limit = MAX_DEATHS
    stuck = add(jobs)
    for _ in range(limit):
        assert jobs.claim(0).id == stuck.id
        jobs.requeue(stuck.id, "its process ended", orphan_slot)
    job = jobs.get(stuck.id)
    assert job.state == "failed"
    assert (
        job.outcome
        == f"its process ended, {limit} times without getting further than 0 rows x draws"
    )
    moving = add(jobs)
    for step in range(2 * limit):
        assert jobs.claim(0).id == moving.id
        assert jobs.progress(moving.id, 100, step + 1, 1.0, PLENTY)
        jobs.requeue(moving.id, "its process ended", orphan_slot)
    assert jobs.get(moving.id).state == "queued"


def test_regular_requeue_does_not_count_as_a_death(jobs):
    job = add(jobs)
    for _ in range(2 * MAX_DEATHS):
        jobs.claim(0)
        jobs.requeue(job.id)
    assert jobs.get(job.id).deaths == 0


def test_cancel_ends_queued_jobs_at_once_and_running_jobs_on_progress(jobs):
    running, queued = add(jobs), add(jobs)
    jobs.claim(0)
    assert jobs.cancel(queued.id).state == "cancelled"
    assert jobs.progress(running.id, 100, 10, 1.0, PLENTY)
    assert jobs.cancel(running.id).state == "running"
    assert not jobs.progress(running.id, 100, 20, 1.0, PLENTY)
    jobs.finish(running.id, "done", "answer.json")
    assert jobs.get(running.id).state == "cancelled"
    completed = add(jobs)
    jobs.claim(0)
    jobs.finish(completed.id, "done", "answer.json")
    assert jobs.cancel(completed.id).state == "done"


def test_orphaned_job_with_pending_cancellation_is_cancelled(jobs):
    job = add(jobs)
    jobs.claim(0)
    jobs.cancel(job.id)
    jobs.requeue_orphans()
    assert jobs.get(job.id).state == "cancelled"


def test_old_jobs_and_stray_folders_are_deleted(jobs, monkeypatch):
    old, running = add(jobs), add(jobs)
    _, folder = jobs.new_folder()
    jobs.claim(0)
    jobs.claim(0)
    jobs.finish(old.id, "done", "answer.json")
    jobs.delete_old(60.0)
    assert (jobs.folder / old.id).exists()
    start = time.time()
    monkeypatch.setattr(time, "time", lambda: start + STRAY_S + 61.0)
    jobs.delete_old(60.0)
    assert not (jobs.folder / old.id).exists()
    assert not folder.exists()
    assert (jobs.folder / running.id).exists()
    jobs.forget(running.id)  # ignored while the job is running
    assert jobs.get(running.id).state == "running"
