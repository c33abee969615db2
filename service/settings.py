"""Settings: environment variables with prefix `DUBITO_`, read once at the entry point."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from model_store.artifacts.place import CACHE, CACHE_BYTES, is_url
from model_store.errors import InvalidInput
from model_store.inference.trials import WORKING_BYTES
from model_store.processors import available_processors

PREFIX = "DUBITO_"
VERIFY_KEY_VARIABLE = f"{PREFIX}VERIFY_KEY_FILE"
SECRETS = {"api_keys", "admin_key", "label_studio_token"}  # settings that are secrets themselves
# how long a thread may hold the interpreter while another waits: threads of arithmetic wait often
SWITCH_S = 0.0005
# read by `python -m training`, which shares the environment
OF_TRAINING = {"DUBITO_DATA", "DUBITO_GRAPHS", "DUBITO_RUNS"}
OF_CLIENT = {"DUBITO_CLIENT_URL", "DUBITO_CLIENT_KEY"}  # read by the client's command `dubito`


class Settings(BaseSettings):
    """Every setting of the service. `docs/settings.md` says what each is for."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid")

    store: Path | str = Field(
        default=Path("models"),
        description="root folder of the model store, or a bucket's URL: `s3://`, `gs://` or `az://bucket/prefix`",
    )
    cache: Path = Field(
        default=CACHE, description="folder for copies of versions, where the store is a bucket"
    )
    cache_bytes: Annotated[int, Field(ge=1)] = Field(
        default=CACHE_BYTES,
        description="most bytes of copies there; those that no alias names and nobody uses go first",
    )
    state: Path | None = Field(
        default=Path("state"),
        description="folder for what must not be forgotten: jobs, their results, what was acquired, and labels; made "
        "when there is something to keep. Empty: no jobs and labels here, as where several "
        "machines serve",
    )
    pools: Path | None = Field(
        default=None,
        description="folder of files that requests may name as `pool_file` or `inputs_file`",
    )
    host: str = Field(default="127.0.0.1", description="address to listen on")
    port: Annotated[int, Field(ge=0, le=65535)] = Field(
        default=8000, description="port to listen on; 0 takes any"
    )
    page: bool = Field(default=True, description="whether `GET /` is a page for people")
    default_model: str | None = Field(
        default=None,
        description="model of requests that name none; needed only where several are published",
    )
    workers: Annotated[int, Field(ge=1, le=256)] = Field(
        default=1, description="processes that serve, each with its own models and limits"
    )
    threads: Annotated[int, Field(ge=0)] = Field(
        default=0,
        description="threads of one model's arithmetic in each process; 0: the processors available, shared evenly",
    )
    poll_interval_s: Annotated[float, Field(gt=0, le=86_400)] = Field(
        default=1.0,
        description="seconds between looks at the store for new versions and moved aliases",
    )
    max_model_bytes: Annotated[int, Field(ge=1)] = Field(
        default=1 << 30,
        description="most memory for models, in bytes, of each process; the least recently used go first",
    )
    trial_s: Annotated[float, Field(ge=0, le=86_400)] = Field(
        default=30.0,
        description="seconds in which a new version must be loaded and predict in a process of its own, before it is "
        "served; 0: versions are served without a trial, for stores that one trusts",
    )
    trial_bytes: Annotated[int, Field(ge=1 << 20)] = Field(
        default=WORKING_BYTES,
        description="most memory of that process, in bytes, beside what it begins with and six times the files",
    )
    ready_draw_sets: Annotated[int, Field(ge=0)] = Field(
        default=64,
        description="fresh draw sets kept ready for each version with an alias, of 64 MB at most",
    )
    max_samples: Annotated[int, Field(ge=1)] = Field(
        default=1000, description="largest num_samples of a request"
    )
    settle: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        default=None,
        description="tolerance of requests that name no `settle`; without one draws are never stopped",
    )
    max_rows: Annotated[int, Field(ge=1)] = Field(
        default=4096, description="most rows of a /predict request"
    )
    max_pool_rows: Annotated[int, Field(ge=1)] = Field(
        default=100_000, description="most rows of an /acquire request's pool"
    )
    max_body_bytes: Annotated[int, Field(ge=1024)] = Field(
        default=64 << 20, description="largest request body, in bytes"
    )
    max_json_bytes: Annotated[int, Field(ge=1024)] = Field(
        default=16 << 20,
        description="largest JSON body, in bytes: it takes much longer to read than an array",
    )
    memory_budget_bytes: Annotated[int, Field(ge=1 << 20)] = Field(
        default=512 << 20,
        description="most memory of each process for requests, in bytes: bodies that are read, what is made of them "
        "and answers that are not read yet; what does not fit is answered 429. A lone client gets "
        "three "
        "quarters of it",
    )
    max_connections: Annotated[int, Field(ge=1)] = Field(
        default=1000,
        description="most connections of each process; beyond that the one that has kept the service waiting longest "
        "is ended, or the new one answered 503",
    )
    max_image_pixels: Annotated[int, Field(ge=1)] = Field(
        default=100_000_000, description="most pixels of one request's image files together"
    )
    max_row_draws: Annotated[int, Field(ge=1)] = Field(
        default=20_000_000, description="most rows x draws of one request"
    )
    max_queued_row_draws: Annotated[int, Field(ge=1)] = Field(
        default=200_000,
        description="rows x draws that a burst may have waiting or in work before further requests are answered 429; "
        "a large request or pool counts with the 6,400 that are computed at once",
    )
    overload_row_draws: Annotated[int, Field(ge=1)] = Field(
        default=6_400,
        description="the same from the first such answer until none was needed for a second, but for tries of more: "
        "under lasting overload those who are let in are answered soon",
    )
    deadline_s: Annotated[float, Field(gt=0, le=86_400)] = Field(
        default=60.0,
        description="seconds after which a request that has not come whole is answered 408, and one that has no "
        "answer yet 504",
    )
    max_answer_numbers: Annotated[int, Field(ge=1)] = Field(
        default=5_000_000,
        description="most numbers that return_samples, or the maps of explain, may add to an answer",
    )
    max_explained_rows: Annotated[int, Field(ge=1)] = Field(
        default=100, description="most rows of a /predict request with `explain`"
    )
    jobs_at_once: Annotated[int, Field(ge=0, le=64)] = Field(
        default=1,
        description="jobs that run at a time, on all processes with the same state folder; 0: this service takes "
        "jobs and runs none",
    )
    max_jobs: Annotated[int, Field(ge=1)] = Field(
        default=100, description="most jobs that may be queued"
    )
    max_job_row_draws: Annotated[int, Field(ge=1)] = Field(
        default=10_000_000_000, description="most rows x draws of one job"
    )
    job_kept_s: Annotated[float, Field(gt=0)] = Field(
        default=604_800.0,
        description="seconds that a job and its result are kept once it has ended: a week",
    )
    drain_s: Annotated[int, Field(ge=1)] = Field(
        default=20,
        description="seconds that requests in flight get to end when the service has stopped listening",
    )
    log: Literal["text", "json"] = Field(
        default="text",
        description="form of the log: `text` for people, `json` with a line for each request",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info",
        description="least level that is logged: `debug`, `info`, `warning` or `error`",
    )
    otlp_endpoint: str | None = Field(
        default=None,
        description="base URL of an OpenTelemetry collector that spans of requests are sent to, over HTTP",
    )
    trace_share: Annotated[float, Field(ge=0, le=1)] = Field(
        default=1.0,
        description="share of requests whose spans are sent, of those without a traced caller",
    )
    api_keys: SecretStr | None = Field(
        default=None, description="keys, with commas between, one of which every request must have"
    )
    api_keys_file: Path | None = Field(
        default=None, description="file to read `DUBITO_API_KEYS` from instead"
    )
    admin_key: SecretStr | None = Field(
        default=None, description="key of the administrative routes; without it there are none"
    )
    admin_key_file: Path | None = Field(
        default=None, description="file to read `DUBITO_ADMIN_KEY` from instead"
    )
    keys_file: Path | None = Field(
        default=None,
        description="TOML file of keys with names, scopes and expiries, in place of the four settings above; what "
        "changes in it is seen without a restart",
    )
    label_studio_url: str | None = Field(
        default=None,
        description="base URL of Label Studio: the one origin that images of tasks are fetched from, and that "
        "`python -m service label-studio` asks; without it nothing is fetched",
    )
    label_studio_token: SecretStr | None = Field(
        default=None,
        description="token of Label Studio's API: a personal access token, or a legacy one",
    )
    label_studio_token_file: Path | None = Field(
        default=None, description="file to read `DUBITO_LABEL_STUDIO_TOKEN` from instead"
    )
    verify_key_file: Path | None = Field(
        default=None,
        description="public Ed25519 key, a PEM file; with it versions that its private key has not signed are broken",
    )
    notice_s: Annotated[float, Field(ge=0, le=3600)] = Field(
        default=1.0,
        description="seconds after SIGTERM in which the service still listens, but says it is not ready",
    )

    @field_validator("store", mode="before")
    @classmethod
    def _url_or_folder(cls, value: object) -> object:
        return value if isinstance(value, str) and is_url(value) else Path(str(value))

    @field_validator("state", mode="before")
    @classmethod
    def _none_where_empty(cls, value: object) -> object:
        return None if value == "" else value

    def label_studio_secret(self) -> str | None:
        """Return the token of Label Studio, of the setting or the file.

        Raises:
            InvalidInput: if both are given, or the file cannot be read.
        """
        given, file = self.label_studio_token, self.label_studio_token_file
        if given is not None and file is not None:
            raise InvalidInput(
                "DUBITO_LABEL_STUDIO_TOKEN_FILE", "none beside DUBITO_LABEL_STUDIO_TOKEN", "both"
            )
        if file is None:
            return None if given is None else given.get_secret_value()
        try:
            return file.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            raise InvalidInput(
                "DUBITO_LABEL_STUDIO_TOKEN_FILE", "a file that can be read", "another"
            ) from None

    @property
    def worker_threads(self) -> int:
        """Threads of one model's arithmetic in this process."""
        return self.threads or max(1, processors() // self.workers)


def processors(cpu_max: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Return how many processors this process may use: those it may run on, or the container's
    limit if less.

    `cpu_max` is the file of cgroup v2: microseconds of processor time in each period, or `max`, and
        the period.
    """
    available = available_processors()
    try:
        quota, period = cpu_max.read_text(encoding="ascii").split()
        return available if quota == "max" else max(1, min(available, int(quota) // int(period)))
    except (OSError, ValueError, ZeroDivisionError):  # no such limit here
        return available


def read_settings() -> Settings:
    """Read the settings from the environment.

    Raises:
        InvalidInput: naming the variable that is wrong or not known.
    """
    known = {PREFIX + name.upper() for name in Settings.model_fields} | OF_TRAINING | OF_CLIENT
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
        raise InvalidInput(
            what, str(first["msg"]).removeprefix("Input should be "), repr(first["input"])
        ) from None
