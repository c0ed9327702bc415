"""The one prefix whose KV a measurement has live, outside of all batches.

It belongs to no session: it counts for no budget, and goes at once when users' requests need its
memory. Everything here belongs to the owner thread, except where a docstring says any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from engines.calibration.instrument import HeldSession, Notice, StateNotice
from engines.mlx_worker.cache import kv_arrays
from engines.mlx_worker.cache.layout import Caches
from engines.mlx_worker.model.instrument import caches_of, session_of
from engines.mlx_worker.model.layer_calls import NotedRows, noted_calls, noted_rows
from engines.mlx_worker.model.scoring import log_probs
from engines.mlx_worker.model.state_calls import NotedState, noted_states
from kvstore.shapes import KVLayout, KVPair, KVRun


class Dropped(Exception):
    """The prefix was given up for a user's request; its work has to begin again."""


class HeldPrefix:
    """The session of at most one prefix. ``layout``: of the part of its cache that grows."""

    def __init__(self, model: Any, layout: KVLayout) -> None:
        self._model = model
        self._layout = layout
        self._caches: Caches | None = None
        self._noted: list[NotedRows | NotedState] = []  # of the tokens that were fed last
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes of live KV, and of all that hangs on it. Any thread."""
        return self._nbytes

    def begin(self, run: KVRun = ()) -> None:
        """Hold a copy of ``run``, or an empty prefix, in place of the earlier prefix."""
        self.begin_whole(HeldSession(run, run[0][0].shape[1] if run else 0))

    def begin_whole(self, session: HeldSession) -> None:
        """Hold a copy of a whole session in place of the earlier prefix."""
        self.drop()
        self._caches = caches_of(self._model, self._layout, session)
        self._count()

    def feed(self, tokens: Sequence[int]) -> None:
        """Prefill ``tokens`` after the held prefix. Raises ``Dropped``."""
        caches = self._held()
        self._model(mx.array(list(tokens))[None], cache=caches)
        # Only the caches: the logits of these positions are never computed.
        mx.eval([cache.state for cache in caches])
        mx.clear_cache()
        self._count()

    def score(self, tokens: Sequence[int]) -> np.ndarray:
        """Feed ``tokens`` and return the log-probabilities after each of them.

        fp32 (len(tokens), vocabulary). Raises ``Dropped``.
        """
        found = np.array(log_probs(self._model, self._held(), tokens))
        mx.clear_cache()
        self._count()
        return found

    def take(self, out: Sequence[KVPair]) -> None:
        """Copy all that is held into ``out``, arrays as ``KVLayout.empty`` makes them, and drop it.

        Raises ``Dropped``.
        """
        run = kv_arrays.growing_run(self._held(), out[0][0].shape[1])
        for (keys, values), (k, v) in zip(out, run, strict=True):
            keys[:], values[:] = k, v
        del k, v, run  # views, which would keep the memory
        self.drop()

    def take_whole(self, num_tokens: int) -> HeldSession:
        """Return a copy of all that is held, of ``num_tokens`` tokens, and drop it.

        Raises ``Dropped``.
        """
        session = session_of(self._held(), num_tokens)
        self.drop()
        return session

    def feed_noted(self, tokens: Sequence[int]) -> int:
        """Prefill ``tokens``, and keep each layer's call; returns the number of calls that count.

        Raises ``Dropped``, and ``NotObservable``.
        """
        held = self._held()
        before = kv_arrays.copy_of(held)
        with noted_calls(self._model, held) as layers:
            self.feed(tokens)
        self._noted = [*noted_rows(held, before, layers), *noted_states(held, before, layers)]
        return len(self._noted)

    def notice(self, number: int, first: int, seed: int) -> Notice | StateNotice | None:
        """Return what one of the calls noticed of the first tokens' K and V, or of its state.

        Raises ``Dropped``.
        """
        self._held()
        found = self._noted[number].notice(first, seed)
        if number == len(self._noted) - 1:
            self._noted = []
        mx.clear_cache()
        return found

    def drop(self) -> None:
        """Free it."""
        if self._nbytes:
            self._caches = None
            self._noted = []
            mx.clear_cache()
        self._nbytes = 0

    def _held(self) -> Caches:
        if self._caches is None:
            raise Dropped("its memory went to a request")
        return self._caches

    def _count(self) -> None:
        self._nbytes = kv_arrays.nbytes_of(self._caches or [])
