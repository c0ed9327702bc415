"""The packed blocks that were reported to readers of KV events, and the changes to report next.

There is no queue of events. The inventory records for each block the media that hold it and the
media that were reported. An event is the difference between the two, made when vLLM requests
events. So changes that were not read yet cannot pile up, and each block is reported as stored once
and as removed once, however many sessions share it: readers may count.
"""

from __future__ import annotations

import logging
import struct
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from engines.vllm_plugin.messages import ID_BYTES, BlockRuns, RankRests
from kvstore.blobs.chain import num_common, split
from kvstore.session import SessionName

logger = logging.getLogger("thermocline.vllm")

CPU: Final = "CPU"  # vLLM's names of media
STORAGE: Final = "STORAGE"
MEDIA: Final = (CPU, STORAGE)
# For all sessions together; a block that sessions share counts once for each of them. A block takes
# about 300 bytes in Python.
MAX_BLOCKS: Final = 1 << 19
# Blocks in one step's events: vLLM's thread makes the events while the model waits.
MAX_TAKEN: Final = 4096


def wants_events(vllm_config: Any) -> bool:
    """True if vLLM was started with KV events."""
    config = getattr(vllm_config, "kv_events_config", None)
    return bool(getattr(config, "enable_kv_cache_events", False))


@dataclass(frozen=True)
class BlocksStored:
    """Consecutive blocks that are in a medium now.

    ``ids``: those of all their tokens; () if they are unknown. ``parent``: the hash of the block
    before them.
    """

    medium: str
    hashes: Sequence[bytes]
    parent: bytes | None
    ids: Sequence[int]


@dataclass(frozen=True)
class BlocksRemoved:
    """Blocks that are no longer in a medium."""

    medium: str
    hashes: Sequence[bytes]


Change: TypeAlias = BlocksStored | BlocksRemoved


@dataclass(frozen=True)
class _Share:
    """The blocks of a session, and the runs of them that every rank has, by medium."""

    hashes: Sequence[bytes] = ()
    ids: bytes = b""
    runs: dict[str, BlockRuns] = field(default_factory=dict)

    def blocks(self, medium: str, first: int) -> list[bytes]:
        """The hashes of the blocks in a medium, from block ``first`` on."""
        runs = self.runs.get(medium, ())
        return [x for a, b in runs for x in self.hashes[max(a, first) : max(b, first)]]

    def before(self, medium: str, end: int) -> BlockRuns:
        """The runs in a medium up to block ``end``."""
        return tuple((a, min(b, end)) for a, b in self.runs.get(medium, ()) if a < end)


_NOTHING: Final = _Share()


class Inventory:
    """Thread-safe: ranks report to it on the hub's event loop, and vLLM's thread takes events.

    Args:
        max_blocks: for all sessions. Above it, the sessions that have not changed for the longest
            time are reported as removed.
    """

    def __init__(self, num_ranks: int, block_tokens: int, *, max_blocks: int = MAX_BLOCKS) -> None:
        self._num_ranks = num_ranks
        self._block_tokens = block_tokens
        self._max_blocks = max_blocks
        self._lock = threading.Lock()
        self._shares: dict[SessionName, dict[int, _Share]] = {}  # by rank, if there are several
        self._sessions: OrderedDict[SessionName, _Share] = OrderedDict()  # longest unchanged first
        self._num_blocks = 0
        self._holders: dict[str, Counter[bytes]] = {x: Counter() for x in MEDIA}  # sessions
        self._reported: dict[str, set[bytes]] = {x: set() for x in MEDIA}
        self._to_store: OrderedDict[SessionName, None] = OrderedDict()
        self._to_remove: dict[str, dict[bytes, None]] = {x: {} for x in MEDIA}
        self._was_full = False

    def __len__(self) -> int:
        """The number of blocks of all sessions; a shared block counts for each session."""
        return self._num_blocks

    # ---- on the hub's event loop

    def update(self, news: RankRests) -> None:
        """Record which media hold the blocks of a session on one rank."""
        name = news.session.name
        runs = {CPU: news.ram, STORAGE: news.storage}
        share = _Share(split(news.hashes), news.ids, runs) if news.hashes else _NOTHING
        with self._lock:
            self._replace(name, share if self._num_ranks == 1 else self._of_all(name, news, share))
            while self._num_blocks > self._max_blocks and len(self._sessions) > 1:
                self._leave_out(next(iter(self._sessions)))

    def _of_all(self, name: SessionName, news: RankRests, share: _Share) -> _Share:
        """The blocks that every rank has, after one rank has reported ``share``."""
        shares = self._shares.setdefault(name, {})
        shares[news.rank] = share
        if not any(x.hashes for x in shares.values()):
            del self._shares[name]
        return _joint(list(shares.values())) if len(shares) == self._num_ranks else _NOTHING

    def _leave_out(self, name: SessionName) -> None:
        if not self._was_full:
            logger.warning(
                "more than %d blocks rest packed: KV events report the newest sessions only",
                self._max_blocks,
            )
        self._was_full = True
        self._shares.pop(name, None)  # each rank reports the session again when it changes
        self._replace(name, _NOTHING)

    def _replace(self, name: SessionName, new: _Share) -> None:
        old = self._sessions.pop(name, _NOTHING)
        self._num_blocks += len(new.hashes) - len(old.hashes)
        if new.hashes:
            self._sessions[name] = new
        common = num_common(old.hashes, new.hashes)
        for medium in MEDIA:
            same = old.before(medium, common) == new.before(medium, common)
            first = common if same else 0
            come, gone = new.blocks(medium, first), old.blocks(medium, first)
            holders = self._holders[medium]
            holders.update(come)
            if come:
                self._to_store[name] = None
            for block_hash in gone:
                holders[block_hash] -= 1
                if not holders[block_hash]:
                    del holders[block_hash]
                    self._to_remove[medium][block_hash] = None

    # ---- from any thread

    @property
    def has_news(self) -> bool:
        """True if there are changes to report."""
        return bool(self._to_store or any(self._to_remove.values()))

    def is_reported(self, name: SessionName) -> bool:
        """Say whether all stored blocks of the session have been reported."""
        return name not in self._to_store

    # ---- on vLLM's thread

    def take(self, most: int = MAX_TAKEN) -> list[Change]:
        """Changes of about ``most`` blocks at most, to be reported in this order.

        Stored blocks come before removed ones, so that a session that moves is always reported in
        at least one medium.
        """
        if not self.has_news:
            return []
        changes: list[Change] = []
        with self._lock:
            while self._to_store and most > 0:
                name = next(iter(self._to_store))
                new = list(self._stored(self._sessions.get(name, _NOTHING), most))
                most -= sum(len(x.hashes) for x in new)
                changes += new
                if most > 0:
                    del self._to_store[name]
            if not self._to_store:
                changes += [x for medium in MEDIA for x in self._removed(medium, most)]
        return changes

    def report_again(self) -> None:
        """Report all blocks again: readers have dropped all that they knew of this engine."""
        with self._lock:
            for medium in MEDIA:
                self._reported[medium].clear()
                self._to_remove[medium].clear()
            self._to_store = OrderedDict.fromkeys(self._sessions)

    def _stored(self, session: _Share, most: int) -> Iterator[BlocksStored]:
        known = len(session.ids) // (ID_BYTES * self._block_tokens)
        for medium in MEDIA:
            reported = self._reported[medium]
            for first, end in session.runs.get(medium, ()):
                new = (i for i in range(first, end) if session.hashes[i] not in reported)
                for run in _in_rows(new, known):
                    run = run[: max(most, 0)]
                    if not run:
                        return
                    most -= len(run)
                    hashes = session.hashes[run.start : run.stop]
                    reported.update(hashes)
                    parent = session.hashes[run.start - 1] if run.start else None
                    yield BlocksStored(medium, hashes, parent, self._ids(session, run))

    def _ids(self, session: _Share, run: range) -> Sequence[int]:
        size = ID_BYTES * self._block_tokens
        ids = session.ids[run.start * size : run.stop * size]
        return struct.unpack(f"<{len(ids) // ID_BYTES}I", ids)

    def _removed(self, medium: str, most: int) -> Iterator[BlocksRemoved]:
        waiting, reported = self._to_remove[medium], self._reported[medium]
        gone: list[bytes] = []
        while waiting and len(gone) < max(most, 1):
            block_hash, _ = waiting.popitem()
            if block_hash in reported and block_hash not in self._holders[medium]:
                reported.remove(block_hash)
                gone.append(block_hash)
        if gone:
            yield BlocksRemoved(medium, gone)


def _in_rows(numbers: Iterable[int], cut: int) -> Iterator[range]:
    """Runs of consecutive numbers; no run crosses ``cut``."""
    first = end = -1
    for i in numbers:
        if i != end or i == cut:
            if first < end:
                yield range(first, end)
            first = i
        end = i + 1
    if first < end:
        yield range(first, end)


def _joint(shares: Sequence[_Share]) -> _Share:
    """The blocks that every rank has in a medium."""
    shortest = min(shares, key=lambda x: len(x.hashes))
    end = min(num_common(shortest.hashes, x.hashes) for x in shares)
    if not end:
        return _NOTHING
    runs = {medium: _overlap([x.before(medium, end) for x in shares]) for medium in MEDIA}
    return _Share(shortest.hashes[:end], min((x.ids for x in shares), key=len), runs)


def _overlap(shares: Sequence[BlockRuns]) -> BlockRuns:
    held = [{i for run in runs for i in range(*run)} for runs in shares]
    return tuple((x.start, x.stop) for x in _in_rows(sorted(set.intersection(*held)), -1))
