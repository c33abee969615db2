import shutil
import time
from contextlib import closing
from unittest.mock import Mock

from model_store.state.database import Database
from model_store.state.jobs import Jobs
from service.batch.runner import JobRunner
from service.settings import Settings
from service.telemetry.metrics import Metrics
from tests.support.serving import wait_until


def test_job_fails_and_frees_its_slot_if_no_process_can_start(tmp_path, monkeypatch, caplog):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    shutil.rmtree(tmp_path / "gone")
    settings = Settings(store=tmp_path / "models", state=tmp_path / "state")
    with closing(Database(tmp_path / "state")) as database:
        jobs = Jobs(database)
        name, _ = jobs.new_folder()
        request = {"model": "m", "version": "1"}
        jobs.add(name, "acquire", "", "me", request, 1, lambda _: True, 1 << 20)
        runner = JobRunner(settings, lambda: database, Metrics())
        runner.start()

        def has_failed():
            runner.wake()
            return jobs.get(name).is_over

        wait_until(has_failed)
        runner.stop()
        assert "cannot start a process for the job" in jobs.get(name).outcome
        assert f"job {name} failed: cannot start a process for the job" in caplog.text
        with jobs.slot(0) as handle:
            assert handle is not None


def test_jobs_of_a_removed_key_are_cancelled(tmp_path, caplog):
    settings = Settings(state=tmp_path, jobs_at_once=0)
    with closing(Database(tmp_path)) as database:
        jobs, ids = Jobs(database), {}
        for owner in ("", "here", "gone"):
            ids[owner], _ = jobs.new_folder()
            request = {"model": "m", "version": "1"}
            jobs.add(ids[owner], "acquire", owner, "me", request, 1, lambda _: True, 1 << 20)
        for names in (None, {"here"}):
            runner = JobRunner(settings, lambda: database, Metrics(), lambda: names)  # noqa: B023
            runner._poll(jobs)
        states = {owner: jobs.get(name).state for owner, name in ids.items()}
        assert states == {"": "queued", "here": "queued", "gone": "cancelled"}
    assert caplog.messages == [f"job {ids['gone']} is cancelled: the key gone was removed"]


def test_results_survive_a_clock_jump(tmp_path, monkeypatch):
    settings, start = Settings(state=tmp_path, jobs_at_once=0), time.time()
    with closing(Database(tmp_path)) as database:
        jobs = Mock(wraps=Jobs(database))
        for jump_s, deletions in ((0, 1), (8 * 86_400, 0)):
            runner = JobRunner(settings, lambda: database, Metrics())
            runner._check_clock()
            monkeypatch.setattr(time, "time", lambda jump_s=jump_s: start + jump_s)
            runner._check_clock()
            jobs.delete_old.reset_mock()
            runner._poll(jobs)
            assert jobs.delete_old.call_count == deletions


def test_state_folder_that_cannot_be_created_is_reported_unusable(tmp_path):
    (tmp_path / "file").write_text("")
    metrics = Mock()
    runner = JobRunner(Settings(state=tmp_path / "file" / "state"), Mock(), metrics)
    runner.start()
    wait_until(lambda: metrics.state_usable.set.called)
    runner.stop()
    metrics.state_usable.set.assert_called_with(0)
