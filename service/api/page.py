"""`GET /`: the web page, whose files are in `service/page/`.

Files and documents that everyone can read are compressed and hashed once, not per request.
"""

import gzip
import mimetypes
from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from service.api.media_types import accepts_gzip, list_header
from service.auth.scopes import OPEN_TO_ALL

FOLDER = Path(__file__).parent.parent / "page"
VENDOR = "vendor"  # files with a version in the name
# The hash of the stylesheet that Observable Plot adds to each plot
PLOT_STYLE = "sha256-jSYQUrW7J0b3jPqhZP9C2Xh1PyJKHKXd4s0fpGGKrww="
POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        f"style-src 'self' '{PLOT_STYLE}'",
        "img-src 'self' data: blob:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    ]
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}

router = APIRouter(include_in_schema=False, dependencies=[OPEN_TO_ALL])


class StaticContent:
    """Static content, in plain and compressed form."""

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
        if self.content.etag in list_header(scope, b"if-none-match"):
            self.status_code, self.body = 304, b""
            del self.headers["content-length"]
        elif accepts_gzip(scope) and len(self.content.compressed) < len(self.body):
            self.body = self.content.compressed
            self.headers["content-length"] = str(len(self.body))
            self.headers["content-encoding"] = "gzip"
        await super().__call__(scope, receive, send)


@cache
def read_static(path: Path) -> StaticContent:
    """Read a file from the package and keep it in memory."""
    media_type = mimetypes.guess_type(path)[0] or "application/octet-stream"
    return StaticContent(path.read_bytes(), media_type)


class PackageFiles(StaticFiles):
    """Serves the files of an installed package."""

    def file_response(self, full_path: Any, *_: Any, **__: Any) -> Response:
        return StaticResponse(read_static(Path(full_path)), {"Cache-Control": "no-cache"})


@router.get("/")
async def get_page() -> Response:
    content = read_static(FOLDER / "index.html")
    return StaticResponse(content, {**HEADERS, "Cache-Control": "no-cache"})


class PageFiles(PackageFiles):
    """Serves the page's static files with security headers."""

    def file_response(self, full_path: Any, *args: Any, **options: Any) -> Response:
        response = super().file_response(full_path, *args, **options)
        is_immutable = VENDOR in Path(full_path).parts
        caching = "public, max-age=31536000, immutable" if is_immutable else "no-cache"
        response.headers.update({**HEADERS, "Cache-Control": caching})
        return response
