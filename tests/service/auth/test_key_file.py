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
ASKED = {
    "read": ("GET", "/models", None, 200),
    "predict": ("POST", "/predict", {"inputs": [ROW]}, 200),
    "acquire": ("POST", "/acquire", {"pool": [ROW], "k": 1}, 200),
    "label": ("POST", "/labels", {"labels": [{"id": "a", "label": "3", "input": ROW}]}, 200),
    "rows": ("GET", "/predict/examples", None, 200),
    "metrics": ("GET", "/metrics", None, 200),
    "admin": ("POST", "/admin/refresh", None, 200),
}


def entry(name, scopes, expires=None, is_hashed=False):
    key = get_key(name)
    options = f'sha256 = "{sha256(key.encode()).hexdigest()}"' if is_hashed else f'key = "{key}"'
    end = "" if expires is None else f"expires = {expires}\n"
    return f'[[keys]]\nname = "{name}"\n{options}\nscopes = {json.dumps(scopes)}\n{end}'


def get_key(name):
    return f"the-long-key-of-{name}"


FILE = "".join(
    [
        *(entry(f"only-{scope}", [scope], is_hashed=scope == "predict") for scope in SCOPES),
        entry("all", list(SCOPES), FUTURE, is_hashed=True),
        entry("late", list(SCOPES), PAST),
        entry("both", ["predict", "rows"]),
    ]
)


def ask(client, name, scope):
    method, path, content, _ = ASKED[scope]
    return client.request(method, path, json=content, headers={"X-API-Key": get_key(name)})


@pytest.fixture(scope="module")
def keyed(tmp_path_factory, digits_store):
    """A client of a service with a file of keys."""
    file = tmp_path_factory.mktemp("secrets") / "keys.toml"
    file.write_text(FILE)
    with open_client(digits_store, DUBITO_KEYS_FILE=str(file)) as client:
        yield client


@pytest.mark.parametrize("needed", ASKED)
def test_a_key_does_what_its_scopes_say_and_nothing_else(keyed, needed):
    for scope in SCOPES:
        answer = ask(keyed, f"only-{scope}", needed)
        if scope == needed:
            assert answer.status_code == ASKED[needed][3]
        else:
            assert answer.status_code == 403
            assert answer.headers["content-type"] == "application/problem+json"
            assert (
                answer.json()["detail"]
                == f"key: expected a key with the scope {needed}, got a key without it"
            )
            assert f'scope="{needed}"' in answer.headers["WWW-Authenticate"]
    assert ask(keyed, "all", needed).status_code == 200


@pytest.mark.parametrize(
    ("needed", "method", "path"),
    [
        *((scope, *asked[:2]) for scope, asked in ASKED.items()),
        ("label", "POST", "/label-studio/digits/webhook"),
        ("predict", "POST", "/v2/models/digits/infer"),
        ("predict", "POST", "/invocations"),
    ],
)
def test_a_new_line_at_a_path_s_end_opens_nothing(keyed, needed, method, path):
    for scope in SCOPES:
        if scope != needed:
            headers = {"X-API-Key": get_key(f"only-{scope}")}
            assert (
                keyed.request(method, f"{path}%0A", json={}, headers=headers).status_code == 403
            ), scope


@pytest.mark.parametrize(("name", "count"), [("only-predict", None), ("both", 5)])
def test_explanations_name_training_rows_only_with_the_scope_for_rows(keyed, name, count):
    content = {"inputs": [ROW], "explain": True}
    answer = keyed.post("/predict", json=content, headers={"X-API-Key": get_key(name)})
    explanation = answer.json()["predictions"][0]["explanation"]
    nearest = explanation["nearest"]
    assert (nearest and len(nearest)) == count


def test_a_key_that_has_expired_is_refused_as_an_unknown_one_is(keyed):
    late, unknown = ask(keyed, "late", "predict"), ask(keyed, "nobody", "predict")
    assert (late.status_code, unknown.status_code) == (401, 401)
    assert late.content == unknown.content
    assert "models" not in keyed.get("/health/ready", headers={"X-API-Key": get_key("late")}).json()
    assert (
        "models" in keyed.get("/health/ready", headers={"X-API-Key": get_key("only-label")}).json()
    )


def test_a_key_ends_when_its_time_is_over():
    now = datetime.now(UTC)
    ends = {"before": now - timedelta(seconds=1), "after": now + timedelta(hours=1)}
    keys = parse_keys("".join(entry(name, ["read"], end.isoformat()) for name, end in ends.items()))
    assert [keys.find(get_key(name).encode()).has_expired for name in ends] == [True, False]
    assert keys.expiries == {name: end.timestamp() for name, end in ends.items()}


def test_the_log_says_which_key_asked_and_never_the_key(serve, digits_store, tmp_path):
    (tmp_path / "keys.toml").write_text(FILE)
    settings = {"DUBITO_KEYS_FILE": str(tmp_path / "keys.toml"), "DUBITO_LOG": "json"}
    with serve(digits_store, **settings) as (url, process):
        with httpx.Client(base_url=url, timeout=60) as client:
            for name in ("all", "only-read", "late", "nobody"):
                ask(client, name, "predict")
        process.terminate()
        message = process.communicate(timeout=60)[1]
    lines = [json.loads(line) for line in message.splitlines()]
    request = [
        line
        for line in lines
        if line["logger"] == "dubito.requests" and line["route"] != "/health/live"
    ]
    assert [(line["key"], line["status"], line["reason"]) for line in request] == [
        ("all", 200, None),
        ("only-read", 403, "forbidden"),
        ("late", 401, "expired_key"),
        (None, 401, "unauthorized"),
    ]
    assert "the-long-key-of" not in message


def replace(file, text):
    file.with_suffix(".new").write_text(text)
    file.with_suffix(".new").rename(file)


def test_keys_come_and_go_without_a_restart_and_a_bad_file_changes_nothing(
    serve, digits_store, tmp_path
):
    file = tmp_path / "keys.toml"
    replace(file, entry("old", ["read"]))
    settings = {"DUBITO_KEYS_FILE": str(file), "DUBITO_POLL_INTERVAL_S": "0.05"}
    with (
        serve(digits_store, **settings) as (url, process),
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        assert ask(client, "new", "read").status_code == 401
        replace(file, entry("old", ["read"]) + entry("new", ["read"]))
        wait_until(lambda: ask(client, "new", "read").status_code == 200)
        assert ask(client, "old", "read").status_code == 200
        replace(file, entry("new", ["read"]))
        wait_until(lambda: ask(client, "old", "read").status_code == 401)
        replace(file, f'[[keys]]\nname = "worse"\nkey = "{SECRET}"\nscopes = ["everything"]\n')
        message = []
        while "the previous keys stay" not in "".join(message):
            message.append(process.stderr.readline())
        assert ask(client, "new", "read").status_code == 200
    output = [
        line.split(" dubito: ")[1].strip()
        for line in message
        if "eys: " in line or FILE_VARIABLE in line
    ]
    assert output[:2] == ["keys: old, new", "keys: new"]
    assert output[2].startswith(f"{FILE_VARIABLE}.keys.0.scopes.0: expected 'read', ")
    assert not any(
        displayed in "".join(message) for displayed in (SECRET, get_key("old"), get_key("new"))
    )


def get_ring(file):
    return KeyRing(Settings(keys_file=file))


def test_current_names_are_those_of_a_readable_file(tmp_path):
    file = tmp_path / "keys.toml"
    file.write_text(entry("old", ["read"]))
    ring = get_ring(file)
    rotated = entry("old", ["read"]).replace(get_key("old"), get_key("next"))
    file.write_text(rotated + entry("new", ["read"]))  # no poll has seen it yet
    assert ring.current_names() == {"old", "new"}
    assert ring.keys.find(get_key("old").encode()) is None
    assert ring.keys.find(get_key("next").encode()).name == "old"
    file.write_text("")
    assert ring.current_names() is None
    assert KeyRing(Settings()).current_names() is None


def test_a_file_that_became_bad_is_said_once_and_its_mending_too(tmp_path, caplog):
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
def test_a_wrong_file_is_refused_by_its_field_without_being_shown(tmp_path, text, expected):
    if text is not None:
        (tmp_path / "keys.toml").write_text(text)
    with pytest.raises(InvalidInput, match=f"^{FILE_VARIABLE}") as raised:
        get_ring(tmp_path / "keys.toml")
    assert expected in str(raised.value)
    assert not any(displayed in str(raised.value) for displayed in (SECRET, DIGEST, "\n"))


def test_the_file_takes_the_place_of_lists(tmp_path):
    (tmp_path / "keys.toml").write_text(FILE)
    for name in ("api_keys", "admin_key"):
        with pytest.raises(
            InvalidInput, match=f"^{FILE_VARIABLE}: expected no DUBITO_{name.upper()}"
        ):
            KeyRing(Settings(keys_file=tmp_path / "keys.toml", **{name: SECRET}))


def test_a_new_key_is_what_its_entry_says():
    key, text = new_key("shop", ["predict", "acquire"], 90)
    actual: Keys = parse_keys(text)
    item = actual.find(key.encode())
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


def test_the_command_gives_the_key_to_the_person_and_the_entry_to_the_file():
    completed = run_service("key", "shop", "--scopes", "predict")
    assert completed.returncode == 0
    (key,) = re.findall(r"dubito_[\w-]{43}", completed.stderr)
    assert parse_keys(completed.stdout).find(key.encode()).name == "shop"
    completed = run_service("key", "shop", "--scopes", "everything")
    assert (completed.returncode, completed.stdout) == (2, "")
    assert "--scopes: expected some of read,predict," in completed.stderr
