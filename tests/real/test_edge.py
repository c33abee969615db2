"""Test the nginx and Caddy configurations of the edge guide. Requires `make test-real`."""

import os
import re
import ssl
import subprocess
from getpass import getuser

import httpx
import pytest

from tests.real.test_clients_and_proxies import needs
from tests.support.environment import ROOT
from tests.support.ports import free_port
from tests.support.serving import serving, wait_until

pytestmark = pytest.mark.real

GUIDE = (ROOT / "docs" / "edge.md").read_text()
ROW = {"inputs": [[8] * 64], "seed": 7}
NGINX = """
daemon off; user {user}; pid {folder}/pid; error_log stderr warn;
events {{ worker_connections 64; }}
http {{ access_log off; {temporary} {guide} }}
"""
METRICS = [f"{prefix}{version}/metrics" for prefix in ("", "/doubt") for version in ("", "/v1")]
OTHER_SPELLINGS = [
    "//metrics",
    "/%6detrics",
    "/x/../metrics",
    "/v1//metrics",
    "/%2e/metrics",
    "/metrics?x",
]
KINDS = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")


@pytest.fixture(scope="module")
def service(digits_store):
    settings = {"DUBITO_PREFIX": "/doubt", "DUBITO_JOBS_AT_ONCE": "0", "DUBITO_ALLOWED_HOSTS": "*"}
    with serving(digits_store, **settings) as (url, _):
        yield url


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certificate")
    name = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -keyout dubito.key -out dubito.crt"
    subprocess.run([*command.split(), *name], cwd=folder, check=True, capture_output=True)
    return folder


@pytest.fixture(params=[pytest.param(name, marks=needs(name)) for name in ("nginx", "caddy")])
def edge(request, service, certificate, tmp_path):
    """A client of a proxy in front of the service."""
    port, (block,) = free_port(), re.findall(rf"```{request.param}\n(.*?)```", GUIDE, re.DOTALL)
    block = block.replace("127.0.0.1:8000", service.removeprefix("http://"))
    if request.param == "nginx":
        block = block.replace("443", str(port)).replace("/etc/ssl", str(certificate))
        temporary = " ".join(f"{kind}_temp_path {tmp_path}/{kind};" for kind in KINDS)
        config = NGINX.format(user=getuser(), folder=tmp_path, temporary=temporary, guide=block)
        command = ["nginx", "-p", str(tmp_path), "-c", str(tmp_path / "config")]
    else:
        tls = f"tls {certificate}/dubito.crt {certificate}/dubito.key"
        block = block.replace("dubito.example.com {", f"https://localhost:{port} {{\n\t{tls}", 1)
        config = "{\n\tadmin off\n\tauto_https disable_redirects\n}\n" + block
        command = ["caddy", "run", "--adapter", "caddyfile", "--config", str(tmp_path / "config")]
    (tmp_path / "config").write_text(config)
    environment = {**os.environ, "XDG_DATA_HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, stderr=log, env=environment)
    trusted = ssl.create_default_context(cafile=certificate / "dubito.crt")
    url = f"https://localhost:{port}/doubt"
    try:
        with httpx.Client(base_url=url, verify=trusted, timeout=60) as client:

            def answers():
                assert process.poll() is None, (tmp_path / "log").read_text()
                try:
                    return client.get("/health/ready").status_code == 200
                except httpx.HTTPError:
                    return False

            wait_until(answers)
            yield client
    finally:
        process.terminate()
        process.wait(timeout=30)


def test_proxies_in_guide_forward_requests(edge, service):
    direct = httpx.post(f"{service}/predict", json=ROW)
    assert edge.post("/predict", json=ROW).json() == direct.json()
    large = {"inputs": [[8.123456] * 64] * 4000, "num_samples": 2, "seed": 7}
    assert len(edge.post("/predict", json=large).json()["predictions"]) == 4000
    assert edge.head("/models").status_code == 200
    page = edge.get("/")
    assert page.headers["content-type"].startswith("text/html")
    for path in re.findall(r'src="([^"]+)"', page.text):
        assert edge.get(path).status_code == 200, path
    assert '"/doubt/openapi.json"' in edge.get("/docs").text.replace("'", '"')


def test_proxies_in_guide_hide_metrics(edge, service):
    assert all(httpx.get(service + path).status_code == 200 for path in METRICS)
    for path in METRICS + OTHER_SPELLINGS:
        answer = edge.get("/", extensions={"target": f"/doubt{path}".encode()})
        assert "dubito_" not in answer.text, path


def test_too_large_body_gets_problem_response_from_service(edge):
    csv = {"Content-Type": "text/csv"}
    answer = edge.post("/predict", content=bytes((64 << 20) + 1), headers=csv)
    assert (answer.status_code, answer.headers["content-type"]) == (413, "application/problem+json")


def test_job_link_works_behind_proxy(edge):
    accepted = edge.post("/predict/jobs", json=ROW)
    location = accepted.headers["location"]
    assert location.startswith("/doubt/jobs/")
    link = edge.base_url.join(location)
    assert edge.get(link).json()["id"] == accepted.json()["id"]
    edge.post(f"{link}/cancel")
