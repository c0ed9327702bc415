"""Differentiates a recurrent layer's call by the state before it.

The call is repeated in pieces of a few tokens, from the last back to the first: a whole one would
keep every token's state at once. Between pieces the derivative is carried by the state, as it was
carried forward.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_map

from engines.calibration.instrument import NUM_DRAWS, StateNotice
from engines.mlx_worker.cache import kv_arrays
from engines.mlx_worker.cache.layout import (
    Caches,
    is_growing,
    is_matrix,
    leaves,
    packable_window,
)
from engines.mlx_worker.model.layer_calls import LayerCall, NotedLayer, calls_by_cache

logger = logging.getLogger(__name__)

PIECE_TOKENS: Final = 16  # each keeps its state, and the state's inputs


class NotedState:
    """One layer's call after a recurrent state. ``notice`` belongs to the thread of the model."""

    def __init__(self, call: LayerCall, before: Any, place: int, number: int) -> None:
        """Keep the call.

        Args:
            before: the cache as it was before the call.
            place: of the array in the cache's state.
            number: of the array among all that a codec may pack.
        """
        self._call = call
        self._before = before
        self._place = place
        self._number = number

    def notice(self, first: int, seed: int) -> StateNotice | None:
        """Differentiate random parts of the call's output by the state; None if mlx cannot."""
        try:
            with _differentiable(self._call.module):
                gradients = list(self._gradients(seed))
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            logger.info("a recurrent layer cannot be differentiated: %s", error)
            return None
        matrices = arrays_of(self._before)[self._place].astype(mx.float32)
        return StateNotice(self._number, np.array(matrices), np.stack(gradients))

    def _gradients(self, seed: int) -> Iterator[np.ndarray]:
        """One for each draw, fp32, as the array lies."""
        call, num_tokens = self._call, self._call.given_shape[1]
        spans = [
            (at, min(at + PIECE_TOKENS, num_tokens)) for at in range(0, num_tokens, PIECE_TOKENS)
        ]
        caches = [self._before]
        for at, end in spans:
            caches.append(kv_arrays.copy_of([caches[-1]])[0])
            _piece(call, at, end).again(caches[-1])
            mx.eval(caches[-1].state)
        sizes = call.sizes()
        for draw in range(NUM_DRAWS):
            key = mx.random.key(seed * NUM_DRAWS + draw)
            drawn = mx.random.normal(call.given_shape, key=key) / sizes
            found = mx.zeros_like(arrays_of(caches[-1])[self._place])
            for (at, end), before in zip(reversed(spans), reversed(caches[:-1]), strict=True):
                found = self._pulled_back(_piece(call, at, end), before, drawn[:, at:end], found)
                mx.eval(found)
            yield np.array(found.astype(mx.float32))

    def _pulled_back(
        self, call: LayerCall, before: Any, drawn: mx.array, after: mx.array
    ) -> mx.array:
        """Pull cotangents of outputs, and of the state after them, back to the state before."""

        def forward(matrices: mx.array) -> list[mx.array]:
            cache = with_array(before, self._place, matrices)
            return [call.again(cache), arrays_of(cache)[self._place]]

        known = arrays_of(before)[self._place]
        found: mx.array = mx.vjp(forward, [known], [drawn, after])[1][0]
        return found


def noted_states(caches: Caches, before: Caches, layers: Sequence[NotedLayer]) -> list[NotedState]:
    """The calls of one forward pass after recurrent states that a codec may pack.

    There is none of a layer that was not called once, or that had no state yet.
    """
    calls = calls_by_cache(layers)
    found, numbers = [], itertools.count()
    for leaf, earlier in zip(leaves(caches), leaves(before), strict=True):
        if is_growing(leaf) or packable_window(leaf):
            continue
        own, known = calls.get(id(leaf), []), arrays_of(earlier)
        for place, array in enumerate(arrays_of(leaf)):
            if not isinstance(array, mx.array) or not is_matrix(array):
                continue
            number = next(numbers)
            if len(own) == 1 and place < len(known) and isinstance(known[place], mx.array):
                found.append(NotedState(own[0], earlier, place, number))
    return found


def arrays_of(cache: Any) -> list[Any]:
    """List all that a cache's state holds, in the order in which a session has it."""
    flat: Any = tree_flatten(cache.state)
    return [x for _, x in flat]


def with_array(cache: Any, place: int, array: mx.array) -> Any:
    """Copy a cache with another array in one place of its state."""
    (copied,) = kv_arrays.copy_of([cache])
    numbers = itertools.count()
    copied.state = tree_map(lambda x: array if next(numbers) == place else x, cache.state)
    return copied


@contextmanager
def _differentiable(module: Any) -> Iterator[None]:
    """Have a module run as in training: kernels for serving have no derivative."""
    was = module.training
    module.train()
    try:
        yield
    finally:
        module.train(was)


def _piece(call: LayerCall, at: int, end: int) -> LayerCall:
    """The call of some of the tokens alone."""
    num_tokens = call.given_shape[1]

    def cut(value: Any) -> Any:
        is_long = isinstance(value, mx.array) and value.ndim > 1 and value.shape[1] == num_tokens
        return value[:, at:end] if is_long else value

    given = tuple(cut(x) for x in call.given)
    return replace(call, given=given, named={k: cut(x) for k, x in call.named.items()})
