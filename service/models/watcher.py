"""A watcher of the model store: it follows aliases.

Where an alias has moved, the version that it names passes a preflight, is verified, loaded and
warmed before requests see it: a new version costs no request anything, and one that is broken never
takes the place of one that works. Where `latest` names a version that cannot be served, and none
was served before, the newest before it that can be is served instead.
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

PATIENCE_S = 5.0  # for preflights when the service starts, or is told to look: most take a second


class Watcher:
    """A thread that looks at the store, and has models serve what aliases name."""

    def __init__(self, models: Models, ending: threading.Event) -> None:
        self.models = models
        self.store = models.store
        self.settings = models.settings
        self.awaits_preflights = False  # whether the last look found one that is not over
        self.seen = 0.0  # when the whole store was last looked at, in seconds since 1970
        self.reachable = True  # whether the last look could reach the store
        self.troubles: dict[tuple[str, str], str] = {}  # by model and alias what is wrong
        self._looking = threading.Lock()  # held while the store is looked at
        self._ending = ending
        self._news = models.preflights.news
        self._thread = threading.Thread(target=self._watch, name="store-watcher", daemon=True)

    def start(self) -> None:
        """Load what `latest` names of each model, but for what takes a long preflight, and begin to
        watch the store."""
        self.refresh(PATIENCE_S)
        self.models.preflights.rest()
        if not self.models.names():
            logger.warning(HOW_TO_PUBLISH)
        self._thread.start()

    def stop(self) -> None:
        self.store.storage.close()
        self._news.set()
        self._thread.join()

    def look(self) -> None:
        """Look at the store at once, also at versions that were found broken a moment ago."""
        with self._looking:
            self.models.forget_broken()
            self.refresh(PATIENCE_S)

    def _watch(self) -> None:
        # replicas that start together take turns
        pause_s = random.uniform(0.0, self.settings.poll_interval_s)
        while not self._ending.is_set():
            self._news.wait(pause_s)  # also set when a preflight is over
            pause_s = self.settings.poll_interval_s
            self._news.clear()
            if self._ending.is_set():
                return
            try:
                with self._looking:
                    self.refresh()
            except Exception:
                logger.exception("looking at the model store failed; trying again")

    def refresh(self, patience_s: float = 0.0) -> None:
        """Look at the store once: follow the aliases, and forget what is gone.

        A version is followed once it has passed its preflight, within `patience_s` or at a later
        look.
        """
        end = time.monotonic() + patience_s
        self._look_once()
        while self.awaits_preflights and time.monotonic() < end and not self._ending.is_set():
            if self._news.wait(LOOK_S):
                self._news.clear()
                self._look_once()

    def _look_once(self) -> None:
        self.awaits_preflights = False
        self._reach_store()
        all_seen = self.reachable
        if self.store.storage.was_seen:
            all_seen = self._follow_all() and all_seen
        if all_seen:
            self.seen = time.time()

    def _reach_store(self) -> None:
        """Look at the store, and log when it can no longer be reached, or can again."""
        try:
            self.store.storage.look()
        except StoreUnreachable as error:
            if self.reachable:
                is_bucket = isinstance(self.settings.store, str)
                copies = f" and is in {self.settings.cache}" if is_bucket else ""
                logger.error("%s; going on with what was seen of it%s", one_line(error), copies)
            self.reachable = False
        else:
            if not self.reachable:
                logger.info("the store can be reached again")
            self.reachable = True

    def _follow_all(self) -> bool:
        """Follow the aliases of all models; return whether all could be read."""
        names, all_seen = self.store.names(), True
        for name in names:
            try:
                aliases = self.store.aliases(name)
            except OSError as error:  # unreadable: of no consequence for other models
                all_seen = False
                self._trouble(name, LATEST, f"cannot read model {name}: {error.strerror}")
            else:
                self._follow(name, aliases)
        self.models.forget_gone({name: self.store.versions(name) for name in names})
        for name, alias in [*self.troubles]:
            if name not in names:
                del self.troubles[name, alias]
        return all_seen

    def _follow(self, name: str, aliases: dict[str, str]) -> None:
        """Serve by each alias the version that it names, or go on with the one before where that
        cannot be served."""
        before, broken = self.models.serves(name), self.models.broken(name)
        serves = {alias: before[alias] for alias in before if alias in aliases}
        for alias, wanted in sorted(aliases.items(), key=lambda item: item[0] != LATEST):
            current = before.get(alias)
            if current == wanted and wanted not in broken:
                self.troubles.pop((name, alias), None)
            elif not before and alias != LATEST:
                serves[alias] = wanted  # nothing was served before: loaded when a request wants it
            else:
                current = None if current in broken else current
                served = self._version_to_serve(name, alias, wanted, current)
                if served is not None:
                    serves[alias] = served
        for alias in {of for model, of in self.troubles if model == name} - aliases.keys():
            del self.troubles[name, alias]
        self.models.serve(name, serves)

    def _version_to_serve(
        self, name: str, alias: str, wanted: str, current: str | None
    ) -> str | None:
        """Return the version that an alias names, else what it goes on with; None to leave it as it
        is."""
        try:
            if not self._has_loaded(name, alias, wanted):
                return None
        except StoreError as error:
            if current is None and alias == LATEST and not isinstance(error, StoreUnreachable):
                current = self._newest_whole(name, wanted)
            going_on = "" if current is None else f"; {alias} goes on with version {current}"
            self._trouble(name, alias, f"cannot serve {one_line(error)}{going_on}")
            return current
        self.troubles.pop((name, alias), None)
        logger.info("serving model %s version %s as %s", name, wanted, alias)
        return wanted

    def _newest_whole(self, name: str, wanted: str) -> str | None:
        """Return the newest version before the one that is wanted that can be served, loaded: not a
        newer one, which `latest` may have been moved back from, nor a candidate that it does not
        come of, which may never have been promoted."""
        line = self._line(name, wanted)
        for version in reversed(self.store.versions(name)):
            if int(version) < int(wanted):
                with suppress(StoreError):
                    is_candidate = self.store.manifest(name, version).training.get("labels")
                    if not is_candidate or version in line:
                        return version if self._has_loaded(name, LATEST, version) else None
        return None

    def _line(self, name: str, version: str) -> set[str]:
        """Return a version and those that its weights come of, as far as manifests tell."""
        line: set[str] = set()
        with suppress(StoreError):
            while is_version(version) and version not in line:
                made = self.store.manifest(name, version).training
                line.add(version)
                origin = made.get("warm_start")
                if isinstance(origin, dict) and origin.get("name") == name:
                    version = str(origin.get("version"))
        return line

    def _has_loaded(self, name: str, alias: str, version: str) -> bool:
        """Load a version that has passed its preflight; return whether that was over."""
        preflight = self.models.preflight(name, version)
        if preflight is not None and not preflight.done():
            self.awaits_preflights = True
            return False
        try:
            served = self.models.load(name, version, for_alias=True)
        except NotReady:  # the service is about to end
            return False
        if alias == LATEST:
            self.models.set_latest(served.model.manifest)
        return True

    def _trouble(self, name: str, alias: str, text: str) -> None:
        if self.troubles.get((name, alias)) != text:
            self.troubles[name, alias] = text
            logger.error("%s", text)
