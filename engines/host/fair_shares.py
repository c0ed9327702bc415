"""Shares an engine's places between tenants, by the tokens that each was served; orders who waits.

Every tenant has a count of the tokens that it was served, divided by its weight. A place that
request waits for is taken from a tenant that holds more than its share of them; where places cannot
be divided, tenants take turns: a tenant that is behind another by a quantum goes first. A tenant
that comes back after a pause begins at the smallest count of those that are there: its pause is no
credit, and its earlier use is no debt to newcomers.

Within a tenant, of every four that begin three are the shortest of those that wait, and the fourth
is the one that has waited longest. So a short prompt is not kept by ten long ones, and a long one
begins at the latest when four have begun for each that came before it, however many short ones
come. Prompts of about the same length keep the order in which they came.

``FairShares`` is arithmetic, without an engine: both of ours choose by it. Not thread-safe.

``TenantLine`` is the line of work that is done piece by piece, such as texts to be embedded: the
next piece is of the tenant that was served least, and within a tenant its requests take turns.
"""

from __future__ import annotations

import asyncio
import heapq
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Final, NamedTuple, TypeVar

# So many tokens, by weight 1, may one tenant be ahead of another that waits.
QUANTUM: Final = 64.0
# A token of a prompt costs less than one of an answer, which takes a step of its own.
PROMPT_TOKEN: Final = 0.25
# Tenants whose counts are remembered while they have nothing here.
MAX_ABSENT: Final = 4096
NO_PLACES: Final[Mapping[str, int]] = {}
T = TypeVar("T")
OLDEST_EVERY: Final = 4
# Of so many of a tenant that come in while its rows take turns, one is a prompt that has not begun.
FRESH_EVERY: Final = 4
# An answer of so many tokens is a long one: it makes way for requests of its own tenant that have
# not begun.
LONG_ANSWER: Final = int(4 * QUANTUM)
# Prompts below it are all equally short; from here on each doubling is another length.
SHORT_TOKENS: Final = 512


class FairShares:
    """Counts what each tenant was served, and says whose turn it is."""

    def __init__(self) -> None:
        self._served: dict[str, float] = {}  # tokens by weight, most recently come last
        self._tokens: dict[str, float] = {}  # of those that are here, not by weight
        self._weights: dict[str, int] = {}
        self._present: Counter[str] = Counter()  # requests of each tenant

    def come(self, tenant: str, weight: int = 1) -> None:
        """Count one more request of a tenant.

        ``weight``: of its share, from now on. Of several weights the largest counts: a tenant may
        have keys of different ones, and has one share all the same.
        """
        if not self._present:
            self._served.clear()
        if not self._present[tenant]:
            least = min((self._served[x] for x in self._present if x != tenant), default=0.0)
            self._served[tenant] = max(self._served.pop(tenant, 0.0), least)
            self._forget_absent()
        self._present[tenant] += 1
        self._weights[tenant] = max(self._weight(tenant), weight)

    def leave(self, tenant: str) -> None:
        """Count one request of a tenant less."""
        self._present[tenant] -= 1
        if not self._present[tenant]:
            del self._present[tenant], self._weights[tenant]
            self._tokens.pop(tenant, None)

    def _forget_absent(self) -> None:
        surplus = len(self._served) - len(self._present) - MAX_ABSENT
        absent = [x for x in self._served if x not in self._present]
        for tenant in absent[: max(0, surplus)]:
            del self._served[tenant]

    def serve(self, tenant: str, num_tokens: float) -> None:
        """Count what a tenant was served."""
        if tenant in self._served:
            self._served[tenant] += num_tokens / self._weight(tenant)
        if tenant in self._present:
            self._tokens[tenant] = self.tokens(tenant) + num_tokens

    def owed(self, tenant: str) -> float:
        """Return for how many times as long as a tenant's last work the others' is to go on.

        That is by their weights; 0 for a tenant that is ahead of none.
        """
        others = [x for x in self._present if x != tenant]
        if all(self.count(tenant) <= self.count(x) for x in others):
            return 0.0
        return sum(map(self._weight, others)) / self._weight(tenant)

    def tokens(self, tenant: str) -> float:
        """Return what a tenant was served since it is here, not by weight."""
        return self._tokens.get(tenant, 0.0)

    def first(self, tenants: Iterable[str], places: Mapping[str, int] = NO_PLACES) -> str:
        """Return the tenant that is next.

        That is a tenant that is behind one with places by a quantum, else the one with fewest by
        weight; of equals the one that was served least. Where no tenant holds any it is that one,
        too: the next place by weight would always be the heaviest's.
        """
        is_held = any(places.values())
        ahead = max((self.count(x) for x, number in places.items() if number), default=0.0)

        def rank(tenant: str) -> tuple[float, float]:
            count = self.count(tenant)
            is_behind = not is_held or ahead - count >= QUANTUM
            return (0 if is_behind else self.held(tenant, places.get(tenant, 0) + 1)), count

        return min(tenants, key=rank)

    def held(self, tenant: str, num_places: int) -> float:
        """Return how many places a tenant holds by weight."""
        return num_places / self._weight(tenant)

    def holder_to_yield(
        self,
        claimant: str,
        wanted: int,
        missing: int,
        places: Mapping[str, int],
        quantum: float = QUANTUM,
    ) -> str | None:
        """Name the tenant that is to give up a place for another's request; None: none is to.

        That is who holds so many that it still has no fewer than the claimant afterwards, or who is
        ahead by more than a quantum.

        Args:
            wanted: the places that the request needs; ``missing`` of them are not free.
            places: the number that each tenant holds.
        """
        others = [x for x, number in places.items() if number and x != claimant]
        if not others:
            return None
        most = max(others, key=lambda x: (self.held(x, places[x]), self.count(x)))
        after = self.held(claimant, places.get(claimant, 0) + wanted)
        # Without the second condition places would go to and fro with every step.
        keeps_as_many = self.held(most, places[most] - missing) >= after
        if keeps_as_many and self.count(claimant) - self.count(most) < quantum:
            return most
        ahead = max(others, key=self.count)
        return ahead if self.count(ahead) - self.count(claimant) >= quantum else None

    def count(self, tenant: str) -> float:
        """Return what a tenant was served, by weight; only differences count."""
        return self._served.get(tenant, 0.0)

    def _weight(self, tenant: str) -> int:
        return self._weights.get(tenant, 1)


def length_class(num_tokens: int) -> int:
    """Return 0 for a short prompt, and one more for each doubling of a longer one."""
    return (num_tokens // SHORT_TOKENS).bit_length()


def next_of(line: Sequence[T], length: Callable[[T], int], num_begun: int) -> T:
    """Return who is next of a tenant's line.

    Args:
        line: those that wait, the oldest first; not empty.
        length: their lengths, as ``length_class`` groups them.
        num_begun: how many of this tenant have begun so far.
    """
    if num_begun % OLDEST_EVERY == OLDEST_EVERY - 1:
        return line[0]
    return min(line, key=length)


def in_turns(line: Sequence[T], length: Callable[[T], int], num_begun: int) -> list[T]:
    """Return a tenant's whole line in the order in which ``next_of`` would choose them."""
    lengths = [length(x) for x in line]
    if len(set(lengths)) < 2:
        return list(line)
    by_length = sorted(range(len(line)), key=lengths.__getitem__)
    shortest, oldest = iter(by_length), iter(range(len(line)))
    order: list[int] = []
    gone: set[int] = set()
    for number in range(num_begun, num_begun + len(line)):
        left = oldest if number % OLDEST_EVERY == OLDEST_EVERY - 1 else shortest
        chosen = next(i for i in left if i not in gone)
        gone.add(chosen)
        order.append(chosen)
    return [line[i] for i in order]


def after_those_who_ran(back: Sequence[T], fresh: Sequence[T], num_back: int) -> list[T]:
    """Return a tenant's whole line: those that ran already first, all but one in four.

    Args:
        num_back: how many that ran already came in since the last one began.
    """
    order: list[T] = []
    ran, new = list(reversed(back)), list(reversed(fresh))
    while ran and new:
        if num_back < FRESH_EVERY - 1:
            order.append(ran.pop())
            num_back += 1
        else:
            order.append(new.pop())
            num_back = 0
    return [*order, *reversed(ran), *reversed(new)]


def in_fair_order(
    shares: FairShares, lines: Mapping[str, Sequence[T]], places: Mapping[str, int]
) -> list[T]:
    """Return all that wait in the order in which ``FairShares.first`` would choose their tenants.

    Args:
        lines: those that wait of each tenant, in order; none is empty.
        places: the number that each tenant holds now; each that is next will hold one more.
    """
    if len(lines) < 2:
        return [x for line in lines.values() for x in line]
    held = {tenant: places.get(tenant, 0) for tenant in lines}
    counts = {x: shares.count(x) for x in {*lines, *places}}
    taken = dict.fromkeys(lines, 0)
    order: list[T] = []
    if not any(places.values()):  # where no tenant holds any the least served is first
        least = min(lines, key=counts.__getitem__)
        order.append(lines[least][0])
        taken[least] = held[least] = 1
    holders = [x for x, number in {**places, **held}.items() if number]
    ahead = max((counts[x] for x in holders), default=0.0)
    # A tenant whose count is below a holder's by a quantum goes first, and as a whole: its own
    # places delay no other.
    by_count = sorted(lines, key=counts.__getitem__)
    heap = [(shares.held(x, held[x] + 1), counts[x], i, x) for i, x in enumerate(lines)]
    heapq.heapify(heap)
    num_behind = 0
    while heap:
        while num_behind < len(by_count) and ahead - counts[by_count[num_behind]] >= QUANTUM:
            tenant = by_count[num_behind]
            order += lines[tenant][taken[tenant] :]
            taken[tenant] = len(lines[tenant])
            num_behind += 1
        _, count, i, tenant = heapq.heappop(heap)
        if taken[tenant] == len(lines[tenant]):
            continue
        order.append(lines[tenant][taken[tenant]])
        taken[tenant] += 1
        held[tenant] += 1
        ahead = max(ahead, count)
        heapq.heappush(heap, (shares.held(tenant, held[tenant] + 1), count, i, tenant))
    return order


async def to_its_end(step: asyncio.Future[T]) -> T:
    """Await a step on a thread. If cancelled, return when it has ended: it cannot be stopped."""
    try:
        return await asyncio.shield(step)
    finally:
        if not step.done():
            await asyncio.wait([step])


class QueueFull(Exception):
    """Too many requests wait already."""


class Payer(NamedTuple):
    """The tenant that a request is served to, and the weight of its share."""

    tenant: str = ""
    weight: int = 1


class QueueLimit:
    """Bounds how many requests wait, in all and for each tenant. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: Counter[str] = Counter()
        self._lock = threading.Lock()

    def enter(self, tenant: str) -> None:
        """Count one more waiting request of this tenant.

        Raises:
            QueueFull: the queue is full, or this tenant's share of it.
        """
        with self._lock:
            # One tenant alone may not fill the queue and so refuse everybody else.
            if self._waiting.total() >= self._limit or self._waiting[tenant] >= self.share:
                raise QueueFull(
                    f"{self._waiting.total()} requests are waiting already; try again later"
                )
            self._waiting[tenant] += 1

    @property
    def num_waiting(self) -> int:
        with self._lock:
            return self._waiting.total()

    @property
    def share(self) -> int:
        """The most requests of one tenant that may wait at a time."""
        return max(1, self._limit * 3 // 4)

    def leave(self, tenant: str) -> None:
        """Count one waiting request of this tenant less."""
        with self._lock:
            self._waiting[tenant] -= 1
            if not self._waiting[tenant]:
                del self._waiting[tenant]


class TenantLine:
    """The pieces that wait, and whose turn it is. Belongs to the event loop."""

    def __init__(self, limit: int) -> None:
        """``limit``: the most requests that are here at once; see ``QueueLimit``."""
        self._limit = QueueLimit(limit)
        self._shares = FairShares()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._busy = False

    @contextmanager
    def place(self, payer: Payer) -> Iterator[None]:
        """Hold a request's place. Raises ``QueueFull`` where there is none, for this tenant."""
        self._limit.enter(payer.tenant)
        self._shares.come(payer.tenant, payer.weight)
        try:
            yield
        finally:
            self._shares.leave(payer.tenant)
            self._limit.leave(payer.tenant)

    @asynccontextmanager
    async def turn(self, payer: Payer, cost: float | None = None) -> AsyncIterator[None]:
        """Wait until no other piece is under way and it is the tenant's turn, and hold it.

        ``cost``: what the piece counts in the tenant's share, such as its tokens, in one unit for
        the whole line; None = the seconds that it takes.
        """
        if self._busy:
            await self._called(payer.tenant)
        self._busy = True
        begin = time.monotonic()
        try:
            yield
        finally:
            self._shares.serve(payer.tenant, time.monotonic() - begin if cost is None else cost)
            self._call_next()

    async def _called(self, tenant: str) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._withdraw(tenant, turn)
            else:  # called in the very moment in which its client left
                self._call_next()
            raise

    def _call_next(self) -> None:
        while self._waiting:
            tenant = self._shares.first(self._waiting)
            turn = self._waiting[tenant][0]
            self._withdraw(tenant, turn)
            if not turn.done():
                turn.set_result(None)
                return  # it stays busy
        self._busy = False

    def _withdraw(self, tenant: str, turn: asyncio.Future[None]) -> None:
        line = self._waiting.get(tenant)
        if line is None or turn not in line:
            return
        line.remove(turn)
        if not line:
            del self._waiting[tenant]
