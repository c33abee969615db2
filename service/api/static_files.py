"""Files and documents that everyone can read: compressed and hashed once, not per request."""

import gzip
import mimetypes
from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from fastapi import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from service.api.media_types import accepts_gzip


class StaticContent:
    """Bytes with their compressed form."""

    def __init__(self, body: bytes, media_type: str) -> None:
        self.body = body
        self.compressed = gzip.compress(body, mtime=0)
        self.media_type = media_type
        self.etag = f'W/"{sha256(body).hexdigest()[:32]}"'


class StaticResponse(Response):
    def __init__(self, content: StaticContent, headers: Mapping[str, str] | None = None) -> None:
        self.content = content
        headers = {"etag": content.etag, "vary": "Accept-Encoding", **(headers or {})}
        super().__init__(content.body, headers=headers, media_type=content.media_type)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if accepts_gzip(scope) and len(self.content.compressed) < len(self.body):
            self.body = self.content.compressed
            self.headers["content-length"] = str(len(self.body))
            self.headers["content-encoding"] = "gzip"
        await super().__call__(scope, receive, send)


@cache
def read_static(path: Path) -> StaticContent:
    """Read a file of the package, which does not change while the service runs."""
    media_type = mimetypes.guess_type(path)[0] or "application/octet-stream"
    return StaticContent(path.read_bytes(), media_type)


class PackageFiles(StaticFiles):
    """Files of an installed package."""

    def file_response(self, full_path: Any, *_: Any, **__: Any) -> Response:
        return StaticResponse(read_static(Path(full_path)), {"Cache-Control": "no-cache"})
