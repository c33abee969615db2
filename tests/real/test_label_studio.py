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
from tests.support.serving import answers, serving, wait_until

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
        wait_until(lambda: process.poll() is not None or answers(f"{url}/health"), 240)
        assert process.poll() is None, (folder / "log").read_text()[-2000:]
        yield url, token
    finally:
        process.terminate()
        process.wait(30)


def png(row):
    """A digit as a PNG file."""
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
def test_a_project_of_digits_is_predicted_sorted_annotated_fitted_and_served(
    folder, digits, tmp_path
):
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

        def ask(method, path, **content):
            answer = studio.request(method, path, json=content or None)
            assert answer.is_success, answer.text
            return answer.json() if answer.content else None

        project = ask(
            "POST",
            "/api/projects/",
            title="digits",
            label_config=CONFIG,
            sampling="Uncertainty sampling",
        )
        number = project["id"]
        tasks = [
            {
                "data": {
                    "image": f"data:image/png;base64,{base64.b64encode(png(row)).decode()}",
                    "place": i,
                }
            }
            for i, row in enumerate(x)
        ]
        assert studio.post(f"/api/projects/{number}/import", json=tasks).is_success
        backend = f"{service_url}/label-studio/digits"
        refused = studio.post(
            "/api/ml/", json={"project": number, "url": backend, "title": "dubito"}
        )
        assert refused.status_code == 400, refused.text  # without a key
        created = ask(
            "POST",
            "/api/ml/",
            project=number,
            url=backend,
            title="dubito",
            auth_method="BASIC_AUTH",
            basic_auth_user="dubito",
            basic_auth_pass=KEY,
        )
        assert created["state"] == "CO" and created["model_version"] == "digits:1", created
        (hook,) = ask("GET", f"/api/webhooks/?project={number}")
        assert hook["url"] == f"{backend}/webhook"
        hook_path = f"/api/webhooks/{hook['id']}/"
        ask("PATCH", hook_path, headers={"X-API-Key": KEY}, send_payload=True)

        # predictions, by Label Studio's own request of the backend
        ask(
            "POST",
            f"/api/dm/actions?id=retrieve_tasks_predictions&project={number}",
            selectedItems={"all": True},
        )

        def all_tasks():
            actual = ask("GET", f"/api/tasks/?project={number}&page_size={TASKS}&fields=all")[
                "tasks"
            ]
            assert len(actual) == TASKS
            return actual

        predictions = [task["predictions"] for task in all_tasks()]
        assert all(
            len(parent) == 1 and parent[0]["model_version"] == "digits:1" for parent in predictions
        )
        right = [
            parent[0]["result"][0]["value"]["choices"] == [str(y[task["data"]["place"]])]
            for parent, task in zip(predictions, all_tasks(), strict=True)
        ]
        assert np.mean(right) > 0.6

        # the polling command: doubt in the data of tasks, and the project's version
        sync = [
            sys.executable,
            "-m",
            "service",
            "label-studio",
            "sync",
            "digits",
            "--project",
            str(number),
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
        doubts = {task["id"]: task["data"]["dubito_doubt"] for task in all_tasks()}
        scores = {task["id"]: task["predictions"][0]["score"] for task in all_tasks()}
        assert all(len(task["predictions"]) == 1 for task in all_tasks())
        assert all(doubts[i] == pytest.approx(1 - scores[i], abs=1e-5) for i in doubts)

        # tasks come by doubt: the queue gives the most doubtful, the data manager sorts by the
        # field
        largest = sorted(doubts, key=lambda i: -doubts[i])
        assert ask("GET", f"/api/projects/{number}/next")["id"] == largest[0]
        view = {"project": number, "data": {"ordering": ["-tasks:data.dubito_doubt"]}}
        tab = ask("POST", "/api/dm/views/", **view)["id"]
        displayed = ask("GET", f"/api/tasks/?view={tab}&project={number}&page_size=20")["tasks"]
        assert [task["id"] for task in displayed] == largest[:20]

        # 40 annotations by its API; the webhook brings them, one by one
        def annotate(task, digit):
            result = [
                {
                    "from_name": "digit",
                    "to_name": "picture",
                    "type": "choices",
                    "value": {"choices": [digit]},
                }
            ]
            return ask("POST", f"/api/tasks/{task['id']}/annotations/", result=result)

        place = {task["id"]: task["data"]["place"] for task in all_tasks()}
        for i in largest[: ANNOTATED - 1]:
            annotate({"id": i}, str(y[place[i]]))
        wait_until(lambda: service.get("/models/digits/labels").json()["labels"] == ANNOTATED - 1)
        assert "39 labels stored" in synchronise()
        assert service.get("/models/digits/labels").json()["labels"] == ANNOTATED - 1

        # one annotation whose webhook is lost is found by polling
        ask("PATCH", hook_path, is_active=False)
        last = largest[ANNOTATED - 1]
        annotate({"id": last}, str(y[place[last]]))
        assert service.get("/models/digits/labels").json()["labels"] == ANNOTATED - 1
        assert "40 labels stored" in synchronise()
        assert service.get("/models/digits/labels").json()["labels"] == ANNOTATED

        # fitted, promoted, served
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
        assert ask("GET", f"/api/projects/{number}/")["model_version"] == "digits:2"
        new = {
            task["id"]: {p["model_version"] for p in task["predictions"]} for task in all_tasks()
        }
        assert all(versions == {"digits:1", "digits:2"} for versions in new.values())
