"""Serves HTTP to the gateway: completions, embeddings, tokenization.

It listens at a unix socket and requires the bearer token. The gateway has checked a request; here
it is planned on a thread (``prompt/request_planner.py``), handed to the owner thread, and answered
as its events arrive.

The response's head is sent when the prompt has its place in a batch, since only then is it known
how much of the prompt was cached.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from functools import partial
from importlib.metadata import version
from typing import Any, TypeVar

import msgspec
from mlx_lm.tokenizer_utils import TokenizerWrapper
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from engines.config import WorkerConfig
from engines.host.work_line import QueueFull
from engines.http import (
    CACHE_HEADER,
    PROMPT_HEADER,
    TENANT_HEADER,
    BearerGate,
    ClientGone,
    patience_from,
    read_body,
    session_from,
    while_client_stays,
)
from engines.mlx_worker.answer.reply import GenerationFailed, ReplyStream, RequestPlan
from engines.mlx_worker.answer.reply_format import (
    KEEPALIVE_S,
    AnsweringModel,
    ChatFormat,
    CompletionFormat,
    ReplyFormat,
    SseResponse,
    chunks,
    collected,
)
from engines.mlx_worker.embeddings import Embedder, shown, tokens_of
from engines.mlx_worker.grammar import GrammarCompiler
from engines.mlx_worker.model.loading import Vocabulary
from engines.mlx_worker.owner import Owner
from engines.mlx_worker.prompt.chat_template import PromptTokens
from engines.mlx_worker.prompt.request_planner import Planning, RequestPlanner
from engines.mlx_worker.prompt.tools import grammar_wanted
from engines.openai.requests import (
    DETOKENIZE_PATH,
    EMBEDDINGS_PATH,
    TOKENIZE_PATH,
    Body,
    CompletionRequest,
    InvalidRequest,
    error_body,
    error_type,
    parse_json,
    read_chat,
    read_completion,
    read_embeddings,
    validate_detokenize,
    validate_tokenize,
)

logger = logging.getLogger(__name__)
T = TypeVar("T")

MAX_BODY_BYTES = 64 << 20
# A larger body is parsed on a thread.
LARGE_BODY_BYTES = 256 << 10
_RETRY_AFTER_S = 1
# nginx's status for a client that has closed the connection, which no client reads.
_CLIENT_CLOSED = 499
# The exceptions that ``_refusal`` turns into responses; the last one stands for all others.
_ANSWERED = (
    InvalidRequest,
    QueueFull,
    GenerationFailed,
    ClientGone,
    ClientDisconnect,
    HTTPException,
    Exception,
)


def create_app(
    owner: Owner,
    tokenizer: TokenizerWrapper,
    config: WorkerConfig,
    keepalive_s: float = KEEPALIVE_S,
    embedder: Embedder | None = None,
) -> Starlette:
    """Return the app.

    Args:
        owner: must have started; it still runs when the app's lifespan ends.
        keepalive_s: seconds between comments in a stream that sends nothing else.
        embedder: None = the route of embeddings answers 404.
    """
    endpoints = Endpoints(owner, tokenizer, config, keepalive_s, embedder)
    return Starlette(
        routes=[
            Route("/v1/chat/completions", endpoints.chat, methods=["POST"]),
            Route("/v1/completions", endpoints.text, methods=["POST"]),
            Route(TOKENIZE_PATH, endpoints.tokenize, methods=["POST"]),
            Route(DETOKENIZE_PATH, endpoints.detokenize, methods=["POST"]),
            Route(EMBEDDINGS_PATH, endpoints.embeddings, methods=["POST"]),
        ],
        middleware=[Middleware(BearerGate, token=config.token)],
        exception_handlers=dict.fromkeys(_ANSWERED, _on_error),
        lifespan=endpoints.lifespan,
    )


class Endpoints:
    """The endpoints, and the threads on which they parse bodies and plan requests."""

    def __init__(
        self,
        owner: Owner,
        tokenizer: TokenizerWrapper,
        config: WorkerConfig,
        keepalive_s: float,
        embedder: Embedder | None,
    ) -> None:
        self._owner = owner
        self._embedder = embedder
        self._keepalive_s = keepalive_s
        self._vocabulary = Vocabulary(tokenizer, owner.facts.vocab_size)
        self._planner = RequestPlanner(self._vocabulary, owner.facts)
        self._tokens = PromptTokens(self._vocabulary, owner.facts)
        self._served = AnsweringModel(owner.facts.name, _fingerprint(config), self._vocabulary)
        # The prompts' thread first builds the grammar vocabulary, so that it need not be built on
        # the event loop later.
        self._planning = Planning(lambda: self._vocabulary.grammar)
        self._grammars = GrammarCompiler(self._vocabulary)
        # A thread of its own, so that large bodies do not wait for prompts.
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="body")

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            self._planning.close()
            self._reader.shutdown(wait=False, cancel_futures=True)
            await self._grammars.close()

    async def chat(self, request: Request) -> Response:
        asked, size = await self._read(request, read_chat)
        session, grammar = session_from(request.headers), None
        if wish := grammar_wanted(asked):
            tenant = request.headers.get(TENANT_HEADER, "")
            compiled = partial(self._grammars.of, tenant, wish)
            grammar = await while_client_stays(request.receive, compiled)
        plan = await self._planned(
            request, lambda: self._planner.chat(asked, session, grammar), size
        )
        return await self._answer(request, asked, plan, ChatFormat(self._served, asked))

    async def text(self, request: Request) -> Response:
        asked, size = await self._read(request, read_completion)
        session = session_from(request.headers)
        plan, echoed = await self._planned(
            request, lambda: (self._planner.text(asked, session), self._echo(asked)), size
        )
        form = CompletionFormat(self._served, asked, echoed)
        return await self._answer(request, asked, plan, form)

    async def tokenize(self, request: Request) -> Response:
        body, size = await self._read(request, parse_json)
        asked = validate_tokenize(body)
        return _json(await self._planned(request, lambda: self._tokens.of(asked), size))

    async def detokenize(self, request: Request) -> Response:
        body, size = await self._read(request, parse_json)
        asked = validate_detokenize(body)
        return _json(await self._planned(request, lambda: self._tokens.text_of(asked), size))

    async def embeddings(self, request: Request) -> Response:
        if self._embedder is None:
            raise HTTPException(404)
        self._embedder.check()
        asked, _ = await self._read(request, read_embeddings)
        known = self._planning, self._vocabulary, self._owner.facts
        texts = await while_client_stays(request.receive, partial(tokens_of, asked, *known))
        embed = partial(self._embedder.embed, asked, texts)
        vectors = await while_client_stays(request.receive, embed)
        num_tokens = sum(map(len, texts))
        body = await asyncio.to_thread(shown, asked, vectors, num_tokens)
        return Response(body, media_type="application/json")

    async def _answer(
        self, request: Request, asked: Body, plan: RequestPlan, form: ReplyFormat
    ) -> Response:
        async with AsyncExitStack() as stack:
            reply = await stack.enter_async_context(aclosing(ReplyStream(self._owner, plan)))
            await _in_time(request, reply)
            if asked.stream:
                return SseResponse(
                    chunks(form, reply),
                    _cache_headers(reply, plan),
                    stack.pop_all(),
                    _error_event,
                    self._keepalive_s,
                )
            whole = await while_client_stays(request.receive, lambda: collected(form, reply))
            return _json(whole, headers=_cache_headers(reply, plan))

    async def _planned(self, request: Request, work: Callable[[], T], size: int) -> T:
        planned = partial(self._planning.do, work, size)
        return await while_client_stays(request.receive, planned)

    async def _read(self, request: Request, parse: Callable[[bytes], T]) -> tuple[T, int]:
        """Return a request's parsed body, and the body's size in bytes.

        A large body is parsed on a thread; on the event loop it would stall all streams.
        """
        body = await read_body(request, MAX_BODY_BYTES)
        if len(body) <= LARGE_BODY_BYTES:
            return parse(body), len(body)
        reading = asyncio.get_running_loop().run_in_executor(self._reader, parse, body)
        return await reading, len(body)

    def _echo(self, asked: CompletionRequest) -> list[str]:
        """Return the prompts as text if the request asks to echo them. On the prompts' thread."""
        decode = self._vocabulary.tokenizer.decode
        prompts = asked.prompts if asked.echo else []
        return [x if isinstance(x, str) else str(decode(x)) for x in prompts]


async def _in_time(request: Request, reply: ReplyStream) -> None:
    """Wait for a place in a batch. Raises ``QueueFull`` after the gateway's time limit."""
    patience_s = patience_from(request.headers)
    try:
        async with asyncio.timeout(patience_s):
            await while_client_stays(request.receive, reply.admitted)
    except TimeoutError:
        raise QueueFull("no place in a batch was free in time; try again later") from None


def _cache_headers(reply: ReplyStream, plan: RequestPlan) -> dict[str, str]:
    return {CACHE_HEADER: reply.outcome.header(), PROMPT_HEADER: str(plan.prompt_tokens)}


def _fingerprint(config: WorkerConfig) -> str:
    """Return OpenAI's system fingerprint, which changes if the same seed may give another answer.

    It depends on the model's path, the dtype and the versions of the libraries.
    """
    parts = (config.model_path, config.engine.dtype, version("mlx"), version("mlx-lm"))
    return f"fp_{hashlib.blake2b(repr(parts).encode(), digest_size=5).hexdigest()}"


def _json(
    body: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    encoded = msgspec.json.encode(body)
    return Response(encoded, status, headers, media_type="application/json")


async def _on_error(request: Request, error: Exception) -> Response:
    body, status = _refusal(error)
    headers = {"retry-after": str(_RETRY_AFTER_S)} if status == 429 else None
    return _json(body, status, headers)


def _error_event(error: Exception) -> dict[str, Any]:
    """Return the last event of a stream that fails after it has begun."""
    body, status = _refusal(error)
    if status >= 500:
        logger.error("a stream failed", exc_info=error)
    return body


def _refusal(error: Exception) -> tuple[dict[str, Any], int]:
    """Return the body and the status for an exception."""
    match error:
        case InvalidRequest():
            return error.body(), error.status
        case QueueFull():
            return error_body(str(error), error_type(429), None, "engine_overloaded"), 429
        case GenerationFailed():
            message = f"The engine failed during this request: {error}"
            return error_body(message, error_type(500), None, "generation_failed"), 500
        case ClientGone() | ClientDisconnect():
            return error_body("The client closed the connection.", "client_closed"), _CLIENT_CLOSED
        case HTTPException():
            return error_body(error.detail, error_type(error.status_code)), error.status_code
    return error_body("Internal error of the engine.", error_type(500)), 500
