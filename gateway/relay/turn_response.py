"""Serves one turn: waits for a slot, asks the engine, relays its answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import NamedTuple, TypeAlias

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engines.base import SessionRef, Upstream
from engines.http import (
    SESSION_HEADER,
    ClientGone,
    patience_header,
    while_client_stays,
)
from engines.openai.foreign_request import renamed
from gateway.errors import FORESEEN, Failure, failure_of
from gateway.gateway import Gateway
from gateway.identity.names import id_to_header
from gateway.identity.outline import SAID_CHARS, Compared
from gateway.models import ServedModel
from gateway.relay.answer import (
    AnswerFormat,
    FirstWords,
    NotStored,
    StoreAnswer,
    parse_usage,
)
from gateway.relay.passthrough import (
    EVENT_STREAM,
    STREAM_HEADERS,
    StreamOut,
    WithoutContent,
    body_part,
    engine_failure,
    is_event_stream,
    passed_on,
    relay_events,
    send_end,
    send_head,
    send_response,
    send_whole,
)
from gateway.request.callers import state_of
from gateway.request.middleware import body_send_of
from gateway.watch.telemetry import context_of
from scheduler.session import TurnHints
from scheduler.sessions import Turn

LEFT_OUT_HEADER = "x-thermocline-left-out"
IGNORED_HEADER = "x-thermocline-ignored"
log = logging.getLogger("thermocline.gateway")

# Sends the rest of the answer, after the turn is over.
Ending: TypeAlias = Callable[[Send], Awaitable[None]]


class TurnRequest(NamedTuple):
    """A turn: the request to the engine, its session, and facts about its client."""

    operation: str  # OpenTelemetry's name
    path: str  # the engine's
    session: SessionRef
    body: bytes
    hints: TurnHints = TurnHints()
    compared: Compared | None = None  # with the previous request of its session
    client: str = ""  # the client program's name; see ``names.client_name``
    weight: int = 1  # of its tenant's share
    num_answers: int = 1
    title: str = ""  # for its session
    foreign: Mapping[str, str] = {}  # engine's field -> the client's name of it
    ignored: Sequence[str] = ()  # fields of the client that this server does not know
    left_out: Sequence[str] = ()  # keywords of JSON schemas that no grammar enforces
    is_silent: bool = False  # True: the answer's text is hidden
    on_words: Callable[[str], None] | None = None  # called with the beginning of the answer


class TurnResponse(Response):
    """A response that serves its turn while it is sent.

    A failure before the head is sent becomes an error response. The end of the answer is sent after
    the turn's slot is free, so that a client that has seen the end finds the session idle.
    """

    def __init__(
        self,
        gateway: Gateway,
        model: ServedModel,
        turn: TurnRequest,
        request_id: str,
        answer: AnswerFormat,
        keep: StoreAnswer | None = None,
    ) -> None:
        super().__init__()
        self._gateway = gateway
        self._model = model
        self._asked = turn._replace(body=b"")
        self._body, self._session = turn.body, turn.session
        self._request_id = request_id
        self._answer = answer
        self._keep = keep
        self._was_there = False  # True: the session existed when its turn began
        self.head_sent = False  # True: ``AwaitingModel`` has sent it

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked, request = self._asked, self._model.live.request
        with request(self._session, self._request_id, asked.operation, asked.client) as live:
            live.title, live.compared = asked.title, asked.compared
            live.error = "cancelled"  # unless another end is noted
            self._live = live
            name = f"{live.operation} {live.model}".strip()
            self._trace = self._gateway.tracing.begin(name, context_of(scope["headers"]))
            await self._answered(scope, receive, send)

    async def _answered(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._state = state_of(scope)
            send_body = body_send_of(scope, send)
            serve = partial(self._serve, send, send_body)
            end = await while_client_stays(receive, serve)
            await end(send)
        except ClientGone:
            self._live.error = "client_gone"
            raise
        except Exception as error:  # noted here; the app's handlers answer it
            self._live.error = _word(failure_of(error))
            raise
        finally:
            self._trace.end(self._live)

    async def _serve(self, send: Send, send_body: Send) -> Ending:
        config = self._gateway.config
        self._ends_at = asyncio.get_running_loop().time() + config.request_timeout_s
        out = StreamOut(send, send_body, self._answer, head_sent=self.head_sent)
        if self.head_sent:
            await out.begin([])
        async with out.showing_life(config.sign_of_life_s, self._own_headers()):
            try:
                return await self._ask(out)
            except FORESEEN as error:
                if not out.begun:
                    raise
                return self._broken_off(out, failure_of(error))

    async def _ask(self, out: StreamOut) -> Ending:
        async with asyncio.timeout_at(self._ends_at) as limit, self._turn() as upstream:
            if upstream.status >= 400:
                return await self._refused(upstream, out)
            if not is_event_stream(upstream):
                return await self._whole(upstream)
            if not limit.expired():
                limit.reschedule(None)  # the relay enforces it, and ends the stream with an event
            return await self._stream(upstream, out)

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[Upstream]:
        asked, engine = self._asked, self._model.engine
        headers = {
            **engine.session_headers(self._session),
            "content-type": "application/json",
            "x-request-id": self._request_id,
        }
        sessions = self._model.sessions
        turns = sessions.turn(self._session, asked.hints, asked.weight, asked.num_answers)
        async with turns as turn:
            self._live.admitted()
            self._was_there = sessions.get(self._session) is not None
            headers |= {**patience_header(turn.patience_s), **self._trace.headers()}
            wait_s = self._gateway.config.engine_wait_s
            opening = engine.open(asked.path, self._body, headers, wait_s)
            self._let_go()
            async with opening as upstream:
                self._live.engine_answered(upstream.headers)
                if upstream.status < 400:
                    turn.engine_answered(self._live.cache)
                try:
                    yield WithoutContent(upstream) if asked.is_silent else upstream
                finally:
                    if upstream.status < 400:
                        self._count(turn)

    def _first_words(self) -> FirstWords | None:
        asked = self._asked
        if asked.on_words is None or asked.num_answers > 1 or asked.is_silent:
            return None
        return FirstWords(SAID_CHARS, asked.on_words)

    def _let_go(self) -> None:
        """Release the body and its share of the budget, as the engine gets it now.

        A turn that computes for minutes must not keep other bodies waiting. The engine's client
        holds small bodies until the answer begins (``engines.client.second_try``).
        """
        self._body = b""
        self._state.body.give_back()

    async def _refused(self, upstream: Upstream, out: StreamOut) -> Ending:
        failure = engine_failure(upstream.status, await upstream.read())
        message, param = renamed(failure.message, failure.param, self._asked.foreign)
        failure = msgspec.structs.replace(failure, message=message, param=param)
        if out.begun:
            return self._broken_off(out, failure)
        self._live.error = _word(failure)
        return partial(send_response, response=self._answer.refusal(failure))

    async def _whole(self, upstream: Upstream) -> Ending:
        body = await upstream.read()
        if words := self._first_words():
            words.read(body)
            words.end()
        self._live.answered(parse_usage(body))
        shown, head = self._answer.whole(body), self._head(upstream)
        if lost := await self._store_answer():
            shown = shown if lost.body is None else lost.body
            head.append(lost.header)
        self._live.error = ""
        return partial(
            send_whole,
            headers=head,
            body=shown,
            client_stall_s=self._gateway.config.client_stall_s,
        )

    def _broken_off(self, out: StreamOut, failure: Failure) -> Ending:
        """Note a failure after the head was sent; return the ending that reports it."""
        self._live.error = _word(failure)
        return partial(send_end, body=out.events.ending(failure))

    async def _stream(self, upstream: Upstream, out: StreamOut) -> Ending:
        await out.begin(self._head(upstream), self._live.usage)
        events = self._live.stream = out.events
        events.words = self._first_words()
        failure = await relay_events(
            upstream,
            events,
            out.send,
            ends_at=self._ends_at,
            client_stall_s=self._gateway.config.client_stall_s,
            on_chunk=self._live.look,
        )
        self._live.answered(events.usage)
        self._live.error = _word(failure) if failure else "engine" if events.failed else ""
        if failure is not None:
            log.warning("request %s ended in mid-stream: %s", self._request_id, failure.message)
        ending = events.ending(failure)
        if (lost := await self._store_answer()) and lost.body is not None:
            ending = lost.body
        return partial(send_end, body=ending)

    async def _store_answer(self) -> NotStored | None:
        """Store the answer if that was asked for; return why that failed, None if it did not."""
        if self._keep is None:
            return None
        return await self._keep(self._session, self._is_deleted)

    def _is_deleted(self) -> bool:
        """Return whether the session was deleted since its turn began."""
        return self._was_there and self._model.sessions.get(self._session) is None

    def _count(self, turn: Turn) -> None:
        """Charge the tokens that the turn used, however it ended."""
        used = self._live.charge()
        num_tokens = used.prompt_tokens + used.completion_tokens
        turn.used(num_tokens)
        self._state.used_tokens(num_tokens)

    def _head(self, upstream: Upstream) -> list[tuple[bytes, bytes]]:
        return [*passed_on(upstream), *self._own_headers()]

    def _own_headers(self) -> list[tuple[bytes, bytes]]:
        headers = [(SESSION_HEADER.encode(), id_to_header(self._session.id).encode())]
        if self._asked.ignored:
            headers.append((IGNORED_HEADER.encode(), ", ".join(self._asked.ignored).encode()))
        if self._asked.left_out:
            headers.append((LEFT_OUT_HEADER.encode(), ", ".join(self._asked.left_out).encode()))
        return headers


class AwaitingModel(Response):
    """Sends comments until a turn's model is loaded, so that clients do not give up.

    A failure before the first comment becomes an error response; after it, an event.
    """

    def __init__(
        self,
        preparing: asyncio.Task[TurnResponse],
        progress: Callable[[], str],
        failed: Callable[[Failure], bytes],
        every_s: float,
    ) -> None:
        """
        Args:
            preparing: returns the turn's response once its model is loaded.
            progress: returns the loading's progress in a sentence.
            failed: returns the event, in the request's dialect, that ends a failed stream.
            every_s: seconds between two comments.
        """
        super().__init__()
        self._preparing = preparing
        self._progress = progress
        self._failed = failed
        self._every_s = every_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        send_body, begun = body_send_of(scope, send), False
        try:
            while True:
                await asyncio.wait((self._preparing,), timeout=self._every_s)
                if self._preparing.done():
                    break
                if not begun:
                    kind = (b"content-type", EVENT_STREAM.encode())
                    await send_head(send, 200, [kind, *STREAM_HEADERS])
                    begun = True
                await send_body(body_part(f": {self._progress()}\n\n".encode()))
            turn = self._preparing.result()
        except FORESEEN as error:
            if not begun:
                raise
            await send_end(send_body, self._failed(failure_of(error)))
            return
        finally:
            self._preparing.cancel()
        turn.head_sent = begun
        await turn(scope, receive, send)


def _word(failure: Failure) -> str:
    """Return a failure's label for metrics: its code, of which there are few, or its status."""
    return failure.code or str(failure.status)
