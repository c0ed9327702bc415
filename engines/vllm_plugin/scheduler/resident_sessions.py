"""Records the blocks of each session, and finds out whether vLLM still holds them.

vLLM keeps the blocks of finished requests until it needs the room, and does not report when it
reuses one. So only the hashes of a session's blocks are remembered. Each query looks up in vLLM's
own table whether the blocks are still cached, from any thread: a lookup changes nothing, and is
repeated if vLLM's thread disturbs it. Only vLLM's thread changes vLLM's table.

A session is hot while vLLM holds all of its blocks. vLLM reuses a chain of blocks from its tail on,
because vLLM and this plug-in free the blocks in that order: if the last block is cached, all are.
Blocks of a chain that has lost its tail are mostly a prefix that it shares with other sessions.

If some layers do not keep all tokens (``groups``), vLLM continues only from a boundary with a
state, so such a session is hot while its newest state is cached, too. The blocks of a state are
looked up one by one: vLLM frees the blocks of each group independently.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from engines.vllm_plugin.groups import DENSE, Groups
from kvstore.blobs.chain import num_common
from kvstore.session import MissReason, SessionName, SessionRef

MAX_SESSIONS: Final = 4096
LOOKUPS: Final = 3  # tries for one block, if vLLM's thread disturbs them; a try takes microseconds


class BlockPool(Protocol):
    """The members of ``vllm.v1.core.block_pool.BlockPool`` that the plug-in uses."""

    blocks: Sequence[Any]
    num_gpu_blocks: int

    def get_cached_block(self, block_hash: Any, kv_cache_group_ids: list[int]) -> Any: ...
    def touch(self, blocks: Sequence[Any]) -> None: ...
    def free_blocks(self, ordered_blocks: Any) -> None: ...
    def evict_blocks(self, block_ids: set[int]) -> None: ...
    def get_num_free_blocks(self) -> int: ...


@dataclass
class ResidentSession:
    """The blocks of one session, and its requests, saves and drops under way."""

    hashes: list[bytes] = field(default_factory=list)
    boundary: int = 0  # the number of blocks that vLLM can continue from: all, or up to a state
    num_requests: int = 0  # being served
    last_used_s: float = 0.0  # monotonic
    num_saves: int = 0  # planned, and not yet copied out by every rank
    dropping: bool = False  # its blocks leave the prefix cache in vLLM's next step
    reported_hot: bool = False  # in the last report to the gateway
    too_short: bool = False  # its last turn had less than a chunk, so nothing was saved


_UNKNOWN: Final = ResidentSession()


class ResidentSessions:
    """The sessions whose blocks vLLM may hold, by name. Thread-safe."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._sessions: OrderedDict[SessionName, ResidentSession] = OrderedDict()
        self._to_drop: list[SessionName] = []
        self._pool: BlockPool | None = None
        self._groups = DENSE

    def bind(self, pool: BlockPool, groups: Groups = DENSE) -> None:
        """Set vLLM's block pool, before the first request."""
        self._pool = pool
        self._groups = groups

    @property
    def pool(self) -> BlockPool:
        assert self._pool is not None, "vLLM binds its block pool before the first request"
        return self._pool

    # ---- turns

    def begin(self, session: SessionRef) -> None:
        """Note that a request of this session is served from now on."""
        with self._lock:
            entry = self._sessions.setdefault(session.name, ResidentSession())
            entry.num_requests += 1
            entry.dropping = False
            entry.last_used_s = self._monotonic()
            self._sessions.move_to_end(session.name)
            self._forget_oldest()

    def end(self, session: SessionRef, hashes: Sequence[bytes], *, too_short: bool = False) -> None:
        """Note that a turn is over, and that the session now consists of these blocks.

        ``hashes``: empty = the blocks have not changed. ``too_short``: they have no full chunk.
        """
        with self._lock:
            entry = self._sessions.get(session.name)
            if entry is None:
                return
            entry.num_requests -= 1
            entry.last_used_s = self._monotonic()
            entry.too_short = too_short
            if hashes:
                entry.hashes, entry.boundary = list(hashes), len(hashes)
                if self._groups.states:
                    newest = self.newest_state(hashes, range(len(hashes), 0, -1))
                    entry.boundary = max(newest, default=0)
                entry.reported_hot = True

    def count_save(self, session: SessionRef, change: int) -> None:
        """Count unfinished saves: +1 when one is planned, -1 when all ranks have copied it."""
        with self._lock:
            entry = self._sessions.get(session.name)
            if entry is not None:
                entry.num_saves = max(0, entry.num_saves + change)

    def _forget_oldest(self) -> None:
        while len(self._sessions) > MAX_SESSIONS:
            idle = (n for n, x in self._sessions.items() if not (x.num_requests or x.num_saves))
            name = next(idle, None)
            if name is None:
                return
            del self._sessions[name]

    # ---- looking

    def why_none(self, session: SessionRef | None) -> MissReason:
        """Return why nothing is stored of a prompt that has no full chunk."""
        entry = _UNKNOWN if session is None else self._known(session.name)
        if entry.too_short:
            return "too-short"
        return "diverged" if entry.hashes else "never-stored"

    def _known(self, name: SessionName) -> ResidentSession:
        return self._sessions.get(name, _UNKNOWN)

    def names(self) -> list[SessionName]:
        with self._lock:
            return list(self._sessions)

    def is_busy(self, name: SessionName) -> bool:
        """True while a request of the session is being served."""
        return self._known(name).num_requests > 0

    def is_saving(self, name: SessionName) -> bool:
        """True while a rank has not yet copied out a planned save of the session."""
        return self._known(name).num_saves > 0

    def idle_s(self, name: SessionName) -> float | None:
        """Seconds since the session was last used; None if it is not known."""
        entry = self._sessions.get(name)
        return None if entry is None else max(0.0, self._monotonic() - entry.last_used_s)

    def num_resident(self, name: SessionName) -> int:
        """The number of blocks that vLLM can continue from; 0 unless it still holds all of them."""
        with self._lock:
            return self._resident(self._known(name))

    def chain(self, session: SessionRef) -> list[bytes]:
        """The hashes of the session's blocks, whether cached or not; [] if it is being dropped."""
        with self._lock:
            entry = self._known(session.name)
            return [] if entry.dropping else list(entry.hashes)

    def pop_cooled(self) -> list[SessionName]:
        """Quiet sessions that were reported as hot and no longer are; each is returned once."""
        with self._lock:
            quiet = [(n, x) for n, x in self._sessions.items() if not x.num_requests]
            cooled = [(n, x) for n, x in quiet if x.reported_hot and not self._resident(x)]
            for _, entry in cooled:
                entry.reported_hot = False
        return [name for name, _ in cooled]

    def num_idle_blocks(self) -> int:
        """The number of blocks of quiet sessions.

        Blocks that requests and saves hold are not included: ``num_used_blocks`` counts those.
        """
        with self._lock:
            quiet = (x for x in self._sessions.values() if not (x.num_requests or x.num_saves))
            return sum(self._resident(x) for x in quiet)

    def num_used_blocks(self) -> int:
        """The number of blocks that running requests and saves hold."""
        return self.pool.num_gpu_blocks - 1 - self.pool.get_num_free_blocks()

    # ---- vLLM's table

    def cached_ids(self, hashes: Sequence[bytes]) -> list[int]:
        """The ids of a chain's blocks, up to the first one that vLLM has reused."""
        block_ids: list[int] = []
        for block_hash in hashes:
            block = self._cached(block_hash, self._groups.full)
            if block is None:
                break
            block_ids.append(block.block_id)
        return block_ids

    def newest_state(
        self, hashes: Sequence[bytes], boundaries: Iterable[int]
    ) -> dict[int, list[int]]:
        """The first of ``boundaries`` whose whole state vLLM still has, with the state's block ids.

        {} if vLLM has none of them, or no layer has states. ``hashes``: those of the session's
        blocks, from its beginning.
        """
        for boundary in boundaries if self._groups.states else ():
            blocks = self._state(hashes, boundary)
            if blocks is not None:
                return {boundary: [x.block_id for x in blocks]}
        return {}

    def _state(self, hashes: Sequence[bytes], boundary: int) -> list[Any] | None:
        groups = self._groups.states
        blocks = [self._cached(hashes[i], x.id) for x in groups for i in x.reach(boundary)]
        return None if None in blocks else blocks

    def _resident(self, entry: ResidentSession) -> int:
        end = entry.boundary
        if entry.dropping or not end:
            return 0
        if self._cached(entry.hashes[end - 1], self._groups.full) is None:
            return 0
        return 0 if self._state(entry.hashes, end) is None else end

    def _cached(self, block_hash: bytes, group: int) -> Any:
        for _ in range(LOOKUPS):
            # If a hash has several blocks, the lookup iterates over them; vLLM may change them.
            with suppress(RuntimeError, StopIteration):
                found = self.pool.get_cached_block(block_hash, [group])
                return found[0] if found else None
        return None

    # ---- dropping

    def ask_to_drop(self, name: SessionName) -> None:
        """Request that the session's blocks are dropped from vLLM's prefix cache. From any thread.

        vLLM's thread drops them before it next looks for a prefix, so no request can use them; an
        idle engine runs no code in between. The blocks of a busy session are not dropped: its turn
        would bring them back.
        """
        with self._lock:
            entry = self._sessions.get(name)
            if entry is not None and not entry.num_requests:
                entry.dropping = True
                self._to_drop.append(name)

    @property
    def has_drops(self) -> bool:
        """True if blocks wait to be dropped in vLLM's next step."""
        return bool(self._to_drop)

    def drop_asked(self) -> None:
        """Drop the requested blocks that no other session has. On vLLM's thread."""
        if not self._to_drop:
            return
        with self._lock:
            names, self._to_drop = self._to_drop, []
            entries = [self._sessions[x] for x in names if x in self._sessions]
            idle = [x for x in entries if x.dropping]  # the sessions not used meanwhile
            kept = [x.hashes for x in self._sessions.values() if not x.dropping]
            hashes = [h for x in idle for h in x.hashes[_num_kept(x.hashes, kept) :]]
            for entry in idle:
                entry.hashes, entry.boundary = [], 0
                entry.dropping = False
        blocks = [x for h in hashes for g in self._groups.ids if (x := self._cached(h, g))]
        self.pool.evict_blocks({x.block_id for x in blocks if x.ref_cnt == 0})


def _num_kept(chain: Sequence[bytes], kept: Sequence[Sequence[bytes]]) -> int:
    """Count the leading blocks of a chain that some other chain has as well."""
    return max((num_common(chain, x) for x in kept), default=0)
