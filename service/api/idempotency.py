"""Support for `Idempotency-Key`: return the stored response to a repeated request."""

import re
from functools import partial
from hashlib import sha256

from model_store.errors import InvalidInput, describe_value
from model_store.state.answers import Repeatable, check_request
from model_store.types import Content
from service.api.requests import header
from service.auth.scopes import get_owner
from service.context import Context
from service.request_context import RequestContext

_KEY = re.compile(r"[!-~]{1,255}")


async def identify_request(
    context: Context, call: RequestContext, body: Content
) -> Repeatable | None:
    """Return the identity of a request with an idempotency key, or None.

    Raises:
        Repeated: if the request has a stored response.
        InvalidInput: if another request used the key.
    """
    request = call.request
    key = header(request, b"idempotency-key")
    if not key:
        return None
    if _KEY.fullmatch(key) is None:
        expected = "1 to 255 printable ASCII characters without spaces"
        raise InvalidInput("Idempotency-Key", expected, describe_value(key))
    parts = (request.scope["path"], str(request.query_params), header(request, b"content-type"))
    digest = sha256("\n".join(parts).encode())
    await context.threads.requests.run(call, len(body), partial(digest.update, body))
    identity = Repeatable(get_owner(request.scope), key, digest.hexdigest())
    await context.threads.state(lambda: check_request(context.state, identity))
    return identity
