"""Settings: environment variables with prefix `DUBITO_`, read once at the entry point."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from model_store.artifacts.place import CACHE, CACHE_BYTES, is_url, whole_path
from model_store.errors import InvalidInput
from model_store.processes import processors
from service.integrations import integration_variables

PREFIX = "DUBITO_"
SECRETS = {"api_keys", "admin_key"}  # settings that are secrets themselves
# how long a thread may hold the interpreter while another waits: threads of arithmetic wait often
SWITCH_S = 0.0005
LOOPBACK = ("127.", "::1", "localhost")
OF_TRAINING = {"DUBITO_DATA", "DUBITO_GRAPHS", "DUBITO_RUNS"}  # read by `python -m training`
OF_CLIENT = {"DUBITO_CLIENT_URL", "DUBITO_CLIENT_KEY"}  # read by the client's command `dubito`


class Settings(BaseSettings):
    """Every setting of the service. `docs/settings.md` says what each is for."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, frozen=True, extra="forbid", use_attribute_docstrings=True
    )

    store: Path | str = Path("models")
    """root folder of the model store, or a bucket's URL: `s3://`, `gs://` or
    `az://bucket/prefix`"""

    cache: Path = CACHE
    """folder for copies of versions, where the store is a bucket"""

    cache_bytes: int = Field(CACHE_BYTES, ge=1)
    """most bytes of copies there; those that no alias names and nobody uses go first"""

    state: Path | None = Path("state")
    """folder for what must not be forgotten: jobs, their results, what was acquired, and labels;
    made when there is something to keep. Empty: no jobs and labels here, as where several machines
    serve"""

    pools: Path | None = None
    """folder of files that requests may name as `pool_file` or `inputs_file`"""

    host: str = "127.0.0.1"
    """address to listen on"""

    port: int = Field(8000, ge=0, le=65535)
    """port to listen on; 0 takes any"""

    allowed_hosts: str | None = None
    """names with dots, and commas between, by which a service without keys may be asked for; `*`:
    any. Unset: none where it listens on loopback alone, otherwise any. Addresses and names without
    dots need not be here"""

    allowed_origins: str | None = None
    """origins such as `https://app.example.com`, and commas between, whose pages may ask from a
    browser (CORS); `*`: any. Unset: none but the service's own page"""

    prefix: str = Field("", pattern=r"^(/[A-Za-z0-9._~-]+)*$")
    """path that a proxy puts before the service's own, such as `/dubito`: links in answers begin
    with it, and the proxy may leave it or take it away"""

    page: bool = True
    """whether `GET /` is a page for people"""

    default_model: str | None = None
    """model of requests that name none; needed only where several are published"""

    workers: int = Field(1, ge=1, le=256)
    """processes that serve, each with its own models and limits"""

    threads: int = Field(0, ge=0)
    """threads of one model's arithmetic in each process; 0: the processors available, shared
    evenly"""

    poll_interval_s: float = Field(1.0, gt=0, le=86_400)
    """seconds between looks at the store for new versions and moved aliases"""

    max_model_bytes: int = Field(1 << 30, ge=1)
    """most memory for models, in bytes, of each process; the least recently used go first"""

    preflight_timeout_s: float = Field(30.0, ge=0, le=86_400)
    """seconds in which a new version must be loaded and predict in a process of its own, before it
    is served; 0: versions are served without a preflight, for stores that one trusts"""

    max_samples: int = Field(1000, ge=1)
    """largest num_samples of a request"""

    max_rows: int = Field(4096, ge=1)
    """most rows of a /predict request"""

    max_pool_rows: int = Field(100_000, ge=1)
    """most rows of an /acquire request's pool"""

    max_body_bytes: int = Field(64 << 20, ge=1024)
    """largest request body, in bytes"""

    memory_budget_bytes: int = Field(512 << 20, ge=1 << 20)
    """most memory of each process for requests, in bytes: bodies that are read, what is made of
    them and answers that are not read yet; what does not fit is answered 429. A lone client gets
    three quarters of it"""

    max_connections: int = Field(1000, ge=1)
    """most connections of each process, of which an address has three quarters at most; beyond that
    the one that has kept the service waiting longest is ended, or the new one answered 503 unless
    it asks for health or metrics"""

    deadline_s: float = Field(60.0, gt=0, le=86_400)
    """seconds after which a request that has not come whole is answered 408, and one that has no
    answer yet 504"""

    jobs_at_once: int = Field(1, ge=0, le=64)
    """jobs that run at a time, on all processes with the same state folder; 0: this service takes
    jobs and runs none"""

    max_jobs: int = Field(100, ge=1)
    """most jobs that may be queued; a client that has its share or less of them may queue more"""

    max_job_bytes: int = Field(4 << 30, ge=1)
    """most bytes on disk of the files of one key's jobs, or of all where there are no keys: what
    came, until a job is over, and results; beyond it a job is answered 507, or fails"""

    job_retention_s: float = Field(604_800.0, gt=0)
    """seconds that a job and its result are kept once it has ended: a week"""

    shutdown_timeout_s: int = Field(20, ge=1)
    """seconds that requests in flight get to end when the service has stopped listening"""

    log: Literal["text", "json"] = "text"
    """form of the log: `text` for people, `json` with a line for each request"""

    otlp_endpoint: str | None = None
    """base URL of an OpenTelemetry collector that gets spans of requests over HTTP;
    `OTEL_TRACES_SAMPLER` and its `_ARG` choose a share of them"""

    api_keys: SecretStr | None = None
    """keys, with commas between, one of which every request must have"""

    admin_key: SecretStr | None = None
    """key of the administrative routes; without it there are none"""

    keys_file: Path | None = None
    """TOML file of keys with names, scopes and expiries, instead of the two settings above; what
    changes in it is seen without a restart"""

    verify_key_file: Path | None = None
    """public Ed25519 key, a PEM file; with it versions that its private key has not signed are
    broken"""

    shutdown_grace_s: float = Field(1.0, ge=0, le=3600)
    """seconds after SIGTERM in which the service still listens, but says it is not ready"""

    @field_validator("store", mode="before")
    @classmethod
    def _url_or_folder(cls, value: object) -> object:
        return value if isinstance(value, str) and is_url(value) else Path(str(value))

    @field_validator("state", mode="before")
    @classmethod
    def _none_where_empty(cls, value: object) -> object:
        return None if value == "" else value

    def known_hosts(self) -> frozenset[str] | None:
        """Return the names of `allowed_hosts`; None for any."""
        if self.allowed_hosts is None:
            return frozenset() if self.host.startswith(LOOPBACK) else None
        names = frozenset(name.strip().lower() for name in self.allowed_hosts.split(","))
        return None if "*" in names else names

    def known_origins(self) -> frozenset[str]:
        return frozenset(
            one.strip().lower() for one in (self.allowed_origins or "").split(",") if one
        )

    def store_options(self) -> dict[str, Any]:
        """Return the arguments of `open_store` as another process is told them."""
        key = self.verify_key_file
        return {
            "place": whole_path(str(self.store)),
            "cache": str(self.cache.resolve()),
            "cache_bytes": self.cache_bytes,
            "verify_key_file": None if key is None else str(key.resolve()),
        }

    @property
    def worker_threads(self) -> int:
        return self.threads or max(1, processors() // self.workers)


def read_settings() -> Settings:
    """Read the settings from the environment.

    Raises:
        InvalidInput: naming the variable that is wrong or not known.
    """
    known = {PREFIX + name.upper() for name in Settings.model_fields} | OF_TRAINING | OF_CLIENT
    known |= integration_variables()
    for name in os.environ:
        if name.upper().startswith(PREFIX) and name.upper() not in known:
            raise InvalidInput("environment", f"one of {sorted(known)}", name)
    return settings_of({})


def settings_of(given: Mapping[str, Any], place: str = "") -> Settings:
    """Return settings: those that are given by name, and the environment's.

    Raises:
        InvalidInput: naming what is wrong or not known, after `place`; without one as environment
            variables.
    """
    try:
        return Settings(**given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0])
        what = f"{place}{name}" if place else PREFIX + name.upper()
        if first["type"] == "extra_forbidden":
            raise InvalidInput(what, f"one of {sorted(Settings.model_fields)}", "another") from None
        expected = str(first["msg"]).removeprefix("Input should be ")
        raise InvalidInput(what, expected, repr(first["input"])) from None
