"""Copies KV between vLLM's blocks and the cold store, in each worker.

Only the start of a save or load runs on the model's thread; all other work runs on threads of this
module. A save reads blocks that the scheduler side holds until this rank has acknowledged the save.
The rank acknowledges as soon as the rows are copied out, or when it skips the save because too much
waits already. Only blocks that the store lacks count as waiting: for a long session that returns
turn by turn, the new ones. A load writes blocks that vLLM has set aside for one waiting request.

A request id is reported as loaded exactly once, with any outcome: vLLM's engine stops if a request
is reported twice, or was not waiting.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from engines.vllm_plugin.blocks.blocks import (
    NONE_BEFORE,
    Blocks,
    Filling,
    Packing,
    PackState,
    RestoredBlocks,
    Rows,
)
from engines.vllm_plugin.plan import Load, Save
from engines.vllm_plugin.process.processes import unbind_thread
from engines.vllm_plugin.worker.rank import StagingArea
from kvstore.blobs.packer import AnyBlob
from kvstore.blobs.segments import FRESH, Lineage
from kvstore.codecs.base import Codec
from kvstore.session import SessionName, SessionRef
from kvstore.shapes import KVPair
from kvstore.store.block_store import Again, BlockStore
from kvstore.store.encoder import ToPack, pack_again
from kvstore.store.records import Span
from kvstore.tiers.base import Blob

logger = logging.getLogger("thermocline.vllm")

OnEnded = Callable[[Save, bool], None]  # the bool: True if the store has the session now


class Transfer:
    """The saves and loads of one rank.

    ``save``, ``load`` and ``take_*`` are called on the worker's own thread, once per step.
    """

    def __init__(
        self, blocks: Blocks, store: BlockStore, staging: StagingArea, max_queued_bytes: int
    ) -> None:
        self._blocks = blocks
        self._store = store
        self._staging = staging
        self._max_queued_bytes = max_queued_bytes
        self._lock = threading.Lock()
        self._restored = RestoredBlocks()
        self._charges: Counter[int] = Counter()  # bytes of blocks that wait to be stored, by job
        self._settled = threading.Condition(self._lock)
        self._saving: Counter[SessionName] = Counter()  # saves that have begun, per session
        self._under_way = 0  # loads, and saves that still need their blocks
        self._acks: dict[int, int] = {}
        self._skipped: set[int] = set()  # those of ``_acks`` that were not begun
        self._loaded: set[str] = set()
        self._failed: set[str] = set()
        self._bad_blocks: set[int] = set()
        # One thread saves, so that saves of one session never overlap.
        self._saver = ThreadPoolExecutor(1, "thermocline-save", initializer=unbind_thread)
        self._loaders = ThreadPoolExecutor(2, "thermocline-load", initializer=unbind_thread)

    @property
    def queued_bytes(self) -> int:
        """The bytes of vLLM's blocks that wait to be stored."""
        with self._lock:
            return self._charges.total()

    @property
    def why_host(self) -> str:
        """See ``Blocks``."""
        return self._blocks.why_host

    @property
    def is_settled(self) -> bool:
        """True if no save and no load is under way."""
        with self._lock:
            return not (self._charges or self._under_way)

    # ---- saving

    def save(self, save: Save, on_ended: OnEnded) -> None:
        """Begin a save, or skip it if too much waits.

        ``on_ended`` is called once, on another thread, in the order of the saves.
        """
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
                self._saving[save.session.name] += 1
        if full:
            self._store.counters.add("saves_skipped")
            self._saver.submit(on_ended, save, False)
        else:
            self._saver.submit(self._save, save, self._blocks.mark(), on_ended)

    def _save(self, save: Save, ready: object, on_ended: OnEnded) -> None:
        kept = False
        try:
            kept = self._stored(save, ready)
        except Exception:  # top level of this thread: one failed save must not end all others
            logger.exception("a session could not be saved")
            self._store.counters.add("saves_failed")
        try:
            on_ended(save, kept)
        finally:
            with self._settled:
                del self._charges[save.job]
                self._saving -= Counter([save.session.name])
                self._settled.notify_all()

    def _stored(self, save: Save, ready: object) -> bool:
        try:
            missing = self._store.missing(save.hashes, save.states, save.part)
            with self._lock:
                self._charges[save.job] = self._nbytes(save, missing)
            rows: Rows | None = {} if len(self._store.save_codecs) > 1 else None
            wanted = [self._packing(save, x) for x in missing]
            packing = self._blocks.pack(wanted, ready, rows)
        finally:  # always acknowledge; otherwise the blocks would be held for ever
            self._acknowledge(save.job)
        self._store.counters.add("chunks_encoded", len(missing))
        kept = sum(x.lineage is not FRESH and x.span.is_chunk for x in wanted)
        self._store.counters.add("chunks_kept", kept)
        blobs = {x.key: future.result() for x, future in zip(missing, packing, strict=True)}
        lineages = {x.span: x.lineage for x in wanted if x.lineage is not FRESH}
        again = self._again(save, rows, lineages) if rows else None
        states, part = [*save.states], save.part
        names = save.session, save.hashes
        record = self._store.commit(*names, blobs, states, part, again, save.ids)
        return record is not None

    def _packing(self, save: Save, span: Span) -> Packing:
        packing, first = _packing(save, span), span.first_block
        if span.is_state:
            return packing
        hashes, size = save.hashes[first : span.end_block], self._store.keys.block_tokens
        before = save.hashes[first - 1] if first else NONE_BEFORE
        num_lossy = self._restored.num_lossy(packing.block_ids, hashes, before, size)
        if not num_lossy:
            return packing
        lossy_tokens = span.first_token + num_lossy
        lineage = self._lineage(save, span, lossy_tokens, self._store.home_codec)
        return replace(packing, lineage=lineage)

    def _lineage(self, save: Save, span: Span, lossy_tokens: int, codec: Codec) -> Lineage:
        part = save.restored_part
        return self._store.lineage(save.session, save.hashes, span, lossy_tokens, codec, part)

    def _again(self, save: Save, rows: Rows, lineages: Mapping[Span, Lineage]) -> Again | None:
        """A function that packs the rows again, for tiers with another codec.

        None if too much waits: these tiers then get copies of the blobs.
        """
        with self._lock:
            others = self._charges.total() - self._charges[save.job]
        if others > self._max_queued_bytes // 2:
            self._store.counters.add("saves_copied")
            return None

        def to_pack(span: Span, what: Sequence[KVPair] | PackState) -> ToPack:
            lossy_tokens = lineages.get(span, FRESH).position

            def pack(codec: Codec, lineage: Lineage) -> Blob:
                if callable(what):
                    return what(codec)
                packer = self._store.packer
                return packer.pack_run(span.key, what, span.first_token, codec, lineage)

            return ToPack(span, pack, partial(self._lineage, save, span, lossy_tokens))

        wanted = [to_pack(span, what) for span, what in rows.items()]
        return partial(pack_again, self._store.workers, wanted, lineages)

    def _nbytes(self, save: Save, spans: Sequence[Span]) -> int:
        num_blocks = sum(len(_packing(save, x).block_ids) for x in spans)
        return num_blocks * self._blocks.block_bytes

    def wait_saved(self, session: SessionRef, within_s: float) -> bool:
        """Wait until all saves of this session that have begun are done; False if time runs out.

        Must not be called on the thread that saves.
        """
        name = session.name
        with self._settled:
            return self._settled.wait_for(lambda: not self._saving[name], within_s)

    def _acknowledge(self, job: int) -> None:
        with self._settled:
            self._acks[job] = 1
            self._under_way -= 1
            self._settled.notify_all()

    def copied(self, job: int) -> None:
        """Note that the blocks of a job other than a save were read. On the worker's thread."""
        with self._settled:
            self._acks[job] = 1
            self._settled.notify_all()

    # ---- loading

    def load(self, load: Load) -> None:
        """Begin a load."""
        with self._lock:
            self._under_way += 1
        self._loaders.submit(self._load, load, self._blocks.mark())

    def filled(self, request_ids: Iterable[str]) -> None:
        """Note that other code has filled the blocks of these requests. On the worker's thread."""
        with self._settled:
            self._loaded.update(request_ids)
            self._settled.notify_all()

    def _load(self, load: Load, ready: object) -> None:
        bad = {*load.block_ids, *load.state_ids}
        try:
            fetched = self._staging.take(load.ticket)
            if fetched is not None:
                fillings = _fillings(load, fetched.spans, fetched.hashes)
                bad -= self._blocks.fill(fillings, ready)
                self._note_restored(fillings, fetched.hashes)
        except Exception:  # top level of this thread: the load's end must be reported
            logger.exception("a restore failed")
        if bad:
            logger.warning("%d blocks could not be restored and are computed again", len(bad))
        # All under one lock: failed blocks must be reported no later than the end of the load.
        with self._settled:
            self._bad_blocks |= bad
            if bad:
                self._failed.add(load.request_id)
            self._loaded.add(load.request_id)
            self._under_way -= 1
            self._settled.notify_all()

    def _note_restored(self, fillings: Sequence[Filling], hashes: Sequence[bytes]) -> None:
        """Remember the lossy blocks, before vLLM learns of the load's end and may save them."""
        for x in fillings:
            if x.span.is_part:
                before = hashes[x.span.first_block - 1]
                lossy = self._store.packer.is_lossy(x.blob)
                self._restored.note_part(x.block_ids[0], before, x.part_tokens, lossy=lossy)
            elif not x.span.is_state:
                first = x.span.first_block + x.skip
                lossy = self._store.packer.is_lossy(x.blob)
                names = hashes[first : first + len(x.block_ids)]
                self._restored.note(x.block_ids, names, lossy=lossy)

    # ---- vLLM's calls in each step

    def wait_for_news(self, within_s: float) -> None:
        """Wait for a load or an acknowledgement to take, while work runs, up to ``within_s``."""
        with self._settled:
            self._settled.wait_for(
                lambda: self._loaded or self._acks or not self._under_way, within_s
            )

    def take_loaded(self) -> set[str]:
        """Return the ids of the requests whose load is over, each once."""
        with self._lock:
            loaded, self._loaded = self._loaded, set()
            return loaded

    def take_bad_blocks(self) -> set[int]:
        """Return the ids of the blocks that could not be filled, each once."""
        with self._lock:
            bad, self._bad_blocks = self._bad_blocks, set()
            return bad

    def take_failed(self, loaded: set[str]) -> set[str]:
        """The requests among ``loaded``, just taken, that have a bad block."""
        with self._lock:
            failed = self._failed & loaded
            self._failed -= failed
            return failed

    def take_acks(self) -> dict[int, int]:
        """Return the jobs whose blocks are no longer needed, each with a count of one rank."""
        with self._lock:
            acks, self._acks = self._acks, {}
            return acks

    def take_skipped(self, acks: Iterable[int]) -> set[int]:
        """The jobs among ``acks``, just taken, that were skipped."""
        with self._lock:
            skipped = self._skipped.intersection(acks)
            self._skipped -= skipped
            return skipped

    def close(self) -> None:
        """Finish the saves and loads that have begun, and end the threads."""
        self._loaders.shutdown(wait=True)
        self._saver.shutdown(wait=True)
        self._blocks.close()


def _packing(save: Save, span: Span) -> Packing:
    """The blocks of the save that belong to this blob."""
    if span.is_state:
        hashes = save.hashes[: span.end_block]
        return Packing(span, save.states[span.end_block], hashes=hashes)
    if span.is_part:
        return Packing(span, [save.block_ids[span.first_block]])
    return Packing(span, save.block_ids[span.first_block : span.end_block])


def _fillings(
    load: Load, spans: Sequence[tuple[Span, AnyBlob]], hashes: Sequence[bytes]
) -> list[Filling]:
    """The part of each staged blob that the load needs; a load may begin and end inside a blob."""
    fillings = []
    for span, blob in spans:
        if span.is_state and span.end_block == load.end_block:
            fillings.append(Filling(span, blob, 0, load.state_ids, hashes=hashes))
            continue
        if span.is_part:
            if load.part_tokens and span.first_block == load.end_block:
                ids = load.block_ids[-1:]
                fillings.append(Filling(span, blob, 0, ids, load.part_tokens))
            continue
        first = max(span.first_block, load.first_block)
        last = min(span.end_block, load.end_block)
        if first < last:
            ids = load.block_ids[first - load.first_block : last - load.first_block]
            fillings.append(Filling(span, blob, first - span.first_block, ids))
    return fillings
