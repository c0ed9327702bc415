"""Copies KV between vLLM's blocks and the cold store, in each worker.

Only the start of a save or load runs on the model's thread; all other work runs on threads of the
store and of this module. A save reads blocks that the scheduler side holds until this rank has
acknowledged the save. The rank acknowledges as soon as the rows are copied out, or when it skips
the save because too much waits already. Only chunks that no session has yet count as waiting: for a
long session that returns turn by turn, the new ones. A load writes blocks that vLLM has set aside
for one waiting request.

A request id is reported as loaded exactly once, with any outcome: vLLM's engine stops if a request
is reported twice, or was not waiting.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from engines.vllm_plugin.blocks.blocks import Blocks, Filling, Packing, RestoredBlocks
from engines.vllm_plugin.blocks.stateful_blocks import StatefulBlocks
from engines.vllm_plugin.inventory import event_note
from engines.vllm_plugin.plan import Load, Save
from engines.vllm_plugin.process.processes import unbind_thread
from engines.vllm_plugin.worker.rank import StagedBlobs, StagingArea
from kvstore.blobs.chain import Piece
from kvstore.store.cold_store import ColdStore
from kvstore.store.states import TakenState, pack_of_states
from kvstore.tiers.base import Blob

logger = logging.getLogger("thermocline.vllm")


@dataclass(frozen=True)
class RankBlocks:
    """A rank's blocks, its store, and which blocks came from lossy copies."""

    blocks: Blocks
    states: StatefulBlocks | None
    store: ColdStore
    block_tokens: int
    restored: RestoredBlocks = field(default_factory=RestoredBlocks)


class BlockRows:
    """The KV of one session in vLLM's blocks: implements ``kvstore.store.save_queue.RowSource``.

    Args:
        ready: marks the end of the device work that fills the blocks; see ``Blocks.mark``.
        released: called once, when the blocks are not read any more.
    """

    def __init__(
        self, save: Save, access: RankBlocks, ready: object, released: Callable[[], None]
    ) -> None:
        self._save = save
        self._access = access
        self._ready = ready
        self._released: Callable[[], None] | None = released
        self._lock = threading.Lock()

    def is_restored(self, piece: Piece) -> bool:
        if piece.is_chunk:
            first, end = self._span(piece)
            ids, hashes = self._save.block_ids[first:end], self._save.hashes[first:end]
            return self._access.restored.has_any(ids, hashes)
        states, hashes = self._access.states, self._save.hashes
        return states is not None and any(
            states.is_restored(piece, boundary, ids, hashes)
            for boundary, ids in self._states_of(piece)
        )

    def pack(self, pieces: Sequence[Piece]) -> list[Blob]:
        chunks = [x for x in pieces if x.is_chunk]
        rest = [x for x in pieces if not x.is_chunk]
        try:
            wanted = [Packing(x, self._save.block_ids[slice(*self._span(x))]) for x in chunks]
            packing = self._access.blocks.pack(wanted, self._ready)
            taken = self._taken(rest)
        finally:  # always; otherwise the blocks would be held for ever
            self.release()
        packer = self._access.store.packer
        found = {x: future.result() for x, future in zip(chunks, packing, strict=True)}
        pack = self._access.store.workers.each(lambda x: pack_of_states(taken, x, packer), rest)
        found.update(zip(rest, pack, strict=True))
        return [found[x] for x in pieces]

    def release(self) -> None:
        with self._lock:
            released, self._released = self._released, None
        if released is not None:
            released()

    def _span(self, piece: Piece) -> tuple[int, int]:
        """The numbers of the blocks that a piece has rows of."""
        size = self._access.block_tokens
        return piece.first_token // size, -(-piece.end_token // size)

    def _states_of(self, piece: Piece) -> list[tuple[int, list[int]]]:
        """The boundaries of the states that a piece belongs to, with their block ids."""
        size, held = self._access.block_tokens, self._save.states.items()
        if piece.is_state:
            return [x for x in held if x[0] * size == piece.first_token]
        return [x for x in held if x[0] * size >= piece.end_token]

    def _taken(self, pieces: Sequence[Piece]) -> list[TakenState]:
        """Copy out the states that these pieces hold parts of."""
        states = self._access.states
        if states is None or not pieces:
            return []
        wanted = {boundary: ids for x in pieces for boundary, ids in self._states_of(x)}
        return [states.read(boundary, ids, self._ready) for boundary, ids in wanted.items()]


OnEnded = Callable[[Save, bool], None]  # the bool: True if the store has the session now


@dataclass
class Ended:
    """The loads and jobs that have ended since the step before.

    Attributes:
        loads: the blocks that could not be filled, by request.
        jobs: the jobs that need their blocks no longer; True: a save that was skipped.
    """

    loads: dict[str, set[int]] = field(default_factory=dict)
    jobs: dict[int, bool] = field(default_factory=dict)


class Transfer:
    """The saves and loads of one rank. The worker's own thread calls all methods."""

    def __init__(self, access: RankBlocks, staging: StagingArea) -> None:
        self._access = access
        self._store = access.store
        self._staging = staging
        self._settled = threading.Condition()
        self._under_way = 0  # loads, and saves that still need their blocks
        self._ended = Ended()
        self._loaders = ThreadPoolExecutor(2, "thermocline-load", initializer=unbind_thread)

    @property
    def is_settled(self) -> bool:
        """True if no save and no load is under way. Any thread."""
        return not self._under_way and self._store.is_saved

    def pop_ended(self, within_s: float = 0.0) -> Ended:
        """Return what has ended, each once; wait up to ``within_s`` for it while work runs."""
        with self._settled:
            self._settled.wait_for(
                lambda: self._ended.loads or self._ended.jobs or not self._under_way, within_s
            )
            ended, self._ended = self._ended, Ended()
            return ended

    # ---- saving

    def save(self, save: Save, on_ended: OnEnded) -> None:
        """Begin a save, or skip it if too much waits.

        ``on_ended`` is called once, perhaps on another thread.
        """
        store, size, blocks = self._store, self._access.block_tokens, self._access.blocks
        chunk_blocks = store.chunk_tokens // size
        self._begin()
        is_begun = store.save(
            save.session,
            store.maker.of_blocks(save.hashes, size),
            BlockRows(save, self._access, blocks.mark(), lambda: self._end(job=save.job)),
            states=sorted(x // chunk_blocks for x in save.states),
            state_bytes=sum(map(len, save.states.values())) * blocks.block_bytes,
            note=event_note(save.hashes, save.ids, chunk_blocks),
            on_done=lambda record: on_ended(save, record is not None),
            always=save.waits,
        )
        if not is_begun:
            # A save that waits for room was refused for another reason, so it is not repeated.
            with self._settled:
                self._ended.jobs[save.job] = not save.waits
            on_ended(save, False)

    def note_read(self, jobs: Iterable[int]) -> None:
        """Note that a measurement has read the blocks of these jobs."""
        with self._settled:
            self._ended.jobs.update(dict.fromkeys(jobs, False))

    def _begin(self) -> None:
        with self._settled:
            self._under_way += 1

    def _end(self, *, job: int = 0, request_id: str = "", bad: Collection[int] = ()) -> None:
        """Note the end of a save, or of a load with the blocks that could not be filled."""
        with self._settled:
            if job:
                self._ended.jobs[job] = False
            else:
                self._ended.loads[request_id] = {*bad}
            self._under_way -= 1
            self._settled.notify_all()

    # ---- loading

    def load(self, load: Load) -> None:
        """Begin a load."""
        self._begin()
        self._loaders.submit(self._load, load, self._access.blocks.mark())

    def note_filled(self, request_ids: Iterable[str]) -> None:
        """Note that a measurement has filled the blocks of these requests."""
        with self._settled:
            self._ended.loads.update((x, set()) for x in request_ids)

    def _load(self, load: Load, ready: object) -> None:
        bad = {*load.block_ids, *load.state_ids}
        try:
            staged = self._staging.take(load.ticket)
            if staged is not None:
                bad -= self._fill(load, staged, ready)
        except Exception:  # top level of this thread: the load's end must be reported
            logger.exception("a restore failed")
        if bad:
            logger.warning("%d blocks could not be restored and are computed again", len(bad))
        self._end(request_id=load.request_id, bad=bad)

    def _fill(self, load: Load, staged: StagedBlobs, ready: object) -> set[int]:
        """Fill the blocks of a load; return the ids of those filled."""
        fillings = self._fillings(load, staged)
        filled = self._access.blocks.fill(fillings, ready)
        # vLLM must not learn of the load's end, and save these blocks, before this is noted.
        for x in fillings:
            first = x.piece.first_token // self._access.block_tokens + x.skip
            lossy = self._store.packer.is_lossy(x.blob)
            names = staged.hashes[first : first + len(x.block_ids)]
            self._access.restored.note(x.block_ids, names, lossy=lossy)
        if self._access.states is not None and load.state_ids:
            blobs, hashes = staged.fetched.blobs, staged.hashes
            where = load.end_block, load.state_ids
            filled |= self._access.states.fill(*where, blobs, hashes, ready)
        return filled

    def _fillings(self, load: Load, staged: StagedBlobs) -> list[Filling]:
        """The part of each chunk that the load needs; it may begin and end inside a chunk."""
        size, fillings = self._access.block_tokens, list[Filling]()
        for read, blob in staged.fetched.blobs:
            if not read.piece.is_chunk:
                continue
            begin, end = read.piece.first_token // size, read.piece.end_token // size
            first, last = max(begin, load.first_block), min(end, load.end_block)
            if first < last:
                ids = load.block_ids[first - load.first_block : last - load.first_block]
                fillings.append(Filling(read.piece, blob, first - begin, ids))
        return fillings

    def close(self) -> None:
        """Finish the loads that have begun and the saves that still need their blocks."""
        self._loaders.shutdown(wait=True)
        self._store.wait_all_saved()
        self._access.blocks.close()
