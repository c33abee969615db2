"""Service settings, read from the `DUBITO_...` environment variables at startup."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, HttpUrl, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from model_store.artifacts.storage import is_url, resolve_location
from model_store.artifacts.store import CACHE, CACHE_BYTES
from model_store.errors import InvalidInput, expected_value, list_choices
from model_store.processes import processors
from service.integrations import integration_variables

PREFIX = "DUBITO_"
SECRETS = {"api_keys", "admin_key"}
# Python's switch interval. A short one lets arithmetic threads get the interpreter lock sooner.
SWITCH_S = 0.0005
LOOPBACK = ("127.", "::1", "localhost")
# Variables of `python -m training` and of the client, with the same prefix
TRAINING_VARIABLES = {"DUBITO_DATA", "DUBITO_GRAPHS", "DUBITO_RUNS"}
CLIENT_VARIABLES = {"DUBITO_CLIENT_URL", "DUBITO_CLIENT_KEY"}


class Settings(BaseSettings):
    """The service settings. `python -m docs.reference` documents them in docs/settings.md."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, frozen=True, extra="forbid", use_attribute_docstrings=True
    )

    # The store and other folders

    store: Path | str = Path("models")
    """root folder of the model store, or a bucket: `s3://`, `gs://` or `az://bucket/prefix`"""

    cache: Path = CACHE
    """folder for copies of a bucket's versions"""

    cache_bytes: int = Field(CACHE_BYTES, ge=1)
    """maximum size of the cache; unused versions without an alias are deleted first"""

    state: Path | None = Path("state")
    """folder for jobs, results, acquired rows and labels. Empty: no jobs and labels, for several
    machines without a shared folder"""

    pools: Path | None = None
    """folder of files that requests can use as `pool_file` or `inputs_file`"""

    verify_key_file: Path | None = None
    """PEM file or folder of trusted public Ed25519 keys; unsigned versions are not served"""

    # Connections and keys

    host: str = "127.0.0.1"
    """address to listen on"""

    port: int = Field(8000, ge=0, le=65535)
    """port to listen on; 0: any free port"""

    allowed_hosts: str | None = None
    """host names with dots for a service without keys, separated by commas; `*`: any. Default: none
    on loopback, otherwise any. Addresses and names without dots are always allowed"""

    allowed_origins: str | None = None
    """other origins whose pages may use the API (CORS), such as `https://app.example.com`,
    separated by commas; `*`: any"""

    prefix: str = Field("", pattern=r"^(/[A-Za-z0-9._~-]+)*$")
    """path prefix of a proxy, such as `/dubito`, for links in answers; the proxy may strip it"""

    page: bool = True
    """whether `GET /` shows the web page"""

    api_keys: SecretStr | None = None
    """API keys, separated by commas; without keys the API is open"""

    admin_key: SecretStr | None = None
    """key for administration; without it, the admin routes do not exist"""

    keys_file: Path | None = None
    """TOML file of keys with names, scopes and expiry dates, instead of the two settings above;
    reloaded when it changes"""

    # Models

    models: str = ""
    """models that must be served before the service is ready, separated by commas"""

    default_model: str | None = None
    """model for requests without a `model`, if there are several"""

    poll_interval_s: float = Field(1.0, gt=0, le=86_400)
    """seconds between checks of the store for new versions and moved aliases"""

    max_model_bytes: int = Field(1 << 30, ge=1)
    """maximum memory of loaded models per process; the least recently used are unloaded"""

    preflight_timeout_s: float = Field(30.0, ge=0, le=86_400)
    """seconds for a new version to load and predict in a separate process before it is served; 0:
    no preflights, for trusted stores"""

    # Processes

    workers: int = Field(1, ge=1, le=256)
    """worker processes, each with its own models and limits"""

    threads: int = Field(0, ge=0)
    """arithmetic threads per process; 0: an equal share of the processors"""

    # Requests

    max_samples: int = Field(1000, ge=1)
    """maximum `num_samples` of a request"""

    max_rows: int = Field(4096, ge=1)
    """maximum rows of a `/predict` request"""

    max_pool_rows: int = Field(100_000, ge=1)
    """maximum pool rows of an `/acquire` request"""

    max_body_bytes: int = Field(64 << 20, ge=1024)
    """maximum size of a request body; JSON has a fixed limit of 16 MiB"""

    memory_budget_bytes: int = Field(512 << 20, ge=1 << 20)
    """maximum memory of each process for requests and unsent answers; 429 beyond. A single client
    gets up to three quarters"""

    max_connections: int = Field(1000, ge=1)
    """maximum connections per process; an address gets up to three quarters. Beyond the limit, the
    service closes the connection that has been idle longest. If none is idle, a new connection gets
    503 except for health and metrics. If the hard limit of open files is too low, the service logs
    a warning and uses fewer"""

    keep_alive_s: int = Field(75, ge=1, le=86_400)
    """seconds until an idle connection is closed; more than the timeout of the proxy"""

    deadline_s: float = Field(60.0, gt=0, le=86_400)
    """seconds to receive a request (408 beyond) and to answer it (504 beyond)"""

    # Jobs

    jobs_at_once: int = Field(1, ge=0, le=64)
    """jobs that run at a time, over all processes with the same state folder; 0: jobs are accepted
    but not run here"""

    max_jobs: int = Field(100, ge=1)
    """maximum queued jobs; a client within its fair share can queue more"""

    max_job_bytes: int = Field(4 << 30, ge=1)
    """maximum size of the job files of one key, or of all clients without keys; 507 beyond"""

    job_retention_s: float = Field(604_800.0, gt=0)
    """seconds to keep a finished job and its result: a week"""

    # Shutdown, log and traces

    shutdown_grace_s: float = Field(1.0, ge=0, le=3600)
    """seconds after SIGTERM to keep accepting connections while reporting not ready"""

    shutdown_timeout_s: int = Field(20, ge=1)
    """seconds for open requests to finish after the grace period"""

    log: Literal["text", "json"] = "text"
    """log format: `text`, or `json` with one line per request"""

    otlp_endpoint: HttpUrl | None = None
    """base URL of an OpenTelemetry collector for request spans (OTLP over HTTP);
    `OTEL_TRACES_SAMPLER` sets the sampling"""

    @field_validator("store", mode="before")
    @classmethod
    def _parse_store(cls, value: object) -> object:
        return value if isinstance(value, str) and is_url(value) else Path(str(value))

    @field_validator("state", mode="before")
    @classmethod
    def _parse_state(cls, value: object) -> object:
        return None if value == "" else value

    @field_validator("otlp_endpoint")
    @classmethod
    def _check_otlp_endpoint(cls, value: HttpUrl | None) -> HttpUrl | None:
        if value is not None and (value.username is not None or value.password is not None):
            raise ValueError("a URL without a user; set OTEL_EXPORTER_OTLP_HEADERS instead")
        return value

    def parse_models(self) -> list[str]:
        return [name.strip() for name in self.models.split(",") if name.strip()]

    def parse_allowed_hosts(self) -> frozenset[str] | None:
        """Return the allowed host names, or None if all are allowed."""
        if self.allowed_hosts is None:
            return frozenset() if self.host.startswith(LOOPBACK) else None
        names = frozenset(name.strip().lower() for name in self.allowed_hosts.split(","))
        return None if "*" in names else names

    def parse_allowed_origins(self) -> frozenset[str]:
        origins = (self.allowed_origins or "").split(",")
        return frozenset(origin.strip().lower() for origin in origins if origin)

    def store_options(self) -> dict[str, Any]:
        """Return JSON values with which another process can call `open_store`."""
        key = self.verify_key_file
        return {
            "place": resolve_location(str(self.store)),
            "cache": str(self.cache.resolve()),
            "cache_bytes": self.cache_bytes,
            "verify_key_file": None if key is None else str(key.resolve()),
        }

    @property
    def worker_threads(self) -> int:
        return self.threads or max(1, processors() // self.workers)


def read_settings() -> Settings:
    """Read the settings from the environment. Reject unknown `DUBITO_` variables."""
    names = {PREFIX + name.upper() for name in Settings.model_fields}
    names |= TRAINING_VARIABLES | CLIENT_VARIABLES | integration_variables()
    for name in os.environ:
        if name.upper().startswith(PREFIX) and name.upper() not in names:
            raise InvalidInput("environment", list_choices(sorted(names)), name)
    return build_settings({})


def build_settings(values: Mapping[str, Any], place: str = "") -> Settings:
    """Build settings from values, with defaults from the environment.

    Errors name a setting with the prefix `place`, or its environment variable without a prefix.
    """
    try:
        return Settings(**values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0])
        field = f"{place}{name}" if place else PREFIX + name.upper()
        if first["type"] == "extra_forbidden":
            expected = list_choices(sorted(Settings.model_fields))
            raise InvalidInput(field, expected, "an unknown name") from None
        expected = expected_value(first["msg"])
        # A URL may contain a password, which must not be logged.
        received = "a URL with a user" if "@" in str(first["input"]) else repr(first["input"])
        raise InvalidInput(field, expected, received) from None
