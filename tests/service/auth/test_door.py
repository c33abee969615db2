import httpx
import pytest

from service.settings import Settings
from tests.support.serving import predict_blank

WEBHOOK = "/label-studio/digits/webhook"
CROSS_ORIGIN_HEADERS = [
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},  # another port on this machine
    {"Origin": "http://evil.example"},  # browsers send no Sec-Fetch-Site over plain HTTP
    {"Origin": "null"},
]


@pytest.mark.parametrize("headers", CROSS_ORIGIN_HEADERS, ids=str)
@pytest.mark.parametrize("path", [WEBHOOK, "/acquire", "/jobs/x/cancel", "/v2/repository/index"])
def test_posts_from_other_origins_are_refused(client, headers, path):
    answer = client.post(path, content=b"{}", headers=headers)
    assert answer.status_code == 403
    assert "Origin: expected none, or the service's origin" in answer.text


def test_posts_from_same_origin_and_links_from_others_are_allowed(client):
    for headers in (
        {"Sec-Fetch-Site": "same-origin"},
        {"Origin": str(client.base_url).rstrip("/")},
    ):
        assert client.post("/predict", json={"inputs": [[0.0] * 64]}, headers=headers).is_success
    for headers in CROSS_ORIGIN_HEADERS:
        assert client.get("/models", headers=headers).is_success


def test_webhook_requires_json_content_type(client):
    for media_type in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        answer = client.post(WEBHOOK, content=b"{}", headers={"Content-Type": media_type})
        assert answer.status_code == 415
    assert client.post(WEBHOOK, content=b"{}").status_code == 415


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example"])
def test_unknown_host_names_are_refused(client, host):
    for method, path in (("GET", "/models"), ("POST", "/predict"), ("GET", "/")):
        answer = client.request(method, path, headers={"Host": host})
        assert (answer.status_code, "DUBITO_ALLOWED_HOSTS" in answer.text) == (421, True)


@pytest.mark.parametrize("host", ["localhost:8000", "127.0.0.1", "[::1]:8000", "[::1]", "service"])
def test_addresses_and_host_names_without_dots_are_allowed(client, host):
    assert client.get("/models", headers={"Host": host}).is_success


def test_allowed_hosts_setting_restricts_host_names(serve, digits_store):
    with serve(digits_store, DUBITO_ALLOWED_HOSTS="dubito.example, other.example") as (url, _):
        for host, status in (
            ("dubito.example:80", 200),
            ("OTHER.example", 200),
            ("x.example", 421),
        ):
            assert httpx.get(f"{url}/models", headers={"Host": host}).status_code == status


def test_any_host_name_is_allowed_with_keys_or_on_all_addresses(open_client, digits_store):
    assert Settings(host="0.0.0.0").parse_allowed_hosts() is None
    assert Settings(allowed_hosts="*").parse_allowed_hosts() is None
    assert Settings(host="0.0.0.0", allowed_hosts="localhost").parse_allowed_hosts() == {
        "localhost"
    }
    key = "a-key-of-the-service"
    with open_client(
        digits_store, DUBITO_API_KEYS=key, headers={"Host": "a.b", "X-API-Key": key}
    ) as client:
        assert predict_blank(client).is_success
