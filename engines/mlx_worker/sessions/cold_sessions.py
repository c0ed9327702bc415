"""Saves hot sessions into the cold store, and finds and unpacks cold ones.

Looking for a prompt's KV and unpacking it happen on a few threads of this module's own, before the
prompt enters a batch, so running sequences never wait for a disk. Rows are unpacked into mlx's own
arrays, which the owner thread only puts into caches. Any error on the way costs a prefill and
nothing else.
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
    """An idle session. Its ``caches`` hold exactly ``num_tokens`` tokens.

    Those are ``tokens``, int32 (num_tokens,). Of a session that was restored ahead of its turn they
    are not known, but ``chain`` is, the names of its full chunks; it has no tokens after them.
    Otherwise the first names are known if they were needed before.
    """

    ref: SessionRef
    caches: Caches
    num_tokens: int
    tokens: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    chain: Chain = ()
    restored_tokens: int = 0  # the first so many may have been restored from a lossy copy
    nbytes: int = 0
    last_used_s: float = 0.0  # monotonic
    # Resolved by the store: True = there is a cold copy. Unresolved = a save is on its way.
    saved: Future[bool] = field(default_factory=Future)
    was_refused: bool = False  # by the store, whose queue was full; it is asked twice

    @property
    def key(self) -> SessionName:
        return self.ref.name

    @property
    def is_saved(self) -> bool:
        """True once there is a cold copy."""
        return self.saved.done() and self.saved.result()


@dataclass(frozen=True)
class ColdPrefix:
    """The cold store's answer; ``restored`` is None for a miss."""

    restored: Restored | None
    reason: MissReason | None
    chain: Chain = ()  # of the prompt
    arrays: Sequence[mx.array] = ()  # that the restored rows lie in, if they are mlx's


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
        """Look for a prompt's longest prefix and unpack it, then call ``then``.

        Args:
            tokens: int32, (num_tokens,).
            limit: at most so many of them are of use.
            held: so many are there already.
            known: the names of its first chunks, as far as they are known.
        """
        work = partial(self._look_up, ref, tokens, limit, held, known)
        self._pool.submit(self._answer, work, then)

    def load(self, ref: SessionRef, then: OnFound) -> None:
        """Unpack everything that is kept of a session, then call ``then``."""
        self._pool.submit(self._answer, partial(self._load, ref), then)

    def chain(self, ref: SessionRef, tokens: np.ndarray, before: Chain = ()) -> list[bytes]:
        """Name the full chunks of these tokens, int32 (num_tokens,), of a session's tenant.

        ``before``: the names of the first ones, if they are known.
        """
        return self.store.maker.of_tokens(ref.salt, tokens, before)

    def save(
        self, hot: HotSession, states: Sequence[StateAt], then: Callable[[bool], None]
    ) -> None:
        """Start copying the session into the store; resolves ``hot.saved``, then calls ``then``.

        Raises all that mlx or the store raise; ``hot.saved`` is then as it was.
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
        # Rows of a packed cache are the codec's own bytes: to save them packs nothing again.
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
        # Last: what raises above leaves no promise that would not be kept.
        hot.saved = saved

    def rebuild(self, found: ColdPrefix) -> Caches | None:
        """Make caches of the KV that was restored; it is given away. None: it cannot be used."""
        restored, layout = found.restored, self._plan.layout
        assert restored is not None
        run, state, count = restored.run, restored.state, restored.num_tokens
        try:
            return kv_arrays.rebuild(self._model, layout, run, state, count, found.arrays)
        except Exception:  # stored data may be wrong in any way; prefill is right
            logger.exception("a restored session could not be used")
            self.counters["rebuild_failures"] += 1
            return None

    def close(self) -> None:
        """End the threads; look-ups that have not begun are dropped."""
        self._pool.shutdown(cancel_futures=True)

    # ---- threads of the pool

    def _answer(self, look_up: Callable[[], ColdPrefix], then: OnFound) -> None:
        try:
            found = look_up()
        except Exception:  # the edge of this thread: a store that fails is a store without KV
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
        if not chain:  # of less than a chunk there is nothing to match
            is_known = self.store.record(ref) is not None
            return ColdPrefix(None, "diverged" if is_known else self.store.ledger.why_unknown(ref))
        match = self.store.match(ref, chain)
        if match.tier is not None and held:
            # All of it is restored, also what is held: in about the time of computing so many.
            worth = TIERS[match.tier].restore_share * match.num_tokens
            if 0 < match.num_tokens - held < worth:
                return ColdPrefix(None, "computed-sooner", chain=chain)
        return replace(self._restore(match, held, len(tokens)), chain=chain)

    def _restore(self, match: Match, held: int = 0, most: int = 0) -> ColdPrefix:
        """Restore a match if it has more tokens than are held, with room for ``most`` tokens.

        Its rows are unpacked where they stay; only of a match that was not all good they are
        copied once more.
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
        run: of all growing layers, from the first token on.
        states: of models that need them, at ends of chunks.
        restored_tokens: no row and no state after so many tokens came from a lossy copy.
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
