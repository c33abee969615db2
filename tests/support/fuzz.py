"""Bad requests sent to a service, and what is checked of each answer."""

import itertools
import json
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

from tests.support.bad_requests import ANSWERED, ANYTHING, BadRequests
from tests.support.odd_values import CANARY
from tests.support.raw import JSON, Connection, Ended, request

BY_DESIGN = {503, 504}
FORMS = ({"error"}, {"error_code", "message"})  # of errors, of others' protocols
PARSED_TYPES = (JSON.encode(), b"application/x-npz", b"application/octet-stream")
PARSED = {200, 400, 404, 413, 422, 503, 504}  # answers to requests that were read
UNPARSED = ("body:", "query", "Content-")  # how the detail of those begins that were not
GOOD_EVERY = 20  # cases between good requests on the same connection
MOST_WRONG = 5  # of a client before it stops
PATIENCE_S = 0.1  # for answers to bytes that may ask for none


@dataclass
class Outcome:
    """What came of bad requests."""

    statuses: Counter = field(default_factory=Counter)
    kinds: Counter = field(default_factory=Counter)
    past_parsing: int = 0
    good: int = 0
    slowest_s: float = 0.0
    wrong: list[str] = field(default_factory=list)

    @property
    def sent(self):
        """How many cases were sent."""
        return sum(self.kinds.values())

    def __str__(self):
        counts = ", ".join(f"{status}: {count}" for status, count in sorted(self.statuses.items()))
        return (
            f"{self.sent} sent, {self.past_parsing} of them read and understood as JSON, npy or "
            "forms; answers "
            f"{counts}; {len(self.wrong)} wrong; slowest {self.slowest_s:.2f} s; {self.good} good "
            "requests between "
            "them right"
        )


def fuzz(port, count, seed, admin_key, clients=4, within_s=20.0, requests=BadRequests):
    """Send `count` cases from several clients at once; each is answered, or its connection ends, in
    `within_s`."""
    good = request("POST", "/predict", json.dumps({"inputs": [[8] * 64], "seed": 7}).encode())
    with Connection(port) as connection:
        expected = connection.ask(good)
    assert expected.status == 200
    outcomes = [Outcome() for _ in range(clients)]
    threads = [
        threading.Thread(target=_client, args=(port, outcome, cases, good, expected.body, within_s))
        for outcome, cases in (
            (outcome, itertools.islice(requests(f"{seed}.{i}", admin_key), i, count, clients))
            for i, outcome in enumerate(outcomes)
        )
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return _together(outcomes)


def _client(port, outcome, cases, good, expected, within_s):
    connection = None
    for case in cases:
        if len(outcome.wrong) >= MOST_WRONG:
            break
        outcome.kinds[case.kind] += 1
        connection = connection or Connection(port, within_s)
        begun = time.perf_counter()
        try:
            answers, open_still = _answers(connection, case)
        except Exception as error:  # no answer, no end, or bytes that are no answer
            outcome.wrong.append(
                f"{case.kind}: {type(error).__name__} {error} after {case.content[:300]!r}"
            )
            answers, open_still = [], False
        outcome.slowest_s = max(outcome.slowest_s, time.perf_counter() - begun)
        for answer in answers:
            outcome.statuses[answer.status] += 1
            if what := _wrong(answer):
                outcome.wrong.append(
                    f"{case.kind}: {what} {answer.body[:300]!r} to {case.content[:300]!r}"
                )
        outcome.past_parsing += (
            len(answers) == 1 and case.content.startswith(b"POST /") and _is_parsed(answers[0])
        )
        if not open_still:
            connection.close()
            connection = None
        elif outcome.kinds.total() % GOOD_EVERY == 0:
            outcome.good += 1
            if connection.ask(good).body != expected:
                outcome.wrong.append(
                    f"a good request was answered wrongly after {case.content[:300]!r}"
                )
    if connection is not None:
        connection.close()


def _answers(connection, case):
    """The answers to a case, and whether the connection is still open."""
    try:
        connection.send(case.content)
    except Ended:
        if case.ends == ANSWERED:
            raise
    if case.ends == ANYTHING:
        return connection.answers_until_end(PATIENCE_S), False
    if case.ends == ANSWERED:
        answers = [connection.answer(case.head) for _ in case.statuses or (0,)]
        if case.statuses and tuple(answer.status for answer in answers) != case.statuses:
            raise AssertionError(
                f"expected {case.statuses}, got {[answer.status for answer in answers]}"
            )
        return answers, not answers[-1].closes
    try:
        answer = connection.answer()
    except Ended:  # what we still sent when it was refused has reset the connection
        return [], False
    assert 400 <= answer.status < 500, f"expected a refusal, got {answer.status}"
    try:
        connection.answer()
    except Ended:
        return [answer], False
    raise AssertionError("expected the end of the connection, got another answer")


def _wrong(answer):
    """What is wrong with an answer, if anything."""
    if answer.status >= 500 and answer.status not in BY_DESIGN:
        return f"status {answer.status}"
    if answer.status >= 400 and answer.headers.get(b"content-type") == b"application/problem+json":
        if answer.body and json.loads(answer.body)["status"] != answer.status:
            return "another status in the problem"
    elif answer.status >= 400 and answer.headers.get(b"content-type") == JSON.encode():
        if answer.body and set(json.loads(answer.body)) not in FORMS:
            return "an error that is of no protocol"
    elif answer.status >= 400 and len(answer.body) > 100:
        return "an error that is no problem"
    if (
        answer.status == 200
        and answer.headers.get(b"content-type") == JSON.encode()
        and answer.body
    ):
        try:
            json.loads(answer.body)
        except ValueError:
            return "no JSON"
    if answer.status != 200 and CANARY.encode() in answer.body:
        return "the request repeated"
    return "a traceback" if b"Traceback" in answer.body else None


def _is_parsed(answer):
    """Whether the answer shows that a body was read and understood, whatever then became of it."""
    if answer.status == 200:
        return answer.headers.get(b"content-type", b"") in PARSED_TYPES
    if answer.status not in PARSED or not answer.body:
        return False
    said = json.loads(answer.body)
    text = said.get("detail") or said.get("error") or said["message"]
    return not text.startswith((*UNPARSED, "path"))


def _together(outcomes):
    whole = Outcome()
    for outcome in outcomes:
        whole.statuses += outcome.statuses
        whole.kinds += outcome.kinds
        whole.past_parsing += outcome.past_parsing
        whole.good += outcome.good
        whole.slowest_s = max(whole.slowest_s, outcome.slowest_s)
        whole.wrong += outcome.wrong
    return whole
