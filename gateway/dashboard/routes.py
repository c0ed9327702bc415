"""GET /ui: the dashboard's page and its files. They hold no data, so they need no key.

The page and ``thermocline top`` ask for ``GET /v1/snapshot`` once a second. If the request has the
last snapshot's tag in ``If-None-Match`` and nothing has changed, the answer is an empty 304.

``/ui/clients`` returns the settings of all clients, as ``thermocline connect`` prints them, for the
server that the page names.

The page calls the public API with the key that its reader types in; there are no cookies, so no
other page can act in the reader's name. A strict content security policy lets it load its own files
and call this server, and nothing else.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import zlib
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import Final, NamedTuple

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from engines.openai.requests import InvalidRequest
from gateway.clients.needs import Server
from gateway.clients.table import CLIENTS, connection
from gateway.request.callers import charged_caller, gateway_of, model_asked, sees_all
from gateway.request.routing import json_response, limit_of, new_router
from gateway.watch.snapshots import MAX_ROWS

FOLDER: Final = Path(__file__).parent / "page"
INDEX: Final = "index.html"
PLACEHOLDER: Final = b"ui/VERSION/"  # in the index, the folder of all other files
# In the index, replaced by preloads of all modules: a browser would otherwise find each module only
# after it has read the one that imports it.
PRELOADS: Final = b"<!-- MODULES -->"
_KINDS: Final = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".LICENSE": "text/plain; charset=utf-8",
}
router = new_router()
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
PLACES: Final = {
    "name": "thermocline",
    "dashboard": "/ui",
    "api": "/v1",
    "description": "/docs",
    "ready": "/readyz",
    "metrics": "/metrics",
}
MAX_WORDS: Final = 1000  # characters of a query's value
USUAL_ROWS: Final = 500  # of a snapshot
PACKED_FROM: Final = 16 << 10  # bytes
_FOR_EVER: Final = "public, max-age=31536000, immutable"


class PageFile(NamedTuple):
    """A file of the page, plain and compressed, with its headers."""

    kind: str
    plain: bytes
    packed: bytes  # compressed by gzip
    tag: str  # ETag, with its quotes


class PageFiles(NamedTuple):
    """All files of one version of the page."""

    version: str
    page: PageFile  # the index
    others: Mapping[str, PageFile]  # by path below the version


@cache
def page_files(folder: Path = FOLDER) -> PageFiles:
    """Read all files of the page, which do not change while the server runs."""
    found = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix in _KINDS
    }
    whole = hashlib.sha256()
    for name, content in found.items():
        whole.update(f"{name} {len(content)} ".encode() + content)
    version = whole.hexdigest()[:16]
    scripts = sorted((x for x in found if x.endswith(".js")), key=_needed_first)
    modules = [f'<link rel="modulepreload" href="ui/VERSION/{x}">' for x in scripts]
    index = found.pop(INDEX).replace(PRELOADS, "\n".join(modules).encode())
    index = index.replace(PLACEHOLDER, f"ui/{version}/".encode())
    others = {name: _file(name, content) for name, content in found.items()}
    return PageFiles(version, _file(INDEX, index), others)


def _needed_first(name: str) -> tuple[bool, str]:
    """Return the sort key of a script: those that fetch data come before those that show it."""
    return not name.startswith(("live/", "vendor/signals", "vendor/preact")), name


def _file(name: str, content: bytes) -> PageFile:
    tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    return PageFile(_KINDS[Path(name).suffix], content, gzip.compress(content, 9, mtime=0), tag)


@router.get("/")
async def root(request: Request) -> Response:
    """Redirect browsers to the dashboard; answer programs with the server's main paths."""
    if "text/html" not in request.headers.get("accept", ""):
        return json_response(PLACES)
    return RedirectResponse("ui", 302, {"vary": "accept"})


@router.get("/ui")
async def dashboard(request: Request) -> Response:
    """Answer with the dashboard, a page for people."""
    if request.scope.get("raw_path", b"").endswith(b"/"):  # the page's addresses are relative
        return RedirectResponse("../ui", 308)
    return _answer(request, page_files().page, "no-cache")


@router.get("/ui/clients")
async def client_settings(request: Request) -> Response:
    """Answer with the settings that each client needs for the server that the query names."""
    asked = {x: request.query_params.get(x, "")[:MAX_WORDS] for x in ("url", "model", "key")}
    context = request.query_params.get("context", "")
    if not (context.isascii() and context.isdigit() and len(context) < 10 and asked["key"]):
        raise InvalidRequest("The query is url, model, key and context, a number.", "context")
    server = Server(asked["url"], asked["model"], int(context), asked["key"])
    try:
        found = {name: connection(name, server, Path("~")) for name in CLIENTS}
    except ValueError as error:
        raise InvalidRequest(f"{error}.", "model") from error
    rows = [
        {"id": name, "name": CLIENTS[name].name, "text": "\n".join(x.lines), "notes": x.notes}
        for name, x in found.items()
    ]
    return json_response({"object": "list", "data": rows})


@router.get("/ui/{version}/{name:path}")
async def dashboard_file(request: Request) -> Response:
    """Answer with a file of the dashboard, which never changes under its versioned path."""
    files, asked = page_files(), request.path_params
    found = files.others.get(asked["name"]) if asked["version"] == files.version else None
    if found is None:
        raise HTTPException(404)
    return _answer(request, found, _FOR_EVER)


@router.get("/v1/snapshot")
async def show_snapshot(request: Request) -> Response:
    """Show the present state of a model and its ``limit`` sessions that were used last."""
    caller, gateway = charged_caller(request), gateway_of(request)
    tenant = None if sees_all(request, caller) else caller.name
    model = model_asked(request) or gateway.models.default
    made = await model.snapshots.get(tenant, limit_of(request, USUAL_ROWS, MAX_ROWS))
    headers = {"cache-control": "no-cache", "etag": f'"{made.tag}"', "vary": "accept-encoding"}
    if _has_already(request, headers["etag"]):
        return Response(status_code=304, headers=headers)
    body = made.body
    if len(body) >= PACKED_FROM and "gzip" in request.headers.get("accept-encoding", ""):
        body = await asyncio.to_thread(partial(zlib.compress, body, 1, 31))
        headers["content-encoding"] = "gzip"
    return Response(body, headers=headers, media_type="application/json")


def _answer(request: Request, file: PageFile, caching: str) -> Response:
    headers = {**PAGE_HEADERS, "vary": "accept-encoding", "etag": file.tag}
    headers["cache-control"] = caching
    if _has_already(request, file.tag):
        return Response(None, 304, headers)
    body = file.plain
    if "gzip" in request.headers.get("accept-encoding", ""):
        headers["content-encoding"] = "gzip"
        body = file.packed
    return Response(body, 200, headers, file.kind)


def _has_already(request: Request, tag: str) -> bool:
    """Return whether the client names ``tag``, with its quotes, as what it has."""
    return tag in request.headers.get("if-none-match", "")
