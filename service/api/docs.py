"""`GET /openapi.json`, and `GET /docs`, which shows it with Swagger UI."""

from fastapi import APIRouter, Request, Response
from fastapi.openapi.docs import get_swagger_ui_html

from service.api.dependencies import CurrentContext, LinkPrefix
from service.api.openapi import OpenApiDocument
from service.api.static_files import StaticResponse
from service.auth.scopes import OPEN_TO_ALL

FILES = "/static-offline-docs"

router = APIRouter(include_in_schema=False, dependencies=[OPEN_TO_ALL])


@router.get("/openapi.json")
async def get_document(request: Request, context: CurrentContext, prefix: LinkPrefix) -> Response:
    document: OpenApiDocument = request.app.openapi
    content = await context.threads.files(lambda: document.content(prefix))
    return StaticResponse(content)


@router.get("/docs")
async def get_docs(request: Request, prefix: LinkPrefix) -> Response:
    return get_swagger_ui_html(
        openapi_url=f"{prefix}/openapi.json",
        title=request.app.title,
        swagger_js_url=f"{prefix}{FILES}/swagger-ui-bundle.js",
        swagger_css_url=f"{prefix}{FILES}/swagger-ui.css",
        swagger_favicon_url=f"{prefix}{FILES}/favicon.png",
    )
