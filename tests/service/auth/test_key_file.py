import json
import logging
import re
import tomllib
from datetime import UTC, datetime, timedelta
from hashlib import sha256

import httpx
import pytest

from model_store.errors import InvalidInput
from service.auth.keys import FILE_VARIABLE, KeyRing, Keys, new_key, parse_keys
from service.auth.scopes import SCOPES
from service.settings import Settings
from tests.support.environment import run_service
from tests.support.serving import open_client, wait_until

ROW = [0.0] * 64
PAST, FUTURE = "2020-01-01T00:00:00Z", "2999-01-01T00:00:00+02:00"
SECRET = "a-secret-that-is-not-shown"
DIGEST = sha256(SECRET.encode()).hexdigest()
REQUESTS = {
    "read": ("GET", "/models", None, 200),
    "predict": ("POST", "/predict", {"inputs": [ROW]}, 200),
    "acquire": ("POST", "/acquire", {"pool": [ROW], "k": 1}, 200),
    "label": ("POST", "/labels", {"labels": [{"id": "a", "label": "3", "input": ROW}]}, 200),
    "rows": ("GET", "/predict/examples", None, 200),
    "metrics": ("GET", "/metrics", None, 200),
    "admin": ("POST", "/admin/refresh", None, 200),
}


def make_entry(name, scopes, expires=None, is_hashed=False):
    key = get_key(name)
    options = f'sha256 = "{sha256(key.encode()).hexdigest()}"' if is_hashed else f'key = "{key}"'
    end = "" if expires is None else f"expires = {expires}\n"
    return f'[[keys]]\nname = "{name}"\n{options}\nscopes = {json.dumps(scopes)}\n{end}'


def get_key(name):
    return f"the-long-key-of-{name}"


FILE = "".join(
    [
        *(make_entry(f"only-{scope}", [scope], is_hashed=scope == "predict") for scope in SCOPES),
        make_entry("all", list(SCOPES), FUTURE, is_hashed=True),
        make_entry("late", list(SCOPES), PAST),
        make_entry("both", ["predict", "rows"]),
    ]
)


def send(client, name, scope):
    method, path, content, _ = REQUESTS[scope]
    return client.request(method, path, json=content, headers={"X-API-Key": get_key(name)})


@pytest.fixture(scope="module")
def keyed(tmp_path_factory, digits_store):
    """A client for a service with a key file."""
    file = tmp_path_factory.mktemp("secrets") / "keys.toml"
    file.write_text(FILE)
    with open_client(digits_store, DUBITO_KEYS_FILE=str(file)) as client:
        yield client


@pytest.mark.parametrize("required", REQUESTS)
def test_key_grants_only_its_scopes(keyed, required):
    for scope in SCOPES:
        answer = send(keyed, f"only-{scope}", required)
        if scope == required:
            assert answer.status_code == REQUESTS[required][3]
        else:
            assert answer.status_code == 403
            assert answer.headers["content-type"] == "application/problem+json"
            assert (
                answer.json()["detail"]
                == f"key: expected a key with the scope {required}, got a key without it"
            )
            assert f'scope="{required}"' in answer.headers["WWW-Authenticate"]
    assert send(keyed, "all", required).status_code == 200


@pytest.mark.parametrize(
    ("required", "method", "path"),
    [
        *((scope, *request[:2]) for scope, request in REQUESTS.items()),
        ("label", "POST", "/label-studio/digits/webhook"),
        ("predict", "POST", "/v2/models/digits/infer"),
        ("predict", "POST", "/invocations"),
    ],
)
def test_newline_at_the_end_of_a_path_does_not_bypass_scopes(keyed, required, method, path):
    for scope in SCOPES:
        if scope != required:
            headers = {"X-API-Key": get_key(f"only-{scope}")}
            assert (
                keyed.request(method, f"{path}%0A", json={}, headers=headers).status_code == 403
            ), scope


@pytest.mark.parametrize(("name", "count"), [("only-predict", None), ("both", 5)])
def test_explanations_include_training_rows_only_with_scope_for_rows(keyed, name, count):
    content = {"inputs": [ROW], "explain": True}
    answer = keyed.post("/predict", json=content, headers={"X-API-Key": get_key(name)})
    explanation = answer.json()["predictions"][0]["explanation"]
    nearest = explanation["nearest"]
    assert (nearest and len(nearest)) == count


def test_expired_key_is_refused_like_an_unknown_key(keyed):
    late, unknown = send(keyed, "late", "predict"), send(keyed, "nobody", "predict")
    assert (late.status_code, unknown.status_code) == (401, 401)
    assert late.content == unknown.content
    assert "models" not in keyed.get("/health/ready", headers={"X-API-Key": get_key("late")}).json()
    assert (
        "models" in keyed.get("/health/ready", headers={"X-API-Key": get_key("only-label")}).json()
    )


def test_key_expires_at_its_expiry_time():
    start = datetime.now(UTC)
    expiries = {"before": start - timedelta(seconds=1), "after": start + timedelta(hours=1)}
    keys = parse_keys(
        "".join(make_entry(name, ["read"], expiry.isoformat()) for name, expiry in expiries.items())
    )
    assert [keys.find(get_key(name).encode()).has_expired for name in expiries] == [True, False]
    assert keys.expiries == {name: expiry.timestamp() for name, expiry in expiries.items()}


def test_log_contains_names_of_keys_but_no_keys(serve, digits_store, tmp_path):
    (tmp_path / "keys.toml").write_text(FILE)
    settings = {"DUBITO_KEYS_FILE": str(tmp_path / "keys.toml"), "DUBITO_LOG": "json"}
    with serve(digits_store, **settings) as (url, process):
        with httpx.Client(base_url=url, timeout=60) as client:
            for name in ("all", "only-read", "late", "nobody"):
                send(client, name, "predict")
        process.terminate()
        log = process.communicate(timeout=60)[1]
    lines = [json.loads(line) for line in log.splitlines()]
    requests = [
        line
        for line in lines
        if line["logger"] == "dubito.requests" and line["route"] != "/health/live"
    ]
    assert [(line["key"], line["status"], line["reason"]) for line in requests] == [
        ("all", 200, None),
        ("only-read", 403, "forbidden"),
        ("late", 401, "expired_key"),
        (None, 401, "unauthorized"),
    ]
    assert "the-long-key-of" not in log


def replace_file(file, text):
    file.with_suffix(".new").write_text(text)
    file.with_suffix(".new").rename(file)


def test_key_file_is_reloaded_unless_it_is_invalid(serve, digits_store, tmp_path):
    file = tmp_path / "keys.toml"
    replace_file(file, make_entry("old", ["read"]))
    settings = {"DUBITO_KEYS_FILE": str(file), "DUBITO_POLL_INTERVAL_S": "0.05"}
    with (
        serve(digits_store, **settings) as (url, process),
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        assert send(client, "new", "read").status_code == 401
        replace_file(file, make_entry("old", ["read"]) + make_entry("new", ["read"]))
        wait_until(lambda: send(client, "new", "read").status_code == 200)
        assert send(client, "old", "read").status_code == 200
        replace_file(file, make_entry("new", ["read"]))
        wait_until(lambda: send(client, "old", "read").status_code == 401)
        replace_file(file, f'[[keys]]\nname = "worse"\nkey = "{SECRET}"\nscopes = ["everything"]\n')
        log_lines = []
        while "the previous keys stay" not in "".join(log_lines):
            log_lines.append(process.stderr.readline())
        assert send(client, "new", "read").status_code == 200
    messages = [
        line.split(" dubito: ")[1].strip()
        for line in log_lines
        if "eys: " in line or FILE_VARIABLE in line
    ]
    assert messages[:2] == ["keys: old, new", "keys: new"]
    assert messages[2].startswith(f"{FILE_VARIABLE}.keys.0.scopes.0: expected 'read', ")
    assert not any(
        secret in "".join(log_lines) for secret in (SECRET, get_key("old"), get_key("new"))
    )


def get_ring(file):
    return KeyRing(Settings(keys_file=file))


def test_current_names_are_read_from_the_current_file(tmp_path):
    file = tmp_path / "keys.toml"
    file.write_text(make_entry("old", ["read"]))
    ring = get_ring(file)
    rotated_entry = make_entry("old", ["read"]).replace(get_key("old"), get_key("next"))
    file.write_text(rotated_entry + make_entry("new", ["read"]))  # not polled yet
    assert ring.current_names() == {"old", "new"}
    assert ring.keys.find(get_key("old").encode()) is None
    assert ring.keys.find(get_key("next").encode()).name == "old"
    file.write_text("")
    assert ring.current_names() is None
    assert KeyRing(Settings()).current_names() is None


def test_invalid_key_file_and_its_repair_are_logged_once(tmp_path, caplog):
    file = tmp_path / "keys.toml"
    file.write_text(FILE)
    ring = get_ring(file)
    before = ring.keys
    caplog.set_level(logging.INFO)
    ring.reload()
    assert caplog.records == []
    for bad in ("", "[[keys]]", None):
        file.unlink() if bad is None else file.write_text(bad)
        ring.reload()
        ring.reload()
    assert ring.keys is before
    assert [record.levelname for record in caplog.records] == ["ERROR"] * 3
    file.write_text(FILE)
    ring.reload()
    assert caplog.records[-1].levelname == "INFO"
    assert ring.keys.names == before.names


GOOD = f'name = "a"\nsha256 = "{DIGEST}"\nscopes = ["read"]\n'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "keys: expected a value, got"),
        ("keys = []", "keys: expected at least 1 item"),
        (f"{SECRET}\n", "expected a TOML file, got invalid TOML, at line 1, column"),
        (f'[[keys]]\nname = "{SECRET}', "expected a TOML file, got invalid TOML"),
        ("a = " + "[" * 100_000, "expected a TOML file, got invalid TOML"),
        ("a = " + "1" * 5000, "expected a TOML file, got invalid TOML"),
        (f"{SECRET} = 1\n[[keys]]\n{GOOD}", "expected only the fields keys"),
        (f"[[keys]]\n{GOOD}{SECRET} = 1\n", "keys.0: expected only the fields"),
        (f'[[keys]]\n{GOOD}key = "{SECRET}"\n', "keys.0: expected one of key and sha256"),
        ('[[keys]]\nname = "a"\nscopes = ["read"]\n', "keys.0: expected one of key and sha256"),
        ('[[keys]]\nname = "a"\nscopes = ["read"]\nkey = "short"\n', "keys.0.key: expected 16"),
        (f'[[keys]]\nname = "a"\nscopes = ["read"]\nkey = "{SECRET} x"\n', "keys.0.key: expected"),
        (f'[[keys]]\nname = "a"\nscopes = ["read"]\nkey = "{SECRET}\\n"\n', "keys.0.key: expected"),
        (
            f'[[keys]]\nname = "a"\nscopes = ["read"]\nsha256 = "{SECRET}"\n',
            "keys.0.sha256: expected a string that matches",
        ),
        (
            f"[[keys]]\n{GOOD}".replace(DIGEST, DIGEST.upper()),
            "keys.0.sha256: expected a string that matches",
        ),
        (
            f"[[keys]]\n{GOOD}".replace('"a"', '"../a"'),
            "keys.0.name: expected a string that matches",
        ),
        (f"[[keys]]\n{GOOD}".replace('"read"', ""), "keys.0.scopes: expected at least 1 item"),
        (f"[[keys]]\n{GOOD}".replace('"read"', '"write"'), "keys.0.scopes.0: expected"),
        (
            f"[[keys]]\n{GOOD}".replace('["read"]', '"read"'),
            "keys.0.scopes: expected a valid array",
        ),
        (f"[[keys]]\n{GOOD}expires = 2999-01-01\n", "keys.0.expires: expected a valid datetime"),
        (f"[[keys]]\n{GOOD}expires = 2999-01-01T00:00:00\n", "keys.0.expires: expected"),
        (f"[[keys]]\n{GOOD}expires = '{FUTURE}'\n", "keys.0.expires: expected a valid datetime"),
        (
            f"[[keys]]\n{GOOD}models = []\n",
            "keys.0.models: expected at least 1 item",
        ),
        (
            f"[[keys]]\n{GOOD}models = ['m']\n".replace('"read"', '"metrics"'),
            "keys.0: expected no models, because metrics cover all models",
        ),
        (f"[[keys]]\n{GOOD}[[keys]]\n{GOOD}".replace('"a"', '"b"', 1), "expected unique keys"),
        ("#" * (1 << 20) + "\n", "at most 1048576 bytes"),
        (None, "a readable file"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_key_file_error_names_the_field_without_showing_secrets(tmp_path, text, expected):
    if text is not None:
        (tmp_path / "keys.toml").write_text(text)
    with pytest.raises(InvalidInput, match=f"^{FILE_VARIABLE}") as raised:
        get_ring(tmp_path / "keys.toml")
    assert expected in str(raised.value)
    assert not any(secret in str(raised.value) for secret in (SECRET, DIGEST, "\n"))


def test_key_file_cannot_be_combined_with_key_settings(tmp_path):
    (tmp_path / "keys.toml").write_text(FILE)
    for name in ("api_keys", "admin_key"):
        with pytest.raises(
            InvalidInput, match=f"^{FILE_VARIABLE}: expected no DUBITO_{name.upper()}"
        ):
            KeyRing(Settings(keys_file=tmp_path / "keys.toml", **{name: SECRET}))


def test_new_key_matches_its_entry():
    key, text = new_key("shop", ["predict", "acquire"], 90)
    keys: Keys = parse_keys(text)
    item = keys.find(key.encode())
    assert (item.name, item.scopes) == ("shop", {"predict", "acquire"})
    assert abs(item.expires - datetime.now(UTC) - timedelta(days=90)) < timedelta(minutes=1)
    assert key not in text
    assert new_key("shop", ["predict"])[0] != key
    assert "expires" not in tomllib.loads(new_key("shop", ["predict"])[1])["keys"][0]


@pytest.mark.parametrize(
    ("name", "scopes", "days", "message"),
    [
        ("a b", ["read"], None, "NAME: expected .*, got 'a b'"),
        ('"', ["read"], None, "NAME: expected"),
        ("a", ["read", ""], None, "--scopes: expected some of read,.*, got 'read,'"),
        ("a", ["read"], -1, "--days: expected more than 0 and at most 36500, got -1"),
        ("a", ["read"], float("nan"), "--days: expected .* got nan"),
        ("a", ["read"], float("inf"), "--days: expected .* got inf"),
        ("a", ["read"], 1e9, "--days: expected .* got 1e\\+09"),
    ],
)
def test_new_key_names_the_invalid_argument(name, scopes, days, message):
    with pytest.raises(InvalidInput, match=f"^{message}"):
        new_key(name, scopes, days)


def test_command_prints_key_to_stderr_and_entry_to_stdout():
    completed = run_service("key", "shop", "--scopes", "predict")
    assert completed.returncode == 0
    (key,) = re.findall(r"dubito_[\w-]{43}", completed.stderr)
    assert parse_keys(completed.stdout).find(key.encode()).name == "shop"
    completed = run_service("key", "shop", "--scopes", "everything")
    assert (completed.returncode, completed.stdout) == (2, "")
    assert "--scopes: expected some of read,predict," in completed.stderr
