"""The models in memory: what aliases serve, which versions are loaded, and what cannot be served
and why.

A watcher (`service.models.watcher`) decides what each alias serves. Versions that no alias serves,
and those that were unloaded to make room, are loaded when a request wants them. Each version passes
a preflight (`service.models.preflights`) before it is loaded.
"""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import numpy as np
from jaxtyping import Float32

from model_store.artifacts.manifest import ENCODER, GRAPHS, TOKENIZER, TRAINING_ROWS, Manifest
from model_store.artifacts.store import LATEST
from model_store.conformal.rank_tables import RankTables
from model_store.errors import InvalidInput, NotFound, StoreError, StoreUnreachable, kind_of
from model_store.inference.encoder import encoder_bytes
from model_store.inference.model import CALIBRATION_FILE, NEEDED, TOKENIZER_COPIES, Model
from model_store.inference.prediction import Prediction
from model_store.inference.preflight_process import Failure
from service import limits
from service.errors import InUse, NotReady, TooLargeToLoad
from service.models.drift import Drift, Evidence, Watched, row_digests
from service.models.preflights import Preflights
from service.models.reservoir import READY_BYTES, Reservoir
from service.settings import Settings

logger = logging.getLogger("dubito")

RETRY_BROKEN_S = 30.0
HOW_TO_PUBLISH = (
    "no model is published in the store yet: run `dubito fit recipes/digits.toml` "
    "with the same DUBITO_STORE, and the service picks it up"
)
Key = tuple[str, str]  # name and version


class Served:
    """A model ready to serve, its fresh draws, and what its live rows look like."""

    def __init__(self, model: Model, reservoir: Reservoir, drift: Drift) -> None:
        self.model = model
        self.reservoir = reservoir
        self.drift = drift
        self.name = model.manifest.name
        self.version = model.manifest.version
        self.key = (self.name, self.version)

    def watch(self, prediction: Prediction, rows: slice, x: Float32[np.ndarray, "N I"]) -> None:
        """Watch live rows `x` for drift, if they were predicted as by a request without options."""
        rank_tables = prediction.rank_tables
        if not isinstance(rank_tables, RankTables):  # of rows under other priors
            return
        if rank_tables.num_draws == self.model.manifest.noise.default_draws:
            self.drift.watch(prediction.p_values.p_value[rows], row_digests(x))


class Models:
    """A cache of a store's versions. Any thread may call its methods."""

    def __init__(
        self,
        settings: Settings,
        idle: threading.Event,
        preflights: Preflights,
        evidence: Evidence | None = None,
    ) -> None:
        """Begin; drift is watched by the rows of this process, unless there is `evidence` of
        several."""
        self.idle = idle  # set while no request is in work
        self.preflights = preflights
        self.store = preflights.store
        self.settings = settings
        self._evidence = evidence
        self._serves: dict[str, dict[str, str]] = {}  # by model the version that each alias serves
        self._latest: dict[str, Manifest] = {}  # of what `latest` serves, in memory or not
        self._loaded: OrderedDict[Key, Served] = OrderedDict()  # the least recently used first
        self._drifts: dict[Key, Drift] = {}  # they outlive the version's stay in memory
        self._broken: dict[Key, tuple[float, StoreError]] = {}
        self._lock = threading.Lock()  # of all these, held for moments
        self._loading = threading.Lock()  # held while a version is loaded

    def close(self) -> None:
        """End the threads that make draws."""
        for served in self.loaded():
            served.reservoir.close()
        for served in self.loaded():
            served.reservoir.join()

    # What requests ask for

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
            raise NotFound("model", f"one of {names}", kind_of(name))
        return name

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
        number = self.serves(name).get(version)
        if number is not None:
            try:
                return self.load(name, number, for_alias=True)
            except NotFound:  # the alias has moved on, and what it served is deleted
                pass
        return self.load(name, self.resolve(name, version), for_alias=False)

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
            expected = f"one of {known} of model {name}"
            raise NotFound("version", expected, kind_of(version)) from None

    def preflight_of(self, name: str | None, version: str) -> "Future[Failure | None] | None":
        """Return the preflight that must be over before `get` loads what a request means, if any.
        Reads files.

        Raises:
            NotReady, InvalidInput, NotFound: as `get` does.
        """
        name = self.name(name)
        return self.preflight(name, self.serves(name).get(version) or self.resolve(name, version))

    # What the watcher does

    def serves(self, name: str) -> dict[str, str]:
        return self._serves.get(name, {})

    def serve(self, name: str, serves: dict[str, str]) -> None:
        with self._lock:
            before, self._serves[name] = self._serves.get(name, {}), serves
        for version in {*before.values()} - {*serves.values()}:
            self._unload(name, version)

    def set_latest(self, manifest: Manifest) -> None:
        with self._lock:
            self._latest[manifest.name] = manifest

    def forget_broken(self) -> None:
        with self._lock:
            self._broken.clear()
        self.preflights.forget_failures()

    def forget_gone(self, versions: dict[str, list[str]]) -> None:
        with self._lock:
            for name in self._serves.keys() - versions.keys():
                del self._serves[name]
                self._latest.pop(name, None)
            there = {(name, version) for name in versions for version in versions[name]}
            for name, serves in self._serves.items():
                there |= {(name, version) for version in serves.values()}
            known: dict[Key, object]
            for known in (self._broken, self._drifts):  # type: ignore[assignment]
                for key in known.keys() - there:
                    del known[key]
            gone = self._loaded.keys() - there
        for key in gone:
            self._unload(*key)

    def preflight(self, name: str, version: str) -> "Future[Failure | None] | None":
        """Return the preflight of a version by its number; None where it needs none."""
        try:
            with self._lock:
                served = self._loaded.get((name, version))
            self._raise_if_broken((name, version))
            return None if served is not None else self.preflights.of(self._manifest(name, version))
        except StoreError:  # of which loading it tells
            return None

    def load(self, name: str, version: str, for_alias: bool) -> Served:
        """Return a version, verified, loaded and warmed unless it is in memory, and make room for
        it.

        What was wrong with it less than `RETRY_BROKEN_S` ago is raised again. With `for_alias`
        draws are kept ready. Waits for its preflight.
        """
        key = (name, version)
        if key not in self._loaded:
            self._raise_if_broken(key)
            self._checked_manifest(name, version)  # others are loaded meanwhile
        with self._loading:
            with self._lock:
                served = self._loaded.get(key)
            if served is None:
                self._raise_if_broken(key)
                served = self._open(self._checked_manifest(name, version))
            if for_alias and served.reservoir.depth == 0:
                served.reservoir = Reservoir(served.model, limits.READY_DRAW_SETS, self.idle)
            with self._lock:
                self._broken.pop(key, None)
                self._loaded[key] = served
                self._loaded.move_to_end(key)
        self._make_room()
        return served

    def _raise_if_broken(self, key: Key) -> None:
        with self._lock:
            when, error = self._broken.get(key, (0.0, None))
        if error is not None and time.monotonic() - when < RETRY_BROKEN_S:
            raise error

    def _manifest(self, name: str, version: str) -> Manifest:
        manifest = self.store.manifest(name, version)
        need = self._bytes_of([manifest])
        if need > self.settings.max_model_bytes:
            raise TooLargeToLoad(name, version, need, self.settings.max_model_bytes)
        return manifest

    def _checked_manifest(self, name: str, version: str) -> Manifest:
        """Wait for a version's preflight, and return the manifest that passed it."""
        with self._noting_what_is_broken(name, version):
            manifest = self._manifest(name, version)
            self.preflights.check(manifest)
            return manifest

    @contextmanager
    def _noting_what_is_broken(self, name: str, version: str) -> Iterator[None]:
        try:
            yield
        except StoreUnreachable:  # which says nothing of the version
            raise
        except StoreError as error:
            if version not in self.store.versions(name):  # deleted meanwhile
                expected = f"one that is published of model {name}"
                raise NotFound("version", expected, "one that is gone") from None
            with self._lock:
                self._broken[name, version] = (time.monotonic(), error)
            raise

    def _open(self, manifest: Manifest) -> Served:
        key = name, version = manifest.name, manifest.version
        with self._noting_what_is_broken(name, version):
            artifact = self.store.open(name, version, wanted=NEEDED)
            if artifact.manifest.digest != manifest.digest:
                raise manifest.broken("manifest.json", "it is another than a moment ago")
            model = Model.load(artifact, self.settings.worker_threads)
        tables = model.calibration.rank_tables(model.manifest.noise.default_draws)
        watched = Watched.of_ranking(tables.statistic, *key)
        with self._lock:
            drift = self._drifts.setdefault(key, Drift(watched, self._evidence))
        return Served(model, Reservoir(model, 0, self.idle), drift)

    # Memory

    def _make_room(self) -> None:
        """Unload the least recently used versions beyond the memory bound, but never the one used
        last."""
        while True:
            with self._lock:
                loaded = [served.model.manifest for served in self._loaded.values()]
                if len(loaded) < 2 or self._bytes_of(loaded) <= self.settings.max_model_bytes:
                    break
                key = next(iter(self._loaded))
            self._unload(*key)

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
        if self.serves(name).get(LATEST) == number:
            expected = "one that latest does not serve"
            raise InUse("version", expected, f"the one that it does: {number}")
        return number, self._unload(name, number)

    def _number(self, name: str, version: str) -> str:
        """Return which version a number or an alias means: what is served by it, is in memory, or
        is in the store."""
        with self._lock:
            is_loaded = (name, version) in self._loaded
        served = self.serves(name).get(version)
        return served or (version if is_loaded else self.resolve(name, version))

    def _unload(self, name: str, version: str) -> bool:
        """Drop a version, and return whether it was in memory; requests that hold it go on with
        it."""
        with self._lock:
            served = self._loaded.pop((name, version), None)
        if served is not None:
            served.reservoir.close()
        return served is not None

    def _bytes_of(self, manifests: list[Manifest]) -> int:
        """Return about how many bytes versions take in memory together; an encoder that several
        have counts once."""
        files = [m.files[ENCODER] for m in manifests if ENCODER in m.files]
        encoders = {file.sha256: encoder_bytes(file) for file in files}
        return sum(map(self.model_bytes, manifests)) + sum(encoders.values())

    def model_bytes(self, manifest: Manifest) -> int:
        """Return about how many bytes a version takes in memory, ready draws included, without its
        encoder.

        A session holds a graph's weights, nearly all of its file, as they are and packed for its
        kernels. docs/results/serving.md compares the estimate with what is measured.
        """
        sizes = {name: file.size for name, file in manifest.files.items()}
        sampler, network = (sizes[file] for file in GRAPHS)
        terms = network if manifest.detectors.attributed else 0  # a part of the network gives them
        others = sizes[CALIBRATION_FILE] + sizes.get(TRAINING_ROWS, 0)
        tokenizer = TOKENIZER_COPIES * sizes.get(TOKENIZER, 0)
        draw_set = 4 * manifest.noise.default_draws * manifest.noise.theta_dimension
        ready = min(limits.READY_DRAW_SETS * draw_set, READY_BYTES)
        return 2 * (sampler + network) + terms + others + tokenizer + ready

    # What there is

    def names(self) -> list[str]:
        return sorted(self._serves)

    def broken(self, name: str) -> dict[str, str]:
        """Return what is wrong with each version of a model that was found broken."""
        with self._lock:
            found = sorted(self._broken.items())
        return {version: str(error) for (of, version), (_, error) in found if of == name}

    def all_broken(self) -> list[Key]:
        with self._lock:
            return sorted(self._broken)

    def all_aliases(self) -> list[tuple[str, str, str]]:
        with self._lock:
            return [(name, *s) for name, serves in self._serves.items() for s in serves.items()]

    def loaded(self) -> list[Served]:
        with self._lock:
            return list(self._loaded.values())

    def latest(self, name: str) -> Manifest | None:
        """Return the manifest of what `latest` serves of a model, if anything; it need not be in
        memory."""
        return self._latest.get(name)

    # Drift

    def drift(self, manifest: Manifest) -> Drift | None:
        return self._drifts.get((manifest.name, manifest.version))

    def bring_drift(self) -> None:
        """Bring the live rows of this process to the test that several processes share.

        Raises:
            OSError: if it cannot be reached.
        """
        with self._lock:
            drifts = list(self._drifts.values())
        for drift in drifts:
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
                reason = "the evidence of all processes cannot be reached; try again"
                raise NotReady(reason) from None
        return number, drift is not None
