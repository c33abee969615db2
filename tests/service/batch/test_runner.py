import shutil
from contextlib import closing

from model_store.state.database import Database
from model_store.state.jobs import Jobs
from service.batch.runner import JobRunner
from service.settings import Settings
from service.telemetry.metrics import Metrics
from tests.support.serving import wait_until


def test_a_job_that_no_process_can_be_started_for_fails_and_leaves_its_slot_free(
    tmp_path, monkeypatch
):
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
        with jobs.slot(0) as handle:
            assert handle is not None
