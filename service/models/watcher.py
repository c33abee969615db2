"""Watch the model store and follow its aliases.

When an alias moves, the new version is tested and loaded before requests use it. An alias serves
only versions that it has named. If it becomes unreadable or names a missing or broken version, the
service keeps serving the previous one and lists the reason in `problems`.
"""

import logging
import random
import threading
import time

from model_store.artifacts.store import LATEST, Aliases
from model_store.errors import StoreError, StoreUnreachable, one_line
from model_store.processes import POLL_S
from service.errors import ShuttingDown
from service.models.models import HOW_TO_PUBLISH, Models

logger = logging.getLogger("dubito")

MAX_BUCKET_WAIT_S = 5.0  # at startup, before the port opens
MAX_PREFLIGHT_WAIT_S = 5.0  # at startup or an explicit refresh; most preflights take a second


class Watcher:
    """A thread that reads the store and updates the versions that aliases serve."""

    def __init__(self, models: Models, ending: threading.Event) -> None:
        self.models = models
        self.store = models.store
        self.settings = models.settings
        self.has_pending_preflights = True  # also before the store was read
        self.last_read = 0.0  # time of the last complete refresh, in seconds since 1970
        self.store_problem: str | None = None  # why the last refresh could not read the store
        self.problems: dict[tuple[str, str], str] = {}  # by model and alias
        self._has_started = threading.Event()
        self._refresh_lock = threading.Lock()
        self._ending = ending
        self._wakeup = models.preflights.wakeup
        self._thread = threading.Thread(target=self._watch, name="store-watcher", daemon=True)

    @property
    def is_reachable(self) -> bool:
        return self.store_problem is None

    def all_problems(self) -> list[str]:
        """List the reasons why the store, aliases or versions cannot be read or served."""
        return [text for text in (self.store_problem, *self.problems.values()) if text is not None]

    def start(self) -> None:
        """Start the thread and wait for the latest versions, but only briefly for a bucket."""
        self._thread.start()
        is_bucket = isinstance(self.settings.store, str)
        self._has_started.wait(MAX_BUCKET_WAIT_S if is_bucket else None)

    def _load_first(self) -> None:
        self._try_refresh(MAX_PREFLIGHT_WAIT_S)
        self._has_started.set()
        settings, names = self.settings, self.models.names()
        if not names:
            logger.warning(HOW_TO_PUBLISH)
        expected = {"DUBITO_DEFAULT_MODEL": [settings.default_model or ""]}
        for variable, models in (expected | {"DUBITO_MODELS": settings.parse_models()}).items():
            for name in {*models} - {"", *names}:
                logger.warning("%s: model %s is not in the store", variable, name)
        if settings.pools is not None and not settings.pools.is_dir():
            logger.warning("DUBITO_POOLS: there is no folder %s", settings.pools)

    def _try_refresh(self, max_wait_s: float = 0.0) -> None:
        try:
            with self._refresh_lock:
                self.refresh(max_wait_s)
        except Exception:
            logger.exception("reading the model store failed; trying again")

    def stop(self) -> None:
        self.store.storage.close()
        self._wakeup.set()
        self._thread.join()

    def refresh_now(self) -> None:
        """Refresh immediately and retry versions that were recently broken."""
        with self._refresh_lock:
            self.models.forget_broken()
            self.refresh(MAX_PREFLIGHT_WAIT_S)

    def _watch(self) -> None:
        self._load_first()
        # Randomise the first pause to spread the load of replicas that start together.
        pause_s = random.uniform(0.0, self.settings.poll_interval_s)
        while not self._ending.is_set():
            self._wakeup.wait(pause_s)
            pause_s = self.settings.poll_interval_s
            self._wakeup.clear()
            if not self._ending.is_set():
                self._try_refresh()

    def refresh(self, max_wait_s: float = 0.0) -> None:
        """Update aliases and versions, waiting up to `max_wait_s` seconds for preflights."""
        end = time.monotonic() + max_wait_s
        self._refresh_once()
        while self.has_pending_preflights and time.monotonic() < end and not self._ending.is_set():
            if self._wakeup.wait(POLL_S):
                self._wakeup.clear()
                self._refresh_once()

    def _refresh_once(self) -> None:
        self._read_storage()
        self.has_pending_preflights = False
        is_complete = self.is_reachable
        if self.store.storage.has_listing:
            is_complete = self._follow_all() and is_complete
        if is_complete:
            self.last_read = time.time()

    def _read_storage(self) -> None:
        try:
            self.store.storage.refresh()
        except StoreUnreachable as error:
            if self.is_reachable:
                is_bucket = isinstance(self.settings.store, str)
                cache = f" with copies in {self.settings.cache}" if is_bucket else ""
                logger.error("%s; serving the versions of the last read%s", one_line(error), cache)
            self.store_problem = one_line(error)
        else:
            if not self.is_reachable:
                logger.info("the store is reachable again")
            self.store_problem = None

    def _follow_all(self) -> bool:
        names, is_complete = self.store.names(), True
        for name in names:
            try:
                aliases = self.store.read_aliases(name)
            except OSError as error:  # other models stay unaffected
                is_complete = False
                self._set_problem(name, LATEST, f"cannot read model {name}: {error.strerror}")
            else:
                self._follow(name, aliases)
        lost = {*self.models.names()} - {*names}
        deleted = {name for name in lost if self.store.was_deleted(name)}
        for name in lost - deleted:
            text = f"model {name} is missing from the store"
            self._set_problem(name, LATEST, text, self.models.aliases(name).get(LATEST))
        retained = [*names, *(lost - deleted)]
        self.models.forget_deleted({name: self.store.versions(name) for name in retained})
        for name, alias in [*self.problems]:
            if name not in retained:
                del self.problems[name, alias]
        return is_complete

    def _follow(self, name: str, stored: Aliases) -> None:
        before, broken = self.models.aliases(name), self.models.errors(name)
        targets, unreadable = stored.versions, dict(stored.problems)
        if LATEST in before and LATEST not in targets:
            unreadable.setdefault(LATEST, f"alias {LATEST} is missing")
        aliases = {alias: before[alias] for alias in before if alias in targets | unreadable}
        for alias, problem in unreadable.items():
            self._set_problem(name, alias, f"model {name}: {problem}", before.get(alias))
        for alias, target in sorted(targets.items(), key=lambda item: item[0] != LATEST):
            current = before.get(alias)
            if current == target and target not in broken:
                change = self.models.find_change(name, target)
                if change is None:
                    self.problems.pop((name, alias), None)
                else:
                    self._set_problem(name, alias, change, current)
            elif not before and alias != LATEST:
                aliases[alias] = target  # loaded on request, to start faster
            else:
                current = None if current in broken else current
                version = self._try_load(name, alias, target, current)
                if version is not None:
                    aliases[alias] = version
        with_problems = {alias for model, alias in self.problems if model == name}
        for alias in with_problems - targets.keys() - unreadable.keys():
            del self.problems[name, alias]
        self.models.set_aliases(name, aliases)

    def _try_load(self, name: str, alias: str, target: str, current: str | None) -> str | None:
        preflight = self.models.preflight(name, target)
        if preflight is not None and not preflight.done():
            self.has_pending_preflights = True
            return None
        try:
            self.models.load(name, target, is_aliased=True)
        except ShuttingDown:
            return None
        except StoreError as error:
            self._set_problem(name, alias, f"cannot serve {one_line(error)}", current)
            return current
        self.problems.pop((name, alias), None)
        logger.info("serving model %s version %s as %s", name, target, alias)
        return target

    def _set_problem(self, name: str, alias: str, text: str, current: str | None = None) -> None:
        if current is not None:
            text = f"{text}; {alias} keeps serving version {current}"
        if self.problems.get((name, alias)) != text:
            self.problems[name, alias] = text
            logger.error("%s", text)
