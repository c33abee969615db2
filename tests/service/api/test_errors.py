import gzip
import socket
from urllib.parse import urlsplit

import numpy as np
import pytest

from service.api.problems import all_problems
from tests.support.files import npy_bytes

ROW = [0.0] * 64
JSON = {"Content-Type": "application/json"}
NPY = {"Content-Type": "application/x-npy"}
SMALL = {"DUBITO_MAX_BODY_BYTES": "4096", "DUBITO_MAX_ROWS": "3", "DUBITO_MAX_SAMPLES": "50"}
SMALL_LIMITS = {"MAX_ROW_DRAWS": 60, "MAX_ANSWER_NUMBERS": 100}


def assert_problem(answer, status, *words):
    """Check the status, body and detail of a problem response."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    content = answer.json()
    assert content["status"] == status
    assert content["type"] == f"/problems#{content['code']}"
    assert content["code"] in {code for code, *_ in all_problems()}
    assert content["detail"].startswith(f"{content['field']}: ")
    if content["errors"]:
        assert content["errors"][0] == {key: content[key] for key in ("field", "detail")}
        assert len(content["errors"]) <= 10
    assert content["title"]
    for word in words:
        assert word in content["detail"]
    assert len(content["detail"]) < 1000


def npy_with(header, data=b"", version=b"\x01\x00"):
    """Build an npy file from its header and data."""
    size = len(header).to_bytes(2 if version == b"\x01\x00" else 4, "little")
    return b"\x93NUMPY" + version + size + header.encode() + data


def header(descr="'<f4'", shape="(1, 64)"):
    return f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n"


@pytest.mark.parametrize(
    "body",
    [
        *(
            b"",
            b" ",
            b"{",
            b"nonsense",
            b"\xff\xfe{}",
            b"\xef\xbb\xbf{}",
            b"\x00",
            b"{} {}",
            b"{'inputs': []}",
        ),
        *(b"[]", b'[{"inputs": [[1]]}]', b"1", b'"text"', b"null", b"true"),
        *(
            b'{"inputs": [[%s]]}' % number
            for number in (b"NaN", b"Infinity", b"-Infinity", b"1e400", b"-1e999")
        ),
        b'{"inputs": [[1%s]]}' % (b"0" * 400),
        *(
            b'{"model": "\\ud800"}',
            b'{"\\udfff": 1}',
            b'{"ids": ["\\ud83d"]}',
            b'{"model": "\xed\xa0\x80"}',
        ),
        *(
            b"[" * 100_000,
            b'{"inputs":' * 50_000,
            b'{"inputs": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        ),
    ],
    ids=lambda body: repr(body[:24]),
)
@pytest.mark.parametrize("path", ["/predict", "/acquire"])
def test_body_must_be_a_json_object(client, path, body):
    assert_problem(client.post(path, content=body, headers=JSON), 422, "body: expected ")


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ([], ("inputs: expected at least one row",)),
        ([[]], ("inputs.0: expected an array of 64", "or 64 numbers flat", "got an array of 0")),
        ([[[]]], ("inputs.0: expected an array of 8", "got an array of 1")),
        ([ROW[:63]], ("inputs.0: expected an array of 64", "got an array of 63")),
        ([ROW, [*ROW, 0]], ("inputs.1: expected an array of 64", "got an array of 65")),
        ([ROW, 5], ("inputs.1: expected an array of 64", "got 5")),
        (ROW, ("inputs.0: expected an array of 64", "got 0.0")),
        ([ROW, None], ("inputs.1: expected an array of 64", "got null")),
        ([ROW, "a row"], ("inputs.1: expected an array of 64", "got a string of 5 characters")),
        (["x" * 64], ("inputs.0: expected an array of 64", "got a string of 64 characters")),
        ([{"a": 1}], ("inputs.0: expected an array of 64", "got an object")),
        ([[ROW[:8]] * 7], ("inputs.0: expected an array of 8", "(8, 8)", "got an array of 7")),
        ([[*[ROW[:8]] * 7, ROW[:7]]], ("inputs.0.7: expected an array of 8", "got an array of 7")),
        ([[ROW[:8]] * 8, ROW], ("inputs.1: expected an array of 8", "got an array of 64")),
        ([[*[ROW[:8]] * 7, [*ROW[:7], "1"]]], ("inputs.0.7.7: expected a number", "got a string")),
        (
            [[*[ROW[:8]] * 7, [*ROW[:7], [1]]]],
            ("inputs.0.7.7: expected a number", "got an array of 1"),
        ),
        (
            [ROW, [*ROW[:63], "1.5"]],
            ("inputs.1.63: expected a number", "got a string of 3 characters"),
        ),
        ([[True, *ROW[:63]]], ("inputs.0.0: expected a number", "got a boolean")),
        ([[None, *ROW[:63]]], ("inputs.0.0: expected a number", "got null")),
        ([[*ROW[:63], {}]], ("inputs.0.63: expected a number", "got an object")),
        ([[*ROW[:63], 1e39]], ("inputs.0.63: expected a finite number in float32's range",)),
        ([ROW, [-1e39, *ROW[:63]]], ("inputs.1.0: expected a finite number in float32's range",)),
        ([[10**60, *ROW[:63]]], ("inputs.0.0: expected a finite number in float32's range",)),
        ("rows", ("inputs: expected a valid list", "got a string of 4 characters")),
        ({"0": ROW}, ("inputs: expected a valid list", "got an object")),
        (None, ("inputs: expected a valid list", "got null")),
        (7, ("inputs: expected a valid list", "got 7")),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_invalid_rows_are_refused_with_their_position(client, inputs, words):
    assert_problem(client.post("/predict", json={"inputs": inputs}), 422, *words)
    pool = [word.replace("inputs", "pool") for word in words]
    assert_problem(client.post("/acquire", json={"pool": inputs}), 422, *pool)


NAMES = [
    "",
    " ",
    "nothing",
    "../../etc/passwd",
    "/etc/passwd",
    "a/b",
    "..",
    "x" * 300,
    "a\x00b",
    "digits\x00",
    "digits\n",
    "é",
]


@pytest.mark.parametrize("name", NAMES, ids=repr)
def test_unknown_model_is_not_found(client, name):
    answer = client.post("/predict", json={"inputs": [ROW], "model": name})
    assert_problem(answer, 404, "model: expected one of digits")


@pytest.mark.parametrize("version", [*NAMES, "0", "2", "-1", "01", "1.0", "999999999999"], ids=repr)
def test_unknown_version_is_not_found(client, version):
    answer = client.post("/predict", json={"inputs": [ROW], "version": version})
    assert_problem(
        answer, 404, "version: expected one of 1, latest of model digits, got a string of"
    )


@pytest.mark.parametrize(
    ("path", "field", "value", "words"),
    [
        *(
            ("/predict", "num_samples", value, "expected ")
            for value in (0, -1, 1.5, 1.0, "10", True, [], {}, 1e30)
        ),
        ("/predict", "num_samples", 0, "greater than or equal to 1, got 0"),
        ("/predict", "num_samples", 10**9, "at most 1000, got 1000000000"),
        ("/predict", "num_samples", 10**30, "a valid integer"),
        *(
            ("/predict", "seed", value, "expected ")
            for value in (-1, 2**53, 1.0, 1.5, "7", True, 2**64, -(2**63), [])
        ),
        *(
            ("/predict", "fpr", value, "expected ")
            for value in (0, 1, -1, 2, 0.0, 1.0, "0.05", True, [0.05], {})
        ),
        ("/predict", "fpr", 1e-9, "at least 0.004"),
        *(
            ("/predict", field, value, "expected ")
            for field in ("fdr", "risk")
            for value in (0, 1, -1, "0.05", True, [])
        ),
        ("/predict", "fdr", 1e-9, "at least 0.004"),
        *(
            ("/predict", "coverage", value, "expected ")
            for value in (0, 1, -0.1, 1.1, None, "0.9", False, [])
        ),
        *(
            ("/predict", "return_samples", value, "expected ")
            for value in (0, 1, "true", None, [], {})
        ),
        *(("/predict", "model", value, "expected ") for value in (1, True, [], {}, ["digits"])),
        *(("/predict", "version", value, "expected ") for value in (1, None, [], {})),
        *(("/acquire", "k", value, "expected ") for value in (0, -1, 1.5, "3", None, True, [])),
        *(
            ("/acquire", "acquisition", value, "'bald'")
            for value in ("", "BALD", "sum", None, 1, ["bald"])
        ),
        *(("/acquire", "seed", value, "expected ") for value in (-1, 2**53, "7")),
        ("/predict", "pool", [], "an unknown field"),
        ("/predict", "sead", 7, "an unknown field"),
        ("/predict", "", 7, "an unknown field"),
        ("/acquire", "inputs", [ROW], "an unknown field"),
        ("/acquire", "fpr", 0.1, "an unknown field"),
        ("/acquire", "fdr", 0.1, "an unknown field"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_invalid_field_is_refused_by_name(client, path, field, value, words):
    request = {"inputs" if path == "/predict" else "pool": [ROW], field: value}
    assert_problem(client.post(path, json=request), 422, f"{field}: expected ", words)


def test_problem_lists_up_to_ten_invalid_fields(client):
    invalid_fields = {"num_samples": 0, "seed": "7", "fpr": 2, "sead": 7}
    problem = client.post("/predict", json={"inputs": [ROW], **invalid_fields}).json()
    assert [error["field"] for error in problem["errors"]] == list(invalid_fields)
    assert problem["errors"][1]["detail"].endswith("got a string of 1 characters")
    extras = {f"field{i}": 0 for i in range(100)}
    assert len(client.post("/predict", json={"inputs": [ROW], **extras}).json()["errors"]) == 10
    labels = [{"id": str(i), "label": "three", "input": ROW} for i in range(20)]
    problem = client.post("/labels", json={"labels": labels}).json()
    assert [e["field"] for e in problem["errors"]] == [f"labels.{i}.label" for i in range(10)]
    assert problem["errors"][0]["detail"].endswith("got a string of 5 characters")


def test_problem_type_links_to_its_description(client):
    problem = client.get("/models/nothing").json()
    page, _, code = problem["type"].partition("#")
    answer = client.get(page)
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert f'id="{code}"' in answer.text


def test_fpr_and_fdr_are_mutually_exclusive(client):
    request = {"inputs": [ROW], "fpr": 0.05, "fdr": 0.05}
    assert_problem(
        client.post("/predict", json=request), 422, "fdr: expected either fdr or fpr", "got both"
    )


@pytest.mark.parametrize("field", ["fpr", "fdr"])
def test_unsupported_rate_is_refused_in_every_request_format(client, field):
    words = (
        f"{field}: expected at least 0.00452489, the smallest rate that digits supports, got 0.004"
    )
    rows, rate = npy_bytes(np.zeros((1, 64))), {field: "0.004"}
    assert_problem(client.post("/predict", json={"inputs": [ROW], field: 0.004}), 422, words)
    assert_problem(client.post("/predict", params=rate, content=rows, headers=NPY), 422, words)
    assert_problem(client.post("/predict", data=rate, files=[("inputs", ("x", rows))]), 422, words)
    assert_problem(
        client.post("/predict", params=rate, files=[("inputs", ("x", rows))]), 422, words
    )


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/predict", "inputs: expected a value, got none"),
        ("/acquire", "pool: expected at least one row, got none"),
    ],
)
def test_missing_rows_are_reported_by_field_name(client, path, expected):
    assert_problem(client.post(path, json={}), 422, expected)


def test_long_unknown_field_name_is_truncated_in_the_error(client):
    answer = client.post("/predict", json={"inputs": [ROW], "secret" * 100: 1})
    assert_problem(answer, 422, "an unknown field")
    assert "secret" * 20 not in answer.text


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            npy_with("{'descr': '|O', 'fortran_order': False, 'shape': (2,)}", b"any bytes"),
            "dtype |O",
        ),
        (npy_bytes(np.zeros((1, 64), dtype=np.complex64)), "dtype <c8"),
        (npy_bytes(np.zeros((1, 64), dtype=bool)), "dtype |b1"),
        (npy_bytes(np.zeros((1, 64), dtype=[("a", "f4"), ("b", "f4")])), "dtype |V8"),
        (npy_bytes(np.zeros((1, 64), dtype="S4")), "dtype |S4"),
        (npy_bytes(np.zeros((1, 64), dtype="M8[s]")), "dtype <M8[s]"),
        (npy_bytes(np.zeros((1, 64), dtype=np.longdouble)), "dtype <f16"),
        (npy_bytes(np.zeros((1, 63))), "shape (1, 63)"),
        (npy_bytes(np.zeros((1, 8, 9))), "shape (1, 8, 9)"),
        (npy_bytes(np.zeros((1, 1, 8, 8))), "shape (1, 1, 8, 8)"),
        (npy_bytes(np.zeros(64)), "shape (64,)"),
        (npy_bytes(np.zeros(())), "another shape"),
        (npy_bytes(np.zeros((0, 64))), "another shape"),
        (npy_bytes(np.zeros((5, 0))), "another shape"),
        (npy_bytes(np.full((1, 64), np.nan)), "inputs.0.0: expected a finite number"),
        (npy_bytes(np.full((1, 64), -np.inf, dtype=np.float32)), "inputs.0.0: expected a finite"),
        (npy_bytes(np.full((1, 64), 1e39)), "inputs.0.0: expected a finite number"),
        (npy_bytes(np.zeros((2, 64)))[:-1], "1023 bytes of data"),
        (npy_bytes(np.zeros((2, 64))) + b"\0", "1025 bytes of data"),
        (npy_bytes(np.zeros((2, 64)))[:128], "0 bytes of data"),
        (npy_with(header(shape="(1000000000000000, 64)")), "0 bytes of data"),
        (npy_with(header(shape=f"({10**30}, 0)")), "another shape"),
        (npy_with(header(shape=f"(0, {10**30})")), "another shape"),
        (npy_with(header(shape="(-1, -64)"), bytes(256)), "another shape"),
        (npy_with(header(shape="(True, 64)"), bytes(256)), "another shape"),
        (npy_with(header(shape=f"({'1, ' * 70})"), bytes(4)), "another shape"),
        *(
            (body, "body: expected an npy file")
            for body in (
                *(
                    b"",
                    b"\x93NUMPY",
                    b"\x93NUMPX\x01\x00",
                    b"PK\x03\x04",
                    b'{"inputs": []}',
                    npy_bytes(np.zeros(64))[:40],
                ),
                npy_with(header(), bytes(256), b"\x03\x00"),
                npy_with(header(), bytes(256), b"\x09\x00"),
                npy_with("{'descr': ("),
                npy_with("{'descr': '''"),
                npy_with("[" * 5000),
                npy_with("-" * 9000 + "1"),
                npy_with(" " * 60_000),
                npy_with("__import__('os').getcwd()"),
                npy_with(header(descr="()")),
                npy_with(header(descr="None")),
                npy_with(header(shape="64")),
                npy_with(header(descr="'<f4\0'"), bytes(256)),
            )
        ),
    ],
    ids=lambda value: repr(value[:60])[-50:],
)
def test_invalid_npy_body_is_refused(client, body, words):
    assert_problem(client.post("/predict", content=body, headers=NPY), 422, words)


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("sead=7", "sead: expected one of"),
        ("seed=7&seed=8", "query: seed: expected one value"),
        ("inputs=[]", "query: inputs: expected one value"),
        ("seed=seven", "query: seed: expected a JSON value"),
        ("seed=", "query: seed: expected a JSON value"),
        ("seed=%ff", "query: seed: expected a JSON value"),
        ("seed=1.5", "seed: expected a valid integer"),
        ("seed=true", "seed: expected a valid integer"),
        ("fpr=NaN", "query: fpr: expected a JSON value"),
        ("fpr=2", "fpr: expected less than 1, got 2"),
        ("return_samples=1", "return_samples: expected a valid boolean"),
        ("%ed%a0%80=1", "an unknown field"),
    ],
)
def test_invalid_query_with_npy_body_is_refused(client, query, words):
    answer = client.post(f"/predict?{query}", content=npy_bytes(np.zeros((1, 64))), headers=NPY)
    assert_problem(answer, 422, words)


@pytest.mark.parametrize("query", ["seed=7", "x", "%ff=%00"])
def test_query_with_json_body_is_refused(client, query):
    assert_problem(
        client.post(f"/predict?{query}", json={"inputs": [ROW]}),
        422,
        "query: expected no parameters",
    )


@pytest.mark.parametrize(
    ("content_type", "description"),
    [
        (None, "none"),
        ("", "none"),
        ("text/plain", "another media type"),
        ("multipart/mixed; boundary=x", "another media type"),
        ("a" * 5000, "another media type"),
    ],
)
def test_unsupported_media_type_is_refused(client, content_type, description):
    headers = {} if content_type is None else {"Content-Type": content_type}
    answer = client.post("/predict", content=b"{}", headers=headers)
    assert_problem(answer, 415, "Content-Type: expected application/json", f"got {description}")


@pytest.mark.parametrize(
    "content_type", ["application/json; charset=utf-8", "Application/JSON", "application/json ;x"]
)
def test_media_type_ignores_case_and_parameters(client, content_type):
    body = b'{"inputs": [%s]}' % str(ROW).encode()
    assert (
        client.post("/predict", content=body, headers={"Content-Type": content_type}).status_code
        == 200
    )


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "identity, gzip"])
def test_encoded_body_is_refused(client, encoding):
    headers = {**JSON, "Content-Encoding": encoding}
    assert_problem(
        client.post("/predict", content=gzip.compress(b"{}"), headers=headers),
        415,
        "Content-Encoding",
    )


@pytest.mark.parametrize(
    "path", ["/nothing", "/predict/x", "/models/a/b", "/models/..%2f..%2fetc", "/.env"]
)
def test_unknown_path_is_not_found(client, path):
    assert_problem(client.get(path), 404, "path: expected")


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        *(("GET", "/predict", "POST"), ("PUT", "/predict", "POST"), ("DELETE", "/acquire", "POST")),
        *(
            ("POST", "/models", "GET, HEAD"),
            ("POST", "/health/live", "GET, HEAD"),
            ("DELETE", "/models/digits", "GET, HEAD"),
        ),
        *(("POST", "/jobs/0", "DELETE, GET, HEAD"), ("GET", "/acquire/jobs", "POST")),
    ],
)
def test_wrong_method_is_refused_with_the_allowed_methods(client, method, path, allowed):
    answer = client.request(method, path)
    assert_problem(answer, 405, f"method: expected {allowed}, got {method}")
    assert answer.headers["allow"] == allowed


def test_last_value_of_a_duplicate_json_key_is_used(client):
    body = b'{"inputs": [%s], "seed": 1, "seed": 2}' % str(ROW).encode()
    answer = client.post("/predict", content=body, headers=JSON)
    assert answer.status_code == 200
    assert answer.json()["seed"] == 2


@pytest.mark.parametrize(
    "length", ["abc", "-1", "5_0", "+5", "1e3", "", "9" * 30, "5\r\nContent-Length: 6"]
)
def test_invalid_content_length_is_refused_by_the_server(client, service_url, length):
    head = f"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    with socket.create_connection(
        (urlsplit(service_url).hostname, urlsplit(service_url).port), timeout=30
    ) as connection:
        connection.sendall(head.encode())
        assert connection.recv(1000).startswith(b"HTTP/1.1 400 ")
    assert client.get("/health/live").status_code == 200


def test_request_limits_are_enforced(open_client, digits_store):
    with open_client(digits_store, limits=SMALL_LIMITS, **SMALL) as client:
        # Oversized bodies are refused before parsing, by their announced length or while streaming.
        assert_problem(
            client.post("/predict", content=b" " * 4097, headers=JSON),
            413,
            "body: expected at most 4096",
        )
        chunks = iter([b" " * 1000] * 5)
        assert_problem(
            client.post("/predict", content=chunks, headers=JSON),
            413,
            "body: expected at most 4096",
        )
        rows = [[0] * 64] * 4
        assert_problem(
            client.post("/predict", json={"inputs": rows}),
            413,
            "inputs: expected at most 3 rows, got 4",
        )
        answer = client.post(
            "/predict", content=npy_bytes(np.zeros((4, 64), dtype="u1")), headers=NPY
        )
        assert_problem(answer, 413, "inputs: expected at most 3 rows, got 4")
        assert_problem(
            client.post("/acquire", json={"pool": rows, "num_samples": 20}),
            413,
            "rows x num_samples: expected at most 60",
        )
        answer = client.post("/predict", json={"inputs": rows[:3], "num_samples": 30})
        assert_problem(answer, 413, "rows x num_samples: expected at most 60, got 90")
        answer = client.post("/predict", json={"inputs": rows[:1], "num_samples": 51})
        assert_problem(answer, 422, "num_samples: expected at most 50, got 51")
        answer = client.post(
            "/predict", json={"inputs": rows[:1], "num_samples": 20, "return_samples": True}
        )
        assert_problem(
            answer, 413, "return_samples: expected at most 100 numbers to return, got 200"
        )
        answer = client.post(
            "/predict", json={"inputs": rows[:1], "num_samples": 10, "return_samples": True}
        )
        assert answer.status_code == 200


def test_error_names_the_invalid_row_of_a_long_request(client):
    rows = [[0.0] * 64] * 3000
    for index, invalid_row, expected in (
        (2500, [*[0.0] * 63, "x"], "pool.2500.63: expected a number, got a string"),
        (2999, [0.0] * 63, "pool.2999: expected an array of 64"),
        (1024, [*[0.0] * 5, 1e39, *[0.0] * 58], "pool.1024.5: expected a finite number"),
    ):
        pool = [*rows[:index], invalid_row, *rows[index + 1 :]]
        answer = client.post("/acquire", json={"pool": pool, "num_samples": 1})
        assert answer.status_code == 422
        assert answer.json()["detail"].startswith(expected)
