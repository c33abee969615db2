"""Synchronise a Label Studio project with a model (`dubito label-studio sync`).

Label Studio sends a webhook only once, so labels can be lost. The command reads all tasks, once or
repeatedly, and

* sends the newest annotation of each task to the service, which skips labels that it has;
* predicts tasks that have no prediction by the current version, and writes the uncertainty into the
  task's data for sorting in the data manager;
* selects the version whose predictions the project displays.
"""

import argparse
from functools import partial
from typing import Any
from urllib.parse import quote

from integrations.label_studio.client import (
    LabelStudio,
    LabelStudioError,
    label_studio_from_environment,
)
from model_store.commands import repeat
from service.auth.keys import read_key_file

UNCERTAINTY = "dubito_doubt"  # key of a task's data, from 0 to 1
TIMEOUT_S = 120.0  # of a request to the service


def run(options: argparse.Namespace) -> None:
    file = options.key_file
    key = None if file is None else read_key_file("--key-file", file).strip()
    service = Backend(f"{options.service.rstrip('/')}/label-studio/{quote(options.model)}", key)
    studio = label_studio_from_environment()
    report = partial(print, flush=True)

    def attempt() -> None:
        report(synchronise(studio, service, options.project))

    if options.watch:
        repeat(attempt, report, lambda text: report(f"error: {text}"))
    else:
        attempt()


class UnreadableTask(LabelStudioError):
    pass


class Backend:
    def __init__(self, url: str, key: str | None) -> None:
        import httpx

        headers = {} if key is None else {"X-API-Key": key}
        self._http = httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT_S)

    def post(self, path: str, content: dict[str, Any]) -> Any:
        import httpx

        try:
            answer = self._http.post(path, json=content)
            if answer.is_success:
                return answer.json()
        except (httpx.HTTPError, ValueError) as error:
            raise LabelStudioError(f"the service: {type(error).__name__}: {error}") from None
        kind = UnreadableTask if answer.status_code == 422 else LabelStudioError
        raise kind(f"the service: {answer.text[:1000]}")


def synchronise(studio: LabelStudio, service: Backend, number: int) -> str:
    project = studio.json("GET", f"api/projects/{number}/")
    config = {"label_config": project["label_config"]}
    version = service.post("setup", {"schema": project["label_config"]})["model_version"]
    has_tasks, labels, predicted, refused, failed = False, 0, 0, 0, 0
    reason = ""
    for tasks in studio.tasks(number):
        for task in tasks:
            annotation = _newest(task.get("annotations") or [])
            if annotation is None:
                continue
            content = {"action": "ANNOTATION_UPDATED", "annotation": annotation, "task": task}
            try:
                content["project"] = {"id": number, **config}
                labels += service.post("webhook", content)["kept"]
            except LabelStudioError as error:
                refused, reason = refused + 1, f" (last: {error})"
        parts = [tasks]
        while parts:
            part = parts.pop()
            try:
                num_predicted, errors = _predict(studio, service, config, version, part)
                predicted, failed = predicted + num_predicted, failed + len(errors)
                reason = f" (last: {errors[-1]})" if errors else reason
            except LabelStudioError as error:
                if isinstance(error, UnreadableTask) and len(part) > 1:
                    parts += [[task] for task in part]  # retry one by one
                else:
                    failed, reason = failed + len(part), f" (last: {error})"
        has_tasks = True
    # Label Studio refuses a version without predictions.
    if has_tasks and project.get("model_version") != version:
        studio.json("PATCH", f"api/projects/{number}/", {"model_version": version})
    summary = f"project {number}, {version}: {labels} labels stored, {predicted} tasks predicted"
    summary += f", {refused} labels refused" if refused else ""
    return summary + (f", {failed} tasks failed" if failed else "") + reason


def _newest(annotations: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the newest annotation that was not skipped."""
    finished = [annotation for annotation in annotations if not annotation.get("was_cancelled")]
    return max(finished, key=lambda a: (str(a.get("updated_at")), a["id"]), default=None)


def _predict(
    studio: LabelStudio,
    service: Backend,
    config: dict[str, Any],
    version: str,
    tasks: list[dict[str, Any]],
) -> tuple[int, list[str]]:
    """Predict the tasks that the model version has not predicted yet.

    The uncertainty of each task is written into its data. Return the number of predicted tasks and
    the errors of the unreadable ones.
    """
    scores: dict[int, float] = {}
    missing, errors = [], []
    for task in tasks:
        existing = [p for p in task.get("predictions") or [] if p.get("model_version") == version]
        if existing and existing[0]["score"] is not None:
            scores[task["id"]] = existing[0]["score"]
        else:
            missing.append(task)
    if missing:
        inputs = [{"id": task["id"], "data": task["data"]} for task in missing]
        results = service.post("predict", {"tasks": inputs, **config})["results"]
        for task, result in zip(missing, results, strict=True):
            if "reason" in result:
                errors.append(result["reason"])
                continue
            studio.json("POST", "api/predictions/", {"task": task["id"], **result})
            scores[task["id"]] = result["score"]
    for task in tasks:
        if task["id"] not in scores:
            continue
        uncertainty = round(1.0 - scores[task["id"]], 6)
        if task["data"].get(UNCERTAINTY) != uncertainty:
            content = {"data": {**task["data"], UNCERTAINTY: uncertainty}}
            studio.json("PATCH", f"api/tasks/{task['id']}/", content)
    return len(missing) - len(errors), errors
