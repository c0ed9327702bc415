"""Asks the engine something that is no turn: no session, no slot, a small answer."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Final

from starlette.requests import Request

from engines.asgi import while_client_stays
from engines.base import Engine
from engines.headers import payer_headers
from engines.openai.errors import InvalidRequest
from gateway.context import caller_of
from gateway.relay.passthrough import engine_failure

QUESTION_S: Final = 60.0


async def answer_to(
    request: Request, engine: Engine, path: str, question: bytes, limit_s: float = QUESTION_S
) -> bytes:
    """POST ``question``, a body of JSON, to an engine; returns the body of its answer.

    The engine hears who asks, since its tenants take turns, and of a client that leaves.

    Raises:
        InvalidRequest: the engine refused it, with the engine's words.
        EngineUnavailable: there is no engine, or it went away.
        TimeoutError: no answer within ``limit_s``.
        ClientGone: the client left; the engine has stopped.
    """
    caller = caller_of(request)
    headers = {**payer_headers(caller.name, caller.weight), "content-type": "application/json"}
    ask = partial(_ask, engine, path, question, limit_s, headers)
    return await while_client_stays(request.receive, ask)


async def _ask(
    engine: Engine, path: str, question: bytes, limit_s: float, headers: dict[str, str]
) -> bytes:
    opening = engine.open(path, question, headers)
    async with asyncio.timeout(limit_s), opening as upstream:
        answer = await upstream.read()
        if upstream.status < 400:
            return answer
        failure = engine_failure(upstream.status, answer)
        if upstream.status in (404, 405) and failure.code == "engine":  # not in our shape: no path
            raise InvalidRequest(f"This engine has no {path}.", code="not_supported", status=404)
        raise InvalidRequest(failure.message, failure.param, failure.code, failure.status)
