"""The packed blocks that were reported to readers of KV events, and the changes to report next.

There is no queue of events. The inventory records for each block the media that hold it and the
media that were reported. Events are the difference between the two, made when vLLM requests them.
So unread changes cannot pile up, and each block is reported as stored once and as removed once,
however many sessions share it.
"""

from __future__ import annotations

import itertools
import logging
import struct
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from engines.vllm_plugin.messages import ID_BYTES, RankRests
from kvstore.blobs.chain import joined, num_common, split
from kvstore.session import SessionName

logger = logging.getLogger("thermocline.vllm")

CPU: Final = "CPU"  # vLLM's names of media
STORAGE: Final = "STORAGE"
MEDIA: Final = (CPU, STORAGE)
HASH_BYTES: Final = 32
# For all sessions together; a block that sessions share counts once for each of them. A block takes
# about 300 bytes in Python.
MAX_BLOCKS: Final = 1 << 19
# Blocks in one step's events: vLLM's thread makes the events while the model waits.
MAX_TAKEN: Final = 4096


def wants_events(vllm_config: Any) -> bool:
    """Return whether vLLM was started with KV events."""
    config = getattr(vllm_config, "kv_events_config", None)
    return bool(getattr(config, "enable_kv_cache_events", False))


@dataclass(frozen=True)
class BlocksStored:
    """Consecutive blocks that are in a medium now."""

    medium: str
    hashes: Sequence[bytes]
    parent: bytes | None  # the hash of the block before them
    ids: Sequence[int]  # of all their tokens


@dataclass(frozen=True)
class BlocksRemoved:
    """Blocks that are no longer in a medium."""

    medium: str
    hashes: Sequence[bytes]


Change: TypeAlias = BlocksStored | BlocksRemoved


@dataclass(frozen=True)
class _Chain:
    """The blocks of a session, and how many of the first ones each medium holds."""

    hashes: Sequence[bytes] = ()
    ids: bytes = b""
    held: Mapping[str, int] = field(default_factory=dict)

    def blocks(self, medium: str) -> Sequence[bytes]:
        """The hashes of the blocks in a medium."""
        return self.hashes[: self.held.get(medium, 0)]


_NOTHING: Final = _Chain()


class Inventory:
    """Thread-safe: a rank reports to it on the hub's event loop, and vLLM's thread takes events."""

    def __init__(self, block_tokens: int, *, max_blocks: int = MAX_BLOCKS) -> None:
        """Above ``max_blocks`` the longest unchanged sessions are reported as removed."""
        self._block_tokens = block_tokens
        self._max_blocks = max_blocks
        self._lock = threading.Lock()
        self._sessions: OrderedDict[SessionName, _Chain] = OrderedDict()  # longest unchanged first
        self._num_blocks = 0
        # By medium and block: the number of sessions that hold it there.
        self._holders: dict[str, Counter[bytes]] = {x: Counter() for x in MEDIA}
        self._reported: dict[str, set[bytes]] = {x: set() for x in MEDIA}
        self._to_store: OrderedDict[SessionName, None] = OrderedDict()
        self._to_remove: dict[str, dict[bytes, None]] = {x: {} for x in MEDIA}
        self._was_full = False

    def __len__(self) -> int:
        """The number of blocks of all sessions; a shared block counts for each session."""
        return self._num_blocks

    # ---- on the hub's event loop

    def update(self, news: RankRests) -> None:
        """Record which media hold the blocks of a session."""
        held = {CPU: news.ram, STORAGE: news.storage}
        chain = _Chain(split(news.hashes), news.ids, held) if news.hashes else _NOTHING
        with self._lock:
            self._replace(news.session.name, chain)
            while self._num_blocks > self._max_blocks and len(self._sessions) > 1:
                if not self._was_full:
                    logger.warning(
                        "more than %d blocks are stored: KV events report the newest sessions only",
                        self._max_blocks,
                    )
                self._was_full = True
                self._replace(next(iter(self._sessions)), _NOTHING)

    def _replace(self, name: SessionName, new: _Chain) -> None:
        old = self._sessions.pop(name, _NOTHING)
        self._num_blocks += len(new.hashes) - len(old.hashes)
        if new.hashes:
            self._sessions[name] = new
        for medium, holders in self._holders.items():
            new_hashes, old_hashes = new.blocks(medium), old.blocks(medium)
            common = num_common(new_hashes, old_hashes)
            holders.update(new_hashes[common:])
            if new_hashes[common:]:
                self._to_store[name] = None
            for block_hash in old_hashes[common:]:
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
        """Return whether all stored blocks of the session have been reported."""
        return name not in self._to_store

    # ---- on vLLM's thread

    def take(self, most: int = MAX_TAKEN) -> list[Change]:
        """Return the next changes, in the order to report them; of about ``most`` blocks at most.

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

    def _stored(self, chain: _Chain, most: int) -> Iterator[BlocksStored]:
        size = ID_BYTES * self._block_tokens
        for medium in MEDIA:
            reported, end = self._reported[medium], 0
            hashes = chain.blocks(medium)
            for is_known, row in itertools.groupby(hashes, reported.__contains__):
                first, end = end, end + len(list(row))
                new = hashes[first : min(end, first + most)]
                if is_known or not new:
                    continue
                most -= len(new)
                reported.update(new)
                ids = chain.ids[first * size : (first + len(new)) * size]
                tokens = struct.unpack(f"<{len(ids) // ID_BYTES}I", ids)
                yield BlocksStored(medium, new, hashes[first - 1] if first else None, tokens)

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


def event_note(hashes: list[bytes], ids: bytes, chunk_blocks: int) -> bytes:
    """Return the note that a rank keeps with a session's record; b"" without ids.

    Readers of KV events know blocks by vLLM's hashes and by token ids; the cold store knows
    neither. So the note holds, chunk after chunk, the hashes of its blocks and its token ids.
    """
    if not ids or not hashes:
        return b""
    size = len(ids) // len(hashes) * chunk_blocks
    return b"".join(
        joined(hashes[i : i + chunk_blocks]) + ids[i // chunk_blocks * size :][:size]
        for i in range(0, len(hashes), chunk_blocks)
    )


def read_event_note(note: bytes, num_chunks: int, chunk_blocks: int) -> tuple[list[bytes], bytes]:
    """Return the hashes of all blocks and the ids of their tokens in an ``event_note``."""
    if not note or not num_chunks:
        return [], b""
    size, of_hashes = len(note) // num_chunks, HASH_BYTES * chunk_blocks
    parts = [note[i : i + size] for i in range(0, len(note), size)]
    hashes = [x for part in parts for x in split(part[:of_hashes])]
    return hashes, b"".join(part[of_hashes:] for part in parts)
