import copy
import io

import httpx
import numpy as np
import pytest

from dubito.endpoints import Endpoints
from dubito.errors import (
    AnswerError,
    Conflict,
    DeadlineExceeded,
    DubitoError,
    Forbidden,
    InvalidInput,
    JobFailed,
    NoAnswer,
    NoSpace,
    NotFound,
    NotReady,
    Overloaded,
    ServerError,
    TooLarge,
    Unauthorized,
    make_error,
)
from dubito.retries import MAX_PAUSE_S, Limits, Pause, Request, send

LIMITS = Limits(timeout_s=90.0, retries=2)
CALLS = Endpoints()
CALLS.limits = LIMITS
LOST = httpx.ReadError("cut")


def problem(status, detail="the service says so", **headers):
    return httpx.Response(status, json={"detail": detail}, headers=headers)


REQUEST = Request("POST", "/predict", content=b"", has_rows=True)


def run_steps(steps, *responses):
    replies, pauses, step = iter(responses), [], next(steps)
    try:
        while True:
            if isinstance(step, Pause):
                pauses.append(step.seconds)
                step = steps.send(None)
            else:
                step = steps.send(next(replies))
    except StopIteration as end:
        result = end.value
    except DubitoError as error:
        result = error
    assert next(replies, None) is None, "unused responses"
    return result, pauses


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("is_repeatable", [True, False])
def test_retry_after_is_respected(status, is_repeatable):
    success = httpx.Response(200, json={})
    steps = send(REQUEST, LIMITS, is_repeatable)
    result, pauses = run_steps(steps, problem(status, **{"Retry-After": "7"}), success)
    assert result is success
    assert len(pauses) == 1
    assert 7 <= pauses[0] <= 7 * 1.25


@pytest.mark.parametrize(
    "refusal",
    [
        problem(503),
        problem(429),
        problem(500, **{"Retry-After": "1"}),
        problem(503, **{"Retry-After": "3600"}),
    ],
    ids=["503", "429", "500", "503 with long pause"],
)
def test_other_refusals_raise_immediately(refusal):
    result, pauses = run_steps(send(REQUEST, LIMITS), refusal)
    assert isinstance(result, AnswerError)
    assert (result.status, pauses) == (refusal.status_code, [])


def test_number_of_retries_is_limited():
    refusal = problem(429, **{"Retry-After": "2"})
    result, pauses = run_steps(send(REQUEST, LIMITS), refusal, refusal, refusal)
    assert isinstance(result, Overloaded)
    assert (result.retry_after_s, len(pauses)) == (2, LIMITS.retries)


@pytest.mark.parametrize(
    "error", [httpx.ConnectError("no"), httpx.ConnectTimeout("no"), httpx.PoolTimeout("no")]
)
def test_unsent_request_is_always_retried(error):
    success = httpx.Response(200, json={})
    result, pauses = run_steps(send(REQUEST, LIMITS, is_repeatable=False), error, error, success)
    assert result is success
    assert 0 < pauses[0] <= 0.5
    assert 0.5 <= pauses[1] <= 1


@pytest.mark.parametrize("error", [LOST, httpx.WriteError("cut"), httpx.RemoteProtocolError("cut")])
def test_interrupted_request_is_retried_only_if_repeatable(error):
    success = httpx.Response(200, json={})
    assert run_steps(send(REQUEST, LIMITS), error, success)[0] is success
    result, pauses = run_steps(send(REQUEST, LIMITS, is_repeatable=False), error)
    assert isinstance(result, NoAnswer)
    assert pauses == []
    assert result.__cause__ is error


def test_job_requests_are_not_retried():
    for steps in (
        Endpoints.predict_job(CALLS, np.ones((1, 2))),
        Endpoints.acquire_job(CALLS, np.ones((1, 2)), k=1),
    ):
        assert isinstance(run_steps(steps, LOST)[0], NoAnswer)


@pytest.mark.parametrize(("keep", "attempts"), [(True, 1), (False, 3)])
def test_interrupted_acquire_is_retried_only_without_keep(keep, attempts):
    steps = Endpoints.acquire(CALLS, np.ones((2, 2)), k=1, keep=keep, ids=["a", "b"])
    assert isinstance(run_steps(steps, *[LOST] * attempts)[0], NoAnswer)


def test_pauses_after_lost_connections_are_limited():
    _, pauses = run_steps(send(REQUEST, Limits(90.0, 9)), *[LOST] * 10)
    assert max(pauses) <= MAX_PAUSE_S


def test_read_timeout_is_not_retried():
    result, pauses = run_steps(send(REQUEST, LIMITS), httpx.ReadTimeout(""))
    assert isinstance(result, DeadlineExceeded)
    assert pauses == []


def test_deadline_is_sent_and_limits_timeouts_and_pauses():
    limits = LIMITS.within(20.0)
    steps = send(REQUEST, limits)
    request = next(steps)
    assert request.timeout_s == float(request.query["deadline_s"])
    assert 19 < request.timeout_s <= 20
    with pytest.raises(Overloaded):
        steps.send(problem(429, **{"Retry-After": "21"}))
    with pytest.raises(DeadlineExceeded):
        next(send(REQUEST, LIMITS.within(0.0)))


def test_deadline_during_connection_raises_deadline_exceeded():
    result, pauses = run_steps(send(REQUEST, LIMITS.within(0.2)), httpx.ConnectTimeout(""))
    assert isinstance(result, DeadlineExceeded)
    assert pauses == []


def test_no_deadline_is_sent_by_default():
    request = next(send(REQUEST, LIMITS))
    assert (request.query, request.timeout_s) == ({}, 90.0)


@pytest.mark.parametrize(
    ("status", "exception"),
    [
        (400, AnswerError),
        (401, Unauthorized),
        (403, Forbidden),
        (404, NotFound),
        (408, DeadlineExceeded),
        (409, Conflict),
        (413, TooLarge),
        (422, InvalidInput),
        (429, Overloaded),
        (500, ServerError),
        (502, ServerError),
        (503, NotReady),
        (504, DeadlineExceeded),
        (507, NoSpace),
    ],
)
def test_each_status_has_its_exception(status, exception):
    error = make_error(problem(status, "labels.3.id: expected another, got one of them"))
    assert type(error) is exception
    assert str(error) == "labels.3.id: expected another, got one of them"
    if status not in (408, 504):
        assert error.field == "labels.3.id"


@pytest.mark.parametrize(
    "error",
    [make_error(problem(422)), make_error(problem(429), 3.0), JobFailed("a", "is failed")],
    ids=str,
)
def test_errors_can_be_copied(error):
    clone = copy.deepcopy(error)
    assert (type(clone), str(clone), vars(clone)) == (type(error), str(error), vars(error))


def test_detail_is_split_into_field_expected_and_received():
    detail = "inputs.0: expected an array of 64 (rows have shape (8, 8), or 64 numbers flat), got an array of 63"
    error = make_error(problem(422, detail))
    assert (error.field, error.received) == ("inputs.0", "an array of 63")
    assert error.expected == "an array of 64 (rows have shape (8, 8), or 64 numbers flat)"
    assert isinstance(error, ValueError)


@pytest.mark.parametrize(
    "content", [b"<html>Bad Gateway</html>", b"[1]", b"{}", b'{"detail": 3}', b"{"]
)
def test_response_without_problem_document_is_reported_by_status(content):
    for kind in ("text/html", "application/json"):
        error = make_error(httpx.Response(502, content=content, headers={"Content-Type": kind}))
        assert (str(error), error.field) == ("HTTP status 502", "")


def npz(rows, **arrays):
    file = io.BytesIO()
    np.savez(file, model="m", version="3", seed=5, flag=np.zeros(rows, bool), **arrays)
    return httpx.Response(
        200, content=file.getvalue(), headers={"Content-Type": "application/x-npz"}
    )


def test_parts_share_draws_and_version_of_the_first_part():
    shares = []
    steps = Endpoints.predict(
        CALLS, np.ones((5, 2)), part_rows=2, on_progress=shares.append, version="latest", fpr=0.1
    )
    first = next(steps)
    second = steps.send(npz(2, unknown_categories=[1, 0]))
    third = steps.send(npz(2, unknown_categories=[0, 2]))
    with pytest.raises(StopIteration) as end:
        steps.send(npz(1, unknown_categories=[1, 1]))
    assert first.query == {"version": "latest", "fpr": "0.1"}
    assert second.query == third.query == {"model": "m", "version": "3", "seed": "5", "fpr": "0.1"}
    assert [len(np.load(io.BytesIO(request.content))) for request in (first, second, third)] == [
        2,
        2,
        1,
    ]
    assert shares == [0.4, 0.8, 1.0]
    answer = end.value.value
    assert (len(answer), answer.seed, answer["unknown_categories"].tolist()) == (5, 5, [2, 3])


def test_invalid_row_is_named_by_its_index_in_all_parts():
    detail = "inputs.1.age: expected a number, got a string of 3 characters"
    errors = [{"field": "inputs.1.age", "detail": detail}]
    content = {"detail": detail, "code": "invalid_input", "errors": errors}
    error, _ = run_steps(
        Endpoints.predict(CALLS, np.ones((5, 2)), part_rows=2),
        npz(2),
        httpx.Response(422, json=content),
    )
    assert (error.field, str(error)) == ("inputs.3.age", detail.replace("1", "3", 1))
    assert error.code == "invalid_input"
    assert [item["field"] for item in error.errors] == ["inputs.3.age"]
    general_detail = "fpr: expected a number, got null"
    error, _ = run_steps(
        Endpoints.predict(CALLS, np.ones((5, 2)), part_rows=2), npz(2), problem(422, general_detail)
    )
    assert str(error) == general_detail


def test_groups_are_split_with_their_rows():
    steps = Endpoints.predict(CALLS, np.ones((3, 2)), part_rows=2, groups=["a", "b", "c"])
    assert b'"groups":["a","b"]' in next(steps).content
    assert b'"groups":["c"]' in steps.send(npz(2)).content
    with pytest.raises(InvalidInput, match="groups: expected 3"):
        next(Endpoints.predict(CALLS, np.ones((3, 2)), part_rows=2, groups=["a"]))


def test_rows_are_sent_in_one_part_if_fdr_is_set():
    steps = Endpoints.predict(CALLS, np.ones((5, 2)), part_rows=2, fdr=0.1)
    assert len(np.load(io.BytesIO(next(steps).content))) == 5


def test_none_options_are_omitted():
    steps = Endpoints.predict(CALLS, np.ones((1, 2)), seed=None, model="m")
    assert next(steps).query == {"model": "m"}


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        (
            {"Content-Type": "text/html; charset=utf-8"},
            "expected a response from Dubito, got text/html",
        ),
        ({}, "expected a response from Dubito, got no media type"),
        (
            {"Content-Type": "application/x-npz"},
            "invalid npz file",
        ),
    ],
)
def test_response_from_another_server_is_an_error(headers, message):
    steps = Endpoints.predict(CALLS, np.ones((1, 2)))
    error, pauses = run_steps(steps, httpx.Response(200, content=b"Please log in", headers=headers))
    assert isinstance(error, ServerError)
    assert message in str(error)
    assert pauses == []


def test_exception_has_code_and_fields_of_the_problem():
    errors = [{"field": "seed", "detail": "seed: expected 1, got 2"}]
    problem = {"detail": errors[0]["detail"], "code": "invalid_input", "errors": errors}
    error = make_error(httpx.Response(422, json=problem))
    assert (error.code, error.field, error.errors) == ("invalid_input", "seed", tuple(errors))
    assert make_error(httpx.Response(502, text="a proxy's page")).code == ""
