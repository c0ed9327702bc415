"""GET /ui: the dashboard's page and its files. They hold no data, so no key is needed for them.

The page asks the public API with the key that its reader types in; there are no cookies, so no
other page can act in the reader's name. What it may load is said by one strict policy: its own
files, this server, nothing else.
"""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from gateway.dashboard.files import PageFile, page_files

router = APIRouter()
POLICY: Final = "; ".join(
    (
        "default-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "object-src 'none'",
    )
)
PAGE_HEADERS: Final = {
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",  # for browsers that do not know ``frame-ancestors``
}
_FOR_EVER: Final = "public, max-age=31536000, immutable"


@router.get("/")
async def root(request: Request) -> Response:
    """Send browsers to the dashboard; programs hear that there is nothing here."""
    if "text/html" not in request.headers.get("accept", ""):
        raise HTTPException(404)
    return RedirectResponse("ui", 302, {"vary": "accept"})


@router.get("/ui")
async def dashboard(request: Request) -> Response:
    """Answer with the dashboard, a page for people."""
    if request.scope.get("raw_path", b"").endswith(b"/"):  # the page's addresses are relative
        return RedirectResponse("../ui", 308)
    return _answer(request, page_files().page, "no-cache")


@router.get("/ui/{version}/{name:path}")
async def dashboard_file(request: Request) -> Response:
    """Answer with a file of the dashboard; it never changes under its address."""
    files, asked = page_files(), request.path_params
    found = files.others.get(asked["name"]) if asked["version"] == files.version else None
    if found is None:
        raise HTTPException(404)
    return _answer(request, found, _FOR_EVER)


def _answer(request: Request, file: PageFile, caching: str) -> Response:
    headers = {**PAGE_HEADERS, "vary": "accept-encoding", "etag": file.tag}
    headers["cache-control"] = caching
    if file.tag in request.headers.get("if-none-match", ""):
        return Response(None, 304, headers)
    body = file.plain
    if "gzip" in request.headers.get("accept-encoding", ""):
        headers["content-encoding"] = "gzip"
        body = file.packed
    return Response(body, 200, headers, file.kind)
