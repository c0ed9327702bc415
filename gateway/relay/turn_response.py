"""Serves one turn: waits for a slot, opens the engine, relays its answer."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import NamedTuple, TypeAlias

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from engines.asgi import ClientGone, while_client_stays
from engines.base import CacheOutcome, EngineUnavailable, SessionRef, Upstream
from engines.headers import (
    CACHE_HEADER,
    PROMPT_HEADER,
    SESSION_HEADER,
    patience_header,
    weight_header,
)
from gateway.context import Gateway
from gateway.edge.body_budget import body_share_of
from gateway.edge.key_limits import key_share_of
from gateway.errors import FORESEEN, Failure, failure_of
from gateway.front import body_send_of
from gateway.identity.names import id_to_header
from gateway.identity.outline import Change, Compared
from gateway.identity.twins import FirstLeft, Key, SharedTurn
from gateway.models.served_model import ServedModel
from gateway.relay.answer_format import AnswerFormat, HearsOfPrompt, Keep, NotStored
from gateway.relay.chat_chunks import parse_usage
from gateway.relay.passthrough import (
    Deadline,
    StreamOut,
    engine_failure,
    is_event_stream,
    passed_on,
    relay_events,
    send_end,
    send_response,
    send_whole,
)
from gateway.watch.metrics import Usage
from gateway.watch.requests import LiveRequest
from gateway.watch.tracing import context_of
from scheduler.session import TurnHints
from scheduler.sessions import Turn

log = logging.getLogger("thermocline.gateway")

# Sends the rest of the answer when the turn is over.
Ending: TypeAlias = Callable[[Send], Awaitable[None]]


class TurnRequest(NamedTuple):
    """The question to the engine, and its session."""

    operation: str  # OpenTelemetry's name
    path: str  # the engine's
    session: SessionRef
    body: bytes
    digest: bytes  # of the body
    hints: TurnHints = TurnHints()
    compared: Compared | None = None  # with the request before it in its session
    client: str = ""  # a word for the program that asks
    shared: bool = False  # if the same request runs already, this one gets its answer
    weight: int = 1  # of its tenant's share
    title: str = ""  # for its session


class TurnResponse(Response):
    """A response that serves its turn while it is sent.

    A failure before the head is sent becomes an error answer. The end of the answer goes out after
    the turn is over and its slot is free, so a client that has seen the end finds the session idle.
    """

    def __init__(
        self,
        gateway: Gateway,
        model: ServedModel,
        turn: TurnRequest,
        request_id: str,
        answer: AnswerFormat,
        keep: Keep | None = None,
    ) -> None:
        super().__init__()
        self._gateway = gateway
        self._model = model
        self._metrics = gateway.metrics
        self._operation, self._path, self._session = turn.operation, turn.path, turn.session
        self._body, self._hints, self._compared = turn.body, turn.hints, turn.compared
        self._client, self._title = turn.client, turn.title
        self._key: Key = (turn.session.tenant, turn.session.id, turn.path.encode() + turn.digest)
        self._may_join = turn.shared
        self._shared: SharedTurn[LiveRequest] | None = None  # set while twins may join this turn
        self._left = False  # its client; the turn may go on for twins
        self._weight = turn.weight
        welcome = model.engine.welcome
        self._named = self._operation, welcome.model if welcome else ""  # for metrics
        self._request_id = request_id
        self._answer = answer
        self._keep = keep
        self._began = time.perf_counter()
        self.head_sent = False  # by ``WhileLoading``
        self._error = "cancelled"  # until it is known better
        self._cache: CacheOutcome | None = None  # what the engine's head said, if it did

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        live, asked = self._model.live, (self._request_id, self._operation, self._client)
        name = " ".join(self._named).strip()
        self._trace = self._gateway.tracing.begin(name, context_of(scope["headers"]))
        with live.request(self._session, *asked, self._title) as self._live:
            await self._answered(scope, receive, send)

    async def _answered(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._share, self._place = body_share_of(scope), key_share_of(scope)
            send_body = body_send_of(scope, send)
            serve = partial(self._serve, send, send_body)
            end = await while_client_stays(receive, serve, self._twins_left)
            await end(send)
        except ClientGone:
            self._error = "client_gone"
            raise
        except Exception as error:  # the app's handlers answer it; it is counted here
            self._error = _word(failure_of(error))
            raise
        finally:
            self._live.error = self._error
            self._trace.end(self._live.attributes(self._named[1]), self._error)
            self._metrics.turn_ended(*self._named, self._seconds(), self._error)

    async def _serve(self, send: Send, send_body: Send) -> Ending:
        config = self._gateway.config
        self._deadline = Deadline(asyncio.get_running_loop().time() + config.request_timeout_s)
        out = StreamOut(send, send_body, self._answer, head_sent=self.head_sent)
        if self.head_sent:
            await out.begin([])
        async with out.showing_life(config.sign_of_life_s, [self._session_header()]):
            try:
                return await self._ask(out)
            except FORESEEN as error:
                if not out.begun:
                    raise
                return self._broken_off(out, failure_of(error))

    async def _ask(self, out: StreamOut) -> Ending:
        async with self._deadline.kept(), self._turn() as (turn, upstream):
            if upstream.status >= 400:
                return await self._refused(upstream, out)
            if not is_event_stream(upstream):
                return await self._whole(turn, upstream)
            return await self._stream(turn, upstream, out)

    async def _twins_left(self) -> None:
        """Return when the turn is to be cancelled: its client left, and it has no other reader."""
        self._left = True
        if self._shared is not None:
            await self._shared.without_readers()
            if self._shared.over:  # all that is left is to count it
                await asyncio.Event().wait()
            self._shared.end(EngineUnavailable("all clients left"))  # it cannot be joined

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[tuple[Turn | None, Upstream]]:
        """Take a turn, or join the one that serves the same request: then there is no ``Turn``."""
        twins = self._model.twins
        while self._may_join and (running := twins.find(self._key)):
            with running.joined(self._deadline.at) as twin, suppress(FirstLeft):
                self._live.shares = running.first
                await twin.begin()
                self._let_go()
                log.info("request %s shares a running turn", self._request_id)
                self._taken(twin)
                yield None, twin
                return
        self._live.shares = None
        with twins.serving(self._key, self._live, self._deadline.put_off) as self._shared:
            async with (
                self._own_turn() as (turn, upstream),
                self._shared.answered(upstream) as read,
            ):
                yield turn, read

    @asynccontextmanager
    async def _own_turn(self) -> AsyncIterator[tuple[Turn, Upstream]]:
        engine = self._model.engine
        headers = {
            **engine.session_headers(self._session),
            "content-type": "application/json",
            "x-request-id": self._request_id,
        }
        sessions = self._model.sessions
        async with sessions.turn(self._session, self._hints, self._weight) as turn:
            self._live.admitted()
            headers |= patience_header(turn.patience_s) | weight_header(self._weight)
            headers |= self._trace.headers()
            wait_s = self._gateway.config.engine_wait_s
            opening = engine.open(self._path, self._body, headers, wait_s)
            self._let_go()
            async with opening as upstream:
                self._taken(upstream)
                if upstream.status < 400:
                    turn.engine_answered(self._cache)
                if CACHE_HEADER in upstream.headers:
                    self._metrics.cache_outcome(self._cache)
                try:
                    yield turn, upstream
                finally:
                    if self._live.usage is None and upstream.status < 400:
                        self._count(turn, self._live.used_so_far())

    def _let_go(self) -> None:
        """Count the body no longer, and hold it no longer: it goes to the engine, or is not used.

        A turn that computes for minutes keeps no other body out. The engine's client holds
        small ones until the answer begins (``engines.client.http_exchange``).
        """
        self._body = b""
        self._share.give_back()

    def _taken(self, upstream: Upstream) -> None:
        """Read what the engine says of its cache."""
        said = upstream.headers.get(CACHE_HEADER, "")
        self._cache = self._live.cache = CacheOutcome.parse(said)
        if self._cache is None:
            return
        if self._compared is not None:
            self._compared.cached_tokens = self._cache.cached_tokens
        prompt_tokens = upstream.headers.get(PROMPT_HEADER, "")
        if not prompt_tokens.isdecimal():
            return
        self._live.reported_prompt_tokens = int(prompt_tokens)
        if isinstance(self._answer, HearsOfPrompt):
            self._answer.prompt_taken(int(prompt_tokens), self._cache.cached_tokens)

    async def _refused(self, upstream: Upstream, out: StreamOut) -> Ending:
        failure = engine_failure(upstream.status, await upstream.read())
        if out.begun:
            return self._broken_off(out, failure)
        self._error = _word(failure)
        return partial(send_response, response=self._answer.refusal(failure))

    async def _whole(self, turn: Turn | None, upstream: Upstream) -> Ending:
        body = await upstream.read()
        self._used(turn, parse_usage(body))
        shown, head = self._answer.whole(body), self._head(upstream)
        if lost := await self._kept():
            shown = shown if lost.body is None else lost.body
            head.append(lost.header)
        self._error = ""
        return partial(
            send_whole,
            headers=head,
            body=shown,
            client_stall_s=self._gateway.config.client_stall_s,
        )

    def _broken_off(self, out: StreamOut, failure: Failure) -> Ending:
        """End an answer whose head went out before it was known that it would fail."""
        self._error = _word(failure)
        return partial(send_end, body=out.events.ending(failure))

    async def _stream(self, turn: Turn | None, upstream: Upstream, out: StreamOut) -> Ending:
        await out.begin(self._head(upstream))
        events = out.events
        relay = partial(
            relay_events,
            upstream,
            events,
            deadline=self._deadline,
            client_stall_s=self._gateway.config.client_stall_s,
            on_chunk=self._heard,
        )
        try:
            failure = await relay(out.send)
        except ClientGone:  # it takes nothing, but another one does or did
            if self._shared is None:
                raise
            for_twins = partial(relay, _nowhere)
            failure = await while_client_stays(_gone, for_twins, self._twins_left)
        self._used(turn, events.usage())
        if (pace := self._live.token_s) is not None:
            self._metrics.per_token(*self._named, pace)
        self._error = _word(failure) if failure else "engine" if events.failed else ""
        if failure is not None:
            log.warning("request %s ended in mid-stream: %s", self._request_id, failure.message)
        ending = events.ending(failure)
        if (lost := await self._kept()) and lost.body is not None:
            ending = lost.body
        return _to_no_client if self._left else partial(send_end, body=ending)

    def _heard(self, chunk: bytes) -> None:
        if self._live.took(chunk):  # the first tokens
            self._metrics.first_token(*self._named, self._seconds(), self._cache)

    async def _kept(self) -> NotStored | None:
        if self._keep is None or self._left:  # a twin keeps its own answer
            return None
        return await self._keep(self._session)

    def _used(self, turn: Turn | None, usage: Usage | None) -> None:
        if usage is not None:
            self._live.usage = usage
            if turn is not None:  # else they are the other request's
                self._count(turn, usage)
            if self._compared is not None:
                self._compared.prompt_tokens = usage.prompt_tokens
        if self._compared is not None and self._compared.change is not None:
            self._diverged(self._compared, self._compared.change)

    def _count(self, turn: Turn, usage: Usage) -> None:
        self._metrics.used(*self._named, usage)
        num_tokens = usage.prompt_tokens + usage.completion_tokens
        turn.used(num_tokens)
        if self._place is not None:
            self._place.used_tokens(num_tokens)

    def _diverged(self, compared: Compared, change: Change) -> None:
        """Count and log that the prompt left the one before it; numbers only, no content."""
        self._live.change = change
        self._metrics.diverged(change.part)
        log.info(
            "session %s: the %s changed (message %d of %d): %d of %d tokens were reused",
            self._session.id,
            change.part,
            change.at_message,
            compared.outline.num_messages,
            compared.cached_tokens,
            compared.prompt_tokens,
            extra={"request_id": self._request_id, "session": self._session.id},
        )

    def _head(self, upstream: Upstream) -> list[tuple[bytes, bytes]]:
        return [*passed_on(upstream), self._session_header()]

    def _session_header(self) -> tuple[bytes, bytes]:
        return SESSION_HEADER.encode(), id_to_header(self._session.id).encode()

    def _seconds(self) -> float:
        return time.perf_counter() - self._began


async def _gone() -> Message:
    """Take the place of the ``receive`` of a client that is as good as gone."""
    return {"type": "http.disconnect"}


async def _nowhere(message: Message) -> None:
    """Take the place of a client's ``send``."""


async def _to_no_client(send: Send) -> None:
    """End an answer whose client is gone."""
    raise ClientGone


def _word(failure: Failure) -> str:
    """Name a failure by a word for a metric's label: one of few."""
    return failure.code or str(failure.status)
