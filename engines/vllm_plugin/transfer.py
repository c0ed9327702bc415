"""The half inside each worker: copies KV between vLLM's blocks and the cold store.

Nothing here runs on the model's thread but the hand-over. A save reads blocks that vLLM's scheduler
keeps from being reused until this rank has acknowledged; it acknowledges as soon as the rows are
copied out (or the save was skipped, because too much waits already). A load writes blocks that vLLM
has set aside for one waiting request.

A request id is reported as loaded exactly once, whatever happened: vLLM's engine stops when it
hears of one twice, or of one that it has never seen wait.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Final, Protocol

from engines.vllm_plugin.plan import Load, Save
from engines.vllm_plugin.rank import StagingArea
from kvstore.block_keys import Piece
from kvstore.block_records import BlockRecord
from kvstore.block_store import BlockStore
from kvstore.errors import Unusable
from kvstore.records import SessionRef
from kvstore.shapes import KVLayout, KVPair
from kvstore.tiers.base import Blob

logger = logging.getLogger("thermocline.vllm")

DECODES_AHEAD: Final = 4


class Blocks(Protocol):
    """vLLM's blocks (``paging.PagedCache``)."""

    @property
    def layout(self) -> KVLayout: ...

    @property
    def block_tokens(self) -> int: ...

    def read(self, block_ids: Sequence[int]) -> list[KVPair]:
        """One run of tokens, copied."""

    def write(self, block_ids: Sequence[int], run: Sequence[KVPair], first_block: int) -> None:
        """Blocks ``first_block ..`` of ``run`` into these blocks."""


class Stream(Protocol):
    """In which order copies and the model's work happen (``streams.SideStream``)."""

    def mark(self) -> object: ...
    def after(self, mark: object) -> AbstractContextManager[None]: ...


class Transfer:
    """``save``, ``load`` and ``take_*`` on the worker's own thread, once per step."""

    def __init__(
        self,
        cache: Blocks,
        store: BlockStore,
        staging: StagingArea,
        stream: Stream,
        max_queued_bytes: int,
    ) -> None:
        self._cache = cache
        self._store = store
        self._staging = staging
        self._stream = stream
        self._max_queued_bytes = max_queued_bytes
        self._block_bytes = cache.block_tokens * cache.layout.bytes_per_token
        self._lock = threading.Lock()
        self._queued_bytes = 0
        self._settled = threading.Condition(self._lock)
        self._saving: Counter[tuple[str, str]] = Counter()  # saves that have begun, per session
        self._acks: dict[int, int] = {}
        self._loaded: set[str] = set()
        self._bad_blocks: set[int] = set()
        # One thread saves, so that saves of one session never overlap.
        self._saver = ThreadPoolExecutor(1, "thermocline-save")
        self._loaders = ThreadPoolExecutor(2, "thermocline-load")

    @property
    def queued_bytes(self) -> int:
        """Hot bytes of saves that wait or run."""
        return self._queued_bytes

    # ---- saving

    def save(self, save: Save, on_saved: Callable[[BlockRecord], None]) -> None:
        nbytes = len(save.block_ids) * self._block_bytes
        with self._lock:
            full = self._queued_bytes and self._queued_bytes + nbytes > self._max_queued_bytes
            if full:
                self._acks[save.job] = 1
            else:
                self._queued_bytes += nbytes
                self._saving[_name(save.session)] += 1
        if full:
            self._store.counters.add("saves_skipped")
        else:
            ready = self._stream.mark()
            self._saver.submit(self._save, save, nbytes, ready, on_saved)

    def _save(
        self, save: Save, nbytes: int, ready: object, on_saved: Callable[[BlockRecord], None]
    ) -> None:
        acknowledged = False
        try:
            with self._stream.after(ready):
                rows = [(x, self._read(save, x)) for x in self._store.missing(save.hashes)]
            self._acknowledge(save.job)
            acknowledged = True
            record = self._store.commit(save.session, save.hashes, self._encoded(rows))
            self._store.expire()
            on_saved(record)
        except Exception:  # the edge of this thread: one bad save must not end all others
            logger.exception("a session could not be saved")
            self._store.counters.add("saves_failed")
        finally:
            if not acknowledged:  # or its blocks would be held for ever
                self._acknowledge(save.job)
            with self._settled:
                self._queued_bytes -= nbytes
                self._saving -= Counter([_name(save.session)])
                self._settled.notify_all()

    def wait_saved(self, session: SessionRef, within_s: float) -> None:
        """Until every save of this session that has begun is done. From any other thread."""
        name = _name(session)
        with self._settled:
            self._settled.wait_for(lambda: not self._saving[name], within_s)

    def _acknowledge(self, job: int) -> None:
        with self._lock:
            self._acks[job] = 1

    def _read(self, save: Save, piece: Piece) -> list[KVPair]:
        return self._cache.read(save.block_ids[piece.first_block : piece.end_block])

    def _encoded(self, rows: list[tuple[Piece, list[KVPair]]]) -> Mapping[bytes, Blob]:
        futures: list[tuple[bytes, Future[bytes]]] = []
        for piece, run in rows:
            pack = self._store.packer.pack_tail if piece.is_tail else self._store.packer.pack_chunk
            first = piece.first_block * self._cache.block_tokens
            futures.append((piece.key, self._store.workers.codec(pack, piece.key, run, first)))
        self._store.counters.add("chunks_encoded", len(futures))
        return {key: future.result() for key, future in futures}

    # ---- loading

    def load(self, load: Load) -> None:
        self._loaders.submit(self._load, load, self._stream.mark())

    def _load(self, load: Load, ready: object) -> None:
        bad = set(load.block_ids)
        try:
            fetched = self._staging.take(load.ticket)
            if fetched is not None:
                bad -= self._filled(load, fetched.pieces, ready)
        except Exception:  # the edge of this thread: the request must hear of its load
            logger.exception("a restore failed")
        if bad:
            logger.warning("%d blocks could not be restored and are computed again", len(bad))
        # Together: vLLM wants the failed blocks no later than the request's own completion.
        with self._lock:
            self._bad_blocks |= bad
            self._loaded.add(load.request_id)

    def _filled(self, load: Load, pieces: list[tuple[Piece, Blob]], ready: object) -> set[int]:
        """The block ids that hold what they should."""
        filled: set[int] = set()
        for piece, future in self._decodes(pieces):
            run = future.result()
            first = max(piece.first_block, load.first_block)
            last = min(piece.end_block, load.first_block + len(load.block_ids))
            if run is None or last <= first:
                continue
            ids = load.block_ids[first - load.first_block : last - load.first_block]
            with self._stream.after(ready):
                self._cache.write(ids, run, first - piece.first_block)
            filled.update(ids)
        return filled

    def _decodes(
        self, pieces: list[tuple[Piece, Blob]]
    ) -> Iterator[tuple[Piece, Future[list[KVPair] | None]]]:
        """In order, a few begun ahead: decoded, a session is many times what was staged of it."""
        ahead: deque[tuple[Piece, Future[list[KVPair] | None]]] = deque()
        for piece, blob in pieces:
            ahead.append((piece, self._store.workers.codec(self._decoded, piece, blob)))
            if len(ahead) > DECODES_AHEAD:
                yield ahead.popleft()
        yield from ahead

    def _decoded(self, piece: Piece, blob: Blob) -> list[KVPair] | None:
        tokens = piece.num_blocks * self._cache.block_tokens
        first = piece.first_block * self._cache.block_tokens
        packer = self._store.packer
        unpack = packer.unpack_tail if piece.is_tail else packer.unpack_chunk
        run = self._cache.layout.empty(tokens)
        try:
            unpack(blob, piece.key, first, tokens, run)
        except Unusable as error:
            logger.warning("a verified blob cannot be decoded: %s", error)
            self._store.discard(piece.key)
            return None
        return run

    # ---- what vLLM asks for with each step

    def take_loaded(self) -> set[str]:
        with self._lock:
            loaded, self._loaded = self._loaded, set()
            return loaded

    def take_bad_blocks(self) -> set[int]:
        with self._lock:
            bad, self._bad_blocks = self._bad_blocks, set()
            return bad

    def take_acks(self) -> dict[int, int]:
        """Jobs whose blocks are needed no longer, each with a count of one rank."""
        with self._lock:
            acks, self._acks = self._acks, {}
            return acks

    def close(self) -> None:
        """Saves that have begun are finished."""
        self._loaders.shutdown(wait=True)
        self._saver.shutdown(wait=True)


def _name(session: SessionRef) -> tuple[str, str]:
    return session.tenant, session.id
