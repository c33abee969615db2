"""Run queued jobs in separate processes.

Services that share a state folder run up to `jobs_at_once` jobs together. Each running job locks a
slot.
"""

import contextlib
import logging
import math
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass

from model_store.errors import DubitoError, NotFound, one_line
from model_store.processes import describe_exit, inherited_environment, start_module, write_line
from model_store.state.database import Database, check_writable
from model_store.state.jobs import Job, Jobs
from model_store.state.labels import has_state
from service import limits
from service.batch.job_process import PUT_BACK, count_answered
from service.settings import Settings
from service.telemetry.metrics import Metrics

logger = logging.getLogger("dubito")

JOB_MODULE = "service.batch.job_process"
POLL_S = 1.0  # between polls of the queue
CLEANUP_INTERVAL_S = 60.0  # between removals of old jobs
JUMP_S = 600.0  # larger steps of the clock delay the removal of old jobs
PROBE_INTERVAL_S = 5.0  # between test writes to the state folder
MAX_END_S = 10.0  # before a terminated job is killed


@dataclass(eq=False)
class _Running:
    job: Job
    process: subprocess.Popen[bytes]
    slot: ExitStack  # keeps its lock
    start: float
    is_yielding: bool = False  # was terminated early


class JobRunner:
    """Runs queued jobs in a thread."""

    def __init__(
        self,
        settings: Settings,
        state: Callable[[], Database],
        metrics: Metrics,
        key_names: Callable[[], Collection[str] | None] = lambda: None,
    ) -> None:
        self.settings = settings
        self.metrics = metrics
        self._state = state
        self._key_names = key_names  # None: unknown, or the API is open
        self._wake = threading.Event()
        self._ending = False
        self._running: list[_Running] = []
        self._next_cleanup = self._next_probe = 0.0
        self._clock_offset = math.inf
        self._thread = threading.Thread(target=self._work, name="jobs", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        self._wake.set()

    def stop(self) -> None:
        """Stop the thread and requeue the running jobs."""
        self._ending = True
        self._wake.set()
        self._thread.join()

    def _work(self) -> None:
        logged, folder = "", self.settings.state
        while not self._ending:
            try:
                self._check_clock()
                if folder is not None and has_state(folder):
                    disk = shutil.disk_usage(folder)
                    self.metrics.state_free_ratio.set(disk.free / disk.total)
                    self._poll(Jobs(self._state()))
                elif folder is not None:
                    check_writable(folder)
                self.metrics.state_usable.set(1)
                logged = ""
            except DubitoError as error:
                self.metrics.state_usable.set(0)
                if str(error) != logged:  # log each error once
                    logger.error("jobs do not run: %s", error)
                logged = str(error)
            except Exception:
                logger.exception("polling the job queue failed; trying again")
            self._wake.wait(0.1 if self._running else POLL_S)
            self._wake.clear()
        self._requeue_all()

    def _poll(self, jobs: Jobs) -> None:
        for running in list(self._running):
            if running.process.poll() is not None:
                self._running.remove(running)
                self._finish(jobs, running)
        if time.monotonic() > self._next_cleanup:
            self._next_cleanup = time.monotonic() + CLEANUP_INTERVAL_S
            jobs.delete_old(self.settings.job_retention_s)
        jobs.clear_ended()
        self._cancel_revoked(jobs)
        queued, at_work = jobs.counts()
        if at_work > len(self._running):
            for name in jobs.requeue_orphans():
                self._record_state(jobs, name)
            queued, _ = jobs.counts()
        for slot in range(self.settings.jobs_at_once if queued else 0):
            self._fill(jobs, slot)
        if queued:
            self._yield_turns(jobs)
        self.metrics.jobs_queued.set(jobs.counts()[0] if queued else 0)
        self.metrics.jobs_running.set(len(self._running))
        if time.monotonic() > self._next_probe:
            self._state().probe()
            self._next_probe = time.monotonic() + PROBE_INTERVAL_S

    def _check_clock(self) -> None:
        """Keep results for another retention period after a jump, because their age is unknown."""
        offset = time.time() - time.monotonic()
        step = offset - self._clock_offset
        if step > JUMP_S:
            logger.warning("the clock jumped by %.0f s; results of jobs stay longer", step)
            self._next_cleanup = time.monotonic() + self.settings.job_retention_s
        self._clock_offset = offset

    def _cancel_revoked(self, jobs: Jobs) -> None:
        owned = [job for job in jobs.unfinished() if job.owner]
        # The keys are read after the jobs, so they include the keys of new jobs.
        names = self._key_names() if owned else None
        for job in owned:
            if names is not None and job.owner not in names:
                jobs.cancel(job.id)
                logger.warning("job %s is cancelled: the key %s was removed", job.id, job.owner)

    def _fill(self, jobs: Jobs, slot: int) -> None:
        with ExitStack() as stack:
            handle = stack.enter_context(jobs.slot(slot))
            job = None if handle is None else jobs.claim(slot)
            if handle is None or job is None:
                return
            try:
                process = _start(self.settings, job, handle)
            except OSError as error:
                jobs.requeue(job.id, f"cannot start a process for the job: {error.strerror}")
                self._record_state(jobs, job.id)
                return
            version = job.request["model"], job.request["version"]
            logger.info("job %s started: %s %s version %s", job.id, job.kind, *version)
            self._running.append(_Running(job, process, stack.pop_all(), time.monotonic()))

    def _yield_turns(self, jobs: Jobs) -> None:
        latest_start = time.monotonic() - limits.JOB_TURN_S
        for running in self._running:
            is_due = not running.is_yielding and running.start < latest_start
            if is_due and jobs.should_yield(running.job.id):
                logger.info("job %s is interrupted for another client's job", running.job.id)
                running.is_yielding = True
                running.process.terminate()

    def _finish(self, jobs: Jobs, running: _Running) -> None:
        code, name = running.process.returncode, running.job.id
        with running.slot:
            if code != 0:
                reason = f"the process of the job ended ({describe_exit(code)})"
                jobs.requeue(name, None if code == PUT_BACK else reason)
            job = self._record_state(jobs, name)
            if job and job.kind == "acquire" and job.state == "done" and job.request["keep"]:
                version = job.request["model"], job.request["version"]
                with contextlib.suppress(FileNotFoundError):  # it was deleted meanwhile
                    rows, control = count_answered(jobs.folder / name)
                    self.metrics.count(version, acquired_rows=rows, control_rows=control)

    def _record_state(self, jobs: Jobs, name: str) -> Job | None:
        """Log and count a job that has ended or been requeued, unless it has been deleted."""
        try:
            job = jobs.get(name)
        except NotFound:
            return None
        if job.is_over:
            self.metrics.jobs.labels(job.kind, job.state).inc()
        if job.state == "failed":
            logger.warning("job %s failed: %s", name, one_line(job.outcome))
        else:
            logger.info("job %s is %s", name, job.state)
        return job

    def _requeue_all(self) -> None:
        for running in self._running:
            running.process.terminate()
        for running in self._running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.process.wait(MAX_END_S)
            running.process.kill()
            running.process.wait()
            with contextlib.suppress(DubitoError):  # the next service finds an orphaned job
                Jobs(self._state()).requeue(running.job.id)
            running.slot.close()


def _start(settings: Settings, job: Job, slot: int) -> subprocess.Popen[bytes]:
    environment = inherited_environment(is_trusted=True)
    assert settings.state is not None
    # Built first, because a process that waits for its options keeps the slot locked.
    options = {
        "job": job.id,
        "state": str(settings.state.resolve()),
        "store": settings.store_options(),
        "threads": settings.worker_threads,
        "max_bytes": settings.max_job_bytes,
    }
    process = start_module(JOB_MODULE, environment, stdout=subprocess.DEVNULL, pass_fds=[slot])
    write_line(process, options)
    with contextlib.suppress(BrokenPipeError):
        assert process.stdin is not None
        process.stdin.close()
    return process
