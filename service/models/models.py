"""Loaded models, their prepared draws, and the versions that aliases point to.

`service.models.watcher` moves the aliases. Requests can load other versions. Each version must pass
a preflight (`service.models.preflights`) before it is loaded.
"""

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import numpy as np
from jaxtyping import Float32

from model_store.artifacts.manifest import ENCODER, GRAPHS, TOKENIZER, TRAINING_ROWS, Manifest
from model_store.artifacts.store import LATEST
from model_store.conformal.rank_tables import RankTables
from model_store.errors import (
    InvalidInput,
    NotFound,
    StoreError,
    StoreUnreachable,
    describe_value,
    list_choices,
    one_line,
)
from model_store.inference.encoder import encoder_bytes
from model_store.inference.model import CALIBRATION_FILE, NEEDED, TOKENIZER_COPIES, Model
from model_store.inference.noise import ROW_NOISE, fresh_seed
from model_store.inference.prediction import Prediction
from model_store.inference.preflight import Failure
from model_store.inference.runtime import MAX_DRAW_SET_BYTES, DrawSet
from service import limits
from service.errors import NotReady, TooLargeToLoad
from service.models.drift import Drift, DriftReport
from service.models.preflights import Preflights
from service.settings import Settings

logger = logging.getLogger("dubito")

RETRY_BROKEN_S = 30.0
RETRY_PREFLIGHT_S = 600.0  # after a failed preflight
PIECE_DRAWS = 50  # prepared between checks for active requests
READY_BYTES = 64 << 20  # of all prepared draw sets together
MAX_IDLE_WAIT_S = 0.05  # before a piece is computed despite active requests
HOW_TO_PUBLISH = (
    "no model is published in the store yet: run `dubito fit recipes/digits.toml` "
    "with the same DUBITO_STORE"
)
Key = tuple[str, str]  # name and version


class Reservoir:
    """A supply of fresh draw sets, prepared in a thread. Each set is used once.

    The thread refills the reservoir if it is half empty, because computing draws evicts the network
    from the processor's cache. It runs while the service is idle or, if three quarters of the sets
    are used, concurrently with requests.
    """

    def __init__(self, model: Model, depth: int, idle: threading.Event) -> None:
        self.model = model
        self.num_draws = model.manifest.noise.default_draws
        self.depth = min(depth, READY_BYTES // (self.num_draws * model.runtime.draw_bytes))
        self._idle = idle
        self.ready: deque[DrawSet] = deque()  # newest last
        self._wakeup = threading.Event()
        self._closed = False
        if self.depth > 0:
            self._wakeup.set()
            self._thread = threading.Thread(target=self._fill, name="draw-reservoir", daemon=True)
            self._thread.start()

    def take(self, num_draws: int) -> DrawSet:
        """Take a prepared set and adjust its size, or compute a set if none is ready."""
        try:
            ready = self.ready.pop()  # the newest may still be in the processor's cache
        except IndexError:
            return self.model.runtime.draw_set(fresh_seed(), num_draws)
        if len(self.ready) <= self.depth // 2:
            self._wakeup.set()
        theta = ready.theta
        if theta is None or num_draws * self.model.runtime.draw_bytes > MAX_DRAW_SET_BYTES:
            return self.model.runtime.draw_set(ready.seed, num_draws)
        if num_draws <= len(theta):
            return DrawSet(ready.seed, num_draws, theta[:num_draws])
        extra = self.model.runtime.draw(ready.seed, len(theta), num_draws - len(theta))
        return DrawSet(ready.seed, num_draws, np.concatenate([theta, extra]))

    def close(self) -> None:
        """Ask the thread to stop."""
        self._closed = True
        self._wakeup.set()

    def join(self) -> None:
        """Wait for the thread to end, because otherwise the process could abort at exit."""
        if self.depth > 0:
            self._thread.join()

    def _fill(self) -> None:
        while not self._closed:
            if len(self.ready) < self.depth:
                self._add_set()
            else:
                self._wakeup.clear()
                if len(self.ready) >= self.depth and not self._closed:
                    self._wakeup.wait()

    def _add_set(self) -> None:
        seed = fresh_seed()
        pieces = []
        for first in range(0, self.num_draws, PIECE_DRAWS):
            if len(self.ready) > self.depth // 4:
                self._idle.wait(MAX_IDLE_WAIT_S)
            if self._closed:
                return
            draws = min(PIECE_DRAWS, self.num_draws - first)
            pieces.append(self.model.runtime.draw(seed, first, draws))
        self.ready.append(DrawSet(seed, self.num_draws, np.concatenate(pieces)))


class ServedModel:
    """A loaded version with its prepared draws and drift test."""

    def __init__(self, model: Model, reservoir: Reservoir, drift: Drift) -> None:
        self.model = model
        self.reservoir = reservoir
        self.drift = drift
        self.name = model.manifest.name
        self.version = model.manifest.version
        self.key = (self.name, self.version)

    def watch(self, prediction: Prediction, rows: slice, x: Float32[np.ndarray, "N I"]) -> None:
        """Add live rows to the drift test if they use the default draw count and priors."""
        rank_tables = prediction.rank_tables
        if not isinstance(rank_tables, RankTables):  # the request has priors
            return
        if rank_tables.num_draws == self.model.manifest.noise.default_draws:
            self.drift.watch(prediction.p_values.p_value[rows], x)


class Models:
    """A cache of a store's versions. Thread-safe."""

    def __init__(self, settings: Settings, idle: threading.Event, preflights: Preflights) -> None:
        self.idle = idle  # set while no request is active
        self.preflights = preflights
        self.store = preflights.store
        self.settings = settings
        self.on_retain: Callable[[set[Key]], None] = lambda _: None  # with all remaining versions
        self._aliases: dict[str, dict[str, str]] = {}  # model, alias, served version
        self._loaded: OrderedDict[Key, ServedModel] = OrderedDict()  # least recently used first
        self._drifts: dict[Key, Drift] = {}  # kept when a version is unloaded
        self._manifests: dict[Key, Manifest] = {}  # of versions that were loaded
        self._broken: dict[Key, tuple[float, StoreError]] = {}
        self._lock = threading.Lock()  # protects the fields above
        self._load_lock = threading.Lock()

    def close(self) -> None:
        for loaded in self.loaded():
            loaded.reservoir.close()
        for loaded in self.loaded():
            loaded.reservoir.join()

    # Requests

    def name(self, name: str | None, allowed: frozenset[str] | None = None) -> str:
        """Return a request's model name, or the name of the default model.

        `allowed` are the models that the request's key can use, or None for all.
        """
        names = self.names(allowed)
        if not names:
            raise NotReady(HOW_TO_PUBLISH)
        if name is None:
            default = self.settings.default_model
            if allowed is not None and default not in allowed:
                default = None
            name = default or (names[0] if len(names) == 1 else None)
        if name is None:
            raise InvalidInput("model", f"{list_choices(names)}, since there are several", "none")
        if name not in names:
            raise NotFound("model", list_choices(names), describe_value(name))
        return name

    def peek(self, name: str, version: str = LATEST) -> ServedModel | None:
        """Return a model if it is loaded."""
        with self._lock:
            key = (name, self._aliases.get(name, {}).get(version, version))
            loaded = self._loaded.get(key)
            if loaded is not None:
                self._loaded.move_to_end(key)
        return loaded

    def get(self, name: str, version: str = LATEST) -> ServedModel:
        """Return a model, loading it if necessary. This can block."""
        loaded = self.peek(name, version)
        if loaded is not None:
            return loaded
        number = self.aliases(name).get(version)
        if number is not None:
            try:
                return self.load(name, number, is_aliased=True)
            except NotFound:  # the alias has moved, and its previous version was deleted
                pass
        return self.load(name, self.resolve(name, version), is_aliased=False)

    def resolve(self, name: str, version: str) -> str:
        """Resolve a version number or alias to a published version's number."""
        try:
            return self.store.resolve(name, version)
        except NotFound:  # its message repeats the input, which a response must not
            versions = [*self.store.versions(name), *sorted(self.store.aliases(name))]
            expected = f"{list_choices(versions)} of model {name}"
            raise NotFound("version", expected, describe_value(version)) from None

    def find_preflight(self, name: str, version: str) -> "Future[Failure | None] | None":
        """Return a version's preflight, or None if no preflight is needed."""
        return self.preflight(name, self.aliases(name).get(version) or self.resolve(name, version))

    # The watcher

    def aliases(self, name: str) -> dict[str, str]:
        return self._aliases.get(name, {})

    def set_aliases(self, name: str, aliases: dict[str, str]) -> None:
        with self._lock:
            before, self._aliases[name] = self._aliases.get(name, {}), aliases
        for version in {*before.values()} - {*aliases.values()}:
            self._unload(name, version)

    def find_change(self, name: str, version: str) -> str | None:
        """Describe any change to the store's copy of a loaded version, or return None."""
        loaded = self._manifests.get((name, version))
        try:
            if loaded is None or loaded.digest == self.store.manifest(name, version).digest:
                return None
        except StoreUnreachable:
            return None
        except StoreError as error:
            return one_line(error)
        return f"model {name} version {version} in the store differs from the loaded one"

    def forget_broken(self) -> None:
        with self._lock:
            self._broken.clear()
        self.preflights.forget_finished()

    def forget_deleted(self, versions: dict[str, list[str]]) -> None:
        """Forget all versions that are neither published nor served."""
        with self._lock:
            for name in self._aliases.keys() - versions.keys():
                del self._aliases[name]
            present = {(name, version) for name in versions for version in versions[name]}
            for name, aliases in self._aliases.items():
                present |= {(name, version) for version in aliases.values()}
            records: dict[Key, object]
            for records in (self._broken, self._drifts, self._manifests):  # type: ignore[assignment]
                for key in records.keys() - present:
                    del records[key]
            deleted = self._loaded.keys() - present
        for key in deleted:
            self._unload(*key)
        self.on_retain(present)

    def preflight(self, name: str, version: str) -> "Future[Failure | None] | None":
        """Return a version's preflight, or None if the version is loaded or broken."""
        try:
            with self._lock:
                is_loaded = (name, version) in self._loaded
            self._check_broken((name, version))
            return None if is_loaded else self.preflights.submit(self._manifest(name, version))
        except StoreError:  # `load` raises it again
            return None

    def load(self, name: str, version: str, is_aliased: bool) -> ServedModel:
        """Return a version, running its preflight and loading it if necessary.

        Only a version that `is_aliased` gets prepared draws. A broken version is tried again after
        `RETRY_BROKEN_S` or, if its preflight failed, `RETRY_PREFLIGHT_S`.
        """
        key, manifest = (name, version), None
        if key not in self._loaded:  # without the lock, so that others can load
            manifest = self._await_preflight(name, version)
        with self._load_lock:
            with self._lock:
                loaded = self._loaded.get(key)
            if loaded is None:
                self._check_broken(key)
                loaded = self._open(manifest or self._await_preflight(name, version))
            if is_aliased and loaded.reservoir.depth == 0:
                loaded.reservoir = Reservoir(loaded.model, limits.READY_DRAW_SETS, self.idle)
            with self._lock:
                self._broken.pop(key, None)
                self._loaded[key] = loaded
                self._loaded.move_to_end(key)
        self._make_room()
        return loaded

    def _check_broken(self, key: Key) -> None:
        with self._lock:
            retry, error = self._broken.get(key, (0.0, None))
        if error is not None and time.monotonic() < retry:
            raise error

    def _manifest(self, name: str, version: str) -> Manifest:
        manifest = self.store.manifest(name, version)
        if self._manifests.get((name, version), manifest).digest != manifest.digest:
            raise manifest.broken("manifest.json", "it differs from the version loaded before")
        size = self._total_bytes([manifest])
        if size > self.settings.max_model_bytes:
            raise TooLargeToLoad(name, version, size, self.settings.max_model_bytes)
        return manifest

    def _await_preflight(self, name: str, version: str) -> Manifest:
        self._check_broken((name, version))
        with self._record_errors(name, version):
            manifest = self._manifest(name, version)
        with self._record_errors(name, version, RETRY_PREFLIGHT_S):
            self.preflights.check(manifest)
        return manifest

    @contextmanager
    def _record_errors(
        self, name: str, version: str, retry_s: float = RETRY_BROKEN_S
    ) -> Iterator[None]:
        try:
            yield
        except StoreUnreachable:  # not an error of the version
            raise
        except StoreError as error:
            if version not in self.store.versions(name):  # deleted meanwhile
                expected = f"a published version of model {name}"
                raise NotFound("version", expected, "a deleted version") from None
            with self._lock:
                self._broken[name, version] = (time.monotonic() + retry_s, error)
            raise

    def _open(self, manifest: Manifest) -> ServedModel:
        key = name, version = manifest.name, manifest.version
        with self._record_errors(name, version):
            artifact = self.store.open(name, version, files=NEEDED)
            if artifact.manifest.digest != manifest.digest:
                raise manifest.broken("manifest.json", "it changed while the version was loaded")
            model = Model.load(artifact, self.settings.worker_threads)
        tables = model.calibration.rank_tables[model.manifest.noise.default_draws]
        has_copies = model.manifest.detectors.ranking_copies > 0
        with self._lock:
            drift = self._drifts.setdefault(key, Drift(*key, tables.statistic, has_copies))
            self._manifests[key] = manifest
        return ServedModel(model, Reservoir(model, 0, self.idle), drift)

    # Memory

    def _make_room(self) -> None:
        while True:
            with self._lock:
                manifests = [loaded.model.manifest for loaded in self._loaded.values()]
                limit = self.settings.max_model_bytes
                if len(manifests) < 2 or self._total_bytes(manifests) <= limit:
                    break
                key = next(iter(self._loaded))
            self._unload(*key)

    def _unload(self, name: str, version: str) -> None:
        with self._lock:
            loaded = self._loaded.pop((name, version), None)
        if loaded is not None:
            loaded.reservoir.close()

    def _total_bytes(self, manifests: list[Manifest]) -> int:
        """Estimate the memory needed by several versions. Shared encoders count once."""
        files = [m.files[ENCODER] for m in manifests if ENCODER in m.files]
        encoders = {file.sha256: encoder_bytes(file) for file in files}
        return sum(map(self.model_bytes, manifests)) + sum(encoders.values())

    def model_bytes(self, manifest: Manifest) -> int:
        """Estimate a version's memory, including prepared draws but not the encoder.

        A session stores the weights of a graph twice, once packed for its kernels.
        """
        sizes = {name: file.size for name, file in manifest.files.items()}
        sampler, network = (sizes[file] for file in GRAPHS)
        # Other sessions compute the terms and joint scores with parts of the network.
        parts = bool(manifest.detectors.attributed) + (manifest.noise.algorithm == ROW_NOISE)
        arrays = sizes[CALIBRATION_FILE] + sizes.get(TRAINING_ROWS, 0)
        tokenizer = TOKENIZER_COPIES * sizes.get(TOKENIZER, 0)
        draw_set = 4 * manifest.noise.default_draws * manifest.noise.theta_dimension
        ready = min(limits.READY_DRAW_SETS * draw_set, READY_BYTES)
        return 2 * (sampler + network) + parts * network + arrays + tokenizer + ready

    # Overview

    def names(self, allowed: frozenset[str] | None = None) -> list[str]:
        """Return the names of all models, or only those of the allowed models."""
        return sorted(self._aliases if allowed is None else allowed & self._aliases.keys())

    def errors(self, name: str) -> dict[str, str]:
        with self._lock:
            broken = sorted(self._broken.items())
        return {version: str(error) for (model, version), (_, error) in broken if model == name}

    def loaded(self) -> list[ServedModel]:
        with self._lock:
            return list(self._loaded.values())

    def latest(self, name: str) -> Manifest | None:
        """Return the manifest of the version that `latest` serves."""
        return self._manifests.get((name, self.aliases(name).get(LATEST, "")))

    # Drift

    def drift(self, manifest: Manifest) -> Drift | None:
        return self._drifts.get((manifest.name, manifest.version))

    def reset_drift(self, name: str, version: str) -> tuple[str, DriftReport | None]:
        """Reset a version's drift test. Return the version's number and the test's last report."""
        is_loaded = self.peek(name, version) is not None  # even if it was deleted from the store
        number = self.aliases(name).get(version)
        number = number or (version if is_loaded else self.resolve(name, version))
        drift = self._drifts.get((name, number))
        if drift is None:
            return number, None
        report = drift.report()
        drift.reset()
        return number, report
