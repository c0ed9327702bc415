"""The headers that name a session."""

from __future__ import annotations

import pytest

from engines.http import SALT_HEADER, SESSION_HEADER, TENANT_HEADER
from tests.integration.worker_http.stage import HELLO, Open, post

pytestmark = pytest.mark.mlx


async def test_session_headers(toy: Open) -> None:
    named = {TENANT_HEADER: "t", SESSION_HEADER: "caf%C3%A9%2F1", SALT_HEADER: "00ff"}
    body = {"model": "toy", "messages": HELLO, "max_tokens": 1}
    async with toy() as stage:
        async with post(stage, body, **named) as response:
            assert response.status == 200
        async with post(stage, body) as response:
            assert response.status == 200
        async with post(stage, body, **{**named, SALT_HEADER: "xx"}) as response:
            assert response.status == 400
    first, second = stage.owner.submitted
    assert (first.session.tenant, first.session.id) == ("t", "café/1")
    assert first.session.salt == b"\x00\xff"
    assert second.session is None
