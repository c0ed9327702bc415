"""The hub: a thread of EngineCore with a socket that the plug-in's other processes connect to.

These are the workers ("ranks") and the HTTP server ("front"). vLLM's thread passes messages to the
hub and collects answers without waiting for the socket. The same event loop serves the gateway's
control connection, so that it works while the engine sleeps. A save is complete when all ranks have
stored their share.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from engines.host.control_server import private_socket, send_bounded
from engines.vllm_plugin.messages import (
    Ask,
    FrontHello,
    Look,
    PeerNews,
    RankAnswer,
    RankHello,
    RankSaved,
    Release,
    RequestAdmitted,
    RunForward,
    Stage,
    Staged,
    ToFront,
    ToRank,
    Wake,
    decode_from_peer,
)
from engines.wire import KVSize, SessionReport, Verb, WireError, frame, read_body
from kvstore.session import TIER_NAMES, TierName

# A rank that lost its connection never reports a save, so the oldest open saves are forgotten.
MAX_OPEN: Final = 1024
logger = logging.getLogger("thermocline.vllm")
CLOSE_S: Final = 10.0
T = TypeVar("T")
_TIERS: Final[list[TierName | None]] = [None, *TIER_NAMES]


class SaveAcks:
    """The saves that at least one rank has not reported yet; bounded. On the hub's event loop."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        # By job, the oldest first: for each rank that has answered, whether it kept the save.
        self._open: dict[int, list[bool]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def completes(self, saved: RankSaved) -> bool:
        """Note one rank's answer; True if it was the last one and all ranks kept the save."""
        kept = self._open.setdefault(saved.job, [])
        kept.append(saved.kept)
        if len(kept) >= self._num_ranks:
            del self._open[saved.job]
            return all(kept)
        if len(self._open) > MAX_OPEN:
            del self._open[next(iter(self._open))]
        return False


class Hub:
    """Sends to all ranks and collects their answers.

    Methods run on the hub's own event loop, unless they are under "from any thread".
    """

    def __init__(self, path: str, num_ranks: int, on_news: Callable[[PeerNews], None]) -> None:
        """``on_news`` gets messages that are no answers, on the hub's event loop."""
        self._path = path
        self.num_ranks = num_ranks
        self._on_news = on_news
        self._lock = threading.Condition()
        self._ranks: dict[int, asyncio.StreamWriter] = {}
        self._hellos: dict[int, RankHello] = {}
        self._fronts: set[asyncio.StreamWriter] = set()
        self._front_came = asyncio.Event()
        self._partial: dict[int, list[Staged]] = {}  # the ranks' answers, by open ticket
        self._numbers = itertools.count(1)
        # Answers to calls of ``ask``, each with its rank's connection; by the call's number.
        self._calls: dict[int, asyncio.Queue[tuple[object, RankAnswer]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._servers: list[asyncio.Server] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="thermocline-hub", daemon=True)

    def start(self, *services: Coroutine[Any, Any, asyncio.Server]) -> None:
        """Open the socket, and run ``services``, which open other sockets, on the event loop.

        Raises ``OSError``: a socket cannot be opened.
        """
        bound = private_socket(Path(self._path))
        self._thread.start()
        self._servers.append(self._wait(asyncio.start_unix_server(self._serve_peer, sock=bound)))
        self._servers += [self._wait(service) for service in services]

    def start_after_front(self, service: Coroutine[Any, Any, asyncio.Server]) -> None:
        """Run ``service`` once the HTTP server has connected: the engine then accepts requests."""

        async def opened() -> None:
            try:
                await self._front_came.wait()
                self._servers.append(await service)
            finally:
                service.close()

        self.spawn(opened)

    def close(self) -> None:
        """End every connection and the thread. Safe to call twice."""
        if self._loop.is_closed():
            return
        self._wait(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=CLOSE_S)
        self._loop.close()
        Path(self._path).unlink(missing_ok=True)

    async def _end(self) -> None:
        for server in self._servers:
            server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return self.submit(work).result(timeout=CLOSE_S)

    def _run(self) -> None:
        # This is vLLM's scheduling process: vLLM's own thread has priority.
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 5)
        self._loop.run_forever()

    # ---- from any thread

    @property
    def ready(self) -> bool:
        """True if every rank is connected."""
        return len(self._ranks) == self.num_ranks

    @property
    def num_fronts(self) -> int:
        """The number of connected HTTP servers."""
        return len(self._fronts)

    @property
    def packed_bytes_per_token(self) -> int:
        """The bytes of a stored token, on all ranks together."""
        return sum(x.packed_bytes_per_token for x in self._hellos.values())

    def send(self, message: ToRank | ToFront) -> None:
        """Send a message: to every rank; a report to all HTTP servers, or an order to one of them.

        The answers to a ``Stage`` are kept until its ticket is released.
        """
        with self._lock:
            if isinstance(message, Stage):
                self._partial[message.ticket] = []
            elif isinstance(message, Release):
                self._partial.pop(message.ticket, None)
        self.call_soon(self._send, message)

    def staged(self, ticket: int, within_s: float = 0.0) -> Staged | None:
        """The joint answer of all ranks to a ``Stage``; it is returned only once.

        It has only the blocks that every rank has staged. None if a rank has not answered after
        ``within_s`` seconds.
        """
        with self._lock:
            answers = self._partial.get(ticket, [])
            if not self._lock.wait_for(lambda: len(answers) >= self.num_ranks, within_s):
                return None
            del self._partial[ticket]
        shortest = min(answers, key=lambda x: x.end_block)
        tier = max((x.tier for x in answers), key=_TIERS.index)
        return Staged(ticket, shortest.end_block, tier, shortest.reason)

    def call_soon(self, call: Callable[..., object], *args: object) -> None:
        """Run ``call`` on the event loop."""
        with suppress(RuntimeError):  # the loop is closed: the engine is ending
            self._loop.call_soon_threadsafe(call, *args)

    def spawn(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run ``work()`` on the event loop without waiting for it."""
        self.call_soon(self._begin, work)

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run ``work`` on the event loop; the future has its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    # ---- on the event loop

    def _begin(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        task = self._loop.create_task(work())
        self._tasks.add(task)  # the loop itself keeps only weak references
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("a task of the hub failed: %s", error or type(error).__name__)

    @property
    def bytes_per_token(self) -> int:
        """The bytes of a token in vLLM's blocks, on all ranks together."""
        return sum(x.bytes_per_token for x in self._hellos.values())

    @property
    def kv_sizes(self) -> tuple[KVSize, KVSize]:
        """The bytes of a session's KV on all ranks together, live and in bf16."""
        hellos = list(self._hellos.values())
        live, bf16 = (x.live_kv for x in hellos), (x.bf16_kv for x in hellos)
        return sum(live, KVSize()), sum(bf16, KVSize())

    async def ask(self, verb: Verb | Look, deadline_s: float) -> list[RankAnswer]:
        """Send a verb to all ranks and return their answers.

        Raises:
            TimeoutError: a rank has not answered after ``deadline_s``.
            ConnectionError: a rank is not connected, or could not carry out the verb.
        """
        if not self.ready:
            raise ConnectionError("not every worker of the engine is connected")
        number = next(self._numbers)
        self._calls[number] = asyncio.Queue()
        try:
            async with asyncio.timeout(deadline_s):
                self._send(Ask(number, verb))
                answers = await self._answers(self._calls[number])
        except TimeoutError as error:
            raise TimeoutError(f"no answer of a worker within {deadline_s:g} s") from error
        finally:
            del self._calls[number]
        if failed := next((x.error for x in answers if x.error), ""):
            raise ConnectionError(f"a worker of the engine could not do it: {failed}")
        return answers

    async def _answers(
        self, messages: asyncio.Queue[tuple[object, RankAnswer]]
    ) -> list[RankAnswer]:
        """Wait for every rank's answer; a long list of sessions comes in several messages."""
        answers: list[RankAnswer] = []
        sessions: dict[object, list[SessionReport]] = {}  # by rank
        while len(answers) < self.num_ranks:
            rank, answer = await messages.get()
            sessions.setdefault(rank, []).extend(answer.sessions)
            if not answer.more:
                answers.append(msgspec.structs.replace(answer, sessions=sessions[rank]))
        return answers

    def _send(self, message: ToRank | ToFront) -> None:
        receivers = list(self._ranks.values())
        if isinstance(message, RequestAdmitted | RunForward | Wake):
            fronts = list(self._fronts)
            receivers = fronts if isinstance(message, RequestAdmitted) else fronts[:1]
        body = frame(message)
        for writer in receivers:
            send_bounded(writer, body)

    async def _serve_peer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                self._receive(await read_body(reader), writer)
        except (EOFError, ConnectionError, WireError, ValueError) as error:
            if writer in self._ranks.values():
                logger.warning("a worker left the hub: %s", error or type(error).__name__)
        except asyncio.CancelledError:
            pass  # the hub ends; Python 3.11 would print an error about a cancelled task
        finally:
            self._fronts.discard(writer)
            self._ranks = {n: x for n, x in self._ranks.items() if x is not writer}
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    def _receive(self, body: bytes, writer: asyncio.StreamWriter) -> None:
        match decode_from_peer(body):
            case RankHello() as hello:
                self._hellos[hello.rank] = hello
                self._ranks[hello.rank] = writer
            case Staged() as staged:
                with self._lock:
                    if staged.ticket in self._partial:
                        self._partial[staged.ticket].append(staged)
                        self._lock.notify_all()
            case RankAnswer() as answer:
                if (call := self._calls.get(answer.number)) is not None:
                    call.put_nowait((writer, answer))
            case FrontHello():
                self._fronts.add(writer)
                self._front_came.set()
            case news:
                self._on_news(news)
