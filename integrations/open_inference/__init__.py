"""The Open Inference Protocol (V2) over REST, as Triton, KServe and MLServer clients use it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from service.integrations import Integration

if TYPE_CHECKING:
    from fastapi import APIRouter


def _routers() -> "Sequence[APIRouter]":
    from integrations.open_inference.routes import router

    return (router,)


integration = Integration(
    routers=_routers,
    short_paths=(
        "/v2/models/{name}/infer",
        "/v2/models/{name}/versions/{version}/infer",
    ),
    health_paths=("/v2/health/live", "/v2/health/ready"),
)
