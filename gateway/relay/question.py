"""Asks the engine something that is no turn: no session, no slot, a small answer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

from engines.base import Engine
from engines.openai.errors import InvalidRequest
from gateway.relay.passthrough import engine_failure

QUESTION_S = 60.0
NO_HEADERS: Final[Mapping[str, str]] = {}


async def answer_to(
    engine: Engine,
    path: str,
    question: bytes,
    limit_s: float = QUESTION_S,
    headers: Mapping[str, str] = NO_HEADERS,
) -> bytes:
    """POST ``question``, a body of JSON, to the engine; returns the body of its answer.

    ``headers``: for the engine, besides the type of the body.

    Raises:
        InvalidRequest: the engine refused it, with the engine's words.
        EngineUnavailable: there is no engine, or it went away.
        TimeoutError: no answer within ``limit_s``.
    """
    opening = engine.open(path, question, {**headers, "content-type": "application/json"})
    async with asyncio.timeout(limit_s), opening as upstream:
        answer = await upstream.read()
        if upstream.status < 400:
            return answer
        failure = engine_failure(upstream.status, answer)
        if upstream.status in (404, 405) and failure.code == "engine":  # not in our shape: no path
            raise InvalidRequest(f"This engine has no {path}.", code="not_supported", status=404)
        raise InvalidRequest(failure.message, failure.param, failure.code, failure.status)
