"""Test the integration with a running Label Studio. Requires `make test-real`."""

import base64
import io
import os
import secrets
import subprocess
import sys
from contextlib import contextmanager

import httpx
import numpy as np
import pytest
from PIL import Image

from tests.support.environment import ROOT, environment_in, environment_with, run_training
from tests.support.ports import free_port
from tests.support.recipes import write_recipe
from tests.support.serving import is_responding, serving, wait_until

pytestmark = pytest.mark.real
STUDIO = ROOT / ".venv-label-studio" / "bin" / "label-studio"
KEY, TASKS, ANNOTATED = "the-key-of-the-team-of-labels", 200, 40
CONFIG = (
    '<View><Image name="picture" value="$image"/><Choices name="digit" toName="picture" '
    'choice="single">'
    + "".join(f'<Choice value="{digit}"/>' for digit in range(10))
    + "</Choices></View>"
)


@contextmanager
def label_studio(folder):
    port = free_port()
    token = secrets.token_hex(20)
    environment = {
        "LABEL_STUDIO_BASE_DATA_DIR": str(folder),
        "LABEL_STUDIO_ENABLE_LEGACY_API_TOKEN": "true",
        "ML_BLOCK_LOCAL_IP": "false",  # the backend is on this machine
        "SSRF_PROTECTION_ENABLED": "false",
        "COLLECT_ANALYTICS": "false",
        "LATEST_VERSION_CHECK": "false",
        "SENTRY_DSN": "",
        "FRONTEND_SENTRY_DSN": "",
    }
    command = [str(STUDIO), "start", "--no-browser", "--init", "--username", "team@example.com"]
    command += ["--password", secrets.token_hex(8), "--user-token", token, "--port", str(port)]
    command += ["--internal-host", "127.0.0.1"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command, env=os.environ | environment, cwd=folder, stdout=log, stderr=log
        )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: process.poll() is not None or is_responding(f"{url}/health"), 240)
        assert process.poll() is None, (folder / "log").read_text()[-2000:]
        yield url, token
    finally:
        process.terminate()
        process.wait(30)


def png(row):
    """Encode a digit as a PNG file."""
    file = io.BytesIO()
    Image.fromarray((row.reshape(8, 8) * 15).astype(np.uint8)).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def digits():
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    return x[order], y[order]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, digits):
    """A folder with a model fitted on images of digits."""
    folder = tmp_path_factory.mktemp("studio")
    x, y = digits
    for part, first, last in (("train", 0, 250), ("test", 250, 550)):
        for i in range(first, last):
            path = folder / "pictures" / part / str(y[i]) / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(png(x[i]))
    recipe = write_recipe(
        folder,
        name="digits",
        data={
            "source": "images:pictures",
            "validation": 40,
            "reference": 30,
            "ranking": 30,
        },
        network={"hidden": [64]},
        training={"epochs": 40, "batch_rows": 32, "learning_rate": 1e-2},
        serving={"draws": 50},
    )
    run_training(folder, "fit", str(recipe), "--quiet", "--device", "cpu")
    (folder / "keys.toml").write_text(
        f'[[keys]]\nname = "team"\nkey = "{KEY}"\nscopes = ["read", "predict", "label"]\n'
    )
    (folder / "key").write_text(KEY)
    return folder


@pytest.mark.skipif(not STUDIO.exists(), reason="make test-real installs Label Studio")
def test_digits_project_is_predicted_annotated_fitted_and_served(folder, digits, tmp_path):
    x, y = (part[800 : 800 + TASKS] for part in digits)
    state = str(folder / "state")
    settings = {
        "DUBITO_STATE": state,
        "DUBITO_KEYS_FILE": str(folder / "keys.toml"),
        "DUBITO_POLL_INTERVAL_S": "0.1",
    }
    with (
        label_studio(tmp_path) as (url, token),
        serving(folder / "models", **settings) as (service_url, _),
        httpx.Client(
            base_url=url, headers={"Authorization": f"Token {token}"}, timeout=120
        ) as studio,
        httpx.Client(base_url=service_url, headers={"X-API-Key": KEY}, timeout=60) as service,
    ):

        def call(method, path, **content):
            answer = studio.request(method, path, json=content or None)
            assert answer.is_success, answer.text
            return answer.json() if answer.content else None

        project = call(
            "POST",
            "/api/projects/",
            title="digits",
            label_config=CONFIG,
            sampling="Uncertainty sampling",
        )
        project_id = project["id"]
        tasks = [
            {
                "data": {
                    "image": f"data:image/png;base64,{base64.b64encode(png(row)).decode()}",
                    "place": i,
                }
            }
            for i, row in enumerate(x)
        ]
        assert studio.post(f"/api/projects/{project_id}/import", json=tasks).is_success
        backend = f"{service_url}/label-studio/digits"
        response = studio.post(
            "/api/ml/", json={"project": project_id, "url": backend, "title": "dubito"}
        )
        assert response.status_code == 400, response.text  # without a key
        created = call(
            "POST",
            "/api/ml/",
            project=project_id,
            url=backend,
            title="dubito",
            auth_method="BASIC_AUTH",
            basic_auth_user="dubito",
            basic_auth_pass=KEY,
        )
        assert created["state"] == "CO" and created["model_version"] == "digits:1", created
        (hook,) = call("GET", f"/api/webhooks/?project={project_id}")
        assert hook["url"] == f"{backend}/webhook"
        hook_path = f"/api/webhooks/{hook['id']}/"
        call("PATCH", hook_path, headers={"X-API-Key": KEY}, send_payload=True)

        # Label Studio requests predictions from the backend.
        call(
            "POST",
            f"/api/dm/actions?id=retrieve_tasks_predictions&project={project_id}",
            selectedItems={"all": True},
        )

        def get_tasks():
            tasks = call("GET", f"/api/tasks/?project={project_id}&page_size={TASKS}&fields=all")[
                "tasks"
            ]
            assert len(tasks) == TASKS
            return tasks

        predictions = [task["predictions"] for task in get_tasks()]
        assert all(
            len(task_predictions) == 1 and task_predictions[0]["model_version"] == "digits:1"
            for task_predictions in predictions
        )
        is_correct = [
            task_predictions[0]["result"][0]["value"]["choices"] == [str(y[task["data"]["place"]])]
            for task_predictions, task in zip(predictions, get_tasks(), strict=True)
        ]
        assert np.mean(is_correct) > 0.6

        # The polling command writes uncertainties to the tasks and sets the project's version.
        sync = [
            sys.executable,
            "-m",
            "service",
            "label-studio",
            "sync",
            "digits",
            "--project",
            str(project_id),
        ]
        sync += ["--service", service_url, "--key-file", str(folder / "key")]
        studio_settings = {"DUBITO_LABEL_STUDIO_URL": url, "DUBITO_LABEL_STUDIO_TOKEN": token}

        def synchronise():
            completed = subprocess.run(
                sync,
                env=environment_with(**studio_settings),
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=240,
            )
            assert completed.returncode == 0, completed.stderr
            return completed.stdout

        assert "0 labels stored, 0 tasks predicted" in synchronise()
        uncertainties = {task["id"]: task["data"]["dubito_doubt"] for task in get_tasks()}
        scores = {task["id"]: task["predictions"][0]["score"] for task in get_tasks()}
        assert all(len(task["predictions"]) == 1 for task in get_tasks())
        assert all(
            uncertainties[i] == pytest.approx(1 - scores[i], abs=1e-5) for i in uncertainties
        )

        # The queue returns the most uncertain task, and the data manager sorts by uncertainty.
        largest = sorted(uncertainties, key=lambda i: -uncertainties[i])
        assert call("GET", f"/api/projects/{project_id}/next")["id"] == largest[0]
        view = {"project": project_id, "data": {"ordering": ["-tasks:data.dubito_doubt"]}}
        tab = call("POST", "/api/dm/views/", **view)["id"]
        displayed = call("GET", f"/api/tasks/?view={tab}&project={project_id}&page_size=20")[
            "tasks"
        ]
        assert [task["id"] for task in displayed] == largest[:20]

        # The webhook delivers 39 annotations, one by one.
        def annotate(task, digit):
            result = [
                {
                    "from_name": "digit",
                    "to_name": "picture",
                    "type": "choices",
                    "value": {"choices": [digit]},
                }
            ]
            return call("POST", f"/api/tasks/{task['id']}/annotations/", result=result)

        row_numbers = {task["id"]: task["data"]["place"] for task in get_tasks()}
        for i in largest[: ANNOTATED - 1]:
            annotate({"id": i}, str(y[row_numbers[i]]))
        wait_until(lambda: service.get("/models/digits/labels").json()["labels"] == ANNOTATED - 1)
        assert "39 labels stored" in synchronise()
        assert service.get("/models/digits/labels").json()["labels"] == ANNOTATED - 1

        # Polling finds the annotation whose webhook was lost.
        call("PATCH", hook_path, is_active=False)
        last = largest[ANNOTATED - 1]
        annotate({"id": last}, str(y[row_numbers[last]]))
        assert service.get("/models/digits/labels").json()["labels"] == ANNOTATED - 1
        assert "40 labels stored" in synchronise()
        assert service.get("/models/digits/labels").json()["labels"] == ANNOTATED

        # The candidate is fitted, promoted and served.
        command = [sys.executable, "-m", "training", "candidate", "digits", "--device", "cpu"]
        command += ["--promote"]
        environment = environment_in(folder) | {"DUBITO_STATE": state}
        completed = subprocess.run(
            command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=240
        )
        assert completed.returncode == 0, completed.stderr
        page = service.get("/models/digits/labels").json()
        assert page["candidates"][0]["labels"] == ANNOTATED
        assert page["candidates"][0]["promoted"], page["candidates"][0]["reason"]
        wait_until(lambda: service.get("/models").json()["models"][0]["serving"] == "2")
        assert f"digits:2: {ANNOTATED} labels stored, {TASKS} tasks predicted" in synchronise()
        assert call("GET", f"/api/projects/{project_id}/")["model_version"] == "digits:2"
        versions_by_task = {
            task["id"]: {p["model_version"] for p in task["predictions"]} for task in get_tasks()
        }
        assert all(versions == {"digits:1", "digits:2"} for versions in versions_by_task.values())
