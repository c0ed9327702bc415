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
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np

from engines.mlx_worker.cache import kv_arrays
from engines.mlx_worker.cache.layout import CachePlan, Caches
from engines.mlx_worker.sessions.hot_sessions import CacheRows, HotSession
from kvstore.blobs.chain import Chain
from kvstore.blobs.state_tree import state_nbytes
from kvstore.codecs.rows.packed_layout import PackedLayout
from kvstore.errors import Mismatch
from kvstore.ledger.record import SessionRecord
from kvstore.session import TIERS, MissReason, SessionRef, TierName
from kvstore.store.cold_store import ColdStore
from kvstore.store.restorer import Match, Restored
from kvstore.store.states import StateAt, TakenState

logger = logging.getLogger(__name__)

# Restores that may run at once; each holds a whole session's KV in flight.
NUM_RESTORES = 4


@dataclass(frozen=True)
class PrefixQuery:
    """A prompt at the start of its turn, for which the cold store may have KV."""

    session: SessionRef
    tokens: np.ndarray  # int32, (num_tokens,)
    limit: int  # at most so many tokens are of use
    held: int  # so many are there already
    chain: Chain = ()  # the names of its first chunks, if they are known


@dataclass(frozen=True)
class ColdPrefix:
    """The cold store's answer; ``restored`` is None for a miss."""

    restored: Restored | None
    reason: MissReason | None
    chain: Chain = ()  # of the prompt
    arrays: Sequence[mx.array] = ()  # that the restored rows lie in, if they are mlx's

    @property
    def num_tokens(self) -> int:
        return self.restored.num_tokens if self.restored else 0

    @property
    def tier(self) -> TierName | None:
        return self.restored.tier if self.restored else None


# Called on a thread of the pool.
OnFound: TypeAlias = Callable[[ColdPrefix], None]


class ColdSessions:
    """Saves hot sessions into the store and brings cold ones back.

    ``save`` and ``rebuild`` are the owner thread's; ``find`` and ``load`` return at once and call
    back on a thread of the pool.
    """

    def __init__(self, store: ColdStore, model: Any, plan: CachePlan) -> None:
        self.store = store
        self._model = model
        self._plan = plan
        self._pool = ThreadPoolExecutor(NUM_RESTORES, "mlx-restore")
        self.counters: Counter[str] = Counter()  # the owner thread's

    def find(self, query: PrefixQuery, then: OnFound) -> None:
        """Look for a prompt's longest prefix and unpack it, then call ``then``."""
        self._pool.submit(self._find, query, then)

    def load(self, session: SessionRef, then: OnFound) -> None:
        """Unpack everything that is kept of a session, then call ``then``."""
        self._pool.submit(self._load_session, session, then)

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

    def rebuild(self, found: ColdPrefix) -> Caches:
        """Make caches of the KV that the store has restored; it is given away.

        Raises ``Mismatch`` for KV of another model, or an error of mlx.
        """
        restored, layout = found.restored, self._plan.layout
        if restored is None:
            raise Mismatch("nothing was restored")
        run, state, num_tokens = restored.run, restored.state, restored.num_tokens
        return kv_arrays.rebuild(self._model, layout, run, state, num_tokens, found.arrays)

    def close(self) -> None:
        """End the threads; look-ups that have not begun are dropped."""
        self._pool.shutdown(cancel_futures=True)

    # ---- threads of the pool

    def _find(self, query: PrefixQuery, then: OnFound) -> None:
        try:
            found = self._look_up(query)
        except Exception:  # the edge of this thread: a store that fails is a store without KV
            logger.exception("the cold store could not be read")
            found = ColdPrefix(None, "unavailable")
        then(found)

    def _load_session(self, session: SessionRef, then: OnFound) -> None:
        found = ColdPrefix(None, "unavailable")
        try:
            match, chain = self.store.prepare(session)
            found = replace(self._restore(match), chain=chain)
        except Exception:  # as in _find
            logger.exception("the cold store could not be read")
        then(found)

    def _look_up(self, query: PrefixQuery) -> ColdPrefix:
        chain = self.chain(query.session, query.tokens[: query.limit], query.chain)
        if not chain:  # of less than a chunk there is nothing to match
            known = self.store.record(query.session) is not None
            why = "diverged" if known else self.store.ledger.why_unknown(query.session)
            return ColdPrefix(None, why)
        match = self.store.match(query.session, chain)
        if match.tier is not None and query.held:
            # All of it is restored, also what is held: in about the time of computing so many.
            worth = TIERS[match.tier].restore_share * match.num_tokens
            if 0 < match.num_tokens - query.held < worth:
                return ColdPrefix(None, "computed-sooner", chain=chain)
        return replace(self._restore(match, query.held, len(query.tokens)), chain=chain)

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
