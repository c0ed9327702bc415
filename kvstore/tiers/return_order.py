"""The eviction order of a tier: inside a byte budget, the chains stay that come back soonest.

LRU fails when sessions take turns and the tier is a little too small for all of them: each session
returns just after its chunks were evicted. This order judges a run (see ``runs``) by its *gap*: how
long it took to come back before.

* Nine tenths of the budget are for runs that are *kept*, the rest for runs on *trial*. A run is
  kept while there is room, or once its gap is shorter than the age of the oldest kept run.
* Kept runs are evicted after those on trial. But one that is unused for ``patience`` times its gap
  is overdue and goes first if it is the older one. The fewer new runs return, the longer patience.
* Patience is learned by comparison with LRU, simulated with one number per run. It shrinks when LRU
  would have held more of a run that returns (near 0 this order is LRU), and grows when less.
* Pinned runs are evicted last. A tenant beyond its limit loses its own oldest blobs.

A chain is evicted from its end, and never to make room for its own later blobs: the beginning of a
chain that is too long stays. A call takes O(1) for each run and each new or evicted blob. Where a
chain branches off inside a run, it also takes the length of the part that is split off. Not
thread-safe: the tier calls it under its lock.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Final, Generic, NamedTuple

from kvstore.session import NO_LIMITS, TenantLimits
from kvstore.tiers.base import EvictionCause
from kvstore.tiers.runs import LINK, RECORD, Run, Runs, V, parents_first

TRIAL: Final = 0.1  # the share of the budget for runs on trial
PATIENCE: Final = (0.02, 2.0)  # the least and the most, as multiples of a run's gap
RATE: Final = 32.0  # doublings of patience if LRU would have held fewer bytes by a whole budget
LATE: Final = 1 / 32  # the weight of evicted bytes that LRU would not have held either
LATELY: Final = 256  # after so many new runs, the counts of new and returned runs are halved
MAX_CAUSES: Final = 1 << 14
ON_TRIAL, KEPT, PINNED = range(3)


class Update(NamedTuple):
    """The changes that the order made and that the tier has yet to make to its blobs.

    A key may be in both lists: its old blob is evicted, and a new one added.
    """

    added: list[bytes]  # now in the order, blobs still to be written
    evicted: list[bytes]  # no longer in the order, blobs still to be removed


def stated_size(key: bytes, nbytes: int) -> int:
    """Return ``nbytes``: the ``size_of`` of a tier whose values are the sizes of its blobs."""
    return nbytes


class ReturnOrder(Generic[V]):
    """The held keys, their values and the pins, within a byte budget and the tenants' limits.

    ``V``: a blob, or its size if the tier keeps the blobs elsewhere.
    """

    def __init__(
        self,
        capacity_bytes: int,
        monotonic: Callable[[], float],
        size_of: Callable[[bytes, V], int],
    ) -> None:
        """``size_of`` returns the bytes of the budget that a key and its value take."""
        self.capacity_bytes = capacity_bytes
        self.nbytes = 0
        self._clock = monotonic
        self._limits = NO_LIMITS
        self._size_of = size_of
        self._runs = Runs(size_of)
        # Runs that can lose a blob, the oldest use first: on trial, kept, pinned; and by owner.
        self._orders: tuple[OrderedDict[Run[V], None], ...] = tuple(OrderedDict() for _ in range(3))
        self._of: defaultdict[str, OrderedDict[Run[V], None]] = defaultdict(OrderedDict)
        # The simulated LRU: how many bytes it would hold of each run, by the run's first link.
        self._lru: OrderedDict[bytes, int] = OrderedDict()
        self.pins: set[bytes] = set()  # heads of pinned runs, held or not
        self._held: Counter[str] = Counter()  # bytes by tenant
        self._kept_bytes = self._lru_bytes = 0
        self._num_new = self._num_back = 0.0  # recent runs that were new, that returned once
        self._patience = PATIENCE[1]
        self._gap_s = math.inf  # a moving average over runs that returned
        self.causes: OrderedDict[bytes, EvictionCause] = OrderedDict()  # of recent evictions

    def __len__(self) -> int:
        return len(self._runs.of)

    def __contains__(self, key: object) -> bool:
        return key in self._runs.of

    def keys(self, prefix: bytes) -> list[bytes]:
        """Return the held keys with this prefix."""
        return [key for key in self._runs.of if key.startswith(prefix)]

    def get(self, keys: Iterable[bytes]) -> list[V | None]:
        """Return the value of each key; None if it is not held."""
        of = self._runs.of
        return [of[key].keys[key] if key in of else None for key in keys]

    def held(self, keys: Iterable[bytes]) -> list[bool]:
        """Return for each key whether it is held."""
        return [*map(self._runs.of.__contains__, keys)]

    # ---- use

    def touch(self, keys: Sequence[bytes], *, restored: bool = True) -> None:
        """Note that a chain was restored, or else that it was saved.

        A save does not count as another use if the chain was restored, or was new, before it.
        """
        runs = self._runs_of(keys)
        for run in runs:
            if restored or not run.is_open:
                self._judge(run)
            run.is_open = restored
        self._settle(runs)

    def add(self, values: Mapping[bytes, V], owner: str = "", after: bytes = b"") -> Update:
        """Add blobs of a chain, in its order, up to the first one that does not fit.

        Args:
            after: the key before them in the chain. If it is not held, nothing is added.
        """
        update, keys = Update([], []), [after, *values]
        new = [key for key in values if key not in self]
        after = keys[keys.index(new[0]) - 1] if new else b""
        if not new or (after and after not in self):
            return update
        line = self._busy(self._runs.ending_at(after)) if after else []
        for key in new:
            if not self._fit(key, self._size_of(key, values[key]), owner, line, update.evicted):
                break
            former = self._runs.gone[key].parent if key in self._runs.gone else None
            run = self._runs.next_run(key, owner, line[0] if line else None, self._clock())
            if former is not None:
                self._place(former)  # it may have lost its last child, so it can be evicted
            if run not in line:
                self._judge(run)
                run.is_open = True
                line.insert(0, run)
            self._enter(run, key, values[key])
            update.added.append(key)
        self._settle(line)
        return update

    def replace(self, key: bytes, value: V, owner: str = "", after: bytes = b"") -> Update:
        """Add a blob in place of the key's older one, which is the first of the evicted ones.

        A record moves to the run of ``after``.
        """
        run = self._runs.of.get(key)
        if run is None or key[:1] == RECORD:
            moved = [key] if run else []
            if run is not None:
                self._pop(key)
            update = self.add({key: value}, owner, after if after in self else b"")
            return Update(update.added, [*moved, *update.evicted])
        evicted = [key]
        line = self._busy(run)
        more = self._size_of(key, value) - self._size_of(key, run.keys[key])
        fits = self._fit(key, more, owner, line, evicted)
        if fits:
            self._count(run, self._runs.exchange(run, key, value))
        self._settle(line)
        return Update([key], evicted) if fits else Update([], evicted[1:])

    def doomed(self, keys: Iterable[bytes]) -> list[bytes]:
        """Return the keys that are held, and all links that continue a link among them."""
        found: dict[bytes, None] = {}
        for key in keys:
            if key in self and key not in found:
                found |= dict.fromkeys(self._runs.and_after(key))
        return list(found)

    def remove(self, keys: Iterable[bytes]) -> list[bytes]:
        """Remove the ``doomed`` keys, pinned or not, and return them; their pins stay."""
        removed = self.doomed(keys)
        for key in removed:
            run = self._runs.of[key]
            for each in list(run.children) if key[:1] == LINK else ():
                self._runs.part(each)
            self._pop(key)
            self._runs.gone.pop(key, None)
            self._place(run)
        return removed

    def pin(self, key: bytes, pinned: bool) -> None:
        """Pin the run whose ``head`` is this key, held or not, or unpin it."""
        if pinned != (key in self.pins):
            (self.pins.add if pinned else self.pins.remove)(key)
            if (run := self._runs.of.get(key)) is not None:
                self._place(run)

    # ---- budget and limits

    def evict(self, nbytes: int = 0, spare: Container[bytes] = ()) -> list[bytes]:
        """Evict at least ``nbytes``, and until the budget holds; stop before a key in ``spare``."""
        evicted: list[bytes] = []
        nbytes = max(nbytes, self.nbytes - self.capacity_bytes)
        while nbytes > 0 and (run := self._victim()) is not None and run.last not in spare:
            nbytes -= self._cut(run, "budget", evicted)
        return evicted

    def limit(self, limits: TenantLimits) -> list[bytes]:
        """Set the limits of tenants, evict what exceeds them, and return the evicted keys."""
        evicted: list[bytes] = []
        self._limits = limits
        for owner in list(self._held):
            self._make_room(0, owner, [], evicted)
        return evicted

    def uses(self, limits: TenantLimits) -> dict[str, int]:
        """Return the bytes of each tenant that has one of these limits."""
        return {x: n for x, n in self._held.items() if n and limits.of(x) is not None}

    def own(self, owner: str, keys: Iterable[bytes]) -> None:
        """Assign the runs of these keys, and all before them, to a tenant if they have no owner.

        They count as just used, and are kept while there is room.
        """
        of = self._runs.of
        runs = dict.fromkeys(of[key] for key in keys if key in of)
        lines = (before for run in runs for before in run.line())
        new = [run for run in dict.fromkeys((*runs, *lines)) if not run.owner]
        for run in new:
            self._held[""] -= run.nbytes
            self._held[owner] += run.nbytes
            self._of[""].pop(run, None)
            run.owner, run.used_s, run.is_spare = owner, self._clock(), False
            self._keep(run, True)
        self._settle(new)

    # ---- restart

    def link_at(self, key: bytes) -> bytes:
        """Return the link before a blob that comes after ``key`` in its chain; b"" = none.

        That is the key itself if it is a link, else the last link of its run.
        """
        return key if key[:1] == LINK or key not in self else self._runs.of[key].end or b""

    def load(self, values: Mapping[bytes, V], before: Mapping[bytes, bytes]) -> None:
        """Add the blobs that an earlier process left to an empty order, even beyond the budget.

        ``values``: the earliest written first. ``before``: the link before each key in its chain.
        ``own``, called later, gives the order in which they were used.
        """
        for key in parents_first(before):
            after = before[key]
            parent = self._runs.ending_at(after) if after in self else None
            self._enter(self._runs.next_run(key, "", parent, self._clock()), key, values[key])
        runs = [*dict.fromkeys(self._runs.of[key] for key in reversed([*values]))]
        self._settle(runs)  # the latest written first: these are kept while there is room
        self._settle(reversed(runs))  # the latest written last: this sets the order

    # ---- judging

    def _runs_of(self, keys: Sequence[bytes]) -> list[Run[V]]:
        """Return the runs up to the last held key of a chain, and those up to its record."""
        last = next((key for key in reversed(keys) if key in self), b"")
        ends = [last, *(key for key in keys[:1] if key[:1] == RECORD)]
        lines = (self._runs.ending_at(key).line() for key in ends if key in self)
        return list(dict.fromkeys(run for line in lines for run in line))

    def _judge(self, run: Run[V]) -> None:
        """Learn patience and gaps from a use of a run, and keep it if it returned soon enough."""
        now, lru = self._clock(), self._lru.get(run.first, 0)
        gain = run.nbytes - lru if run.nbytes or lru else run.lost * LATE
        step = 2 ** min(9.0, RATE * gain / max(self.capacity_bytes, 1))
        self._patience = min(PATIENCE[1], max(PATIENCE[0], self._patience * step))
        run.is_busy = True
        self._place(run)
        is_new = not run.nbytes and not run.lost
        self._num_new += is_new
        if not is_new:
            gap_s = now - run.used_s
            self._num_back += not run.gap_s
            known_s = self._gap_s if self._gap_s < math.inf else gap_s
            self._gap_s = known_s + (gap_s - known_s) / 16
            run.gap_s = max(gap_s, run.gap_s - gap_s / 4)
            oldest = next(iter(self._orders[KEPT]), None)
            if oldest is not None and now - run.gap_s > oldest.used_s:
                self._keep(run, True)
        run.used_s, run.lost, run.is_spare = now, 0, False
        if self._num_new > LATELY:
            self._num_new, self._num_back = self._num_new / 2, self._num_back / 2

    def _settle(self, runs: Iterable[Run[V]]) -> None:
        """Put used runs back into the orders as the most recent, and keep those that fit."""
        room = self.capacity_bytes * (1 - TRIAL)
        for run in runs:
            if not run.is_kept and self._kept_bytes + run.nbytes <= room:
                self._keep(run, True)
                run.is_spare = True
            elif run.is_spare and self._kept_bytes > room:
                self._keep(run, False)
            run.is_busy = False
            self._place(run)
            self._lru_bytes += run.nbytes - self._lru.pop(run.first, 0)
            self._lru[run.first] = run.nbytes
        while self._lru_bytes > self.capacity_bytes:
            self._lru_bytes -= self._lru.popitem(last=False)[1]
        while self._kept_bytes > room and self._orders[KEPT]:
            self._keep(next(iter(self._orders[KEPT])), False)

    def _keep(self, run: Run[V], is_kept: bool) -> None:
        if run.is_kept != is_kept:
            self._kept_bytes += run.nbytes if is_kept else -run.nbytes
            run.is_kept = is_kept
            self._place(run)

    # ---- the orders

    def _busy(self, run: Run[V]) -> list[Run[V]]:
        """Protect a run, and those before it in its chain, from eviction until ``_settle``."""
        for each in (line := run.line()):
            each.is_busy = True
            self._place(each)
        return line

    def _place(self, run: Run[V]) -> None:
        """Make a run the most recent one in its orders, or remove it if it cannot lose a blob."""
        for order in (*self._orders, self._of[run.owner]):
            order.pop(run, None)
        if run.keys and not (run.children or run.is_busy):
            kind = PINNED if run.head in self.pins else KEPT if run.is_kept else ON_TRIAL
            for order in (self._orders[kind], self._of[run.owner]):
                order[run] = None

    def _enter(self, run: Run[V], key: bytes, value: V) -> None:
        self._count(run, self._runs.append(run, key, value))
        self.causes.pop(key, None)

    def _count(self, run: Run[V], nbytes: int) -> None:
        self.nbytes += nbytes
        self._held[run.owner] += nbytes
        self._kept_bytes += nbytes if run.is_kept else 0

    def _fit(
        self, key: bytes, nbytes: int, owner: str, line: list[Run[V]], evicted: list[bytes]
    ) -> bool:
        """Make room for a blob; for a record, evict even the end of its own chain."""
        while not self._make_room(nbytes, owner, line, evicted):
            if key[:1] != RECORD or not line or line[0].children or len(line[0].keys) < 2:
                return False
            self._cut(line[0], "budget", evicted)
        return True

    def _make_room(
        self, nbytes: int, owner: str, line: Sequence[Run[V]], evicted: list[bytes]
    ) -> bool:
        """Evict until ``nbytes`` more fit beside the runs in ``line``; False if they cannot."""
        limit = math.inf if (most := self._limits.of(owner)) is None else most
        own = nbytes + sum(run.nbytes for run in line)
        while True:
            is_over = self._held[owner] + nbytes > limit
            if not is_over and self.nbytes + nbytes <= self.capacity_bytes:
                return True
            run = self._oldest_of(owner) if is_over else self._victim()
            if run is None or own > (limit if is_over else self.capacity_bytes):
                return False
            self._cut(run, "limit" if is_over else "budget", evicted)

    def _oldest_of(self, owner: str) -> Run[V] | None:
        runs, pinned = self._of[owner], self._orders[PINNED]
        return next((x for x in runs if x not in pinned), next(iter(runs), None))

    def _victim(self) -> Run[V] | None:
        trial, kept, pinned = (next(iter(order), None) for order in self._orders)
        if trial is None or kept is None:
            return trial or kept or pinned
        away_s = self._clock() - kept.used_s
        patience = self._patience * max(1.0, self._num_new / (2 * self._num_back + 1))
        is_overdue = away_s > patience * (kept.gap_s or self._gap_s)
        return kept if is_overdue and kept.used_s < trial.used_s else trial

    def _cut(self, run: Run[V], cause: EvictionCause, evicted: list[bytes]) -> int:
        """Evict the last blob of a run; return its size."""
        evicted.append(run.last)
        self.causes[run.last] = cause
        if len(self.causes) > MAX_CAUSES:
            self.causes.popitem(last=False)
        return self._pop(run.last)

    def _pop(self, key: bytes) -> int:
        """Remove a blob; return its size."""
        run, nbytes = self._runs.pop(key)
        self._count(run, -nbytes)
        if not run.keys or (run.head in self.pins) != (run in self._orders[PINNED]):
            self._place(run)
        if not run.keys and run.parent is not None:
            self._place(run.parent)
        return nbytes
