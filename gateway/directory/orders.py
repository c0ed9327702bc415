"""Verbs on sessions: carried out on this server's, asked of another server for its own.

An order is for one life of a server, and for as long as that server counts it as fresh: by the
number of its own board that the order names. It is carried out once, however often it is read. Who
asks waits ``ORDER_S`` for the answer; what is done after that is done all the same, as with a
client that has left.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple

import msgspec

from engines.base import SessionRef, TierName
from gateway.errors import FORESEEN, failure_of
from gateway.keys import Tenants
from gateway.models.loading import Loading
from gateway.models.served_model import ServedModel
from kvstore.directory.boards import MAX_ORDERS, Answer, Board, Order
from scheduler.session import SAVING, SessionView

ORDER_S: Final = 30.0
FRESH_S: Final = 2 * ORDER_S
ANSWER_S: Final = 2 * ORDER_S  # so long an answer stays on our board
MAX_OF_TENANT: Final = MAX_ORDERS // 4
AT_ONCE: Final = 8  # orders of others that are carried out
MAX_ANSWER_BYTES: Final = 2048
_MAX_DONE: Final = 64 * MAX_ORDERS
log = logging.getLogger("thermocline.directory")
MAX_WORDS: Final = 400  # of an error


class Result(NamedTuple):
    """The answer to a verb, as HTTP has it; without a body 404 and 503 say enough."""

    status: int
    body: bytes


CarryOut = Callable[[Order], Awaitable[Result]]


class TooManyOrders(Exception):
    """This server, or the tenant, waits for as many answers of others as it may."""


class Orders:
    """Our orders to others, and theirs to us. Runs on the event loop."""

    def __init__(
        self, life: bytes, carry_out: CarryOut, clock: Callable[[], float], say: Callable[[], None]
    ) -> None:
        """
        Args:
            carry_out: does what an order says, and never raises but when cancelled.
            say: has our board written soon.
        """
        self._life = life
        self._carry_out = carry_out
        self._clock = clock
        self._say = say
        self._numbers = 0
        self._open: dict[int, tuple[Order, asyncio.Future[Result]]] = {}
        self._done: OrderedDict[tuple[bytes, int], None] = OrderedDict()
        self._answers: deque[tuple[float, Answer]] = deque(maxlen=MAX_ORDERS)
        self._jobs: set[asyncio.Task[None]] = set()
        self._boards: deque[tuple[int, float]] = deque()  # numbers of our own, and when they began

    # ---- ours

    async def ask(
        self, board: Board, verb: str, tenant: str, model: str, id: str, tier: TierName | None
    ) -> Result:
        """Have the server of a board carry out a verb, and return its answer.

        Raises:
            TooManyOrders: try later.
            TimeoutError: it did not answer in time.
        """
        of_tenant = sum(x.tenant == tenant for x, _ in self._open.values())
        if len(self._open) >= MAX_ORDERS or of_tenant >= MAX_OF_TENANT:
            raise TooManyOrders
        self._numbers += 1
        number = self._numbers
        order = Order(number, board.life, board.number, verb, tenant, model, id, tier)
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._open[number] = order, future
        self._say()
        try:
            async with asyncio.timeout(ORDER_S):
                return await future
        finally:
            del self._open[number]

    # ---- both, on boards

    def said(self, number: int) -> tuple[list[Order], list[Answer]]:
        """Return what our next board is to have; ``number`` is that board's."""
        now = self._clock()
        self._boards.append((number, now))
        while now - self._boards[0][1] > FRESH_S:
            self._boards.popleft()
        while self._answers and now - self._answers[0][0] > ANSWER_S:
            self._answers.popleft()
        return [x for x, _ in self._open.values()], [x for _, x in self._answers]

    def take(self, board: Board) -> None:
        """Take over the answers and orders on another server's board."""
        for answer in board.answers:
            if answer.to == self._life and (asked := self._open.get(answer.number)):
                order, future = asked
                if order.to == board.life and not future.done():
                    future.set_result(Result(answer.status, answer.body))
        for order in board.orders:
            key = board.life, order.number
            if order.to == self._life and key not in self._done and self._is_fresh(order):
                self._done[key] = None
                if len(self._done) > _MAX_DONE:
                    self._done.popitem(last=False)
                self._begin(board.life, order)

    def _is_fresh(self, order: Order) -> bool:
        return bool(self._boards) and order.seen >= self._boards[0][0]

    def _begin(self, life: bytes, order: Order) -> None:
        async def done() -> None:
            self._answer(life, order, await self._carry_out(order))

        if len(self._jobs) >= AT_ONCE:
            self._answer(life, order, Result(503, b""))
            return
        job = asyncio.create_task(done(), name="directory-order")
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)

    def _answer(self, life: bytes, order: Order, result: Result) -> None:
        if len(result.body) > MAX_ANSWER_BYTES:
            result = Result(503, b"")
        answer = Answer(life, order.number, result.status, result.body)
        self._answers.append((self._clock(), answer))
        self._say()

    async def close(self) -> None:
        """End what is being carried out."""
        for job in self._jobs:
            job.cancel()
        await asyncio.gather(*self._jobs, return_exceptions=True)


class Verbs:
    """The verbs that other servers ask for, on all models of this server."""

    def __init__(
        self, models: Sequence[ServedModel], tenants: Tenants, loading: Loading | None
    ) -> None:
        self._models = models
        self._tenants = tenants
        self._loading = loading

    async def carry_out(self, order: Order, server: str) -> Result:
        """Do what another server asked for, and answer as to a client."""
        ref = SessionRef(order.tenant, order.id, self._tenants.salt_of(order.tenant))
        model = next((x for x in self._models if x.label == order.model), None)
        try:
            view = None
            if model is not None:
                async with self._using(model, order):
                    view = await done(model, ref, order.verb, order.tier)
        except Exception as error:  # the edge of a task: the other server gets an answer
            if not isinstance(error, FORESEEN):
                log.exception("a verb of another server failed")
            failure = failure_of(error)
            failure = msgspec.structs.replace(failure, message=failure.message[:MAX_WORDS])
            return Result(failure.status, failure.json())
        if view is None or model is None:
            return Result(404, b"")
        body = msgspec.json.encode({**shown(model, view), "server": server})
        return Result(status_of(view), body)

    @asynccontextmanager
    async def _using(self, model: ServedModel, order: Order) -> AsyncIterator[None]:
        """Have a model loaded inside the context, if the verb needs its engine."""
        if model.on_demand is None or self._loading is None or sleeps(model, order.verb):
            yield
            return
        await self._loading.enter(model.on_demand, order.tenant)
        try:
            yield
        finally:
            self._loading.leave(model.on_demand)


def sleeps(model: ServedModel, verb: str) -> bool:
    """Say whether the model's sessions sleep already, as deep as the verb could have them."""
    return verb == "demote" and model.state == "unloaded"


async def done(
    model: ServedModel, session: SessionRef, verb: str, tier: TierName | None = None
) -> SessionView | None:
    """Carry out a verb on a loaded model; returns None if the session is not known.

    Raises ``SessionKept``, ``Overloaded``, ``MemoryScarce``, ``EngineError``.
    """
    if sleeps(model, verb):
        return model.sessions.get(session)
    match verb:
        case "demote":
            return await model.sessions.demote(session, tier)
        case "prefetch":
            return await model.sessions.prefetch(session)
        case "pin" | "unpin":
            return await model.sessions.pin(session, verb == "pin")
        case _:
            return None


def status_of(view: SessionView) -> int:
    """Return the status of a verb's answer: 202 if the verb is still being carried out."""
    return 202 if view.state == SAVING else 200


def shown(model: ServedModel, view: SessionView) -> dict[str, Any]:
    """Show a session of this server."""
    return {**msgspec.to_builtins(view), "model": model.label}
