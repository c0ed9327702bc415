"""What vLLM itself still holds of each session.

vLLM keeps the blocks of finished requests until it needs the room, and tells nobody here when it
reuses one. So nothing is remembered but the hashes of a session's blocks; whether they are there is
looked up in vLLM's own table whenever somebody asks, from any thread: a lookup changes nothing, and
one that vLLM's thread disturbs is made again. vLLM's table is changed on vLLM's thread only.

A session is hot while vLLM holds all of its blocks. Chains are reused from their tails on, because
vLLM frees them in that order, and so do we: the last block answers for all. What is left of a
chain without its tail is mostly the beginning that it shares with others.

Where some layers do not keep all tokens (``groups``), vLLM goes on only from a boundary with a
state, so the session is hot while the newest such state is there, too. States are asked for one by
one: vLLM frees the blocks of each group when it likes.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from engines.vllm_plugin.groups import DENSE, Groups
from kvstore.records import SessionRef

MAX_SESSIONS: Final = 4096
LOOKUPS: Final = 3  # of one block, each disturbed by vLLM's thread; it takes microseconds


class Block(Protocol):
    block_id: int
    ref_cnt: int


class BlockPool(Protocol):
    """As much of ``vllm.v1.core.block_pool.BlockPool`` as the plug-in uses."""

    blocks: Sequence[Any]
    num_gpu_blocks: int

    def get_cached_block(self, block_hash: Any, kv_cache_group_ids: list[int]) -> Any: ...
    def touch(self, blocks: Sequence[Any]) -> None: ...
    def free_blocks(self, ordered_blocks: Any) -> None: ...
    def evict_blocks(self, block_ids: set[int]) -> None: ...
    def get_num_free_blocks(self) -> int: ...


Name = tuple[str, str]  # tenant and session id


def name_of(session: SessionRef) -> Name:
    return session.tenant, session.id


@dataclass
class HotSession:
    hashes: list[bytes] = field(default_factory=list)
    part: tuple[int, ...] = ()  # ids of the tokens behind them whose KV is saved
    boundary: int = 0  # so many of them vLLM can go on from: all, or those before the newest state
    num_requests: int = 0  # being served
    last_used_s: float = 0.0  # monotonic
    num_saves: int = 0  # planned, and not yet in the hands of every rank
    dropping: bool = False  # its blocks will go at vLLM's next step
    told_hot: bool = False  # what was last said of it


class HotSessions:
    """Thread-safe."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._sessions: OrderedDict[Name, HotSession] = OrderedDict()
        self._users: Counter[bytes] = Counter()  # sessions per block hash
        self._to_drop: list[Name] = []
        self._pool: BlockPool | None = None
        self._groups = DENSE

    def bind(self, pool: BlockPool, groups: Groups = DENSE) -> None:
        self._pool = pool
        self._groups = groups

    @property
    def pool(self) -> BlockPool:
        assert self._pool is not None, "vLLM binds its block pool before the first request"
        return self._pool

    # ---- turns

    def begin(self, session: SessionRef) -> None:
        with self._lock:
            entry = self._sessions.setdefault(name_of(session), HotSession())
            entry.num_requests += 1
            entry.dropping = False
            entry.last_used_s = self._monotonic()
            self._sessions.move_to_end(name_of(session))
            self._forget_oldest()

    def end(
        self,
        session: SessionRef,
        hashes: Sequence[bytes],
        part: tuple[int, ...] = (),
        boundary: int | None = None,
    ) -> None:
        """The turn is over; the session is now these blocks (none: as before).

        ``boundary``: where layers have states, how many blocks come before the newest; 0 = none.
        """
        with self._lock:
            entry = self._sessions.get(name_of(session))
            if entry is None:
                return
            entry.num_requests -= 1
            entry.last_used_s = self._monotonic()
            if hashes:
                self._let_go(entry.hashes)
                entry.hashes, entry.part = list(hashes), part
                entry.boundary = len(hashes) if boundary is None else boundary
                entry.told_hot = True
                self._users.update(entry.hashes)

    def count_save(self, session: SessionRef, change: int) -> None:
        """+1 when a save is planned, -1 when every rank has the rows."""
        with self._lock:
            entry = self._sessions.get(name_of(session))
            if entry is not None:
                entry.num_saves = max(0, entry.num_saves + change)

    def _forget_oldest(self) -> None:
        while len(self._sessions) > MAX_SESSIONS:
            idle = (n for n, x in self._sessions.items() if not (x.num_requests or x.num_saves))
            name = next(idle, None)
            if name is None:
                return
            self._let_go(self._sessions.pop(name).hashes)

    def _let_go(self, hashes: Sequence[bytes]) -> None:
        """One session less has these blocks; those that none has are not counted any more."""
        for block_hash in hashes:
            self._users[block_hash] -= 1
            if not self._users[block_hash]:
                del self._users[block_hash]

    # ---- looking

    def names(self) -> list[Name]:
        with self._lock:
            return list(self._sessions)

    def is_busy(self, name: Name) -> bool:
        with self._lock:
            entry = self._sessions.get(name)
            return entry is not None and entry.num_requests > 0

    def is_saving(self, name: Name) -> bool:
        with self._lock:
            entry = self._sessions.get(name)
            return entry is not None and entry.num_saves > 0

    def idle_s(self, name: Name) -> float | None:
        with self._lock:
            entry = self._sessions.get(name)
            return None if entry is None else max(0.0, self._monotonic() - entry.last_used_s)

    def num_resident(self, name: Name) -> int:
        """Blocks that vLLM would go on from; 0 unless it still holds all of them."""
        with self._lock:
            entry = self._sessions.get(name)
            return 0 if entry is None else self._resident(entry)

    def chain(self, session: SessionRef) -> list[bytes]:
        """The session's blocks, whether vLLM has them or not; none once they are to be dropped."""
        with self._lock:
            entry = self._sessions.get(name_of(session))
            return [] if entry is None or entry.dropping else list(entry.hashes)

    def part_behind(
        self, session: SessionRef, num_blocks: int, block_hash: bytes
    ) -> tuple[int, ...]:
        """Ids of the session's tokens behind this block, if it is the last of its full ones."""
        with self._lock:
            entry = self._sessions.get(name_of(session))
            if entry is None or len(entry.hashes) != num_blocks:
                return ()
            return entry.part if entry.hashes[-1] == block_hash else ()

    def take_cooled(self) -> list[Name]:
        """Quiet sessions that were hot when they were last told of, and are not any more."""
        with self._lock:
            told = [(n, x) for n, x in self._sessions.items() if x.told_hot and not x.num_requests]
            cooled = [(n, x) for n, x in told if not self._resident(x)]
            for _, entry in cooled:
                entry.told_hot = False
        return [name for name, _ in cooled]

    def _resident(self, entry: HotSession) -> int:
        end = entry.boundary
        if entry.dropping or not end:
            return 0
        last = [(entry.hashes[end - 1], self._groups.full)]
        state = [(entry.hashes[i], x.id) for x in self._groups.states for i in x.reach(end)]
        return 0 if any(self._cached(*x) is None for x in last + state) else end

    def num_idle_blocks(self) -> int:
        """Of quiet sessions; what requests and saves hold is counted as used, not here."""
        with self._lock:
            quiet = (x for x in self._sessions.values() if not (x.num_requests or x.num_saves))
            return sum(self._resident(x) for x in quiet)

    def num_used_blocks(self) -> int:
        """Held by running requests and by saves."""
        return self.pool.num_gpu_blocks - 1 - self.pool.get_num_free_blocks()

    # ---- dropping

    def ask_to_drop(self, name: Name) -> None:
        """From any thread. It happens before vLLM next looks for a prefix, so it is as good as
        done; an idle engine runs no code in between. Nothing happens to a session that is busy:
        its turn would bring the blocks back."""
        with self._lock:
            entry = self._sessions.get(name)
            if entry is not None and not entry.num_requests:
                entry.dropping = True
                self._to_drop.append(name)

    def drop_asked(self) -> None:
        """On vLLM's thread: take the blocks out of the prefix cache that no other session has."""
        if not self._to_drop:
            return
        with self._lock:
            names, self._to_drop = self._to_drop, []
            entries = [self._sessions[x] for x in names if x in self._sessions]
            idle = [x for x in entries if x.dropping]  # nobody has come back to it meanwhile
            hashes = [h for x in idle for h in x.hashes if self._users[h] <= 1]
            for entry in idle:
                self._let_go(entry.hashes)
                entry.hashes, entry.boundary = [], 0
                entry.dropping = False
        blocks = [x for h in hashes for g in self._groups.ids if (x := self._cached(h, g))]
        self.pool.evict_blocks({x.block_id for x in blocks if x.ref_cnt == 0})

    def _cached(self, block_hash: bytes, group: int) -> Any:
        for _ in range(LOOKUPS):
            # Where a hash has several blocks, the lookup iterates; vLLM may add or drop one.
            with suppress(RuntimeError, StopIteration):
                found = self.pool.get_cached_block(block_hash, [group])
                return found[0] if found else None
        return None
