"""Test nginx, Java's HttpClient and curl. Requires `make test-real`."""

import json
import shutil
import subprocess
from contextlib import contextmanager

import httpx
import pytest

from tests.support.ports import free_port
from tests.support.raw import Connection, request
from tests.support.serving import wait_until

pytestmark = pytest.mark.real

BODY = json.dumps({"inputs": [[8] * 64], "seed": 7}).encode()
UPGRADE = [("Connection", "Upgrade"), ("Upgrade", "foo")]
NGINX = """
daemon off; pid {folder}/pid; error_log stderr warn;
events {{ worker_connections 64; }}
http {{
  access_log off; client_max_body_size 8m; client_body_buffer_size 8m; proxy_max_temp_file_size 0;
  {temporary}
  map $http_upgrade $connection_upgrade {{ default upgrade; '' ''; }}
  upstream service {{ server 127.0.0.1:{service}; keepalive 1; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://service;
      proxy_http_version 1.1;
      proxy_set_header Upgrade $http_upgrade;
      proxy_set_header Connection $connection_upgrade;
    }}
  }}
}}
"""
JAVA = """
import java.net.URI; import java.net.http.*; import java.net.http.HttpRequest.BodyPublishers;
public class Client {
  public static void main(String[] args) throws Exception {
    HttpClient client = HttpClient.newHttpClient();  // requests h2c each time
    for (int i = 0; i < 3; i++) {
      HttpRequest post = HttpRequest.newBuilder(URI.create(args[0] + "/predict"))
        .header("Content-Type", "application/json").POST(BodyPublishers.ofString(args[1])).build();
      HttpResponse<String> answer = client.send(post, HttpResponse.BodyHandlers.ofString());
      System.out.println(answer.statusCode() + " " + answer.body());
    }
  }
}
"""


def needs(program):
    return pytest.mark.skipif(shutil.which(program) is None, reason=f"{program} is not installed")


@contextmanager
def nginx(folder, service):
    port = free_port()
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = " ".join(f"{kind}_temp_path {folder}/{kind};" for kind in kinds)
    path = folder / "nginx.conf"
    path.write_text(NGINX.format(folder=folder, temporary=temporary, service=service, port=port))
    process = subprocess.Popen(
        ["nginx", "-p", str(folder), "-c", str(path)], stderr=subprocess.PIPE, text=True
    )
    try:

        def answers():
            assert process.poll() is None, process.stderr.read()
            try:
                return httpx.get(f"http://127.0.0.1:{port}/health/live").status_code == 200
            except httpx.HTTPError:
                return False

        wait_until(answers)
        yield port
    finally:
        process.terminate()
        process.communicate(timeout=30)


@pytest.fixture
def expected(client):
    """The correct response to BODY."""
    answer = client.post("/predict", content=BODY, headers={"Content-Type": "application/json"})
    assert answer.status_code == 200
    return answer.content


@needs("nginx")
def test_smuggled_request_behind_nginx_affects_no_other_client(client, expected, tmp_path):
    with nginx(tmp_path, client.base_url.port) as port:
        for _ in range(5):
            with Connection(port) as attacker, Connection(port) as victim:
                inner = request("POST", "/predict", b"smuggled")
                attack = request("POST", "/predict", inner, UPGRADE)
                assert attacker.ask(attack).status == 422
                assert victim.ask(request("GET", "/health/live")).body == b'{"status":"live"}'
                answer = victim.ask(request("POST", "/predict", BODY))
                assert (answer.status, answer.body) == (200, expected)
                assert attacker.ask(request("POST", "/predict", BODY, UPGRADE)).body == expected


@needs("nginx")
def test_bodies_of_all_sizes_pass_nginx_intact(client, tmp_path):
    with nginx(tmp_path, client.base_url.port) as port:
        for rows in (1, 100, 2000):
            body = json.dumps(
                {"inputs": [[8.25] * 64] * rows, "seed": 7, "num_samples": 2}
            ).encode()
            direct = client.post(
                "/predict", content=body, headers={"Content-Type": "application/json"}
            )
            headers = {"Content-Type": "application/json"}
            answer = httpx.post(
                f"http://127.0.0.1:{port}/predict", content=body, headers=headers, timeout=60
            )
            assert (answer.status_code, answer.content) == (200, direct.content)


@needs("java")
def test_java_client_that_requests_h2c_is_answered(client, expected, tmp_path):
    source = tmp_path / "Client.java"
    source.write_text(JAVA)
    command = ["java", str(source), str(client.base_url), BODY.decode()]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert completed.stdout.splitlines() == [f"200 {expected.decode()}"] * 3, completed.stderr


@needs("curl")
@pytest.mark.parametrize(
    ("version", "chunked"),
    [
        ("--http1.0", False),
        ("--http1.1", False),
        ("--http1.1", True),
        ("--http2", False),
        ("--http2", True),
    ],
)
def test_curl_works_with_all_http_versions(client, expected, version, chunked):
    url = f"{client.base_url}/predict"
    headers = [
        "-H",
        "Content-Type: application/json",
        *(["-H", "Transfer-Encoding: chunked"] if chunked else []),
    ]
    command = ["curl", "--silent", version, *headers, "--data-binary", "@-", url, url]
    completed = subprocess.run(command, input=BODY, capture_output=True, timeout=60)
    assert completed.stdout == expected * 2


@needs("curl")
def test_curl_sends_large_body_after_100_continue(client, tmp_path):
    file = tmp_path / "body.json"
    file.write_text(json.dumps({"inputs": [[8.123456] * 64] * 2000, "num_samples": 2}))
    assert file.stat().st_size > 1 << 20
    headers = ["-H", "Content-Type: application/json", "-H", "Expect: 100-continue"]
    command = ["curl", "--silent", *headers, "-w", "%{http_code} %{time_total}", "-o", "/dev/null"]
    completed = subprocess.run(
        [*command, "--data-binary", f"@{file}", f"{client.base_url}/predict"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert completed.stdout.split()[0] == "200"
