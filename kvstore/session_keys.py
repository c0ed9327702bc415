"""All blobs of one session, by key, in the order in which they matter.

A session's blobs are its full chunks, and behind them either the tail or, for a model whose cache
cannot be cut, its snapshots. The order is that of the tokens: whoever evicts from the end loses the
least.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvstore.chain import CHUNK, DIGEST_BYTES, KEY_BYTES, Chain, KeySpace
from kvstore.records import SessionRecord

MEMO_BYTES: Final = 32 << 20  # of keys that are remembered
_ENTRY_BYTES: Final = 512


@dataclass(frozen=True)
class SessionKeys:
    chunks: list[bytes]
    tail: bytes | None
    snapshots: dict[int, bytes]  # by position, ascending

    def in_order(self, chunk_tokens: int) -> list[bytes]:
        """Chunks and snapshots by the last token they need, the tail at the end."""
        ends = [((i + 1) * chunk_tokens, key) for i, key in enumerate(self.chunks)]
        placed = sorted(ends + list(self.snapshots.items()), key=lambda x: x[0])
        return [key for _, key in placed] + ([self.tail] if self.tail else [])


class KeyMaker:
    """Knows which kinds of blobs this store's sessions have.

    Args:
        growing: the model has layers that grow with the tokens.
        needs_state: its cache cannot be cut back, so sessions have snapshots and no tail.
    """

    def __init__(self, space: KeySpace, *, growing: bool, needs_state: bool) -> None:
        self.space = space
        self.growing = growing
        self.needs_state = needs_state
        self._memo = _Memo(MEMO_BYTES)

    def record_key(self, record: SessionRecord) -> bytes:
        return self.space.record_key(record.tenant, record.id)

    def of(self, record: SessionRecord, chain: Chain | None = None) -> SessionKeys:
        chain = chain or self.space.chain(record.root, record.tokens)
        has_tail = self.growing and not self.needs_state and record.tail_tokens > 0
        return SessionKeys(
            chain.chunk_keys if self.growing else [],
            chain.tail_key(record.tenant, record.id) if has_tail else None,
            {x: chain.snapshot_key(x) for x in record.snapshots},
        )

    def listed(self, record: SessionRecord) -> list[bytes]:
        """``of`` in order; what must be there for all of the session to be restorable.

        Remembered: whoever looks through all sessions would hash all their tokens each time.
        """
        key, names = self.record_key(record), _Names.of(record)
        keys = self._memo.get(key, names)
        if keys is None:
            keys = self.of(record).in_order(self.space.chunk_tokens)
            self._memo.put(key, names, keys)
        return keys


class _Names(NamedTuple):
    """All of a record that its keys depend on, besides its own key."""

    root: bytes
    token_ids: bytes
    tail_tokens: int
    snapshots: tuple[int, ...]

    @classmethod
    def of(cls, record: SessionRecord) -> _Names:
        return cls(record.root, record.token_ids, record.tail_tokens, record.snapshots)


class _Memo:
    """The keys of the sessions that were asked for last, by record key. Thread-safe.

    The token ids are those of the index, not another copy; the keys take about a quarter of them.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._nbytes = 0
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, tuple[_Names, bytes]] = OrderedDict()

    def get(self, record_key: bytes, names: _Names) -> list[bytes] | None:
        with self._lock:
            known, joined = self._kept.get(record_key, (None, b""))
            if known != names:
                return None
            self._kept.move_to_end(record_key)
        return [joined[i : i + KEY_BYTES] for i in range(0, len(joined), KEY_BYTES)]

    def put(self, record_key: bytes, names: _Names, keys: list[bytes]) -> None:
        joined = b"".join(keys)
        with self._lock:
            self._remove(record_key)
            self._kept[record_key] = (names, joined)
            self._nbytes += _ENTRY_BYTES + len(joined)
            while self._nbytes > self._max_bytes:
                self._remove(next(iter(self._kept)))

    def _remove(self, record_key: bytes) -> None:
        _, joined = self._kept.pop(record_key, (None, None))
        if joined is not None:
            self._nbytes -= _ENTRY_BYTES + len(joined)


def left_behind_keys(record: SessionRecord) -> list[bytes]:
    digests = record.left_behind
    return [CHUNK + digests[i : i + DIGEST_BYTES] for i in range(0, len(digests), DIGEST_BYTES)]
