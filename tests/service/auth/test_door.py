import httpx
import pytest

from service.settings import Settings
from tests.support.serving import predict_blank

WEBHOOK = "/label-studio/digits/webhook"
OTHERS = [
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},  # another port of this machine
    {"Origin": "http://evil.example"},  # plain HTTP, where browsers send no Sec-Fetch-Site
    {"Origin": "null"},
]


@pytest.mark.parametrize("headers", OTHERS, ids=str)
@pytest.mark.parametrize("path", [WEBHOOK, "/acquire", "/jobs/x/cancel", "/v2/repository/index"])
def test_what_a_page_of_another_origin_asks_for_is_refused(client, headers, path):
    answer = client.post(path, content=b"{}", headers=headers)
    assert answer.status_code == 403
    assert "Origin: expected none, or the service's origin" in answer.text


def test_the_service_s_own_page_and_links_to_it_are_answered(client):
    for headers in (
        {"Sec-Fetch-Site": "same-origin"},
        {"Origin": str(client.base_url).rstrip("/")},
    ):
        assert client.post("/predict", json={"inputs": [[0.0] * 64]}, headers=headers).is_success
    for headers in OTHERS:
        assert client.get("/models", headers=headers).is_success


def test_a_webhook_is_json_and_says_so(client):
    for media_type in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        answer = client.post(WEBHOOK, content=b"{}", headers={"Content-Type": media_type})
        assert answer.status_code == 415
    assert client.post(WEBHOOK, content=b"{}").status_code == 415


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example"])
def test_a_name_that_was_made_to_lead_here_is_refused(client, host):
    for method, path in (("GET", "/models"), ("POST", "/predict"), ("GET", "/")):
        answer = client.request(method, path, headers={"Host": host})
        assert (answer.status_code, "DUBITO_ALLOWED_HOSTS" in answer.text) == (421, True)


@pytest.mark.parametrize("host", ["localhost:8000", "127.0.0.1", "[::1]:8000", "[::1]", "service"])
def test_addresses_and_names_without_dots_are_known(client, host):
    assert client.get("/models", headers={"Host": host}).is_success


def test_hosts_are_of_the_list_where_there_is_one(serve, digits_store):
    with serve(digits_store, DUBITO_ALLOWED_HOSTS="dubito.example, other.example") as (url, _):
        for host, status in (
            ("dubito.example:80", 200),
            ("OTHER.example", 200),
            ("x.example", 421),
        ):
            assert httpx.get(f"{url}/models", headers={"Host": host}).status_code == status


def test_a_service_with_keys_or_on_all_addresses_is_asked_by_any_name(open_client, digits_store):
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
