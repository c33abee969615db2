"""The models in memory: which versions are loaded, what aliases mean, and what cannot be served and why.

A watcher thread looks at the store: it verifies, loads and warms the version that `latest` names before requests see
it, so a new version costs no request anything, and one that is broken never takes the place of one that works.
"""

import logging
import threading
import time
from collections import OrderedDict
from contextlib import suppress

from model_store.errors import InvalidInput, NotFound, StoreError
from model_store.model import NEEDED, Model, Prediction
from model_store.store import LATEST, ModelStore
from service.draws import Reservoir
from service.drift import Drift
from service.problems import InUse, NotReady
from service.settings import Settings

logger = logging.getLogger("dubito")

RETRY_BROKEN_S = 30.0
HOW_TO_PUBLISH = (
    "no model is published in the store yet: run `python -m training fit recipes/digits.toml` with the same "
    "DUBITO_STORE, and the service picks it up"
)


class Served:
    """A model ready to serve, its fresh draws, and what its live rows look like."""

    def __init__(self, model: Model, reservoir: Reservoir) -> None:
        self.model = model
        self.reservoir = reservoir
        self.name = model.manifest.name
        self.version = model.manifest.version
        self.drift = Drift(model.calibration.ranking[-1])

    def watch(self, prediction: Prediction) -> None:
        """Take in what is said of live rows, if as many draws were looked at as the model's own number."""
        if prediction.judged_draws == self.model.manifest.noise.default_draws:
            self.drift.watch(prediction.judgement.p_value)


class Models:
    """All models of a store, as the service sees them."""

    def __init__(self, settings: Settings, idle: threading.Event) -> None:
        self.idle = idle  # set while no request is in work
        self.store = ModelStore(settings.store)
        self.settings = settings
        self._latest: dict[str, Served] = {}
        self._aliases: dict[str, dict[str, str]] = {}
        self._others: OrderedDict[tuple[str, str], Served] = OrderedDict()
        self._broken: dict[tuple[str, str], tuple[float, StoreError]] = {}
        self._lock = threading.Lock()
        self._looking = threading.Lock()
        self._stopping = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="store-watcher", daemon=True)

    def start(self) -> None:
        """Load what is published and begin to watch the store."""
        self.refresh()
        if not self.names():
            logger.warning(HOW_TO_PUBLISH)
        self._watcher.start()

    def stop(self) -> None:
        """End the watcher and the reservoirs' threads."""
        self._stopping.set()
        self._watcher.join()
        for served in [*self._latest.values(), *self._others.values()]:
            served.reservoir.close()

    def look(self) -> None:
        """Look at the store at once, also at versions that were found broken a moment ago."""
        with self._looking:
            self._broken = {}
            self.refresh()

    def _watch(self) -> None:
        while not self._stopping.wait(self.settings.poll_interval_s):
            try:
                with self._looking:
                    self.refresh()
            except Exception:
                logger.exception("looking at the model store failed; trying again")

    def refresh(self) -> None:
        """Look at the store once: load each model's latest version, and forget what is gone."""
        names = self.store.names()
        for name in names:
            try:
                aliases = self.store.aliases(name)
            except OSError as error:  # unreadable: of no consequence for other models
                logger.error("cannot read model %s: %s", name, error.strerror)
                continue
            current = self._latest.get(name)
            wanted = aliases.get(LATEST)
            if wanted and (current is None or current.version != wanted):
                try:
                    served = self._load(name, wanted, self.settings.ready_draw_sets)
                except StoreError as error:
                    if current is None:
                        logger.error("cannot serve %s", error)
                    else:
                        logger.error("cannot serve %s; going on with version %s", error, current.version)
                else:
                    self._latest[name] = served
                    logger.info("serving model %s version %s", name, wanted)
                    if current is not None:
                        current.reservoir.close()
            self._aliases[name] = aliases
        self._forget_gone({name: self.store.versions(name) for name in names})

    def _forget_gone(self, versions: dict[str, list[str]]) -> None:
        for name in self.names():
            if name not in versions:
                self._aliases.pop(name, None)
                latest = self._latest.pop(name, None)
                if latest is not None:
                    latest.reservoir.close()
        with self._lock:
            for name, version in [*self._others]:
                if version not in versions.get(name, []):
                    self._others.pop((name, version)).reservoir.close()
        for name, version in [*self._broken]:
            if version not in versions.get(name, []):
                self._broken.pop((name, version), None)

    def _load(self, name: str, version: str, ready_draw_sets: int) -> Served:
        """Verify, load and warm a version, or raise what was wrong with it less than `RETRY_BROKEN_S` ago."""
        key = (name, version)
        when, error = self._broken.get(key, (0.0, None))
        if error is not None and time.monotonic() - when < RETRY_BROKEN_S:
            raise error
        try:
            model = Model.load(self.store.open(name, version, wanted=NEEDED), self.settings.threads)
        except StoreError as error:
            self._broken[key] = (time.monotonic(), error)
            raise
        self._broken.pop(key, None)
        return Served(model, Reservoir(model, ready_draw_sets, self.idle))

    def names(self) -> list[str]:
        """Return the names of models that are served or should be."""
        return sorted({*self._latest, *self._aliases})

    def broken(self, name: str) -> dict[str, str]:
        """Return what is wrong with each version of a model that was found broken."""
        return {version: str(error) for (of, version), (_, error) in sorted(self._broken.items()) if of == name}

    def loaded(self) -> list[Served]:
        """Return all versions in memory."""
        return [*list(self._latest.values()), *list(self._others.values())]

    def latest(self, name: str) -> Served | None:
        """Return what `latest` serves of a model, if anything."""
        return self._latest.get(name)

    def name(self, name: str | None) -> str:
        """Return the model that a request means.

        Raises:
            NotReady: if nothing is published.
            InvalidInput: if the request names none where there are several.
            NotFound: if there is no such model.
        """
        names = self.names()
        if not names:
            raise NotReady(HOW_TO_PUBLISH)
        if name is None:
            name = self.settings.default_model or (names[0] if len(names) == 1 else None)
        if name is None:
            raise InvalidInput("model", f"one of {names}, since there are several", "none")
        if name not in names:
            raise NotFound(f"model: expected one of {names}, got another")
        return name

    def get(self, name: str | None, version: str = LATEST) -> Served:
        """Return the model that a request means, loading its version where it is not yet in memory.

        May read files: call it from a worker thread unless `peek` found nothing to load.

        Raises:
            NotReady, InvalidInput, NotFound: as `name` does, or for an unknown version.
            BrokenArtifact: if the version must not be served.
        """
        served = self.peek(name, version)
        if served is not None:
            return served
        name = self.name(name)
        with self._lock:
            number = self.resolve(name, version)
            return self.peek(name, number) or self._keep(self._load(name, number, 0))

    def resolve(self, name: str, version: str) -> str:
        """Return the number that a number or an alias of a published version names; reads the store.

        Raises:
            NotFound: if there is no such version.
        """
        try:
            return self.store.resolve(name, version)
        except NotFound:  # the store's own text repeats what came
            known = [*self.store.versions(name), *sorted(self.store.aliases(name))]
            raise NotFound(f"version: expected one of {known} of model {name}, got another") from None

    def peek(self, name: str | None, version: str = LATEST) -> Served | None:
        """Return the model that a request means if it is in memory; reads no file.

        Raises:
            NotReady, InvalidInput, NotFound: as `name` does.
        """
        name = self.name(name)
        latest = self._latest.get(name)
        if version == LATEST:
            return latest
        number = self._aliases.get(name, {}).get(version, version)
        if latest is not None and number == latest.version:
            return latest
        other = self._others.get((name, number))
        if other is not None:
            with suppress(KeyError):  # the loader's thread may have dropped it since
                self._others.move_to_end((name, number))
        return other

    def unload(self, name: str, version: str) -> tuple[str, bool]:
        """Take a version out of memory, given its number or an alias; return its number, and whether it was there.

        Requests in work keep it until they are answered. Reads files, and may wait for one that is being loaded.

        Raises:
            NotReady, NotFound: as `get` does.
            InUse: if `latest` serves it.
        """
        name = self.name(name)
        number = self.resolve(name, version)
        latest = self._latest.get(name)
        if latest is not None and latest.version == number:
            raise InUse(f"version: expected one that latest does not serve, got the one that it does: {number}")
        with self._lock:
            served = self._others.pop((name, number), None)
        if served is not None:
            served.reservoir.close()
        return number, served is not None

    def _keep(self, served: Served) -> Served:
        self._others[served.name, served.version] = served
        while len(self._others) > self.settings.max_loaded_versions:
            self._others.popitem(last=False)[1].reservoir.close()
        return served
