"""Administration: look at the store at once, take versions out of memory. The store itself is only ever read."""

from typing import Any

import orjson
from fastapi import FastAPI, Response

from service.engine.batching import Predictor
from service.http.requests import JSON
from service.registry.models import Models


def install(app: FastAPI, models: Models, predictor: Predictor, problem: dict[str, Any]) -> None:
    """Add the administrative routes; `problem` describes an error for OpenAPI."""

    @app.post("/admin/refresh")
    async def post_refresh() -> Response:
        """Look at the store at once, broken versions included, and say what is served of each model."""
        await predictor.load(models.look)
        content = {}
        for name in models.names():
            latest = models.latest(name)
            serving = None if latest is None else latest.version
            content[name] = {"serving": serving, "broken": models.broken(name)}
        return Response(orjson.dumps({"models": content}), media_type=JSON)

    @app.post("/admin/models/{name}/versions/{version}/unload", responses={404: problem, 409: problem})
    async def post_unload(name: str, version: str) -> Response:
        """Take a version out of memory, unless `latest` serves it; a request for it loads it again."""
        number, unloaded = await predictor.load(lambda: models.unload(name, version))
        return Response(orjson.dumps({"model": name, "version": number, "unloaded": unloaded}), media_type=JSON)

    @app.post("/admin/models/{name}/versions/{version}/drift/reset", responses={404: problem})
    async def post_drift_reset(name: str, version: str) -> Response:
        """Begin anew to watch a version's rows for drift, in this process: an alarm that was looked into goes."""
        number, reset = await predictor.load(lambda: models.reset_drift(name, version))
        return Response(orjson.dumps({"model": name, "version": number, "reset": reset}), media_type=JSON)
