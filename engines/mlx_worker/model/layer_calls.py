"""Records the calls of a model's layers, to repeat and differentiate them one by one.

The module that is passed a layer's cache is that layer's attention, whatever its name. While calls
are recorded, ``NotedModule``s replace such modules (``Module.update_modules``); afterwards the
model is as before.

A recurrent layer's call is differentiated with respect to the state before it. The call is repeated
in pieces of a few tokens, from the last back to the first, since a whole call would keep every
token's state at once. Between pieces, the gradient with respect to the state is carried on.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import KVCache

from engines.calibration.instrument import NUM_DRAWS, LayerNotice, NotObservable, StateNotice
from engines.mlx_worker.cache import kv_arrays
from engines.mlx_worker.cache.layout import Caches, is_growing, is_matrix, leaves, packable_window

logger = logging.getLogger(__name__)
PIECE_TOKENS: Final = 16  # every token of a piece keeps its state and the state's inputs


@dataclass(frozen=True)
class LayerCall:
    """One call of a module that was passed ``cache``.

    ``stream`` is the residual stream that the output is added to; None if it is not known.
    """

    module: Module
    given: tuple[Any, ...]
    named: Mapping[str, Any]
    cache: Any
    stream: mx.array | None

    @property
    def given_shape(self) -> tuple[int, ...]:
        """The shape of the module's input, which is also that of its output."""
        first = next(x for x in [*self.given, *self.named.values()] if isinstance(x, mx.array))
        return tuple(first.shape)

    def again(self, cache: Any) -> mx.array:
        """Repeat the call with another cache; return its output, fp32 (1, num_tokens, hidden)."""
        given = [cache if x is self.cache else x for x in self.given]
        named = {name: cache if x is self.cache else x for name, x in self.named.items()}
        output: Any = self.module(*given, **named)
        added: mx.array = output[0] if isinstance(output, tuple) else output
        return added.astype(mx.float32)

    def sizes(self) -> mx.array:
        """Return the RMS of each token's residual stream, (num_tokens, 1); 1.0 if not known."""
        if self.stream is None:
            return mx.array(1.0)
        return mx.sqrt(mx.mean(mx.square(self.stream[0].astype(mx.float32)), -1, keepdims=True))


class NotedModule(Module):
    """Replaces a module and records its calls."""

    def __init__(self, module: Module, layer: NotedLayer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self["module"] = module
        self._layer = layer

    def __call__(self, *given: Any, **named: Any) -> Any:
        self._layer.note(self["module"], given, named)
        return self["module"](*given, **named)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "module" not in self:
                raise
            return getattr(self["module"], name)


class NotedLayer:
    """The calls within one layer of a model."""

    def __init__(self, caches: Sequence[Any]) -> None:
        """``caches``: the leaves of the layer's cache."""
        self._caches = caches
        self._stream: mx.array | None = None  # the input of the layer's first module
        self.calls: list[LayerCall] = []

    def note(self, module: Module, given: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """Record a call if it was passed one of the layer's caches."""
        arguments = [*given, *named.values()]
        for cache in self._caches:
            if any(x is cache for x in arguments):
                self.calls.append(LayerCall(module, given, named, cache, self._stream))
                return
        if self._stream is None and given and isinstance(given[0], mx.array):
            self._stream = given[0]


@contextmanager
def noted_calls(model: Any, caches: Caches) -> Iterator[list[NotedLayer]]:
    """Record the calls of a forward pass with these caches; yield one ``NotedLayer`` per layer.

    The list is empty if the model's layers and its caches do not correspond.
    """
    layers = list(model.layers)
    if len(layers) != len(caches):
        yield []
        return
    noted, before = [], []
    for layer, cache in zip(layers, caches, strict=True):
        found = NotedLayer([cache, *leaves([cache])])
        children = {k: x for k, x in layer.children().items() if isinstance(x, Module)}
        before.append((layer, children))
        layer.update_modules({k: NotedModule(x, found) for k, x in children.items()})
        noted.append(found)
    try:
        yield noted
    finally:
        for layer, children in before:
            layer.update_modules(children)


class NotedRows:
    """One layer's call, to differentiate with respect to the K and V before it."""

    def __init__(self, call: LayerCall, before: Any, number: int) -> None:
        """``before``: the cache before the call. ``number``: the layer's, among those of its kind.

        The two kinds are growing layers and windows.
        """
        self._call = call
        self._before = before
        self._number = number

    def begin(self, first: int, seed: int) -> Callable[[], LayerNotice]:
        """Begin to differentiate random projections of the call's output by the first tokens' rows.

        The current stream computes while the caller continues.

        Returns:
            A function that waits for the result and returns it.
        """
        known = _rows_of(self._before)
        keys, values = _gradients(self._call, self._before, known, seed)
        mx.async_eval(keys, values)  # type: ignore[no-untyped-call]

        def end() -> LayerNotice:
            mx.eval(keys, values)
            num_known = min(first, known[0].shape[2])
            rows = [kv_arrays.as_numpy(x[0]).copy() for x in known]
            return LayerNotice(
                not is_growing(self._before),
                self._number,
                (rows[0], rows[1]),
                (np.array(keys[:, :, :num_known]), np.array(values[:, :, :num_known])),
            )

        return end


def calls_by_cache(layers: Sequence[NotedLayer]) -> dict[int, list[LayerCall]]:
    """Return the calls of one forward pass by the ``id`` of the cache that each was passed."""
    calls: dict[int, list[LayerCall]] = {}
    for call in (x for layer in layers for x in layer.calls):
        calls.setdefault(id(call.cache), []).append(call)
    return calls


def noted_rows(caches: Caches, before: Caches, layers: Sequence[NotedLayer]) -> list[NotedRows]:
    """Return the calls of one forward pass whose caches hold rows from the first token on.

    Raises:
        NotObservable: a layer that keeps all tokens was not recorded with exactly one call.
    """
    calls = calls_by_cache(layers)
    found, numbers = [], {True: 0, False: 0}
    for leaf, earlier in zip(leaves(caches), leaves(before), strict=True):
        growing = is_growing(leaf)
        if not (growing or packable_window(leaf)):
            continue
        own = calls.get(id(leaf), [])
        if growing and (len(own) != 1 or not isinstance(earlier, KVCache)):
            raise NotObservable("the module that reads a layer's cache is not found")
        if len(own) == 1 and (growing or earlier.offset <= earlier.max_size):
            found.append(NotedRows(own[0], earlier, numbers[growing]))
        numbers[growing] += 1
    return found


def _rows_of(leaf: Any) -> tuple[mx.array, mx.array]:
    """Return the K and V that a cache holds, (1, KV heads, tokens, dim)."""
    keys, values = leaf.state[:2]
    used = min(leaf.offset, keys.shape[2])
    return keys[..., :used, :], values[..., :used, :]


def _gradients(
    call: LayerCall, before: Any, known: tuple[mx.array, mx.array], seed: int
) -> tuple[mx.array, mx.array]:
    """Return gradients of random projections of a call's output, relative to the residual stream.

    The gradients, with respect to K and to V, are fp32 (``NUM_DRAWS``, KV heads, tokens, dim), not
    evaluated.
    """

    def output(keys: mx.array, values: mx.array) -> mx.array:
        (cache,) = kv_arrays.copy_of([before])
        cache.state = (keys, values, *before.state[2:])
        return call.again(cache) / call.sizes()

    found = []
    for draw in range(NUM_DRAWS):
        key = mx.random.key(seed * NUM_DRAWS + draw)
        cotangent = mx.random.normal(call.given_shape, key=key)
        found.append(mx.vjp(output, list(known), [cotangent])[1])
    keys, values = (mx.concatenate(list(x)).astype(mx.float32) for x in zip(*found, strict=True))
    return keys, values


class NotedState:
    """One layer's call, to differentiate with respect to the recurrent state before it."""

    def __init__(self, call: LayerCall, before: Any, place: int, number: int) -> None:
        """Keep the call.

        Args:
            before: the cache before the call.
            place: index of the array in the cache's state.
            number: index of the array among all that a codec may pack.
        """
        self._call = call
        self._before = before
        self._place = place
        self._number = number

    def begin(self, first: int, seed: int) -> Callable[[], StateNotice | None]:
        """Return a function that differentiates random projections of the output by the state.

        The function returns None if mlx cannot differentiate the layer.
        """
        return partial(self._notice, seed)

    def _notice(self, seed: int) -> StateNotice | None:
        try:
            with _differentiable(self._call.module):
                gradients = list(self._gradients(seed))
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            logger.info("a recurrent layer cannot be differentiated: %s", error)
            return None
        matrices = arrays_of(self._before)[self._place].astype(mx.float32)
        return StateNotice(self._number, np.array(matrices), np.stack(gradients))

    def _gradients(self, seed: int) -> Iterator[np.ndarray]:
        """Yield a gradient for each draw, fp32, in the shape of the state's array."""
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
        """Return the cotangent of the state before, given those of outputs and state after."""

        def forward(matrices: mx.array) -> list[mx.array]:
            cache = with_array(before, self._place, matrices)
            return [call.again(cache), arrays_of(cache)[self._place]]

        known = arrays_of(before)[self._place]
        found: mx.array = mx.vjp(forward, [known], [drawn, after])[1][0]
        return found


def noted_states(caches: Caches, before: Caches, layers: Sequence[NotedLayer]) -> list[NotedState]:
    """Return the calls of one forward pass after recurrent states that a codec may pack.

    Layers that were not called exactly once, or had no state yet, are left out.
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
    """Return the leaves of a cache's state, in the order in which a session stores them."""
    flat: Any = tree_flatten(cache.state)
    return [x for _, x in flat]


def with_array(cache: Any, place: int, array: mx.array) -> Any:
    """Return a copy of a cache with another array at one index of its state."""
    (copied,) = kv_arrays.copy_of([cache])
    numbers = itertools.count()
    copied.state = tree_map(lambda x: array if next(numbers) == place else x, cache.state)
    return copied


@contextmanager
def _differentiable(module: Any) -> Iterator[None]:
    """Put a module into training mode, since kernels for inference have no derivative."""
    was = module.training
    module.train()
    try:
        yield
    finally:
        module.train(was)


def _piece(call: LayerCall, at: int, end: int) -> LayerCall:
    """Return the call limited to the tokens from ``at`` to ``end``."""
    num_tokens = call.given_shape[1]

    def cut(value: Any) -> Any:
        is_long = isinstance(value, mx.array) and value.ndim > 1 and value.shape[1] == num_tokens
        return value[:, at:end] if is_long else value

    given = tuple(cut(x) for x in call.given)
    return replace(call, given=given, named={k: cut(x) for k, x in call.named.items()})
