"""`GET /`: the page for people. Its files lie in `service/page/`, and all they ask is what any
client may ask."""

import gzip
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from pathlib import Path

from fastapi import APIRouter, Request, Response
from starlette.exceptions import HTTPException

FOLDER = Path(__file__).parent.parent / "page"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
START = "index.html"
VENDOR = "vendor/"  # files with their version in the name, which never change
# The stylesheet that Observable Plot puts into each plot, always the same:
# `tests/real/test_page.py` sees it refused
# where this is wrong.
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
    "Vary": "Accept-Encoding",
}

router = APIRouter()


@dataclass(frozen=True)
class PageFile:
    media_type: str
    content: bytes = field(repr=False)
    packed: bytes = field(repr=False)  # by gzip
    etag: str
    is_kept: bool  # by browsers, without asking again


@router.get("/", include_in_schema=False)
async def get_page(request: Request) -> Response:
    return _answer(request, START)


@router.get("/page/{path:path}", include_in_schema=False)
async def get_page_file(request: Request, path: str) -> Response:
    return _answer(request, path)


@cache
def page_files() -> dict[str, PageFile]:
    found = [path for path in sorted(FOLDER.rglob("*")) if path.suffix in MEDIA_TYPES]
    return {path.relative_to(FOLDER).as_posix(): _read(path) for path in found}


def _read(path: Path) -> PageFile:
    content = path.read_bytes()
    is_kept = path.relative_to(FOLDER).as_posix().startswith(VENDOR)
    etag = f'"{sha256(content).hexdigest()[:32]}"'
    return PageFile(
        MEDIA_TYPES[path.suffix], content, gzip.compress(content, mtime=0), etag, is_kept
    )


def _answer(request: Request, path: str) -> Response:
    found = page_files().get(path)
    if found is None:
        raise HTTPException(404)
    kept = "public, max-age=31536000, immutable" if found.is_kept else "no-cache"
    headers = {**HEADERS, "ETag": found.etag, "Cache-Control": kept}
    if found.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        headers["Content-Encoding"] = "gzip"
        return Response(found.packed, headers=headers, media_type=found.media_type)
    return Response(found.content, headers=headers, media_type=found.media_type)
