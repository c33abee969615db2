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
CUT = httpx.ReadError("cut")


def problem(status, detail="the service says so", **headers):
    return httpx.Response(status, json={"detail": detail}, headers=headers)


REQUEST = Request("POST", "/predict", content=b"", has_rows=True)


def outcome(steps, *came):
    answers, pauses, step = iter(came), [], next(steps)
    try:
        while True:
            if isinstance(step, Pause):
                pauses.append(step.seconds)
                step = steps.send(None)
            else:
                step = steps.send(next(answers))
    except StopIteration as end:
        result = end.value
    except DubitoError as error:
        result = error
    assert next(answers, None) is None, "more was to come"
    return result, pauses


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("is_repeatable", [True, False])
def test_a_refusal_that_says_when_to_come_back_is_heeded(status, is_repeatable):
    good = httpx.Response(200, json={})
    steps = send(REQUEST, LIMITS, is_repeatable)
    result, pauses = outcome(steps, problem(status, **{"Retry-After": "7"}), good)
    assert result is good
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
    ids=["503", "429", "500", "an hour"],
)
def test_other_refusals_are_errors_at_once(refusal):
    result, pauses = outcome(send(REQUEST, LIMITS), refusal)
    assert isinstance(result, AnswerError)
    assert (result.status, pauses) == (refusal.status_code, [])


def test_tries_come_to_an_end():
    refusal = problem(429, **{"Retry-After": "2"})
    result, pauses = outcome(send(REQUEST, LIMITS), refusal, refusal, refusal)
    assert isinstance(result, Overloaded)
    assert (result.retry_after_s, len(pauses)) == (2, LIMITS.retries)


@pytest.mark.parametrize(
    "error", [httpx.ConnectError("no"), httpx.ConnectTimeout("no"), httpx.PoolTimeout("no")]
)
def test_what_was_not_sent_is_sent_again_whatever_it_does(error):
    good = httpx.Response(200, json={})
    result, pauses = outcome(send(REQUEST, LIMITS, is_repeatable=False), error, error, good)
    assert result is good
    assert 0 < pauses[0] <= 0.5
    assert 0.5 <= pauses[1] <= 1


@pytest.mark.parametrize("error", [CUT, httpx.WriteError("cut"), httpx.RemoteProtocolError("cut")])
def test_what_may_have_been_done_is_sent_again_only_if_that_does_no_more(error):
    good = httpx.Response(200, json={})
    assert outcome(send(REQUEST, LIMITS), error, good)[0] is good
    result, pauses = outcome(send(REQUEST, LIMITS, is_repeatable=False), error)
    assert isinstance(result, NoAnswer)
    assert pauses == []
    assert result.__cause__ is error


def test_a_job_is_not_asked_for_twice():
    for steps in (
        Endpoints.predict_job(CALLS, np.ones((1, 2))),
        Endpoints.acquire_job(CALLS, np.ones((1, 2)), k=1),
    ):
        assert isinstance(outcome(steps, CUT)[0], NoAnswer)


@pytest.mark.parametrize(("keep", "tries"), [(True, 1), (False, 3)])
def test_rows_are_not_set_aside_twice(keep, tries):
    steps = Endpoints.acquire(CALLS, np.ones((2, 2)), k=1, keep=keep, ids=["a", "b"])
    assert isinstance(outcome(steps, *[CUT] * tries)[0], NoAnswer)


def test_pauses_after_lost_connections_do_not_grow_forever():
    _, pauses = outcome(send(REQUEST, Limits(90.0, 9)), *[CUT] * 10)
    assert max(pauses) <= MAX_PAUSE_S


def test_no_answer_in_time_is_not_asked_for_again():
    result, pauses = outcome(send(REQUEST, LIMITS), httpx.ReadTimeout(""))
    assert isinstance(result, DeadlineExceeded)
    assert pauses == []


def test_a_deadline_is_told_and_bounds_waits_and_pauses():
    limits = LIMITS.within(20.0)
    steps = send(REQUEST, limits)
    request = next(steps)
    assert request.timeout_s == float(request.query["deadline_s"])
    assert 19 < request.timeout_s <= 20
    with pytest.raises(Overloaded):
        steps.send(problem(429, **{"Retry-After": "21"}))
    with pytest.raises(DeadlineExceeded):
        next(send(REQUEST, LIMITS.within(0.0)))


def test_a_deadline_that_passes_while_connecting_is_said():
    result, pauses = outcome(send(REQUEST, LIMITS.within(0.2)), httpx.ConnectTimeout(""))
    assert isinstance(result, DeadlineExceeded)
    assert pauses == []


def test_without_a_deadline_none_is_told():
    request = next(send(REQUEST, LIMITS))
    assert (request.query, request.timeout_s) == ({}, 90.0)


@pytest.mark.parametrize(
    ("status", "kind"),
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
def test_each_status_is_an_error_of_its_own(status, kind):
    error = make_error(problem(status, "labels.3.id: expected another, got one of them"))
    assert type(error) is kind
    assert str(error) == "labels.3.id: expected another, got one of them"
    if status not in (408, 504):
        assert error.field == "labels.3.id"


@pytest.mark.parametrize(
    "error",
    [make_error(problem(422)), make_error(problem(429), 3.0), JobFailed("a", "is failed")],
    ids=str,
)
def test_errors_can_be_copied_and_so_sent_between_processes(error):
    again = copy.deepcopy(error)
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


def test_a_wrong_field_is_taken_apart():
    detail = "inputs.0: expected an array of 64 (rows have shape (8, 8), or 64 numbers flat), got an array of 63"
    error = make_error(problem(422, detail))
    assert (error.field, error.received) == ("inputs.0", "an array of 63")
    assert error.expected == "an array of 64 (rows have shape (8, 8), or 64 numbers flat)"
    assert isinstance(error, ValueError)


@pytest.mark.parametrize(
    "page", [b"<html>Bad Gateway</html>", b"[1]", b"{}", b'{"detail": 3}', b"{"]
)
def test_an_answer_that_is_no_problem_document_is_told_by_its_status(page):
    for kind in ("text/html", "application/json"):
        error = make_error(httpx.Response(502, content=page, headers={"Content-Type": kind}))
        assert (str(error), error.field) == ("HTTP status 502", "")


def npz(rows, **arrays):
    file = io.BytesIO()
    np.savez(file, model="m", version="3", seed=5, flag=np.zeros(rows, bool), **arrays)
    return httpx.Response(
        200, content=file.getvalue(), headers={"Content-Type": "application/x-npz"}
    )


def test_parts_share_the_draws_and_the_version_of_the_first():
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


def test_a_wrong_row_is_named_by_its_place_among_all():
    detail = "inputs.1.age: expected a number, got a string of 3 characters"
    errors = [{"field": "inputs.1.age", "detail": detail}]
    content = {"detail": detail, "code": "invalid_input", "errors": errors}
    error, _ = outcome(
        Endpoints.predict(CALLS, np.ones((5, 2)), part_rows=2),
        npz(2),
        httpx.Response(422, json=content),
    )
    assert (error.field, str(error)) == ("inputs.3.age", detail.replace("1", "3", 1))
    assert error.code == "invalid_input"
    assert [item["field"] for item in error.errors] == ["inputs.3.age"]
    of_all = "fpr: expected a number, got null"
    error, _ = outcome(
        Endpoints.predict(CALLS, np.ones((5, 2)), part_rows=2), npz(2), problem(422, of_all)
    )
    assert str(error) == of_all


def test_groups_go_with_their_rows():
    steps = Endpoints.predict(CALLS, np.ones((3, 2)), part_rows=2, groups=["a", "b", "c"])
    assert b'"groups":["a","b"]' in next(steps).content
    assert b'"groups":["c"]' in steps.send(npz(2)).content
    with pytest.raises(InvalidInput, match="groups: expected 3"):
        next(Endpoints.predict(CALLS, np.ones((3, 2)), part_rows=2, groups=["a"]))


def test_rows_whose_flags_are_decided_together_go_together():
    steps = Endpoints.predict(CALLS, np.ones((5, 2)), part_rows=2, fdr=0.1)
    assert len(np.load(io.BytesIO(next(steps).content))) == 5


def test_options_that_are_none_are_left_out():
    steps = Endpoints.predict(CALLS, np.ones((1, 2)), seed=None, model="m")
    assert next(steps).query == {"model": "m"}


@pytest.mark.parametrize(
    ("headers", "said"),
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
def test_an_answer_of_somebody_else_is_no_answer(headers, said):
    steps = Endpoints.predict(CALLS, np.ones((1, 2)))
    error, pauses = outcome(steps, httpx.Response(200, content=b"Please log in", headers=headers))
    assert isinstance(error, ServerError)
    assert said in str(error)
    assert pauses == []


def test_a_problem_s_code_and_fields_are_the_exception_s():
    wrong = [{"field": "seed", "detail": "seed: expected 1, got 2"}]
    problem = {"detail": wrong[0]["detail"], "code": "invalid_input", "errors": wrong}
    error = make_error(httpx.Response(422, json=problem))
    assert (error.code, error.field, error.errors) == ("invalid_input", "seed", tuple(wrong))
    assert make_error(httpx.Response(502, text="a proxy's page")).code == ""
