"""The description of the API: every route is in it, and it is a valid document."""

from __future__ import annotations

import re

from gateway.app import ROUTES
from tests.unit.gateway.in_process import App


async def test_every_path_is_described_and_answers(app: App) -> None:
    api = (await app.get("/openapi.json")).json
    paths = api["paths"]
    for routes in ROUTES:
        for route in routes.router.routes:
            assert re.sub(r":\w+}", "}", route.path) in paths
    for path, kinds in paths.items():
        for method, operation in kinds.items():
            assert operation["summary"]
            names = [x["name"] for x in operation["parameters"] if x["in"] == "path"]
            url = path.format(**dict.fromkeys(names, "x"))
            reply = await app.call(method.upper(), url, b"", {})
            assert str(reply.status) in operation["responses"], (method, path, reply.status)


async def test_references_lead_somewhere() -> None:
    api = (await App().get("/openapi.json")).json
    found = re.findall(r"#/components/schemas/(\w+)", str(api))
    assert set(found) <= set(api["components"]["schemas"])
    assert "ResponseFields" in found and "ChatRequest" in found
    ids = [x["operationId"] for kinds in api["paths"].values() for x in kinds.values()]
    assert len(set(ids)) == len(ids)


async def test_the_page_loads_nothing_from_elsewhere() -> None:
    reply = await App().get("/docs")
    page, policy = reply.body.decode(), reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy and reply.headers["x-frame-options"] == "DENY"
    assert "<title>" in page
    assert "http:" not in page and "https:" not in page and "src=" not in page
