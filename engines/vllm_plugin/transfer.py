"""The half inside each worker: copies KV between vLLM's blocks and the cold store.

Nothing here runs on the model's thread but the hand-over. A save reads blocks that vLLM's scheduler
keeps from being reused until this rank has acknowledged; it acknowledges as soon as the rows are
copied out (or the save was skipped, because too much waits already). What waits is what the store
lacks: of a long session that comes back turn by turn, the new blocks. A load writes blocks that
vLLM has set aside for one waiting request.

A request id is reported as loaded exactly once, whatever happened: vLLM's engine stops when it
hears of one twice, or of one that it has never seen wait.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeAlias

from engines.vllm_plugin.affinity import roam
from engines.vllm_plugin.plan import Load, Save
from engines.vllm_plugin.rank import StagingArea
from engines.vllm_plugin.restored_blocks import RestoredBlocks
from kvstore.block_keys import Piece
from kvstore.block_store import Again, BlockStore
from kvstore.codecs.base import Codec
from kvstore.records import SessionRef
from kvstore.shapes import KVPair
from kvstore.tiers.base import Blob

logger = logging.getLogger("thermocline.vllm")


OnEnded = Callable[[Save, bool], None]  # and whether the store has it now


@dataclass(frozen=True)
class Packing:
    """A blob to be made of these blocks: all of the piece's, or the first rows of one."""

    piece: Piece
    block_ids: list[int]
    restored: bool = False  # some of it came from a lossy copy: rows are kept, not packed again


# Rows of chunks as they were computed, (num_kv_heads, num_tokens, dim) for K and V of each layer.
Rows: TypeAlias = dict[Piece, Sequence[KVPair]]


@dataclass(frozen=True)
class Filling:
    """Blocks to be filled out of a blob: from the piece's block ``skip`` on.

    ``part_tokens``: of a part, how many rows; those behind them stay as they are.
    """

    piece: Piece
    blob: Blob
    skip: int
    block_ids: list[int]
    part_tokens: int = 0


class Blocks(Protocol):
    """vLLM's blocks, in exchange for blobs (``host_blocks``, ``device_blocks``)."""

    @property
    def block_bytes(self) -> int:
        """Hot bytes of one block, all layers."""

    def mark(self) -> object:
        """On the model's thread: all that it has asked of the device so far."""

    def pack(
        self, wanted: Sequence[Packing], ready: object, rows: Rows | None = None
    ) -> list[Future[bytes]]:
        """Read the blocks once ``ready`` has happened; they are free again when this returns.

        ``rows``: where to leave those of chunks that are to be packed by another codec, too.
        """

    def fill(self, wanted: Sequence[Filling], ready: object) -> set[int]:
        """The block ids that now hold what they should; they can be used at once."""

    def close(self) -> None:
        """Nothing is asked of it any more."""


class Transfer:
    """``save``, ``load`` and ``take_*`` on the worker's own thread, once per step."""

    def __init__(
        self,
        blocks: Blocks,
        store: BlockStore,
        staging: StagingArea,
        max_queued_bytes: int,
    ) -> None:
        self._blocks = blocks
        self._store = store
        self._staging = staging
        self._max_queued_bytes = max_queued_bytes
        self._lock = threading.Lock()
        self._restored = RestoredBlocks()
        self._charges: Counter[int] = Counter()  # hot bytes of saves that wait or run, by job
        self._settled = threading.Condition(self._lock)
        self._saving: Counter[tuple[str, str]] = Counter()  # saves that have begun, per session
        self._under_way = 0  # loads, and saves that still need their blocks
        self._acks: dict[int, int] = {}
        self._skipped: set[int] = set()  # of those
        self._loaded: set[str] = set()
        self._failed: set[str] = set()
        self._bad_blocks: set[int] = set()
        # One thread saves, so that saves of one session never overlap.
        self._saver = ThreadPoolExecutor(1, "thermocline-save", initializer=roam)
        self._loaders = ThreadPoolExecutor(2, "thermocline-load", initializer=roam)

    @property
    def queued_bytes(self) -> int:
        """Hot bytes that wait to be stored."""
        with self._lock:
            return self._charges.total()

    # ---- saving

    def save(self, save: Save, on_ended: OnEnded) -> None:
        """``on_ended`` is called once, on another thread, in the order of the saves."""
        nbytes = self._nbytes(save, self._store.unlisted(save.hashes, save.states, save.part))
        with self._lock:
            queued = self._charges.total()
            full = nbytes and queued and queued + nbytes > self._max_queued_bytes
            full = full and not save.waits
            if full:
                self._acks[save.job] = 1
                self._skipped.add(save.job)
            else:
                self._charges[save.job] = nbytes
                self._under_way += 1
                self._saving[_name(save.session)] += 1
        if full:
            self._store.counters.add("saves_skipped")
            self._saver.submit(on_ended, save, False)
        else:
            self._saver.submit(self._save, save, self._blocks.mark(), on_ended)

    def _save(self, save: Save, ready: object, on_ended: OnEnded) -> None:
        kept = False
        try:
            kept = self._stored(save, ready)
        except Exception:  # the edge of this thread: one bad save must not end all others
            logger.exception("a session could not be saved")
            self._store.counters.add("saves_failed")
        try:
            on_ended(save, kept)
        finally:
            with self._settled:
                del self._charges[save.job]
                self._saving -= Counter([_name(save.session)])
                self._settled.notify_all()

    def _stored(self, save: Save, ready: object) -> bool:
        try:
            missing = self._store.missing(save.hashes, save.states, save.part)
            with self._lock:
                self._charges[save.job] = self._nbytes(save, missing)
            rows: Rows | None = {} if len(self._store.save_codecs) > 1 else None
            wanted = [self._packing(save, x) for x in missing]
            packing = self._blocks.pack(wanted, ready, rows)
        finally:  # whatever happened: or its blocks would be held for ever
            self._acknowledge(save.job)
        self._store.counters.add("chunks_encoded", len(missing))
        self._store.counters.add(
            "chunks_kept", sum(x.restored and x.piece.is_chunk for x in wanted)
        )
        blobs = {x.key: future.result() for x, future in zip(missing, packing, strict=True)}
        again = self._again(save, rows, blobs) if rows else None
        states, part = [*save.states], save.part
        record = self._store.commit(save.session, save.hashes, blobs, states, part, again)
        return record is not None

    def _packing(self, save: Save, piece: Piece) -> Packing:
        packing = _packing(save, piece)
        hashes = save.hashes[piece.first_block : piece.end_block]
        if piece.is_state or piece.is_part:  # neither is ever packed with loss
            return packing
        return replace(packing, restored=self._restored.any_of(packing.block_ids, hashes))

    def _again(self, save: Save, rows: Rows, blobs: Mapping[bytes, bytes]) -> Again | None:
        """For tiers with a codec of their own; None: too much waits, they get copies."""
        with self._lock:
            others = self._charges.total() - self._charges[save.job]
        if others > self._max_queued_bytes // 2:
            self._store.counters.add("saves_copied")
            return None
        return partial(self._packed_again, rows, blobs)

    def _packed_again(
        self, rows: Rows, blobs: Mapping[bytes, bytes], codec: Codec
    ) -> Mapping[bytes, Blob]:
        """Few are in flight, and a thread is left for restores."""
        at_once = max(1, self._store.workers.num_threads - 1)
        packer, per_block = self._store.packer, self._store.keys.block_tokens
        waiting: deque[tuple[bytes, Future[bytes]]] = deque()
        done: dict[bytes, bytes] = {}
        for piece, run in rows.items():
            if len(waiting) >= at_once:
                key, blob = waiting.popleft()
                done[key] = blob.result()
            first = piece.first_block * per_block
            blob = self._store.workers.codec(packer.pack_chunk, piece.key, run, first, codec)
            waiting.append((piece.key, blob))
        return {**blobs, **done, **{key: blob.result() for key, blob in waiting}}

    def _nbytes(self, save: Save, pieces: Sequence[Piece]) -> int:
        num_blocks = sum(len(_packing(save, x).block_ids) for x in pieces)
        return num_blocks * self._blocks.block_bytes

    def wait_saved(self, session: SessionRef, within_s: float) -> bool:
        """Until every save of this session that has begun is done. From any other thread."""
        name = _name(session)
        with self._settled:
            return self._settled.wait_for(lambda: not self._saving[name], within_s)

    def _acknowledge(self, job: int) -> None:
        with self._settled:
            self._acks[job] = 1
            self._under_way -= 1
            self._settled.notify_all()

    # ---- loading

    def load(self, load: Load) -> None:
        with self._lock:
            self._under_way += 1
        self._loaders.submit(self._load, load, self._blocks.mark())

    def _load(self, load: Load, ready: object) -> None:
        bad = {*load.block_ids, *load.state_ids}
        try:
            fetched = self._staging.take(load.ticket)
            if fetched is not None:
                fillings = _fillings(load, fetched.pieces)
                bad -= self._blocks.fill(fillings, ready)
                self._note_restored(fillings, fetched.hashes)
        except Exception:  # the edge of this thread: the request must hear of its load
            logger.exception("a restore failed")
        if bad:
            logger.warning("%d blocks could not be restored and are computed again", len(bad))
        # Together: vLLM wants the failed blocks no later than the request's own completion.
        with self._settled:
            self._bad_blocks |= bad
            if bad:
                self._failed.add(load.request_id)
            self._loaded.add(load.request_id)
            self._under_way -= 1
            self._settled.notify_all()

    def _note_restored(self, fillings: Sequence[Filling], hashes: Sequence[bytes]) -> None:
        """Before vLLM hears of the load: nobody saves these blocks earlier."""
        for x in fillings:
            if not (x.piece.is_state or x.piece.is_part):
                first = x.piece.first_block + x.skip
                lossy = self._store.packer.is_lossy(x.blob)
                names = hashes[first : first + len(x.block_ids)]
                self._restored.note(x.block_ids, names, lossy=lossy)

    # ---- what vLLM asks for with each step

    def wait_for_news(self, within_s: float) -> None:
        """Until there is something to take, or nothing that could come."""
        with self._settled:
            self._settled.wait_for(
                lambda: self._loaded or self._acks or not self._under_way, within_s
            )

    def take_loaded(self) -> set[str]:
        with self._lock:
            loaded, self._loaded = self._loaded, set()
            return loaded

    def take_bad_blocks(self) -> set[int]:
        with self._lock:
            bad, self._bad_blocks = self._bad_blocks, set()
            return bad

    def take_failed(self, loaded: set[str]) -> set[str]:
        """Which of these, just taken as loaded, have a bad block."""
        with self._lock:
            failed = self._failed & loaded
            self._failed -= failed
            return failed

    def take_acks(self) -> dict[int, int]:
        """Jobs whose blocks are needed no longer, each with a count of one rank."""
        with self._lock:
            acks, self._acks = self._acks, {}
            return acks

    def take_skipped(self, acks: Iterable[int]) -> set[int]:
        """Which of these, just taken as acknowledged, were not even begun: too much waited."""
        with self._lock:
            skipped = self._skipped.intersection(acks)
            self._skipped -= skipped
            return skipped

    def close(self) -> None:
        """Saves that have begun are finished."""
        self._loaders.shutdown(wait=True)
        self._saver.shutdown(wait=True)
        self._blocks.close()


def _name(session: SessionRef) -> tuple[str, str]:
    return session.tenant, session.id


def _packing(save: Save, piece: Piece) -> Packing:
    if piece.is_state:
        return Packing(piece, save.states[piece.end_block])
    if piece.is_part:
        return Packing(piece, [save.block_ids[piece.first_block]])
    return Packing(piece, save.block_ids[piece.first_block : piece.end_block])


def _fillings(load: Load, pieces: Sequence[tuple[Piece, Blob]]) -> list[Filling]:
    """What of each piece the load asks for; it may begin and end inside of one."""
    fillings = []
    for piece, blob in pieces:
        if piece.is_state and piece.end_block == load.end_block:
            fillings.append(Filling(piece, blob, 0, load.state_ids))
            continue
        if piece.is_part:
            if load.part_tokens and piece.first_block == load.end_block:
                ids = load.block_ids[-1:]
                fillings.append(Filling(piece, blob, 0, ids, load.part_tokens))
            continue
        first = max(piece.first_block, load.first_block)
        last = min(piece.end_block, load.end_block)
        if first < last:
            ids = load.block_ids[first - load.first_block : last - load.first_block]
            fillings.append(Filling(piece, blob, first - piece.first_block, ids))
    return fillings
