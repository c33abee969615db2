import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import numpy as np
import pytest
from PIL import Image

from integrations.label_studio.client import URL_VARIABLE

CONFIG = """<View><{object} name="row" value="$row"/>
<Choices name="class" toName="row">{choices}</Choices></View>"""


def get_config(kind, classes):
    choices = "".join(f'<Choice value="{name}"/>' for name in classes)
    return CONFIG.format(object=kind, choices=choices)


@pytest.fixture
def studio(monkeypatch):
    state = {"label_config": "", "tasks": [], "tokens": set()}

    class Handler(BaseHTTPRequestHandler):
        def answer(self, content, status=200):
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(content).encode())

        def do_GET(self):
            state["tokens"].add(self.headers["Authorization"])
            if self.path.startswith("/api/tasks/"):
                self.answer({"tasks": state["tasks"], "total": len(state["tasks"])})
            elif self.path == "/api/projects/1/":
                self.answer({"label_config": state["label_config"]})
            else:
                self.answer({"detail": "not found"}, 404)

        def do_POST(self):
            content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/api/token/refresh":
                self.answer({"access": "fresh"})
            else:
                state["tasks"] += content
                self.answer({"task_count": len(content)}, 201)

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv(URL_VARIABLE, f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("DUBITO_LABEL_STUDIO_TOKEN", "a.personal.token")
    yield state
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def backend(url, key):
    def predict(model, state):
        request = {"tasks": state["tasks"], "label_config": state["label_config"]}
        path = f"{url}/label-studio/{model}/predict"
        answer = httpx.post(path, json=request, headers={"X-API-Key": key}, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()["results"]

    return predict


def get_classes(run, model):
    models = json.loads(run("models", "--json")[1])["models"]
    return next(item["classes"] for item in models if item["name"] == model)


def test_table_rows_become_tasks_that_the_backend_predicts(run, studio, backend, tmp_path):
    studio["label_config"] = get_config("Text", get_classes(run, "people"))
    lines = "\n".join(f"p{n},{20 + n if n else ''},Rome,a note" for n in range(6))
    (tmp_path / "people.csv").write_text(f"id,age,city,note\n{lines}\n")
    push = ("label-studio", "push", "people.csv", "--model", "people", "-k", 4, "--project", 1)
    status, out, err = run(*push, "--control", 0.5, "--seed", 3)
    assert (status, out, err) == (0, "project 1: 4 tasks for 6 rows\n", "")
    tasks = [task["data"] for task in studio["tasks"]]
    assert [task["dubito_id"] for task in tasks] == sorted(task["dubito_id"] for task in tasks)
    for task in tasks:
        assert task["note"] == "a note"
        assert task["row"] == f"age: {task['age']}, city: Rome"
    assert len(backend("people", studio)) == 4
    assert studio["tokens"] == {"Bearer fresh"}
    output = json.loads(run(*push, "--control", 0.5, "--seed", 3, "--json")[1])
    assert (output["model"], output["tasks"]) == ("people", [])  # all tasks exist


def test_images_and_arrays_become_tasks_that_the_backend_predicts(
    run, studio, backend, digits_rows
):
    studio["label_config"] = get_config("Image", get_classes(run, "pictures"))
    for name, color in (("a.png", "red"), ("b.png", "blue")):
        Image.new("RGB", (1, 1), color).save(name)
    run("label-studio", "push", "a.png", "b.png", "--model", "pictures", "-k", 1, "--project", 1)
    (task,) = studio["tasks"]
    assert task["data"]["dubito_id"] in ("a.png", "b.png")
    assert task["data"]["row"].startswith("data:image/png;base64,")
    assert len(backend("pictures", studio)) == 1
    studio.update(label_config=get_config("Text", get_classes(run, "digits")), tasks=[])
    np.save("rows.npy", digits_rows[:5])
    run("label-studio", "push", "rows.npy", "--model", "digits", "-k", 2, "--project", 1)
    assert len(backend("digits", studio)) == 2


def test_errors_print_one_line(run, studio, monkeypatch, digits_rows):
    np.save("rows.npy", digits_rows[:5])
    push = ("label-studio", "push", "rows.npy", "--model", "digits", "--project")
    status, _, err = run(*push, 2)
    assert (
        status,
        err.startswith("dubito: Label Studio: GET /api/projects/2/ returned 404"),
    ) == (1, True)
    status, _, err = run(*push, 1)
    assert (status, err.startswith("dubito: project 1: expected a labelling configuration")) == (
        1,
        True,
    )
    monkeypatch.delenv(URL_VARIABLE)
    status, _, err = run(*push, 1)
    assert err == f"dubito: {URL_VARIABLE}: expected the URL of Label Studio, got none\n"
