"""`python -m service label-studio`: bring a project of Label Studio and a model together, once or
again and again.

Webhooks come once, and get lost. So this asks for all tasks, and

* sends the newest annotation of each to the service, which knows those that it has;
* gives tasks without a prediction of the version that is served one, and writes its doubt into the task's data, by
  which the data manager sorts;
* tells the project which version's predictions to go by.
"""

import argparse
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import quote

from model_store.errors import DubitoError, InvalidInput
from service.auth.keys import read_key_file
from service.integrations.label_studio.client import LabelStudio, LabelStudioError
from service.settings import Settings

PAGE = 100  # tasks asked for, and predicted, at a time
DOUBT = "dubito_doubt"  # of a task's data: 0 to 1
TIMEOUT_S = 120.0


def run(arguments: list[str], settings: Settings) -> None:
    """Do what the arguments ask for.

    Raises:
        InvalidInput: naming the option or setting that is wrong.
        LabelStudioError: if either side does not answer as expected.
    """
    parser = argparse.ArgumentParser(prog="python -m service label-studio", description=__doc__)
    parser.add_argument("model", metavar="NAME", help="a published model")
    parser.add_argument(
        "--project", type=int, required=True, metavar="N", help="the project's number"
    )
    parser.add_argument(
        "--service", default=f"http://127.0.0.1:{settings.port}", metavar="URL", help="the service"
    )
    parser.add_argument(
        "--key-file",
        type=Path,
        metavar="FILE",
        help="a key of the service: read, predict and label",
    )
    parser.add_argument("--watch", action="store_true", help="again and again")
    parser.add_argument(
        "--interval-s", type=float, default=60.0, metavar="S", help="between times, with --watch"
    )
    options = parser.parse_args(arguments)
    if settings.label_studio_url is None:
        raise InvalidInput("DUBITO_LABEL_STUDIO_URL", "the URL of Label Studio", "none")
    key = (
        None if options.key_file is None else read_key_file("--key-file", options.key_file).strip()
    )
    service = Backend(f"{options.service.rstrip('/')}/label-studio/{quote(options.model)}", key)
    studio = LabelStudio(settings.label_studio_url, settings.label_studio_secret())
    for look in count(1):
        try:
            print(synchronised(studio, service, options.project), flush=True)
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


class Backend:
    """The service, as Label Studio sees it."""

    def __init__(self, url: str, key: str | None) -> None:
        self._url = url
        self._headers = {"Content-Type": "application/json"} | (
            {} if key is None else {"X-API-Key": key}
        )

    def ask(self, path: str, content: dict[str, Any]) -> Any:
        """Send JSON to a path below the model's.

        Raises:
            LabelStudioError: if it is not answered, or refused: with the reason.
        """
        body = json.dumps(content).encode()
        request = urllib.request.Request(f"{self._url}/{path}", data=body, headers=self._headers)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise LabelStudioError(
                f"the service: {error.read(1000).decode('utf-8', 'replace')}"
            ) from None
        except (OSError, ValueError) as error:
            raise LabelStudioError(f"the service: {type(error).__name__}: {error}") from None


def synchronised(studio: LabelStudio, service: Backend, number: int) -> str:
    """Bring a project and a model together, and say what was done."""
    project = studio.json("GET", f"api/projects/{number}/")
    config = {"label_config": project["label_config"]}
    version = service.ask("setup", {"schema": project["label_config"]})["model_version"]
    seen = labels = predicted = refused = 0
    why = ""
    for tasks in _pages(studio, number):
        for task in tasks:
            annotation = _newest(task.get("annotations") or [])
            if annotation is None:
                continue
            content = {"action": "ANNOTATION_UPDATED", "annotation": annotation, "task": task}
            try:
                labels += service.ask("webhook", {**content, "project": {"id": number, **config}})[
                    "kept"
                ]
            except LabelStudioError as error:
                refused, why = refused + 1, f" (last: {error})"
        predicted += _predicted(studio, service, config, version, tasks)
        seen += len(tasks)
    if (
        seen and project.get("model_version") != version
    ):  # which it refuses before there are predictions of it
        studio.json("PATCH", f"api/projects/{number}/", {"model_version": version})
    told = f"project {number}, {version}: {labels} labels there, {predicted} tasks predicted"
    return told + (f", {refused} labels refused{why}" if refused else "")


def _pages(studio: LabelStudio, number: int) -> Iterator[list[dict[str, Any]]]:
    """Yield the tasks of a project with their annotations and predictions, a page at a time."""
    page = 1
    while True:
        answer = studio.json(
            "GET", f"api/tasks/?project={number}&page={page}&page_size={PAGE}&fields=all"
        )
        tasks = answer["tasks"]
        if not tasks:
            return
        yield tasks
        if page * PAGE >= answer["total"]:
            return
        page += 1


def _newest(annotations: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the annotation that was changed last, of those that were not skipped."""
    made = [annotation for annotation in annotations if not annotation.get("was_cancelled")]
    return max(
        made,
        key=lambda annotation: (str(annotation.get("updated_at")), annotation["id"]),
        default=None,
    )


def _predicted(
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
        known = [
            p["score"] for p in task.get("predictions") or [] if p.get("model_version") == version
        ]
        if known and known[0] is not None:
            scores[task["id"]] = known[0]
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
            studio.json(
                "PATCH", f"api/tasks/{task['id']}/", {"data": {**task["data"], DOUBT: doubt}}
            )
    return len(missing)
