"""Saves hot sessions into the cold store, and finds and unpacks cold ones.

A few threads of this module look for a prompt's KV and unpack it before the prompt enters a batch,
so running sequences never wait for a disk. Rows are unpacked into mlx's own arrays, which the owner
thread only has to put into caches. Any error costs a prefill and nothing else.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np

from engines.mlx_worker.cache import kv_arrays
from engines.mlx_worker.cache.layout import CachePlan, Caches
from kvstore.blobs.chain import Chain, Piece
from kvstore.blobs.state_tree import state_nbytes
from kvstore.codecs.rows.packed_layout import PackedLayout
from kvstore.ledger.record import SessionRecord
from kvstore.session import TIERS, MissReason, SessionName, SessionRef
from kvstore.shapes import KVRun, slice_tokens
from kvstore.store.cold_store import ColdStore
from kvstore.store.restorer import Match, Restored
from kvstore.store.states import StateAt, TakenState, pack_of_states
from kvstore.tiers.base import Blob

logger = logging.getLogger(__name__)

# Restores that may run at once; each holds a whole session's KV in flight.
NUM_RESTORES = 4

# Runs a command on the owner thread, soon. Any thread may call it.
Post: TypeAlias = Callable[[Callable[[], None]], None]


@dataclass(eq=False)
class HotSession:
    """An idle session whose ``caches`` hold exactly ``num_tokens`` tokens.

    ``tokens``, int32 (num_tokens,), are these tokens. A session that was restored before its turn
    has none; instead ``chain``, the hashes of its full chunks, covers all of its tokens. For other
    sessions, ``chain`` has the hashes of the first chunks, as far as they were computed.
    """

    ref: SessionRef
    caches: Caches
    num_tokens: int
    tokens: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    chain: Chain = ()
    restored_tokens: int = 0  # number of first tokens that may come from a lossy copy
    nbytes: int = 0
    last_used_s: float = 0.0  # monotonic
    # True = there is a cold copy. The store resolves it; until then a save is running.
    saved: Future[bool] = field(default_factory=Future)
    was_refused: bool = False  # the store refused a save, and was asked a second time

    @property
    def key(self) -> SessionName:
        return self.ref.name

    @property
    def is_saved(self) -> bool:
        """True once there is a cold copy."""
        return self.saved.done() and self.saved.result()


@dataclass(frozen=True)
class ColdPrefix:
    """The cold store's answer to a search for a prompt's KV."""

    restored: Restored | None  # None = nothing was restored
    reason: MissReason | None  # why no more was restored
    chain: Chain = ()  # of the prompt
    arrays: Sequence[mx.array] = ()  # the mlx arrays that hold the restored rows, if any


# Called on the owner thread.
OnFound: TypeAlias = Callable[[ColdPrefix], None]


class ColdSessions:
    """Saves hot sessions into the store and brings cold ones back.

    Belongs to the owner thread; ``find`` and ``load`` return at once and call back later.
    """

    def __init__(self, store: ColdStore, model: Any, plan: CachePlan, post: Post) -> None:
        self.store = store
        self._model = model
        self._plan = plan
        self._post = post
        self._pool = ThreadPoolExecutor(NUM_RESTORES, "mlx-restore")
        self.counters: Counter[str] = Counter()  # the owner thread's

    def find(
        self,
        ref: SessionRef,
        tokens: np.ndarray,
        limit: int,
        held: int,
        known: Chain,
        then: OnFound,
    ) -> None:
        """Search for a prompt's longest stored prefix and unpack it, then call ``then``.

        Args:
            tokens: the prompt's tokens, int32 (num_tokens,).
            limit: most tokens to restore.
            held: number of tokens whose KV is hot already.
            known: the hashes of its first chunks that are known already.
        """
        work = partial(self._look_up, ref, tokens, limit, held, known)
        self._pool.submit(self._answer, work, then)

    def load(self, ref: SessionRef, then: OnFound) -> None:
        """Restore all stored KV of a session, then call ``then``."""
        self._pool.submit(self._answer, partial(self._load, ref), then)

    def chain(self, ref: SessionRef, tokens: np.ndarray, before: Chain = ()) -> list[bytes]:
        """Return the hashes of the full chunks of ``tokens``, int32 (num_tokens,).

        The hashes depend on the tenant's salt in ``ref``. ``before``: the known first ones.
        """
        return self.store.maker.of_tokens(ref.salt, tokens, before)

    def save(
        self, hot: HotSession, states: Sequence[StateAt], then: Callable[[bool], None]
    ) -> None:
        """Start to save a session; at the end, resolve ``hot.saved``, then call ``then``.

        Raises whatever mlx or the store raises; ``hot.saved`` is then unchanged.
        """
        saved: Future[bool] = Future()

        def done(record: SessionRecord | None) -> None:
            saved.set_result(record is not None)
            then(record is not None)

        size, model = self.store.chunk_tokens, self.store.model
        if len(hot.tokens):
            known = hot.chain[: hot.num_tokens // size]
            hot.chain = self.chain(hot.ref, hot.tokens, known)
        chain = hot.chain
        end = len(chain) * size
        if not self._plan.needs_state:
            states = ()
        elif hot.num_tokens == end:
            states = [*states, StateAt(end, kv_arrays.state_tree(hot.caches))]
        fitting = {x.position: x for x in states if not x.position % size and x.position <= end}
        taken = [TakenState(x, model.windows, model.window_tokens) for x in fitting.values()]
        # A packed cache's rows are the codec's bytes already, so saving them adds no loss.
        packed = isinstance(self._plan.layout, PackedLayout)
        restored_tokens = 0 if packed else hot.restored_tokens
        run = kv_arrays.growing_run(hot.caches, end)
        if not self.store.save(
            hot.ref,
            chain,
            CacheRows(self.store, run, taken, restored_tokens),
            states=sorted(x // size for x in fitting),
            state_bytes=sum(state_nbytes(x.tree) for x in fitting.values()),
            on_done=done,
        ):
            saved.set_result(False)
        # Set last, so that an error above leaves no future that is never resolved.
        hot.saved = saved

    def rebuild(self, found: ColdPrefix) -> Caches | None:
        """Return caches of the restored KV, which they take over; None if it cannot be used."""
        restored, layout = found.restored, self._plan.layout
        assert restored is not None
        run, state, count = restored.run, restored.state, restored.num_tokens
        try:
            return kv_arrays.rebuild(self._model, layout, run, state, count, found.arrays)
        except Exception:  # stored data may be wrong in any way; a prefill is always right
            logger.exception("a restored session could not be used")
            self.counters["rebuild_failures"] += 1
            return None

    def close(self) -> None:
        """End the threads; searches that have not begun are dropped."""
        self._pool.shutdown(cancel_futures=True)

    # ---- threads of the pool

    def _answer(self, look_up: Callable[[], ColdPrefix], then: OnFound) -> None:
        try:
            found = look_up()
        except Exception:  # the thread's edge: a failure of the store counts as a miss
            logger.exception("the cold store could not be read")
            found = ColdPrefix(None, "unavailable")
        self._post(partial(then, found))

    def _load(self, ref: SessionRef) -> ColdPrefix:
        match, chain = self.store.prepare(ref)
        return replace(self._restore(match), chain=chain)

    def _look_up(
        self, ref: SessionRef, tokens: np.ndarray, limit: int, held: int, known: Chain
    ) -> ColdPrefix:
        chain = self.chain(ref, tokens[:limit], known)
        if not chain:  # there is less than a chunk
            is_known = self.store.record(ref) is not None
            return ColdPrefix(None, "diverged" if is_known else self.store.ledger.why_unknown(ref))
        match = self.store.match(ref, chain)
        if match.tier is not None and held:
            # A restore also reads the tokens that are hot; it takes as long as computing ``worth``.
            worth = TIERS[match.tier].restore_share * match.num_tokens
            if 0 < match.num_tokens - held < worth:
                return ColdPrefix(None, "computed-sooner", chain=chain)
        return replace(self._restore(match, held, len(tokens)), chain=chain)

    def _restore(self, match: Match, held: int = 0, most: int = 0) -> ColdPrefix:
        """Restore a match if it has more tokens than are held, with room for ``most`` tokens.

        Rows are unpacked in their final place; they are copied again only if a part of the match
        could not be restored.
        """
        if match.num_tokens <= held:
            return ColdPrefix(None, match.reason)
        arrays, out = kv_arrays.empty_rows(self.store.model.layout, match.num_tokens, most)
        restored = self.store.restore(match, out=out)
        reason = restored.reason or match.reason
        if restored.num_tokens <= held:
            return ColdPrefix(None, reason)
        return ColdPrefix(restored, reason, arrays=arrays if restored.run is out else ())


class CacheRows:
    """Implements ``kvstore.store.save_queue.RowSource`` with views of the engine's caches.

    Args:
        run: K and V of all growing layers, from the first token on.
        states: states at chunk ends, for models that need them.
        restored_tokens: number of first tokens that may come from a lossy copy; they are not saved.
    """

    def __init__(
        self, store: ColdStore, run: KVRun, states: Sequence[TakenState], restored_tokens: int
    ) -> None:
        self._store = store
        self._run = run
        self._states = states
        self._restored_tokens = restored_tokens

    def is_restored(self, piece: Piece) -> bool:
        if piece.is_state:
            return 0 < piece.first_token <= self._restored_tokens
        return piece.first_token < self._restored_tokens

    def pack(self, pieces: Sequence[Piece]) -> list[Blob]:
        return self._store.workers.each(self._packed, pieces)

    def release(self) -> None:
        self._run, self._states = (), ()

    def _packed(self, piece: Piece) -> Blob:
        packer = self._store.packer
        if not piece.is_chunk:
            return pack_of_states(self._states, piece, packer)
        return packer.pack_rows(piece, slice_tokens(self._run, piece.first_token, piece.end_token))
