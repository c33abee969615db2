"""Start jobs: a thread looks for queued ones, and has each run by a process of its own.

A process for each job, since a job's pool and model take memory that is then given back, since it
can be given less of the processors than requests get, and since what kills it leaves the service
alone. At most `jobs_at_once` run on all processes that share a state folder: each holds the lock of
a slot while it runs.
"""

import contextlib
import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from model_store.errors import DubitoError, NotFound
from model_store.processes import describe_exit, start_module, write_line
from model_store.state.database import Database
from model_store.state.jobs import Job, Jobs
from model_store.state.labels import has_state
from service import limits
from service.batch.job_process import PUT_BACK, count_answered
from service.settings import Settings
from service.telemetry.metrics import Metrics

logger = logging.getLogger("dubito")

JOB_MODULE = "service.batch.job_process"
LOOK_S = 1.0  # between looks at the queue, for what other processes have put there
SWEEP_S = 60.0  # between looks for what is old
PROBE_S = 5.0  # between tries to write a file
END_S = 10.0  # that a job gets to end in order
SECRET = ("API_KEYS", "ADMIN_KEY", "KEYS_FILE", "LABEL")  # no settings for a job's process


@dataclass(eq=False)
class _Running:
    job: Job
    process: subprocess.Popen[bytes]
    slot: ExitStack  # holds its lock
    begun: float
    gives_way: bool = False  # it was told to end, and will be queued again


class JobRunner:
    """Starts jobs and sees to those that ended. Any thread may call its methods."""

    def __init__(self, settings: Settings, state: Callable[[], Database], metrics: Metrics) -> None:
        self.settings = settings
        self.metrics = metrics
        self._state = state
        self._wake = threading.Event()
        self._ending = False
        self._running: list[_Running] = []
        self._swept = self._probed = 0.0
        self._thread = threading.Thread(target=self._work, name="jobs", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Look at once: something was queued or cancelled."""
        self._wake.set()

    def stop(self) -> None:
        """Put running jobs back in the queue, and end."""
        self._ending = True
        self._wake.set()
        self._thread.join()

    def _work(self) -> None:
        logged = ""
        while not self._ending:
            try:
                if has_state(self.settings.state):  # else there never was a job
                    self._look(Jobs(self._state()))
                self.metrics.state_usable.set(1)
                logged = ""
            except DubitoError as error:
                self.metrics.state_usable.set(0)
                if str(error) != logged:  # once
                    logger.error("jobs do not run: %s", error)
                logged = str(error)
            except Exception:
                logger.exception("looking for jobs failed; trying again")
            self._wake.wait(0.1 if self._running else LOOK_S)
            self._wake.clear()
        self._put_back_all()

    def _look(self, jobs: Jobs) -> None:
        for running in list(self._running):
            if running.process.poll() is not None:
                self._running.remove(running)
                self._finish(jobs, running)
        if time.monotonic() - self._swept > SWEEP_S:
            self._swept = time.monotonic()
            jobs.forget_old(self.settings.job_retention_s)
        jobs.clear_ended()
        queued, at_work = jobs.counts()
        if at_work > len(self._running):
            jobs.put_back_orphans()
            queued, _ = jobs.counts()
        for slot in range(self.settings.jobs_at_once if queued else 0):
            self._fill(jobs, slot)
        if queued:
            self._let_others_run(jobs)
        self.metrics.jobs_queued.set(jobs.counts()[0] if queued else 0)
        self.metrics.jobs_running.set(len(self._running))
        if time.monotonic() - self._probed > PROBE_S:
            self._state().probe()
            self._probed = time.monotonic()

    def _fill(self, jobs: Jobs, slot: int) -> None:
        """Start a job in a slot, if it is free and there is one."""
        held = ExitStack()
        handle = held.enter_context(jobs.slot(slot))
        job = None if handle is None else jobs.claim(slot)
        if handle is None or job is None:
            held.close()
            return
        try:
            process = _start(self.settings, job, handle)
        except OSError as error:
            jobs.put_back(job.id, f"no process could be started for it: {error.strerror}")
            held.close()
            return
        logger.info(
            "job %s begins: %s %s version %s",
            job.id,
            job.kind,
            job.request["model"],
            job.request["version"],
        )
        self._running.append(_Running(job, process, held, time.monotonic()))

    def _let_others_run(self, jobs: Jobs) -> None:
        """Have jobs that have run for long give way to those of other clients whose turn it is;
        they save their work and go on from there later."""
        long_ago = time.monotonic() - limits.JOB_TURN_S
        for running in self._running:
            is_due = not running.gives_way and running.begun < long_ago
            if is_due and jobs.is_due_to_give_way(running.job.id):
                logger.info("job %s gives way to another client's", running.job.id)
                running.gives_way = True
                running.process.terminate()

    def _finish(self, jobs: Jobs, running: _Running) -> None:
        code = running.process.returncode
        try:
            if code == PUT_BACK:
                jobs.put_back(running.job.id)
            elif code != 0:
                jobs.put_back(
                    running.job.id, f"the process that ran it ended ({describe_exit(code)})"
                )
            try:
                job = jobs.get(running.job.id)
            except NotFound:  # it was deleted meanwhile
                return
            if job.is_over:
                self.metrics.jobs.labels(job.kind, job.state).inc()
            if job.kind == "acquire" and job.state == "done" and job.request["keep"]:
                of_model = job.request["model"], job.request["version"]
                with contextlib.suppress(FileNotFoundError):  # it was deleted meanwhile
                    self.metrics.count_acquired(of_model, *count_answered(jobs.folder / job.id))
            logger.info("job %s is %s", job.id, job.state)
        finally:
            running.slot.close()

    def _put_back_all(self) -> None:
        for running in self._running:
            running.process.terminate()
        for running in self._running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.process.wait(END_S)
            running.process.kill()
            running.process.wait()
            with contextlib.suppress(DubitoError):  # the next service finds its slot free
                Jobs(self._state()).put_back(running.job.id)
            running.slot.close()


def _start(settings: Settings, job: Job, slot: int) -> subprocess.Popen[bytes]:
    """Start the process of a job, which holds the slot's lock as long as it lives."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not any(secret in name for secret in SECRET)
    }
    assert settings.state is not None
    options = {  # before there is a process, which would wait for them and hold the slot for ever
        "job": job.id,
        "state": str(settings.state.resolve()),
        "store": settings.store_options(),
        "threads": settings.worker_threads,
        "most_bytes": settings.max_job_bytes,
    }
    process = start_module(JOB_MODULE, environment, stdout=subprocess.DEVNULL, pass_fds=[slot])
    write_line(process, options)
    with contextlib.suppress(BrokenPipeError):
        assert process.stdin is not None
        process.stdin.close()
    return process
