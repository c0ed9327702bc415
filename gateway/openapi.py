"""GET /openapi.json and /docs: the description of this server's API, made from its routes.

The schema of a body is that of the struct which checks it (``routing.takes``), so the two cannot
differ. The page loads nothing from other hosts.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable
from http import HTTPStatus
from importlib.metadata import version
from typing import Any, Final

import msgspec
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from engines.openai.messages import Json
from gateway.dashboard.routes import PAGE_HEADERS
from gateway.openai.stored_objects import MAX_ROWS
from gateway.request.routing import json_response, new_router
from gateway.sessions import MAX_ROWS as MAX_SESSIONS

router = new_router()
_OTHER_GOOD = {("POST", "/admin/keys"): 201} | {
    ("POST", f"/admin/{x}"): 202
    for x in ("measure", "models/load", "models/unload", "models/download")
}
_STREAMS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"})
_NUMBER_OF_ROWS = {"type": "integer", "minimum": 0, "maximum": MAX_ROWS}
_LISTS = re.compile(r"/(items|input_items|messages)$|^/v1/chat/completions$")
_PAGES = frozenset({"/", "/docs", "/ui", "/ui/{version}/{name}"})
_OPEN = _PAGES | {"/livez", "/readyz", "/health", "/ping", "/version", "/openapi.json"}
_REFS = "#/components/schemas/{name}"
_PATH_NAME = re.compile(r"{(\w+)(?::\w+)?}")
_ERROR: Json = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_STYLE: Final = """
:root{color-scheme:light dark}
body{font:15px/1.5 system-ui;margin:2em auto;max-width:60em;padding:0 1em}
summary{cursor:pointer;font-family:monospace;overflow-wrap:anywhere}pre{overflow:auto;background:#8881;padding:1em}
"""
_SCRIPT: Final = """
const add = (to, tag, text) => {
  const made = to.appendChild(document.createElement(tag)); made.textContent = text; return made;
};
fetch("openapi.json").then(x => x.json()).then(api => {
  const all = document.getElementById("all");
  for (const [path, kinds] of Object.entries(api.paths))
    for (const [method, it] of Object.entries(kinds)) {
      const row = add(all, "details", "");
      add(row, "summary", method.toUpperCase() + " " + path);
      add(row, "p", it.summary);
      const body = it.requestBody?.content["application/json"].schema.$ref?.split("/").pop();
      if (body) add(row, "pre", JSON.stringify(api.components.schemas[body], null, 2));
    }
});
"""
_PAGE: Final = f"""<!doctype html><html lang="en"><meta charset="utf-8">
<meta name="viewport" content="width=device-width"><title>Thermocline</title>
<style>{_STYLE}</style><h1>Thermocline</h1><p><a href="openapi.json">openapi.json</a></p>
<div id="all"></div><script>{_SCRIPT}</script>
"""


def _source(text: str) -> str:
    """Return the source expression by which a content security policy allows this text only."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "connect-src 'self'",
        f"script-src {_source(_SCRIPT)}",
        f"style-src {_source(_STYLE)}",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)


@router.get("/openapi.json")
async def openapi(request: Request) -> Response:
    """Describe every path of this server as OpenAPI 3.1."""
    return json_response(document(request.app.routes))


@router.get("/docs")
async def docs(request: Request) -> Response:
    """Show the OpenAPI description as a page."""
    return HTMLResponse(_PAGE, headers={**PAGE_HEADERS, "content-security-policy": _POLICY})


def document(routes: Iterable[Any]) -> Json:
    """Return the OpenAPI document of ``routes``."""
    paths: dict[str, Json] = {}
    bodies: set[type[msgspec.Struct]] = set()
    for route in routes:
        assert isinstance(route, APIRoute)
        bodies |= {route.openapi_extra["body"]} if route.openapi_extra else set()
        path = _PATH_NAME.sub(r"{\1}", route.path)
        for method in sorted((route.methods or set()) - {"HEAD"}):
            paths.setdefault(path, {})[method.lower()] = _operation(route, path, method)
    _, schemas = msgspec.json.schema_components(bodies, ref_template=_REFS)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Thermocline", "version": version("thermocline")},
        "paths": dict(sorted(paths.items())),
        "security": [{"key": []}],
        "components": {
            "schemas": {**schemas, "Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: APIRoute, path: str, method: str) -> Json:
    words = (route.endpoint.__doc__ or route.name.replace("_", " ")).strip().partition("\n")[0]
    operation: Json = {
        "operationId": "_".join([method.lower(), *re.findall(r"\w+", path)]),
        "summary": words,
        "parameters": list(_parameters(path, method)),
        "responses": _answers(path, method),
    }
    if route.openapi_extra:
        schema = {"$ref": _REFS.format(name=route.openapi_extra["body"].__name__)}
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema}},
        }
    if path in _OPEN:
        operation["security"] = []
    return operation


def _parameters(path: str, method: str) -> Iterable[Json]:
    for name in _PATH_NAME.findall(path):
        yield {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
    if method == "GET" and _LISTS.search(path):
        yield {"name": "limit", "in": "query", "schema": _NUMBER_OF_ROWS}
        yield {"name": "order", "in": "query", "schema": {"enum": ["asc", "desc"]}}
        yield {"name": "after", "in": "query", "schema": {"type": "string"}}
    if path.startswith("/v1/sessions"):  # another tenant's, for admins
        yield {"name": "tenant", "in": "query", "schema": {"type": "string"}}
    if path == "/v1/sessions" and method == "GET":
        kinds = {"enum": ["main", "child", "task"]}
        yield {"name": "kind", "in": "query", "schema": kinds}
        rows = {"type": "integer", "minimum": 1, "maximum": MAX_SESSIONS}
        yield {"name": "limit", "in": "query", "schema": rows}
        yield {"name": "after", "in": "query", "schema": {"type": "string"}}


def _answers(path: str, method: str) -> Json:
    content: Json = {"application/json": {"schema": {}}}
    if path == "/metrics":
        content = {"text/plain": {"schema": {"type": "string"}}}
    if path in _PAGES:
        content = {"text/html": {"schema": {"type": "string"}}}
    if method == "POST" and path in _STREAMS:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    error = {"application/json": {"schema": {"$ref": _REFS.format(name="Error")}}}
    statuses = [400, 408, 413, 415, 429, 502, 503, 504] if method == "POST" else [400, 503]
    statuses += [] if path in _OPEN else [401]
    statuses += [404] if path.startswith("/v1/") or "{" in path else []
    statuses += [403, 409] if path.startswith("/admin/") else []
    good = _OTHER_GOOD.get((method, path), 200)
    goods = [good, 202] if path.endswith("/demote") else [good]
    answers: Json = {
        str(x): {"description": HTTPStatus(x).phrase, "content": content} for x in goods
    }
    for status in sorted(statuses):
        answers[str(status)] = {"description": HTTPStatus(status).phrase, "content": error}
    return answers
