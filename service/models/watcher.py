"""Watch the model store, and follow its aliases.

When an alias moves, the new version is tested and loaded before requests use it. If `latest` is
broken at startup, the service uses the newest older version that works.
"""

import logging
import random
import threading
import time
from contextlib import suppress

from model_store.artifacts.storage import is_version
from model_store.artifacts.store import LATEST
from model_store.errors import StoreError, StoreUnreachable, one_line
from model_store.processes import LOOK_S
from service.errors import NotReady
from service.models.models import HOW_TO_PUBLISH, Models

logger = logging.getLogger("dubito")

MAX_PREFLIGHT_WAIT_S = 5.0  # at startup or an explicit refresh; most preflights take a second


class Watcher:
    """A thread that reads the store and updates the versions that aliases serve."""

    def __init__(self, models: Models, ending: threading.Event) -> None:
        self.models = models
        self.store = models.store
        self.settings = models.settings
        self.has_pending_preflights = False  # at the last refresh
        self.last_read = 0.0  # time of the last complete refresh, in seconds since 1970
        self.is_reachable = True  # at the last refresh
        self.problems: dict[tuple[str, str], str] = {}  # by model and alias
        self._refresh_lock = threading.Lock()
        self._ending = ending
        self._wakeup = models.preflights.wakeup
        self._thread = threading.Thread(target=self._watch, name="store-watcher", daemon=True)

    def start(self) -> None:
        """Load the latest version of each model, and start the thread."""
        self.refresh(MAX_PREFLIGHT_WAIT_S)
        self.models.preflights.close_idle()
        if not self.models.names():
            logger.warning(HOW_TO_PUBLISH)
        self._thread.start()

    def stop(self) -> None:
        self.store.storage.close()
        self._wakeup.set()
        self._thread.join()

    def refresh_now(self) -> None:
        """Refresh immediately, and retry versions that were recently broken."""
        with self._refresh_lock:
            self.models.forget_broken()
            self.refresh(MAX_PREFLIGHT_WAIT_S)

    def _watch(self) -> None:
        # Randomise the first pause to spread the load of replicas that start together.
        pause_s = random.uniform(0.0, self.settings.poll_interval_s)
        while not self._ending.is_set():
            self._wakeup.wait(pause_s)
            pause_s = self.settings.poll_interval_s
            self._wakeup.clear()
            if self._ending.is_set():
                return
            try:
                with self._refresh_lock:
                    self.refresh()
            except Exception:
                logger.exception("reading the model store failed; trying again")

    def refresh(self, max_wait_s: float = 0.0) -> None:
        """Update aliases and versions, and wait up to `max_wait_s` for preflights."""
        end = time.monotonic() + max_wait_s
        self._refresh_once()
        while self.has_pending_preflights and time.monotonic() < end and not self._ending.is_set():
            if self._wakeup.wait(LOOK_S):
                self._wakeup.clear()
                self._refresh_once()

    def _refresh_once(self) -> None:
        self.has_pending_preflights = False
        self._read_storage()
        is_complete = self.is_reachable
        if self.store.storage.has_listing:
            is_complete = self._follow_all() and is_complete
        if is_complete:
            self.last_read = time.time()

    def _read_storage(self) -> None:
        """Read the storage, and log changes of its reachability."""
        try:
            self.store.storage.refresh()
        except StoreUnreachable as error:
            if self.is_reachable:
                is_bucket = isinstance(self.settings.store, str)
                cache = f" with copies in {self.settings.cache}" if is_bucket else ""
                logger.error("%s; serving the versions of the last read%s", one_line(error), cache)
            self.is_reachable = False
        else:
            if not self.is_reachable:
                logger.info("the store is reachable again")
            self.is_reachable = True

    def _follow_all(self) -> bool:
        """Follow the aliases of all models. Return False if some are unreadable."""
        names, is_complete = self.store.names(), True
        for name in names:
            try:
                aliases = self.store.aliases(name)
            except OSError as error:  # other models stay unaffected
                is_complete = False
                self._set_problem(name, LATEST, f"cannot read model {name}: {error.strerror}")
            else:
                self._follow(name, aliases)
        self.models.forget_deleted({name: self.store.versions(name) for name in names})
        for name, alias in [*self.problems]:
            if name not in names:
                del self.problems[name, alias]
        return is_complete

    def _follow(self, name: str, targets: dict[str, str]) -> None:
        """Move a model's aliases to their targets, except to broken versions."""
        before, broken = self.models.aliases(name), self.models.errors(name)
        aliases = {alias: before[alias] for alias in before if alias in targets}
        for alias, target in sorted(targets.items(), key=lambda item: item[0] != LATEST):
            current = before.get(alias)
            if current == target and target not in broken:
                self.problems.pop((name, alias), None)
            elif not before and alias != LATEST:
                aliases[alias] = target  # loaded on request, to start faster
            else:
                current = None if current in broken else current
                version = self._version_to_serve(name, alias, target, current)
                if version is not None:
                    aliases[alias] = version
        for alias in {alias for model, alias in self.problems if model == name} - targets.keys():
            del self.problems[name, alias]
        self.models.set_aliases(name, aliases)

    def _version_to_serve(
        self, name: str, alias: str, target: str, current: str | None
    ) -> str | None:
        """Return an alias's target, a fallback if the target is broken, or None for no change."""
        try:
            if not self._try_load(name, alias, target):
                return None
        except StoreError as error:
            if current is None and alias == LATEST and not isinstance(error, StoreUnreachable):
                current = self._load_older(name, target)
            fallback = "" if current is None else f"; {alias} goes on with version {current}"
            self._set_problem(name, alias, f"cannot serve {one_line(error)}{fallback}")
            return current
        self.problems.pop((name, alias), None)
        logger.info("serving model %s version %s as %s", name, target, alias)
        return target

    def _load_older(self, name: str, target: str) -> str | None:
        """Load the newest working version before `target`, and return its number.

        Candidates are skipped unless they are ancestors of the target, because they may never have
        been promoted.
        """
        ancestors = self._ancestors(name, target)
        for version in reversed(self.store.versions(name)):
            if int(version) < int(target):
                with suppress(StoreError):
                    is_candidate = self.store.manifest(name, version).training.get("labels")
                    if not is_candidate or version in ancestors:
                        return version if self._try_load(name, LATEST, version) else None
        return None

    def _ancestors(self, name: str, version: str) -> set[str]:
        """Return a version and all versions from which it was warm-started."""
        ancestors: set[str] = set()
        with suppress(StoreError):
            while is_version(version) and version not in ancestors:
                training = self.store.manifest(name, version).training
                ancestors.add(version)
                origin = training.get("warm_start")
                if isinstance(origin, dict) and origin.get("name") == name:
                    version = str(origin.get("version"))
        return ancestors

    def _try_load(self, name: str, alias: str, version: str) -> bool:
        """Load a version. Return False if its preflight is pending."""
        preflight = self.models.preflight(name, version)
        if preflight is not None and not preflight.done():
            self.has_pending_preflights = True
            return False
        try:
            loaded = self.models.load(name, version, is_aliased=True)
        except NotReady:  # the service is shutting down
            return False
        if alias == LATEST:
            self.models.set_latest(loaded.model.manifest)
        return True

    def _set_problem(self, name: str, alias: str, text: str) -> None:
        if self.problems.get((name, alias)) != text:
            self.problems[name, alias] = text
            logger.error("%s", text)
