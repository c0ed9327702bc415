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
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from engines.vllm_plugin.blocks.blocks import Filling
from engines.vllm_plugin.inventory import event_note
from engines.vllm_plugin.plan import Load, Save
from engines.vllm_plugin.process.processes import unbind_thread
from engines.vllm_plugin.worker.block_rows import BlockRows, RankBlocks
from engines.vllm_plugin.worker.rank import StagedBlobs, StagingArea

logger = logging.getLogger("thermocline.vllm")

OnEnded = Callable[[Save, bool], None]  # the bool: True if the store has the session now


class Transfer:
    """The saves and loads of one rank.

    ``save``, ``load`` and ``take_*`` are called on the worker's own thread, once per step.
    """

    def __init__(self, access: RankBlocks, staging: StagingArea) -> None:
        self._access = access
        self._store = access.store
        self._staging = staging
        self._lock = threading.Lock()
        self._settled = threading.Condition(self._lock)
        self._under_way = 0  # loads, and saves that still need their blocks
        self._acks: dict[int, int] = {}
        self._skipped: set[int] = set()  # those of ``_acks`` that were not begun
        self._loaded: set[str] = set()
        self._failed: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._loaders = ThreadPoolExecutor(2, "thermocline-load", initializer=unbind_thread)

    @property
    def why_host(self) -> str:
        """See ``Blocks``."""
        return self._access.blocks.why_host

    @property
    def is_settled(self) -> bool:
        """True if no save and no load is under way."""
        with self._lock:
            if self._under_way:
                return False
        return self._store.is_saved

    # ---- saving

    def save(self, save: Save, on_ended: OnEnded) -> None:
        """Begin a save, or skip it if too much waits.

        ``on_ended`` is called once, perhaps on another thread.
        """
        store, size = self._store, self._access.block_tokens
        chunk_blocks = store.chunk_tokens // size
        with self._lock:
            self._under_way += 1
        state_blocks = sum(map(len, save.states.values()))
        is_begun = store.save(
            save.session,
            store.maker.of_blocks(save.hashes, size),
            BlockRows(
                save, self._access, self._access.blocks.mark(), partial(self._release, save.job)
            ),
            states=sorted(x // chunk_blocks for x in save.states),
            state_bytes=state_blocks * self._access.blocks.block_bytes,
            note=event_note(save.hashes, save.ids, chunk_blocks),
            on_done=lambda record: on_ended(save, record is not None),
            always=save.waits,
        )
        if not is_begun:
            if not save.waits:  # else it was refused for another reason, and would be again
                with self._lock:
                    self._skipped.add(save.job)
            on_ended(save, False)

    def _release(self, job: int) -> None:
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
        self._loaders.submit(self._load, load, self._access.blocks.mark())

    def filled(self, request_ids: Iterable[str]) -> None:
        """Note that other code has filled the blocks of these requests. On the worker's thread."""
        with self._settled:
            self._loaded.update(request_ids)
            self._settled.notify_all()

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
        # All under one lock: failed blocks must be reported no later than the end of the load.
        with self._settled:
            self._bad_blocks |= bad
            if bad:
                self._failed.add(load.request_id)
            self._loaded.add(load.request_id)
            self._under_way -= 1
            self._settled.notify_all()

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

    # ---- vLLM's calls in each step

    def wait_for_news(self, within_s: float) -> None:
        """Wait for a load or an acknowledgement to take, while work runs, up to ``within_s``."""
        with self._settled:
            self._settled.wait_for(
                lambda: self._loaded or self._acks or not self._under_way, within_s
            )

    def pop_loaded(self) -> set[str]:
        """Return the ids of the requests whose load is over, each once."""
        with self._lock:
            loaded, self._loaded = self._loaded, set()
            return loaded

    def pop_bad_blocks(self) -> set[int]:
        """Return the ids of the blocks that could not be filled, each once."""
        with self._lock:
            bad, self._bad_blocks = self._bad_blocks, set()
            return bad

    def pop_failed(self, loaded: set[str]) -> set[str]:
        """The requests among ``loaded``, just taken, that have a bad block."""
        with self._lock:
            failed = self._failed & loaded
            self._failed -= failed
            return failed

    def pop_acks(self) -> dict[int, int]:
        """Return the jobs whose blocks are no longer needed, each with a count of one rank."""
        with self._lock:
            acks, self._acks = self._acks, {}
            return acks

    def pop_skipped(self, acks: Iterable[int]) -> set[int]:
        """The jobs among ``acks``, just taken, that were skipped."""
        with self._lock:
            skipped = self._skipped.intersection(acks)
            self._skipped -= skipped
            return skipped

    def close(self) -> None:
        """Finish the loads that have begun and the saves that still need their blocks."""
        self._loaders.shutdown(wait=True)
        self._store.wait_all_saved()
        self._access.blocks.close()
