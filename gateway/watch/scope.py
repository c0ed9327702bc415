"""The part of everything that one caller may see, its changes, and how many may look at once.

A scope is one tenant's, or the admins'. Every look gives a *moment* its number; a reader that was
last served at a moment gets what changed after it. Nothing is queued: a reader that was slow for a
minute, or comes back with ``Last-Event-ID``, gets each changed session once, as it is now.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from gateway.errors import Failure, Refused
from gateway.watch.figures import Sums
from gateway.watch.rows import Key, Rows
from gateway.watch.shape import (
    MAX_MOVES,
    Change,
    HourShown,
    MemoryShown,
    More,
    MoveShown,
    NowShown,
    QualityShown,
    ServerShown,
    SessionShown,
    Snapshot,
)

AGAIN_S = 5.0
K = TypeVar("K", bound=Hashable)
MAX_ENTRIES = 200_000
MAX_ROWS = 20_000  # of a snapshot; those used last
ROWS_AT_ONCE = 250
_encode = msgspec.json.Encoder().encode


class StreamPlaces:
    """The open streams of each tenant. Belongs to the event loop."""

    def __init__(self, most: int) -> None:
        """``most``: of one tenant."""
        self._most = most
        self._open: Counter[str] = Counter()

    @contextmanager
    def place(self, tenant: str) -> Iterator[None]:
        """Hold a place. Raises ``Refused`` (429) if the tenant has none left."""
        if self._open[tenant] >= self._most:
            message = f"{self._most} streams of events are open already; close one."
            raise Refused(Failure(429, message, None, "too_many_streams", AGAIN_S))
        self._open[tenant] += 1
        try:
            yield
        finally:
            self._open[tenant] -= 1
            if not self._open[tenant]:
                del self._open[tenant]


class ChangeLog(Generic[K]):
    """Names, each with the number of the moment in which it last changed.

    A reader that was last served at moment n asks for the changes after n, so one that is slow or
    comes back gets each session once, as it is now: nothing is queued for any reader.
    """

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self._max_entries = max_entries
        self._moments: OrderedDict[K, int] = OrderedDict()  # the latest last
        self._complete_since = 0

    def mark(self, name: K, moment: int) -> None:
        """Note a change; moments never fall."""
        self._moments[name] = moment
        self._moments.move_to_end(name)
        while len(self._moments) > self._max_entries:
            _, self._complete_since = self._moments.popitem(last=False)

    def knows(self, moment: int) -> bool:
        """Say whether all that changed after ``moment`` is still known."""
        return moment >= self._complete_since

    def since(self, moment: int) -> list[K]:
        """Return what changed after ``moment``, the earliest change first."""
        found = []
        for name in reversed(self._moments):
            if self._moments[name] <= moment:
                break
            found.append(name)
        found.reverse()
        return found


class Parts(NamedTuple):
    """All that is shown besides the sessions."""

    server: ServerShown
    now: NowShown
    memory: MemoryShown
    quality: QualityShown | None


class Scope:
    """Shows the readers of one tenant, or admins, what they may see. Belongs to the event loop."""

    def __init__(
        self,
        tenant: str | None,
        rows: Rows,
        look: Callable[[str | None, Sums[Key]], Parts],
        past: Callable[[str | None], tuple[HourShown, list[MoveShown]]],
        epoch: int,
    ) -> None:
        """
        Args:
            tenant: whose; None = everybody's, for admins. look: makes the parts of this moment.
            past: gives the last hour, which is in snapshots only. epoch: distinguishes this scope's
            moments from those of another, or of an earlier process.
        """
        self.tenant = tenant
        self.num_readers = 0
        self.moment = 0
        self._epoch = epoch
        self._rows = rows
        self._look = look
        self._past = past
        self._moves: deque[tuple[int, MoveShown]] = deque(maxlen=MAX_MOVES)
        self._log: ChangeLog[Key] = ChangeLog()
        self._pending: set[Key] = set()
        self._sums: Sums[Key] = Sums()
        self._changed_at: dict[str, int] = {}
        self._made: dict[int, bytes] = {}  # changes since a moment, until the next moment
        self._next_moment = asyncio.Event()
        for key in rows.keys(tenant):
            self._count(key)
        self._num_sessions = self._sums.num_sessions
        self._parts = look(tenant, self._sums)

    # ---- what happens

    def sees(self, tenant: str) -> bool:
        """Say whether this scope shows that tenant's sessions."""
        return self.tenant is None or self.tenant == tenant

    def mark(self, key: Key) -> None:
        """Note that a session is no longer as it was."""
        self._pending.add(key)

    def moved(self, move: MoveShown) -> None:
        """Note that a session's KV went to another place."""
        self._moves.append((self.moment + 1, move))

    def look(self) -> None:
        """Look for changes; if there are any, a new moment begins and readers are woken."""
        upcoming = self.moment + 1
        changed = bool(self._pending)
        for key in self._pending:
            self._count(key)
            self._log.mark(key, upcoming)
        self._pending.clear()
        parts = self._look(self.tenant, self._sums)
        for name, before, after in zip(Parts._fields, self._parts, parts, strict=True):
            if before != after:
                self._changed_at[name] = upcoming
                changed = True
        if self._num_sessions != self._sums.num_sessions:
            self._num_sessions = self._sums.num_sessions
            self._changed_at["num_sessions"] = upcoming
        self._parts = parts
        if changed:
            self.moment = upcoming
            self._made.clear()
            self.wake()

    def _count(self, key: Key) -> None:
        session = self._rows.session(key)
        if session is None:
            self._sums.take(key, None)
            return
        hot_bytes = self._rows.hot_bytes(session) or 0
        in_bf16 = self._rows.bf16_bytes(session.cold_tokens) if session.cold_bytes else 0
        self._sums.take(key, session, hot_bytes, in_bf16 or 0)

    def wake(self) -> None:
        """Let every reader look: there is a new moment, or the end has come."""
        self._next_moment.set()
        self._next_moment = asyncio.Event()

    async def beyond(self, moment: int) -> None:
        """Wait for a moment after ``moment``, or until ``wake`` is called."""
        if self.moment <= moment:
            await self._next_moment.wait()

    # ---- what is shown

    def event_id(self, moment: int) -> str:
        """Name a moment for ``Last-Event-ID``."""
        return f"{self._epoch}.{moment}"

    def resumes(self, event_id: str) -> int | None:
        """Return the moment that a reader had last; None if it has to begin anew."""
        epoch, _, moment = event_id.partition(".")
        if epoch != str(self._epoch) or not moment.isdecimal() or len(moment) > 15:
            return None
        number = int(moment)
        return number if number <= self.moment and self._log.knows(number) else None

    def snapshot(self, most: int = MAX_ROWS) -> Iterator[bytes]:
        """Make the data of a snapshot, in pieces; together they are one line of JSON.

        ``most``: rows of sessions, those that were used last.
        """
        yield from self._snapshot(self._rows.latest(self.tenant, most))

    def paged(self, page_rows: int, most: int = MAX_ROWS) -> Iterator[tuple[str, list[bytes]]]:
        """Make a snapshot of the first rows, then the rest of them: events by name, with data.

        So a reader can show something after the first, however many sessions there are.
        """
        keys = self._rows.latest(self.tenant, most)
        yield "snapshot", list(self._snapshot(keys[:page_rows]))
        for at in range(page_rows, len(keys), page_rows):
            shown = self._shown(keys[at : at + page_rows])
            left = max(0, len(keys) - at - page_rows)
            yield "more", [_encode(More(sessions=shown, left=left))]

    def _snapshot(self, keys: Sequence[Key]) -> Iterator[bytes]:
        hour, moves = self._past(self.tenant)
        head = Snapshot(
            server=self._parts.server,
            now=self._parts.now,
            memory=self._parts.memory,
            quality=self._parts.quality,
            hour=hour,
            moves=moves,
            num_sessions=self._num_sessions,
            sessions=[],
        )
        yield _encode(head).removesuffix(b"]}")
        separator = b""
        for at in range(0, len(keys), ROWS_AT_ONCE):
            shown = self._shown(keys[at : at + ROWS_AT_ONCE])
            if shown:
                yield separator + _encode(shown)[1:-1]
                separator = b","
        yield b"]}"

    def _shown(self, keys: Sequence[Key]) -> list[SessionShown]:
        found = (self._rows.session(key) for key in keys)
        return [self._rows.shown(x, admin=self.tenant is None) for x in found if x]

    def change_since(self, moment: int) -> bytes:
        """Return the data of a change: all that is not as it was at ``moment``."""
        made = self._made.get(moment)
        if made is None:
            made = self._made[moment] = _encode(self._change(moment))
        return made

    def _change(self, moment: int) -> Change:
        admin = self.tenant is None
        shown, gone = [], []
        for key in self._log.since(moment):
            session = self._rows.session(key)
            if session is None:
                gone.append(self._rows.gone(key, admin=admin))
            else:
                shown.append(self._rows.shown(session, admin=admin))
        values: dict[str, Any] = {**self._parts._asdict(), "num_sessions": self._num_sessions}
        new = {name: values[name] for name, at in self._changed_at.items() if at > moment}
        moves = [x for at, x in self._moves if at > moment]
        return Change(sessions=shown, gone=gone, moves=moves, **new)
