"""The models in memory: what aliases serve, which versions are loaded, and what cannot be served
and why.

A watcher thread looks at the store. Where an alias has moved it has the version that the alias
names tried in a process of its own (`service.models.trials`), then verifies, loads and warms it
before requests see it: a new version costs no request anything, and one that is broken never takes
the place of one that works. Versions that no alias serves, and those that were unloaded to make
room, are loaded when a request wants them.
"""

import logging
import random
import threading
import time
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import numpy as np
from jaxtyping import Float32

from model_store.artifacts.manifest import ENCODER, GRAPHS, TOKENIZER, TRAINING_ROWS, Manifest
from model_store.artifacts.store import LATEST
from model_store.conformal.calibration import DEFAULT_FPR
from model_store.conformal.rank_tables import RankTables
from model_store.conformal.stopping import StoppingRule
from model_store.errors import (
    BrokenArtifact,
    InvalidInput,
    NotFound,
    StoreError,
    StoreUnreachable,
    one_line,
)
from model_store.inference.model import CALIBRATION_FILE, NEEDED, TOKENIZER_COPIES, Model
from model_store.inference.prediction import Prediction
from model_store.inference.trials import LOOK_S, Failure
from service.errors import InUse, NotReady, TooLargeToLoad
from service.models.drift import Drift, Evidence, SharedDrift, Watched, row_digests
from service.models.reservoir import READY_BYTES, Reservoir
from service.models.trials import Trials
from service.settings import Settings

logger = logging.getLogger("dubito")

RETRY_BROKEN_S = 30.0
ENCODER_COPIES = 1.5  # in memory, of an encoder's file, while it is loaded
PATIENCE_S = 5.0  # for trials when the service starts, or is told to look: most take a second
HOW_TO_PUBLISH = (
    "no model is published in the store yet: run `python -m training fit recipes/digits.toml` "
    "with the same "
    "DUBITO_STORE, and the service picks it up"
)


AnyDrift = Drift | SharedDrift


class Served:
    """A model ready to serve, its fresh draws, and what its live rows look like."""

    def __init__(
        self, model: Model, reservoir: Reservoir, drift: AnyDrift, rule: StoppingRule | None = None
    ) -> None:
        self.model = model
        self.reservoir = reservoir
        self.drift = drift
        self.name = model.manifest.name
        self.version = model.manifest.version
        self.key = (self.name, self.version)
        self.rule = rule  # of the rows that are watched

    def watch(
        self, prediction: Prediction, rows: slice, x: Float32[np.ndarray, "N I"], client: Hashable
    ) -> None:
        """Take in what is said of live rows, if their draws were taken as those of a request
        without options.

        `x` are the rows themselves, of which those that came of late are passed over, and `client`
        is who sent them.
        """
        rank_tables = prediction.rank_tables
        if not isinstance(rank_tables, RankTables):  # rows that are known to be others
            return
        if (rank_tables.num_draws, rank_tables.rule) == (
            self.model.manifest.noise.default_draws,
            self.rule,
        ):
            self.drift.watch(prediction.p_values.p_value[rows], row_digests(x), client)


class Models:
    """All models of a store, as the service sees them. Any thread may call its methods."""

    def __init__(
        self,
        settings: Settings,
        idle: threading.Event,
        ending: threading.Event,
        trials: Trials,
        evidence: Evidence | None = None,
    ) -> None:
        """Begin; drift is watched by the rows of this process, unless there is `evidence` of
        several."""
        self.idle = idle  # set while no request is in work
        self.trials = trials
        self._evidence = evidence
        self.store = trials.store
        self.settings = settings
        self._serves: dict[str, dict[str, str]] = {}  # by model the version that each alias serves
        self._latest: dict[str, Manifest] = {}  # of what `latest` serves, in memory or not
        self._loaded: OrderedDict[tuple[str, str], Served] = (
            OrderedDict()
        )  # the least recently used first
        self._drifts: dict[
            tuple[str, str], AnyDrift
        ] = {}  # they outlive the version's stay in memory
        self._broken: dict[tuple[str, str], tuple[float, StoreError]] = {}
        self._said: dict[tuple[str, str], str] = {}  # by model and alias what the log says is wrong
        self._lock = threading.Lock()  # of all these, held for moments
        self._loading = threading.Lock()  # held while a version is loaded
        self._looking = threading.Lock()  # held while the store is looked at
        self.awaits_trials = False  # whether the last look found a version that is being tried
        self.seen = 0.0  # when the whole store was last looked at, in seconds since 1970
        self.reachable = (
            True  # whether the last look at the store came to anything; a folder always is
        )
        self._ending = ending
        self._watcher = threading.Thread(target=self._watch, name="store-watcher", daemon=True)

    def start(self) -> None:
        """Load what `latest` names of each model, but for what takes long to try, and begin to
        watch the store."""
        self.refresh(PATIENCE_S)
        self.trials.rest()
        if not self.names():
            logger.warning(HOW_TO_PUBLISH)
        self._watcher.start()

    def stop(self) -> None:
        """End the watcher and the reservoirs' threads; `ending` is set."""
        self.store.storage.close()
        self.trials.news.set()
        self._watcher.join()
        for served in self.loaded():
            served.reservoir.close()
        for served in self.loaded():
            served.reservoir.join()

    def look(self) -> None:
        """Look at the store at once, also at versions that were found broken a moment ago."""
        with self._looking:
            with self._lock:
                self._broken.clear()
            self.trials.forget_failures()
            self.refresh(PATIENCE_S)

    def _watch(self) -> None:
        pause_s = random.uniform(
            0.0, self.settings.poll_interval_s
        )  # so that replicas that start together take turns
        while not self._ending.is_set():
            self.trials.news.wait(pause_s)  # also set when a trial is over
            pause_s = self.settings.poll_interval_s
            self.trials.news.clear()
            if self._ending.is_set():
                return
            try:
                with self._looking:
                    self.refresh()
            except Exception:
                logger.exception("looking at the model store failed; trying again")

    def refresh(self, patience_s: float = 0.0) -> None:
        """Look at the store once: follow the aliases, and forget what is gone.

        A version that must be tried first is followed when it has been, within `patience_s` or at a
        later look.
        """
        end = time.monotonic() + patience_s
        self._look_once()
        while self.awaits_trials and time.monotonic() < end and not self._ending.is_set():
            if self.trials.news.wait(LOOK_S):
                self.trials.news.clear()
                self._look_once()

    def _look_once(self) -> None:
        self.awaits_trials = False
        all_seen = self._look_at_store()
        if self.store.storage.was_seen:
            all_seen = self._follow_all() and all_seen
        if all_seen:
            self.seen = time.time()

    def _look_at_store(self) -> bool:
        """Look at the store anew; return whether it can be reached, and say so when that has
        changed."""
        try:
            self.store.storage.look()
        except StoreUnreachable as error:
            if self.reachable:
                logger.error(
                    "%s; going on with what was seen of it and is in %s",
                    one_line(error),
                    self.settings.cache,
                )
            self.reachable = False
        else:
            if not self.reachable:
                logger.info("the store can be reached again")
            self.reachable = True
        return self.reachable

    def _follow_all(self) -> bool:
        """Follow the aliases of all models; return whether all could be read."""
        names, all_seen = self.store.names(), True
        for name in names:
            try:
                aliases = self.store.aliases(name)
            except OSError as error:  # unreadable: of no consequence for other models
                all_seen = False
                self._say_once(name, LATEST, f"cannot read model {name}: {error.strerror}")
            else:
                self._follow(name, aliases)
        self._forget_gone({name: self.store.versions(name) for name in names})
        return all_seen

    def _follow(self, name: str, aliases: dict[str, str]) -> None:
        """Serve by each alias the version that it names, or go on with the one before where that
        cannot be served."""
        is_new = not self._serves.get(name)
        before = self._serves.get(name, {})
        serves = dict(before)
        for alias in before.keys() - aliases.keys():
            del serves[alias]
        for alias, wanted in sorted(aliases.items(), key=lambda item: item[0] != LATEST):
            if before.get(alias) == wanted:
                self._said.pop((name, alias), None)
            elif is_new and alias != LATEST:
                serves[alias] = wanted  # nothing was served before: loaded when a request wants it
            elif self._can_serve(name, alias, wanted, before.get(alias)):
                serves[alias] = wanted
        with self._lock:
            self._serves[name] = serves
        for version in {*before.values()} - {*serves.values()}:
            self._unload(name, version)

    def _can_serve(self, name: str, alias: str, wanted: str, current: str | None) -> bool:
        trial = self.trial(name, wanted)
        if trial is not None and not trial.done():
            self.awaits_trials = True
            return False
        try:
            served = self._load(name, wanted, for_alias=True)
        except NotReady:  # the service is about to end
            return False
        except StoreError as error:
            going_on = "" if current is None else f"; {alias} goes on with version {current}"
            self._say_once(name, alias, f"cannot serve {one_line(error)}{going_on}")
            return False
        self._said.pop((name, alias), None)
        if alias == LATEST:
            with self._lock:
                self._latest[name] = served.model.manifest
        logger.info("serving model %s version %s as %s", name, wanted, alias)
        return True

    def _say_once(self, name: str, alias: str, text: str) -> None:
        if self._said.get((name, alias)) != text:
            self._said[name, alias] = text
            logger.error("%s", text)

    def _forget_gone(self, versions: dict[str, list[str]]) -> None:
        with self._lock:
            for name in self._serves.keys() - versions.keys():
                del self._serves[name]
                self._latest.pop(name, None)
            in_use = {
                (name, version)
                for name, serves in self._serves.items()
                for version in serves.values()
            }
            there = in_use | {(name, version) for name in versions for version in versions[name]}
            for known in (self._broken, self._drifts):
                for key in known.keys() - there:
                    del known[key]
            gone = self._loaded.keys() - there
        for key in gone:
            self._unload(*key)

    def _load(self, name: str, version: str, for_alias: bool) -> Served:
        """Return a version, verified, loaded and warmed unless it is in memory, and make room for
        it.

        What was wrong with it less than `RETRY_BROKEN_S` ago is raised again. With `for_alias`
        draws are kept ready. Waits for its trial.
        """
        key = (name, version)
        if key not in self._loaded:
            self._raise_if_broken(key)
            self._tried(name, version)  # others are loaded meanwhile
        with self._loading:
            with self._lock:
                served = self._loaded.get(key)
            if served is None:
                self._raise_if_broken(key)
                served = self._opened(self._tried(name, version))
            if for_alias and served.reservoir.depth == 0:
                served.reservoir = Reservoir(served.model, self.settings.ready_draw_sets, self.idle)
            with self._lock:
                self._broken.pop(key, None)
                self._loaded[key] = served
                self._loaded.move_to_end(key)
        self._make_room()
        return served

    def _raise_if_broken(self, key: tuple[str, str]) -> None:
        """Raise again what was wrong with a version a moment ago."""
        with self._lock:
            when, error = self._broken.get(key, (0.0, None))
        if error is not None and time.monotonic() - when < RETRY_BROKEN_S:
            raise error

    def trial_of(self, name: str | None, version: str = LATEST) -> "Future[Failure | None] | None":
        """Return the trial that must be over before `get` loads what a request means, if any. Reads
        files.

        Raises:
            NotReady, InvalidInput, NotFound: as `get` does.
        """
        name = self.name(name)
        return self.trial(
            name, self._serves.get(name, {}).get(version) or self.resolve(name, version)
        )

    def trial(self, name: str, version: str) -> "Future[Failure | None] | None":
        """Return the same of a version by its number."""
        try:
            with self._lock:
                served = self._loaded.get((name, version))
            self._raise_if_broken((name, version))
            return None if served is not None else self.trials.of(self._manifest(name, version))
        except StoreError:  # of which loading it tells
            return None

    def _manifest(self, name: str, version: str) -> Manifest:
        """Return the manifest of a version that there is memory for."""
        manifest = self.store.manifest(name, version)
        need = self._bytes_of([manifest])
        if need > self.settings.max_model_bytes:
            raise TooLargeToLoad(name, version, need, self.settings.max_model_bytes)
        return manifest

    def _tried(self, name: str, version: str) -> Manifest:
        """Wait for a version's trial, and return the manifest of what was tried."""
        with self._noting_what_is_broken(name, version):
            manifest = self._manifest(name, version)
            self.trials.check(manifest)
            return manifest

    @contextmanager
    def _noting_what_is_broken(self, name: str, version: str) -> Iterator[None]:
        try:
            yield
        except StoreError as error:
            if isinstance(error, StoreUnreachable):  # which says nothing of the version
                raise
            if version not in self.store.versions(name):  # deleted meanwhile
                raise NotFound(
                    f"version: expected one that is published of model {name}, got another"
                ) from None
            with self._lock:
                self._broken[name, version] = (time.monotonic(), error)
            raise

    def _opened(self, manifest: Manifest) -> Served:
        """Return a version that was tried."""
        name, version = manifest.name, manifest.version
        with self._noting_what_is_broken(name, version):
            artifact = self.store.open(name, version, wanted=NEEDED)
            if artifact.manifest.digest != manifest.digest:
                raise BrokenArtifact(
                    name, version, "manifest.json", "it is another than a moment ago"
                )
            model = Model.load(artifact, self.settings.worker_threads)
        settle = self.settings.settle
        rule = None if settle is None else StoppingRule(DEFAULT_FPR, settle)
        statistic = model.calibration.rank_tables(
            model.manifest.noise.default_draws, rule
        ).statistic
        key = (name, version)
        with self._lock:
            drift = self._drifts.setdefault(
                key, self._watching(Watched.of_ranking(statistic, *key))
            )
        return Served(model, Reservoir(model, 0, self.idle), drift, rule)

    def _make_room(self) -> None:
        """Unload the least recently used versions beyond the memory bound, but never the one used
        last."""
        while True:
            with self._lock:
                loaded = [served.model.manifest for served in self._loaded.values()]
                if len(loaded) < 2 or self._bytes_of(loaded) <= self.settings.max_model_bytes:
                    break
                name, version = next(iter(self._loaded))
            self._unload(name, version)

    def unload(self, name: str, version: str) -> tuple[str, bool]:
        """Take a version out of memory, given its number or an alias; return its number, and
        whether it was there.

        One that was deleted since it was loaded is taken out too. Requests in work keep it until
        they are answered. Reads files.

        Raises:
            NotReady, NotFound: as `get` does.
            InUse: if `latest` serves it.
        """
        name = self.name(name)
        number = self._number(name, version)
        if self._serves.get(name, {}).get(LATEST) == number:
            raise InUse(
                "version: expected one that latest does not serve, got the one that it does: "
                f"{number}"
            )
        return number, self._unload(name, number)

    def _number(self, name: str, version: str) -> str:
        """Return which version a number or an alias means: what is served by it, is in memory, or
        is in the store."""
        with self._lock:
            is_loaded = (name, version) in self._loaded
        return self._serves.get(name, {}).get(version) or (
            version if is_loaded else self.resolve(name, version)
        )

    def _unload(self, name: str, version: str) -> bool:
        """Drop a version, and return whether it was in memory; requests that hold it go on with
        it."""
        with self._lock:
            served = self._loaded.pop((name, version), None)
        if served is None:
            return False
        served.reservoir.close()
        return True

    def _bytes_of(self, manifests: list[Manifest]) -> int:
        """Return about how many bytes versions take in memory together; an encoder that several
        have counts once."""
        encoders = {
            m.files[ENCODER].sha256: m.files[ENCODER].size for m in manifests if ENCODER in m.files
        }
        return sum(map(self.model_bytes, manifests)) + int(ENCODER_COPIES * sum(encoders.values()))

    def model_bytes(self, manifest: Manifest) -> int:
        """Return about how many bytes a version takes in memory, ready draws included, without its
        encoder.

        A session holds a graph's weights, nearly all of its file, as they are and packed for its
        kernels. docs/results/startup.md compares the estimate with what is measured.
        """
        sampler, network = (manifest.files[file].size for file in GRAPHS)
        terms = (
            network if manifest.detectors.attributed else 0
        )  # the part of the network that gives them, at most
        rows = manifest.files[TRAINING_ROWS].size if TRAINING_ROWS in manifest.files else 0
        tokenizer = manifest.files[TOKENIZER].size if TOKENIZER in manifest.files else 0
        draw_set = 4 * manifest.noise.default_draws * manifest.noise.theta_dimension
        ready = min(self.settings.ready_draw_sets * draw_set, READY_BYTES)
        beside = terms + manifest.files[CALIBRATION_FILE].size + rows + TOKENIZER_COPIES * tokenizer
        return 2 * (sampler + network) + beside + ready

    def names(self) -> list[str]:
        """Return the names of models that are served or should be."""
        return sorted(self._serves)

    def broken(self, name: str) -> dict[str, str]:
        """Return what is wrong with each version of a model that was found broken."""
        with self._lock:
            return {
                version: str(error)
                for (of, version), (_, error) in sorted(self._broken.items())
                if of == name
            }

    def all_broken(self) -> list[tuple[str, str]]:
        """Return all versions that were found broken, by model and version."""
        with self._lock:
            return sorted(self._broken)

    def all_aliases(self) -> list[tuple[str, str, str]]:
        """Return each model's aliases and the version that each serves: model, alias, version."""
        with self._lock:
            return [
                (name, *served)
                for name, serves in self._serves.items()
                for served in serves.items()
            ]

    def loaded(self) -> list[Served]:
        """Return all versions in memory."""
        with self._lock:
            return list(self._loaded.values())

    def latest(self, name: str) -> Manifest | None:
        """Return the manifest of what `latest` serves of a model, if anything; it need not be in
        memory."""
        return self._latest.get(name)

    def drift(self, manifest: Manifest) -> AnyDrift | None:
        """Return what live rows of a version look like."""
        return self._drifts.get((manifest.name, manifest.version))

    def _watching(self, watched: Watched) -> AnyDrift:
        return Drift(watched) if self._evidence is None else SharedDrift(watched, self._evidence)

    def bring_drift(self) -> None:
        """Bring what this process saw of live rows to the evidence of all, where there are several.

        Raises:
            OSError: if it cannot be reached.
        """
        with self._lock:
            drifts = list(self._drifts.values())
        for drift in drifts:
            if isinstance(drift, SharedDrift):
                drift.bring()

    def reset_drift(self, name: str, version: str) -> tuple[str, bool]:
        """Forget what live rows of a version looked like, given its number or an alias; return its
        number, and whether any were watched. Reads files.

        Raises:
            NotFound: as `get` does.
            NotReady: as `get` does, and if the evidence of several processes cannot be reached.
        """
        name = self.name(name)
        number = self._number(name, version)
        drift = self._drifts.get((name, number))
        if drift is not None:
            try:
                drift.reset()
            except OSError:
                raise NotReady(
                    "the evidence of all processes cannot be reached; try again"
                ) from None
        return number, drift is not None

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
            BrokenArtifact, UnsupportedFormat, TooLargeToLoad: if the version must not or cannot be
                served.
        """
        served = self.peek(name, version)
        if served is not None:
            return served
        name = self.name(name)
        number = self._serves.get(name, {}).get(version)
        if number is not None:
            try:
                return self._load(name, number, for_alias=True)
            except NotFound:  # the alias has moved on, and what it served is deleted
                pass
        return self._load(name, self.resolve(name, version), for_alias=False)

    def resolve(self, name: str, version: str) -> str:
        """Return the number that a number or an alias of a published version names; reads the
        store.

        Raises:
            NotFound: if there is no such version.
        """
        try:
            return self.store.resolve(name, version)
        except NotFound:  # the store's own text repeats what came
            known = [*self.store.versions(name), *sorted(self.store.aliases(name))]
            raise NotFound(
                f"version: expected one of {known} of model {name}, got another"
            ) from None

    def peek(self, name: str | None, version: str = LATEST) -> Served | None:
        """Return the model that a request means if it is in memory; reads no file.

        Raises:
            NotReady, InvalidInput, NotFound: as `name` does.
        """
        name = self.name(name)
        with self._lock:
            key = (name, self._serves.get(name, {}).get(version, version))
            served = self._loaded.get(key)
            if served is not None:
                self._loaded.move_to_end(key)
        return served
