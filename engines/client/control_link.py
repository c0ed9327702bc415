"""The gateway's end of the control connection to one engine.

``ControlLink.run`` keeps one connection open for as long as it runs: it connects, sends ``Hello``,
waits for the welcome, hands out replies and notices, and reconnects when the connection ends. Every
``HEARTBEAT_S`` it asks the engine for its figures; a connection that is silent for ``SILENCE_S`` is
closed, so that a frozen engine is noticed although its sockets are still open.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

from engines.base import EngineError, EngineRefused, EngineUnavailable
from engines.wire import (
    ALL_CHANGED,
    WIRE_VERSION,
    Adopted,
    CodecReport,
    ControlRequest,
    FromEngine,
    GetStats,
    Hello,
    Notice,
    Refused,
    Stats,
    Verb,
    VerbAnswer,
    Welcome,
    WireError,
    frame,
    read_from_engine,
)

log = logging.getLogger("thermocline.engines")

HEARTBEAT_S = 5.0
SILENCE_S = 30.0
POLL_S = 0.1  # between attempts while no server listens yet
RETRY_FIRST_S = 0.05  # first delay after a connection ended; it doubles up to ``RETRY_CAP_S``
RETRY_CAP_S = 5.0
STABLE_AFTER_S = 10.0  # after a connection that lasted this long, the delay starts anew
MAX_NOTICES = 4096
_ADDRESS = re.compile(r"unix:.+|tcp://\S+:\d{1,5}")

_LINK_ENDED = (OSError, EOFError, TimeoutError, WireError)


class NoticeQueue:
    """Notices for one reader; one that is too slow gets None instead, to list all sessions."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Notice | None] = asyncio.Queue(MAX_NOTICES)

    def publish(self, notice: Notice | None) -> None:
        """Queue a notice; None asks the reader to list all sessions."""
        if self._queue.full():
            while not self._queue.empty():
                self._queue.get_nowait()
            notice = None
        self._queue.put_nowait(notice)

    async def read(self) -> AsyncIterator[Notice | None]:
        """Yield the notices; None = some are lost, or the engine is new: list all sessions."""
        while True:
            yield await self._queue.get()


class ControlLink:
    """Sends numbered verbs, each with a deadline, over a connection that reconnects by itself."""

    def __init__(
        self,
        address: str,
        token: str,
        *,
        welcome_timeout_s: float,
        silence_s: float = SILENCE_S,
        why_absent: str = "the engine is starting",
        on_lost: Callable[[str], None] = lambda why: None,
    ) -> None:
        """Make a link; nothing happens before ``run``.

        Args:
            address: ``unix:/path`` or ``tcp://host:port``.
            welcome_timeout_s: longest wait for the welcome, in seconds.
            silence_s: longest silence of the engine, in seconds.
            why_absent: ``trouble`` while no server listens there.
            on_lost: called with the reason, a sentence, whenever the connection ends.
        """
        self._address = address
        self._hello = Hello(token=token)
        self._welcome_timeout_s = welcome_timeout_s
        self._silence_s = silence_s
        self._on_lost = on_lost
        self._numbers = itertools.count(1)
        self._pending: dict[int, asyncio.Future[VerbAnswer]] = {}
        self.notices = NoticeQueue()
        self._writer: asyncio.StreamWriter | None = None
        self.welcome: Welcome | None = None
        self.was_welcomed = False  # at any time since the start
        self.codec: CodecReport | None = None  # the codec of the welcome or of a later answer
        self._why_absent = why_absent
        self.trouble = why_absent

    async def run(self) -> None:
        """Keep the connection open until cancelled."""
        loop = asyncio.get_running_loop()
        retry_s = RETRY_FIRST_S
        while True:
            began = loop.time()
            try:
                await self._serve_connection()
            except (FileNotFoundError, ConnectionRefusedError):
                self._lost(self._why_absent)
                await asyncio.sleep(POLL_S)
                continue
            except (*_LINK_ENDED, EngineRefused) as error:
                log.warning("lost the engine at %s: %s", self._address, _words(error))
                self._lost(_words(error))
            if loop.time() - began >= STABLE_AFTER_S:
                retry_s = RETRY_FIRST_S
            await asyncio.sleep(retry_s)
            retry_s = min(RETRY_CAP_S, retry_s * 2)

    def forget(self) -> None:
        """Forget all about the engine; call it after ``run`` has been cancelled."""
        self.welcome = self.codec = None
        self.was_welcomed = False
        self.trouble = self._why_absent

    async def ask(self, verb: Verb, deadline_s: float) -> VerbAnswer:
        """Send one verb, wait for its answer and return it.

        Raises:
            EngineUnavailable: there is no connection, or no answer within ``deadline_s`` seconds.
            EngineRefused: the engine refused.
        """
        if self._writer is None:
            raise EngineUnavailable(self.trouble)
        number = next(self._numbers)
        answer: asyncio.Future[VerbAnswer] = asyncio.get_running_loop().create_future()
        self._pending[number] = answer
        try:
            async with asyncio.timeout(deadline_s):
                self._writer.write(frame(ControlRequest(number, verb)))
                reply = await answer
        except (TimeoutError, OSError) as error:
            raise EngineUnavailable(
                f"the engine gave no answer to {type(verb).__name__} within {deadline_s:g} s"
            ) from error
        finally:
            self._pending.pop(number, None)
        if isinstance(reply, Refused):
            raise EngineRefused(reply.message)
        return reply

    async def _serve_connection(self) -> None:
        reader, writer = await _connect(self._address)
        heartbeat: asyncio.Task[None] | None = None
        try:
            welcome = await self._greet(reader, writer)
            self._writer, self.welcome, self.trouble = writer, welcome, ""
            self.was_welcomed = True
            self.codec = welcome.codec
            log.info("engine %s serves %s", welcome.engine, welcome.model)
            self.notices.publish(None)
            heartbeat = asyncio.create_task(self._beat(writer), name="engine-heartbeat")
            while True:
                async with asyncio.timeout(self._silence_s):
                    message = await read_from_engine(reader)
                self._deliver(message)
        finally:
            if heartbeat is not None:
                heartbeat.cancel()
            writer.close()
            self._writer = None

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Welcome:
        writer.write(frame(ControlRequest(0, self._hello)))
        async with asyncio.timeout(self._welcome_timeout_s):
            message = await read_from_engine(reader)
        answer = None if isinstance(message, Notice) else message.answer
        if isinstance(answer, Refused):
            raise EngineRefused(f"the engine refused the control connection: {answer.message}")
        if not isinstance(answer, Welcome):
            raise WireError("the engine's first message is not a welcome")
        if answer.version != WIRE_VERSION:
            raise EngineRefused(
                f"the engine speaks control version {answer.version}, this gateway {WIRE_VERSION};"
                " run the same release on both sides"
            )
        if not answer.model.isprintable():  # clients write it into files and show it in terminals
            raise EngineRefused(f"the engine's model has control characters: {answer.model!r}")
        return answer

    async def _beat(self, writer: asyncio.StreamWriter) -> None:
        """Ask for the engine's figures periodically, as a sign of life; drop the replies."""
        with suppress(OSError):  # the reader notices the connection's end, too, and reports it
            while True:
                await asyncio.sleep(min(HEARTBEAT_S, self._silence_s / 3))
                writer.write(frame(ControlRequest(next(self._numbers), GetStats())))

    def _deliver(self, message: FromEngine) -> None:
        if isinstance(message, Notice):
            self.notices.publish(None if message.why == ALL_CHANGED else message)
            return
        self._take_codec(message.answer)
        waiting = self._pending.get(message.number)
        if waiting is not None and not waiting.done():
            waiting.set_result(message.answer)

    def _take_codec(self, answer: VerbAnswer) -> None:
        """Keep the codec of an answer: another gateway may have changed it."""
        if isinstance(answer, Adopted):
            self.codec = answer.codec
        elif isinstance(answer, Stats) and answer.report.codec is not None:
            self.codec = answer.report.codec

    def _lost(self, why: str) -> None:
        self.trouble = why
        self.welcome = self.codec = None
        for waiting in self._pending.values():
            if not waiting.done():
                waiting.set_exception(EngineUnavailable(why))
        self._on_lost(why)


def check_control(address: str) -> None:
    """Raises ``EngineError``: this is no control address."""
    if not _ADDRESS.fullmatch(address):
        raise EngineError(
            f"engine.control must be like unix:/path or tcp://host:port, not {address!r}"
        )


async def _connect(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    scheme, _, rest = address.partition(":")
    if scheme == "unix":
        return await asyncio.open_unix_connection(rest)
    host, _, port = rest.removeprefix("//").rpartition(":")
    return await asyncio.open_connection(host.strip("[]"), int(port))


def _words(error: BaseException) -> str:
    """Return a readable reason why the connection ended."""
    if isinstance(error, TimeoutError):
        return "the engine does not answer"
    if isinstance(error, EOFError | ConnectionError):
        return "the engine closed the connection"
    return str(error) or type(error).__name__
