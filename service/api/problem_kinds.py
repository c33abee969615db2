"""`GET /problems`: the kinds of problems, where their `type` leads. `python -m
service.api.reference` writes them into docs/problems.md."""

from html import escape

from fastapi import APIRouter, Response

from service.error_forms import PROBLEMS

# By code: the status, what it means, and what to do
KINDS = {
    "invalid_input": (422, "a field is not as it should be", "correct what `errors` names"),
    "unauthorized": (401, "a key is needed, and none that is valid came", "send one"),
    "forbidden": (
        403,
        "the key lacks the scope that `detail` names, or another site's page asks (421: by a name "
        "that `DUBITO_HOSTS` does not have)",
        "ask for a key with that scope",
    ),
    "not_found": (404, "no such model, version, job, file or path", "`GET /models`"),
    "method_not_allowed": (405, "the path takes another method", "use one named in `Allow`"),
    "not_acceptable": (
        406,
        "`Accept` names no media type that the answer could have",
        "name `application/json`, or none",
    ),
    "in_use": (409, "a version that is served cannot be unloaded", "move the alias first"),
    "not_done": (409, "a job is not over, or what was asked cannot be done here", "as `detail`"),
    "conflict": (409, "a label goes against one that was kept", "send it with `replace`"),
    "too_large": (413, "more than a limit allows", "send less at once, or raise the limit"),
    "unsupported": (
        415,
        "a media type or an encoding that the service does not read",
        "send JSON, npy or a form",
    ),
    "overloaded": (
        429,
        "too much work is waiting, and the client has its share of it",
        "try again after `Retry-After` seconds",
    ),
    "unexpected": (
        500,
        "an error that Dubito did not expect",
        "look for `X-Request-ID` in the log",
    ),
    "not_ready": (503, "there is nothing to predict with yet", "publish a model, or wait"),
    "broken_artifact": (503, "the files of a version are damaged", "publish it again"),
    "unsupported_format": (503, "a version of a newer format", "update the service"),
    "store_unreachable": (503, "the bucket of the store cannot be reached", "try again"),
    "too_large_to_load": (503, "a version takes more memory than there may be", "raise the limit"),
    "state_unusable": (503, "jobs and labels cannot be read or written", "see the log"),
    "past_deadline": (504, "no answer by the deadline", "ask for less, or for longer"),
    "no_space": (507, "the disk is full", "make room"),
    "over_quota": (507, "the results of a key's jobs take too much", "delete jobs"),
}

router = APIRouter(include_in_schema=False)


@router.get(PROBLEMS)
async def get_problems() -> Response:
    rows = "".join(
        f'<dt id="{code}"><code>{code}</code> ({status})</dt>'
        f"<dd>{escape(means.replace('`', ''))}. To do: {escape(do.replace('`', ''))}.</dd>"
        for code, (status, means, do) in KINDS.items()
    )
    page = f'<!DOCTYPE html><html lang="en"><title>Problems</title><dl>{rows}</dl></html>'
    headers = {"Content-Security-Policy": "default-src 'none'"}
    return Response(page, media_type="text/html; charset=utf-8", headers=headers)


def problem_table() -> str:
    rows = [
        f"| `{code}` | {status} | {means} | {do} |" for code, (status, means, do) in KINDS.items()
    ]
    return "\n".join(["| Code | Status | Means | Do |", "|---|---|---|---|", *rows])
