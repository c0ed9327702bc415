"""Saves turns, off the critical path.

One thread takes the queued saves, one at a time. Only pieces that no tier holds are packed, so the
work is proportional to the new tokens. Each piece is packed once, and the same bytes go to every
tier. Rows that were restored from a lossy copy are never packed again. If all copies of such a
chunk were evicted meanwhile, it is not saved, and the session's chain ends before it. So a session
that sleeps a hundred times loses precision only once.

The record is written last, so that a reader that finds it also finds the blobs that it names. If
the process ends at any moment, the session is as it was after this turn or after the one before.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from msgspec.structs import replace

from kvstore.blobs.chain import Chain, ChainKeys, Piece, joined, num_common_joined
from kvstore.blobs.packer import Packer
from kvstore.ledger.ledger import Ledger
from kvstore.ledger.record import SessionRecord, abandoned_chunks
from kvstore.session import STATES_PER_SESSION, by_worth, kept_states
from kvstore.store.save_queue import SaveJob, SaveQueue
from kvstore.tiers.base import Blob

LOOK_S: Final = 15.0  # the longest wait for a job before the thread checks whether it is closed

_log = logging.getLogger(__name__)


class _Selection(NamedTuple):
    """The content of one save: chain, numbers of the chunks with a state, and pieces to pack."""

    chain: Chain
    states: tuple[int, ...]
    missing: list[Piece]


class Saver:
    """Carries out the queued saves on a thread of its own."""

    def __init__(
        self,
        queue: SaveQueue,
        ledger: Ledger,
        packer: Packer,
        keys: ChainKeys,
        *,
        needs_state: bool,
    ) -> None:
        self._queue = queue
        self._ledger = ledger
        self._index = ledger.index
        self._stack = ledger.stack
        self._packer = packer
        self._keys = keys
        self._needs_state = needs_state
        self._thread = threading.Thread(target=self._run, name="kvstore-save", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        while not self._queue.closed:
            job = self._queue.take(LOOK_S)
            if job is not None:
                self._serve(job)
            job = None  # its listeners may refer to a session's KV, which the next wait would keep

    def _serve(self, job: SaveJob) -> None:
        record = None
        try:
            record = self._save(job)
        except Exception:  # the outermost frame of this thread: a bad save must not end the others
            _log.exception("a session could not be saved")
        self._ledger.counters.add("saves" if record else "saves_failed")
        self._queue.settle(job)
        job.call_listeners(record)
        self._queue.finish(job)

    def _save(self, job: SaveJob) -> SessionRecord | None:
        old = self._index.find_anywhere(job.session)
        if old is not None and not self._ledger.records.is_usable(old):
            old = None
        chosen = self._select(job, old)
        if not chosen.chain:
            return None
        rows = sum(x.num_tokens for x in chosen.missing if x.is_chunk)
        self._queue.charge(job, max(job.nbytes, rows * self._packer.layout.bytes_per_token))
        blobs = job.source.pack(chosen.missing)
        self._queue.packed(job)
        fresh = {x.key: blob for x, blob in zip(chosen.missing, blobs, strict=True)}
        self._ledger.counters.add("chunks_packed", sum(x.is_chunk for x in chosen.missing))
        self._ledger.counters.add("states_packed", sum(x.is_state for x in chosen.missing))
        record, obsolete = self._record(job, old, chosen, fresh)
        fresh |= self._pages(record)
        return record if self._ledger.committer.save(record, fresh, obsolete) else None

    def _pages(self, record: SessionRecord) -> dict[bytes, Blob]:
        """Return the blobs, by key, of the pages of the chain that no tier has."""
        keys = self._ledger.records.page_keys(record)
        levels = self._stack.locate(keys).levels
        missing = [key for key, level in zip(keys, levels, strict=True) if level is None]
        return {key: self._ledger.records.pack_page(record, key) for key in missing}

    # ---- what is saved

    def _select(self, job: SaveJob, old: SessionRecord | None) -> _Selection:
        """Choose what to store. The chain ends before a restored chunk that no tier has."""
        missing = self._missing_chunks(job.chain)
        lost = next((x for x in missing if job.source.is_restored(x)), None)
        chain = job.chain
        if lost is not None:
            chain = chain[: lost.first_token // self._keys.chunk_tokens]
            missing = [x for x in missing if x.first_token < lost.first_token]
            self._ledger.counters.add("chunks_left_out", len(job.chain) - len(chain))
        if not self._needs_state:
            return _Selection(chain, (), missing)
        new, of_states = [], dict[Piece, None]()
        for number in (x for x in job.states if x <= len(chain)):
            pieces = self._keys.windows(chain, number)
            wanted = self._missing([*pieces, self._keys.state(chain, number)])
            if not any(map(job.source.is_restored, wanted)):
                new.append(number)
        states = self._states(job, old, chain, new)
        for number in (x for x in new if x in states):
            pieces = [*self._keys.windows(chain, number), self._keys.state(chain, number)]
            of_states.update(dict.fromkeys(self._missing(pieces)))
        return _Selection(chain, states, [*missing, *of_states])

    def _missing_chunks(self, chain: Chain) -> list[Piece]:
        num = len(chain) if self._keys.growing else 0
        held = [self._stack.num_held(x, chain.__getitem__, num) for x in self._stack.local]
        return self._missing(self._keys.chunks(chain, max(held, default=0), num))

    def _missing(self, pieces: Sequence[Piece]) -> list[Piece]:
        levels = self._stack.locate([x.key for x in pieces]).levels
        return [x for x, level in zip(pieces, levels, strict=True) if level is None]

    def _states(
        self, job: SaveJob, old: SessionRecord | None, chain: Chain, new: Iterable[int]
    ) -> tuple[int, ...]:
        """Choose the states that the session keeps: numbers of chunks, ascending."""
        common = num_common_joined(old.chain, joined(chain)) if old else 0
        still_valid = [x for x in (old.states if old else ()) if x <= common]
        held = self._stack.locate([self._keys.state(chain, x).key for x in still_valid])
        # A state is not given up because a tier does not answer.
        gone = [level is None and not held.down for level in held.levels]
        known = {*new, *(x for x, lost in zip(still_valid, gone, strict=True) if not lost)}
        own = kept_states(known, STATES_PER_SESSION)
        return (*self._shared_beginning(job, chain, known.difference(own)), *own)

    def _shared_beginning(self, job: SaveJob, chain: Chain, others: Iterable[int]) -> list[int]:
        """Return the furthest of these states at which another session has the same chunk, or [].

        That is often the end of a system prompt. Its state is then stored once for all sessions
        that start with the prompt.
        """
        for number in by_worth(others):
            last = self._keys.chunks(chain, number - 1, number)
            if last and not self._index.unshared([last[0].key], job.key):
                return [number]
        return []

    # ---- the record

    def _record(
        self,
        job: SaveJob,
        old: SessionRecord | None,
        chosen: _Selection,
        fresh: Mapping[bytes, Blob],
    ) -> tuple[SessionRecord, list[bytes]]:
        """Return the new record, and the keys of blobs that are unused once it is written."""
        chain = chosen.chain
        note_bytes = len(job.note) // max(len(job.chain), 1)  # of a chunk
        names = joined(chain)
        common = num_common_joined(old.chain, names) if old else 0
        left, overflow = abandoned_chunks(old, chain, common) if old else (b"", list[bytes]())
        record = SessionRecord(
            tenant=job.session.tenant,
            id=job.session.id,
            fingerprint=self._packer.fingerprint,
            chunk_tokens=self._keys.chunk_tokens,
            chain=names,
            states=chosen.states,
            last_used_s=self._ledger.clock(),
            pinned=old is not None and old.pinned,
            left_behind=left,
            note=job.note[: note_bytes * len(chain)],
        )
        record = replace(record, packed_bytes=self._packed_bytes(record, old, common, fresh))
        if old is None:
            return record, []
        current = {*self._ledger.records.keys_beside(record)}
        gone = [x for x in self._ledger.records.keys_beside(old) if x not in current]
        return record, self._index.unshared([*gone, *overflow], job.key)

    def _packed_bytes(
        self,
        record: SessionRecord,
        old: SessionRecord | None,
        common: int,
        fresh: Mapping[bytes, Blob],
    ) -> int:
        """Return the total size of the record's blobs.

        If the new chain continues the old one, the change is added to the old size.
        """
        records, fresh_bytes = self._ledger.records, sum(map(len, fresh.values()))
        if old is not None and common == old.num_chunks:
            before, now = ({*records.sized_keys(x, common)} for x in (old, record))
            gone = before - now
            if fresh.keys() <= now - before and None not in self._stack.locate([*gone]).levels:
                more = self._stack.nbytes(now - before - fresh.keys()) - self._stack.nbytes(gone)
                return old.packed_bytes + fresh_bytes + more
        older = [x for x in records.sized_keys(record) if x not in fresh]
        return fresh_bytes + self._stack.nbytes(older)
