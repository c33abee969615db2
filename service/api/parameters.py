"""Options as protocols of others have them: parameters, each a number, a boolean or a string."""

import re
from typing import Any

import orjson

from model_store.errors import InvalidInput
from service.api.schemas import PredictRequest, validate

# Those of /predict that go with any form of an answer.
KNOWN = tuple(
    name
    for name in PredictRequest.model_fields
    if name not in ("model", "version", "inputs", "groups", "explain")
)
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def fields_of(parameters: dict[str, Any], where: str, also: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return parameters as fields of /predict; numbers, booleans, null and `priors` may come as
    strings of JSON.

    Raises:
        InvalidInput: naming the parameter that is not known, or is no JSON.
    """
    fields: dict[str, Any] = {}
    for name, value in parameters.items():
        if name not in KNOWN:
            place = f"{where}.{name}" if _NAME.fullmatch(name) else where
            raise InvalidInput(
                place, f"one of {', '.join(sorted((*KNOWN, *also)))}", "an unknown one"
            )
        if isinstance(value, str):
            try:
                value = orjson.loads(value.encode("utf-8", "replace"))
            except orjson.JSONDecodeError:
                raise InvalidInput(
                    f"{where}.{name}", "a number, or one as a string", "another string"
                ) from None
        fields[name] = value
    return fields


def envelope_of(
    model: str | None, version: str | None, fields: dict[str, Any], where: str
) -> PredictRequest:
    """Return the envelope of a request, whose fields came as parameters.

    Raises:
        InvalidInput: naming the parameter that is wrong.
    """
    content = {"inputs": [], **fields}
    content |= {} if model is None else {"model": model}
    content |= {} if version is None else {"version": version}
    try:
        return validate(PredictRequest, content)
    except InvalidInput as error:
        raise InvalidInput(f"{where}.{error.field}", error.expected, error.got) from None
