"""Test requests from another origin in Chromium."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest

from tests.support.browser import MISSING, chromium, until
from tests.support.serving import serving

pytestmark = [pytest.mark.real, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]
LABEL = {"labels": [{"id": "a", "label": "3", "input": [0.0] * 64}]}
SEND = """
const [address, body] = arguments;
const forms = [undefined, 'text/plain', 'application/x-www-form-urlencoded', 'application/json'];
window.sent = 0;
for (const type of forms)
  fetch(address, { method: 'POST', mode: type === forms[3] ? 'cors' : 'no-cors', body: new Blob([body], { type }) })
    .catch(() => 0).then(() => { sent += 1; });
"""


class Page(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def page():
    """The port of a server with an empty page."""
    with HTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def test_cross_origin_page_cannot_store_labels(digits_store, tmp_path, page):
    choices = "".join(f'<Choice value="{digit}"/>' for digit in range(10))
    config = (
        f'<View><Image name="p" value="$i"/><Choices name="d" toName="p">{choices}</Choices></View>'
    )
    value = {"from_name": "d", "to_name": "p", "type": "choices", "value": {"choices": ["3"]}}
    webhook = {
        "action": "ANNOTATION_CREATED",
        "annotation": {"id": 1, "result": [value]},
        "task": {"id": 1, "data": {"dubito_input": [0.0] * 64}},
        "project": {"id": 2, "label_config": config},
    }
    acquire = {"pool": [[0.0] * 64], "k": 1, "keep": True}
    endpoints = {"label-studio/digits/webhook": webhook, "labels": LABEL, "acquire": acquire}
    with serving(digits_store, DUBITO_STATE=str(tmp_path)) as (url, _), chromium() as driver:
        # The page is cross-site on localhost, and same-site but cross-origin on 127.0.0.1.
        for name in ("localhost", "127.0.0.1"):
            driver.get(f"http://{name}:{page}/")
            for path, content in endpoints.items():
                driver.execute_script(SEND, f"{url}/{path}", json.dumps(content))
                until(driver, lambda: driver.execute_script("return sent") == 4)
        figures = httpx.get(f"{url}/models/digits/labels").json()
        assert (figures["labels"], figures["acquired"]) == (0, 0)
        # The same webhook stores a label if a program sends it.
        answer = httpx.post(f"{url}/label-studio/digits/webhook", json=webhook)
        assert answer.status_code == 201, answer.text
