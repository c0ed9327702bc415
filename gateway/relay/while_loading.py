"""A stream that begins while its model is still being loaded: comments first, then its turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.errors import FORESEEN, Failure, failure_of
from gateway.front import body_send_of
from gateway.relay.passthrough import EVENT_STREAM, body_part, send_end, send_head
from gateway.relay.stream_out import NO_CACHE
from gateway.relay.turn_response import TurnResponse


class WhileLoading(Response):
    """Shows life in comments until a turn can begin, so that clients do not give up.

    What fails before the first comment is an error answer; after it, an event.
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
            preparing: makes the turn, once its model is loaded.
            progress: says in a sentence how far that is.
            failed: makes the event that ends a stream, of the request's dialect.
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
                    await send_head(send, 200, [kind, NO_CACHE])
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
