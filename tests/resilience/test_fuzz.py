"""Requests that nobody thought of: whatever comes is answered, or refused with a problem that gives
nothing away."""

import io

import numpy as np
import orjson
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

FIELDS = (
    *(
        "model",
        "version",
        "inputs",
        "pool",
        "ids",
        "num_samples",
        "seed",
        "fpr",
        "fdr",
        "coverage",
        "return_samples",
    ),
    *("acquisition", "k"),
)
CANARY = "canary-3f9a"
quietly = settings(
    max_examples=150,
    database=None,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
    ],
)

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=20).filter(lambda text: text.isprintable()),
    st.sampled_from([CANARY, "latest", "digits", "1", 0, 1, 1e39, 5e-324, -0.0, 2**53, 10**9]),
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=10,
)


@st.composite
def rows(draw):
    """Rows that may be right: some elements, some rows, or their nesting are changed."""
    made = [
        draw(st.lists(st.integers(0, 16), min_size=64, max_size=64))
        for _ in range(draw(st.integers(1, 3)))
    ]
    for _ in range(draw(st.integers(0, 2))):
        row = draw(st.sampled_from(made))
        if row and isinstance(row, list):
            row[draw(st.integers(0, len(row) - 1))] = draw(values)
    if draw(st.booleans()):
        made[draw(st.integers(0, len(made) - 1))] = draw(values)
    return made


@st.composite
def requests(draw):
    """A request whose fields are right or not."""
    request = {draw(st.sampled_from(["inputs", "inputs", "pool"])): draw(rows())}
    for field in draw(st.lists(st.sampled_from(FIELDS), max_size=3, unique=True)):
        request[field] = draw(values)
    return request


def assert_answered(answer, store):
    """An answer is good, or a problem that repeats neither the request nor a path."""
    assert answer.status_code < 500, answer.text
    if answer.status_code != 200:
        assert answer.headers["content-type"] == "application/problem+json"
        assert {"type", "title", "status", "detail"} <= set(answer.json())
        assert answer.json()["status"] == answer.status_code
    assert CANARY not in answer.text
    assert str(store) not in answer.text
    assert "Traceback" not in answer.text


@pytest.mark.parametrize("path", ["/predict", "/acquire"])
def test_any_json_object_is_answered(client, digits_store, path):
    @quietly
    @given(request=requests())
    @example(request={"inputs": [[0] * 64], "version": CANARY})
    @example(request={"pool": [[0] * 64], "model": CANARY})
    @example(request={"pool": [[0] * 64], "acquisition": CANARY})
    @example(request={"pool": [[CANARY] * 64]})
    def answered(request):
        answer = client.post(
            path, content=orjson.dumps(request), headers={"Content-Type": "application/json"}
        )
        if (
            answer.status_code != 200 or "ids" not in request
        ):  # an answer names the rows by their ids
            assert_answered(answer, digits_store)

    answered()


@pytest.mark.parametrize("media_type", ["application/json", "application/x-npy"])
def test_any_change_of_bytes_is_answered(client, digits_store, digits_rows, media_type):
    file = io.BytesIO()
    np.save(file, digits_rows[:1].astype("u1"), allow_pickle=False)
    whole = (
        file.getvalue()
        if media_type.endswith("npy")
        else orjson.dumps({"inputs": digits_rows[:1].tolist()})
    )

    @quietly
    @given(
        place=st.one_of(st.integers(0, 130), st.integers(0, len(whole) - 1)),
        cut=st.integers(0, 4),
        new=st.one_of(
            st.binary(max_size=4),
            st.sampled_from([b"9" * 30, b"[" * 9, b"(", b"'''", b"\\ud800", b"-"]),
        ),
    )
    def answered(place, cut, new):
        body = whole[:place] + new + whole[place + cut :]
        assert_answered(
            client.post("/predict", content=body, headers={"Content-Type": media_type}),
            digits_store,
        )

    answered()
