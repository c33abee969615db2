"""Media types and content negotiation (RFC 9110, section 12)."""

import re

from starlette.types import Scope

JSON = "application/json"
PROBLEM_JSON = "application/problem+json"
FORM = "multipart/form-data"
NPY = "application/x-npy"
NPZ = "application/x-npz"
PARQUET = "application/vnd.apache.parquet"
FILE_ENDINGS = {NPZ: ".npz", PARQUET: ".parquet", "application/zip": ".zip", "text/csv": ".csv"}
ENDINGS = {**FILE_ENDINGS, NPY: ".npy"}
MAX_MEMBERS = 64  # of a header; the rest is ignored

_WEIGHT = re.compile(r"(?:^|;)\s*q=(0(?:\.[0-9]*)?|1(?:\.0*)?)\s*(?:;|$)")


def list_header(scope: Scope, name: bytes) -> str:
    """Join all lines of a header into one comma-separated list."""
    return ",".join([str(value, "latin-1") for key, value in scope["headers"] if key == name])


def weight(accept: str, media_type: str) -> float:
    """Return a media type's weight in an Accept header, or 0 if it is not accepted."""
    if accept in ("", "*/*", media_type):
        return 1.0
    weights = _weights(accept)
    names = media_type, f"{media_type.partition('/')[0]}/*", "*/*"
    return next((weights[name] for name in names if name in weights), 0.0)


def accepts_gzip(scope: Scope) -> bool:
    weights = _weights(list_header(scope, b"accept-encoding"))
    gzip = weights.get("gzip", weights.get("*", 0.0))
    return gzip > 0 and gzip >= weights.get("identity", 0.0)


def _weights(header: str) -> dict[str, float]:
    weights: dict[str, float] = {}
    for member in header.lower().split(",", MAX_MEMBERS)[:MAX_MEMBERS]:
        name, _, parameters = member.partition(";")
        match = _WEIGHT.search(parameters)
        weights[name.strip()] = float(match[1]) if match else 1.0
    return weights
