"""Lets a request with grammars through to vLLM only if they compile within bounds.

vLLM compiles grammars in its API server, on the thread that tokenizes every prompt, and once more
in EngineCore, and neither can be interrupted. So each grammar is compiled first in a process that
can be ended if it exceeds its bounds or the client leaves (``host.grammar_trial``). The verdict on
a grammar is remembered for its tenant, as on our mlx engine.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final, TypeAlias

from engines.host.grammar import Verdict
from engines.host.grammar_trial import GrammarTrials
from engines.host.tenant_cache import TenantCache
from engines.host.work_line import QueueFull, WorkLine
from engines.openai.errors import InvalidRequest
from engines.vllm_plugin.grammar.wanted import WantedGrammar, wanted_by

logger = logging.getLogger("thermocline.vllm")

Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]

PROGRAM: Final = "engines.vllm_plugin.grammar.program"
MAX_WAITING: Final = 64  # requests
MAX_KNOWN: Final = 256  # grammars


class ClientLeft(Exception):
    """The client of a request left before vLLM saw it."""


class GrammarGate:
    """Tries the grammars of requests. Belongs to the event loop of vLLM's API server."""

    def __init__(self) -> None:
        self._line = WorkLine(MAX_WAITING)
        self._known = TenantCache[Verdict](MAX_KNOWN)
        self._trials: GrammarTrials | None = None
        self._beginning: asyncio.Task[None] | None = None

    def begin(self, client: Any) -> None:
        """Start the process that tries grammars, for the model of vLLM's engine ``client``."""
        tokenizer = client.renderer.tokenizer
        if not hasattr(tokenizer, "backend_tokenizer"):
            logger.warning("grammars are not tried out: this tokenizer cannot be written as JSON")
            return
        width = client.model_config.get_vocab_size()
        self._trials = GrammarTrials(lambda: _vocabularies(tokenizer, width), PROGRAM)
        self._beginning = asyncio.create_task(self._trials.begin(), name="grammar-trials")

    async def close(self) -> None:
        """End the process."""
        if self._trials is not None:
            await self._trials.close()

    async def passed(self, tenant: str, receive: Receive) -> Receive:
        """Read a request, and try its grammars; return a callable that receives the request again.

        Raises:
            InvalidRequest: a grammar cannot be compiled within the bounds; the error names the
                request's field.
            ClientLeft: the client left meanwhile.
            QueueFull: too many requests wait already, or no grammar can be tried now.
        """
        if self._trials is None:
            return receive
        body = await _read_body(receive)
        wanted = await asyncio.to_thread(wanted_by, body)
        if not wanted:
            return _Replay(body, receive)
        leaving = asyncio.ensure_future(receive())
        trying = asyncio.create_task(self._try_all(tenant, wanted))
        try:
            await asyncio.wait({leaving, trying}, return_when=asyncio.FIRST_COMPLETED)
            if leaving.done() and leaving.result()["type"] == "http.disconnect":
                raise ClientLeft
            await trying
        except BaseException:
            leaving.cancel()
            raise
        finally:
            trying.cancel()
            await asyncio.wait({trying})
        return _Replay(body, receive, leaving)

    async def _try_all(self, tenant: str, wanted: list[WantedGrammar]) -> None:
        for one in wanted:
            verdict = await self._verdict(tenant, one)
            if not verdict.is_final:
                raise QueueFull(f"{one.param}: {verdict.reason}")
            if verdict.reason:
                raise InvalidRequest(f"{one.param}: {verdict.reason}", one.param)

    async def _verdict(self, tenant: str, wanted: WantedGrammar) -> Verdict:
        assert self._trials is not None
        key = tenant, hashlib.blake2b(f"{wanted.kind} {wanted.text}".encode()).digest()
        if verdict := self._known.find(key):
            return verdict
        async with self._line.turn():
            verdict = self._known.find(key) or await self._trials.of(wanted)
        if verdict.is_final:
            self._known.add(key, verdict)
        return verdict


class _Replay:
    """Delivers a request's body once more, then the messages that came after it."""

    def __init__(
        self, body: bytes, receive: Receive, coming: asyncio.Future[Any] | None = None
    ) -> None:
        self._body: bytes | None = body
        self._receive = receive
        self._coming = coming

    async def __call__(self) -> MutableMapping[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        if self._coming is not None:
            message: MutableMapping[str, Any] = await asyncio.shield(self._coming)
            self._coming = None
            return message
        return await self._receive()


async def _read_body(receive: Receive) -> bytes:
    pieces = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        pieces.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(pieces)


def _vocabularies(tokenizer: Any, width: int) -> Any:
    import xgrammar  # only when it is needed: the middleware's tests use no grammars

    from engines.vllm_plugin.grammar.program import Vocabularies

    known = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=width)
    width = max(width, len(tokenizer))
    eos = [tokenizer.eos_token_id]
    return Vocabularies(tokenizer.backend_tokenizer.to_str(), width, eos, known.serialize_json())
