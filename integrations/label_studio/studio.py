"""Label Studio's API, and `dubito label-studio`: bring a project and a model together.

Webhooks come once, and get lost. So the command, once or again and again, asks for all tasks, and

* sends the newest annotation of each to the service, which knows those that it has;
* gives tasks without a prediction of the version that is served one, and writes its doubt into the
  task's data, by which the data manager sorts;
* tells the project which version's predictions to go by.
"""

import argparse
import json
import ssl
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

from model_store.errors import DubitoError, InvalidInput
from service.auth.keys import read_key_file
from service.settings import Settings

PAGE = 100  # tasks asked for, and predicted, at a time
DOUBT = "dubito_doubt"  # of a task's data: 0 to 1
TIMEOUT_S = 20.0
PREDICTING_TIMEOUT_S = 120.0
FILES = "data/"  # uploads, and files of local storage
MAX_FILE_BYTES = 32 << 20
MAX_JSON_BYTES = 256 << 20


class LabelStudioError(DubitoError):
    pass


class LabelStudio:
    """A client of Label Studio's API at the one origin that the operator names.

    It follows no redirects, and asks none of the proxies that the environment names: they could
    reach what we cannot. The token is a personal access token, or a legacy one.
    """

    def __init__(self, url: str, token: str | None) -> None:
        import httpx

        parts = urlsplit(url)
        is_http = parts.scheme in ("http", "https") and parts.hostname
        if not is_http or parts.query or parts.fragment:
            expected = "an http or https URL without query"
            raise InvalidInput("DUBITO_LABEL_STUDIO_URL", expected, "another")
        self._base = url.rstrip("/") + "/"
        self._origin = _origin(self._base)
        self._token = token
        self._access: str | None = None
        self._http = httpx.Client(
            trust_env=False,
            verify=ssl.create_default_context(),
            timeout=TIMEOUT_S,
            headers={"Accept-Encoding": "identity"},
        )

    def fetch(self, url: str) -> bytes:
        """Return a file of this origin, such as one that was uploaded to a project; `url` may be
        relative to it."""
        expected = "images as data URIs, or files of DUBITO_LABEL_STUDIO_URL below /data/"
        try:
            whole = urljoin(self._base, url)
            path = urlsplit(whole).path
        except ValueError:
            raise InvalidInput("tasks", expected, "no URL") from None
        is_below = path.startswith(urlsplit(self._base).path + FILES)
        is_file = is_below and ".." not in path and "%" not in path
        if _origin(whole) != self._origin or not is_file:  # not its API, which the token would open
            raise InvalidInput("tasks", expected, "another URL")
        try:
            return self._ask("GET", whole, None, MAX_FILE_BYTES)
        except LabelStudioError:  # which repeats what Label Studio says
            expected = "images that Label Studio has"
            raise InvalidInput("tasks", expected, "none, or no answer") from None

    def json(self, method: str, path: str, content: Any = None) -> Any:
        url = urljoin(self._base, path.lstrip("/"))
        answer = self._ask(method, url, content, MAX_JSON_BYTES)
        try:
            return json.loads(answer) if answer else None
        except ValueError:
            expected = f"JSON of {method} {path}"
            raise LabelStudioError(f"Label Studio: expected {expected}, got another") from None

    def _ask(self, method: str, url: str, content: Any, limit: int) -> bytes:
        status, answer = self._send(method, url, content, limit, self._authorization())
        if status == 401 and self._access is not None:  # it has expired
            self._access = None
            status, answer = self._send(method, url, content, limit, self._authorization())
        if not 200 <= status < 300:
            said = answer[:500].decode("utf-8", "replace")
            path = urlsplit(url).path
            raise LabelStudioError(f"Label Studio: {method} {path} was answered {status}: {said}")
        if len(answer) > limit:
            raise LabelStudioError(f"Label Studio: expected at most {limit} bytes, got more")
        return answer

    def _send(
        self, method: str, url: str, content: Any, limit: int, headers: dict[str, str]
    ) -> tuple[int, bytes]:
        """Return the status and the body of an answer, which ends beyond the limit."""
        import httpx

        answer = b""
        json_content = None if content is None else json.dumps(content).encode()
        headers = {"Content-Type": "application/json", **headers}
        try:
            with self._http.stream(method, url, content=json_content, headers=headers) as response:
                for part in response.iter_bytes():
                    answer += part
                    if len(answer) > limit:
                        break
                return response.status_code, answer
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise LabelStudioError(f"Label Studio: {type(error).__name__}: {error}") from None

    def _authorization(self) -> dict[str, str]:
        """Return the header that the token needs; a personal access token is exchanged for one of
        some minutes."""
        if self._token is None:
            return {}
        if self._token.count(".") != 2:
            return {"Authorization": f"Token {self._token}"}
        if self._access is None:
            url, refresh = urljoin(self._base, "api/token/refresh"), {"refresh": self._token}
            status, answer = self._send("POST", url, refresh, MAX_FILE_BYTES, {})
            try:
                self._access = str(json.loads(answer)["access"])
            except (ValueError, KeyError, TypeError):
                raise LabelStudioError(f"Label Studio: the token is refused: {status}") from None
        return {"Authorization": f"Bearer {self._access}"}


def _origin(url: str) -> tuple[str, str, int]:
    parts = urlsplit(url)
    if "@" in parts.netloc or "\\" in url:
        return ("", "", 0)
    try:
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)
    except ValueError:
        return ("", "", 0)
    return (parts.scheme, (parts.hostname or "").lower(), port)


def run(arguments: list[str], settings: Settings, prog: str) -> None:
    options = parser_of(prog, settings.port).parse_args(arguments)
    if settings.label_studio_url is None:
        raise InvalidInput("DUBITO_LABEL_STUDIO_URL", "the URL of Label Studio", "none")
    file = options.key_file
    key = None if file is None else read_key_file("--key-file", file).strip()
    service = Backend(f"{options.service.rstrip('/')}/label-studio/{quote(options.model)}", key)
    studio = LabelStudio(settings.label_studio_url, settings.label_studio_secret())
    for look in count(1):
        try:
            print(synchronise(studio, service, options.project), flush=True)
        except DubitoError as error:
            if not options.watch:
                raise
            print(f"error: {error}", flush=True)  # the next time may find it put right
        if not options.watch:
            return
        try:
            if look == 1:
                print(f"looking again every {options.interval_s:g} s", flush=True)
            time.sleep(options.interval_s)
        except KeyboardInterrupt:  # with nothing half done: a good end
            return


def parser_of(prog: str, port: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, here = parser.add_argument, f"http://127.0.0.1:{port}"
    add("model", metavar="NAME", help="a published model")
    add("--project", type=int, required=True, metavar="N", help="the project's number")
    add("--service", default=here, metavar="URL", help="the service")
    help = "a key of the service: read, predict and label"
    add("--key-file", type=Path, metavar="FILE", help=help)
    add("--watch", action="store_true", help="again and again")
    help = "between times, with --watch"
    add("--interval-s", type=float, default=60.0, metavar="S", help=help)
    return parser


class Backend:
    def __init__(self, url: str, key: str | None) -> None:
        import httpx

        headers = {} if key is None else {"X-API-Key": key}
        self._http = httpx.Client(base_url=url, headers=headers, timeout=PREDICTING_TIMEOUT_S)

    def ask(self, path: str, content: dict[str, Any]) -> Any:
        """Send JSON to a path below the model's."""
        import httpx

        try:
            answer = self._http.post(path, json=content)
            if answer.is_success:
                return answer.json()
        except (httpx.HTTPError, ValueError) as error:
            raise LabelStudioError(f"the service: {type(error).__name__}: {error}") from None
        raise LabelStudioError(f"the service: {answer.text[:1000]}")


def synchronise(studio: LabelStudio, service: Backend, number: int) -> str:
    project = studio.json("GET", f"api/projects/{number}/")
    config = {"label_config": project["label_config"]}
    version = service.ask("setup", {"schema": project["label_config"]})["model_version"]
    seen = labels = predicted = refused = pages = 0
    why = ""
    for tasks in _pages(studio, number):
        for task in tasks:
            annotation = _newest(task.get("annotations") or [])
            if annotation is None:
                continue
            content = {"action": "ANNOTATION_UPDATED", "annotation": annotation, "task": task}
            try:
                of_project = {"project": {"id": number, **config}}
                labels += service.ask("webhook", {**content, **of_project})["kept"]
            except LabelStudioError as error:
                refused, why = refused + 1, f" (last: {error})"
        try:
            predicted += _predict(studio, service, config, version, tasks)
        except LabelStudioError as error:  # of a task that cannot be read: later pages go on
            pages, why = pages + 1, f" (last: {error})"
        seen += len(tasks)
    # It refuses a version before there are predictions of it.
    if seen and project.get("model_version") != version:
        studio.json("PATCH", f"api/projects/{number}/", {"model_version": version})
    told = f"project {number}, {version}: {labels} labels there, {predicted} tasks predicted"
    told += f", {refused} labels refused" if refused else ""
    return told + (f", {pages} pages of tasks not predicted" if pages else "") + why


def _pages(studio: LabelStudio, number: int) -> Iterator[list[dict[str, Any]]]:
    for page in count(1):
        query = f"project={number}&page={page}&page_size={PAGE}&fields=all"
        answer = studio.json("GET", f"api/tasks/?{query}")
        if answer["tasks"]:
            yield answer["tasks"]
        if not answer["tasks"] or page * PAGE >= answer["total"]:
            return


def _newest(annotations: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the annotation that was changed last, of those that were not skipped."""
    made = [annotation for annotation in annotations if not annotation.get("was_cancelled")]
    return max(made, key=lambda one: (str(one.get("updated_at")), one["id"]), default=None)


def _predict(
    studio: LabelStudio,
    service: Backend,
    config: dict[str, Any],
    version: str,
    tasks: list[dict[str, Any]],
) -> int:
    """Give tasks a prediction of the version that have none, and have each task's data say the
    doubt of its own; return how many there were.
    """
    scores: dict[int, float] = {}
    missing = []
    for task in tasks:
        made = [p for p in task.get("predictions") or [] if p.get("model_version") == version]
        if made and made[0]["score"] is not None:
            scores[task["id"]] = made[0]["score"]
        else:
            missing.append(task)
    if missing:
        asked = [{"id": task["id"], "data": task["data"]} for task in missing]
        results = service.ask("predict", {"tasks": asked, **config})["results"]
        for task, result in zip(missing, results, strict=True):
            studio.json("POST", "api/predictions/", {"task": task["id"], **result})
            scores[task["id"]] = result["score"]
    for task in tasks:
        doubt = round(1.0 - scores[task["id"]], 6)
        if task["data"].get(DOUBT) != doubt:
            content = {"data": {**task["data"], DOUBT: doubt}}
            studio.json("PATCH", f"api/tasks/{task['id']}/", content)
    return len(missing)
