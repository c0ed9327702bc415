"""Lets ``engines.calibration`` measure an mlx model. Belongs to the thread that loaded it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import msgspec
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from engines.calibration.instrument import HeldSession, Note, NotObservable, draw_seed
from engines.calibration.rope_probe import read_rope
from engines.mlx_worker.cache import kv_arrays
from engines.mlx_worker.cache.layout import CachePlan, Caches, is_growing, leaves, packable_window
from engines.mlx_worker.model.layer_calls import (
    NotedRows,
    NotedState,
    noted_calls,
    noted_rows,
    noted_states,
)
from engines.mlx_worker.model.loading import LoadedModel, fingerprint
from kvstore.blobs.state_tree import copied_state
from kvstore.session import CHUNK_TOKENS
from kvstore.shapes import KVLayer, KVLayout, KVRun, Rope, StateLayout

PREFILL_TOKENS: Final = 512  # of a prefill at a time


def log_probs(model: Any, caches: Caches, tokens: Sequence[int]) -> mx.array:
    """Feed ``tokens`` after ``caches``; the log-probabilities after each, fp32 (tokens, vocab)."""
    logits = model(mx.array(list(tokens))[None], cache=caches)[0].astype(mx.float32)
    scores: mx.array = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    return scores


class MlxInstrument:
    """An ``Instrument``, and a ``StatefulInstrument`` for models with windows or states.

    It is an ``Observing`` one as well.
    """

    def __init__(self, loaded: LoadedModel, plan: CachePlan, folder: Path | None = None) -> None:
        """Look at a loaded model. ``folder``: see ``fingerprint``.

        Raises:
            ValueError: this model's cache cannot be kept.
        """
        if plan.layout is None:
            raise ValueError(plan.reason)
        self._layout = plan.layout
        self._plan = plan
        self._loaded = loaded
        self._folder = folder

    @property
    def layout(self) -> KVLayout:
        return self._layout

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint(self._loaded, self._plan, self._folder)

    @property
    def ropes(self) -> tuple[Rope | None, ...]:
        return self._ropes(windows=False)

    @property
    def states(self) -> StateLayout | None:
        return self._plan.states

    def window_ropes(self) -> tuple[Rope | None, ...]:
        return self._ropes(windows=True)

    def _ropes(self, *, windows: bool) -> tuple[Rope | None, ...]:
        readers = rope_readers(self._loaded.model, self._plan, windows=windows)
        return tuple(read() for read in readers)

    def encode(self, text: str) -> list[int]:
        return list(self._loaded.tokenizer.encode(text, verbose=False))

    def prefill(self, tokens: Sequence[int], past: KVRun = ()) -> KVRun:
        num_past = past[0][0].shape[1] if past else 0
        return self.prefill_whole(tokens, HeldSession(past, num_past)).run

    @property
    def state_step(self) -> int:
        return CHUNK_TOKENS

    def prefill_whole(self, tokens: Sequence[int], past: HeldSession | None = None) -> HeldSession:
        past = past or HeldSession((), 0)
        caches = self._prefilled(self._caches(past), tokens, past.num_tokens)
        return session_of(caches, len(tokens))

    def _prefilled(self, caches: Caches, tokens: Sequence[int], num_past: int) -> Caches:
        for first in range(num_past, len(tokens), PREFILL_TOKENS):
            part = mx.array(list(tokens[first : first + PREFILL_TOKENS]))[None]
            self._loaded.model(part, cache=caches)
            mx.eval([cache.state for cache in caches])
        return caches

    def log_probs(self, run: KVRun, tokens: Sequence[int]) -> np.ndarray:
        return self.log_probs_whole(HeldSession(run, run[0][0].shape[1]), tokens)

    def log_probs_whole(self, session: HeldSession, tokens: Sequence[int]) -> np.ndarray:
        return np.array(log_probs(self._loaded.model, self._caches(session), tokens))

    @property
    def sees_states(self) -> bool:
        return True

    def observe(self, tokens: Sequence[int], first: int, note: Note) -> KVRun:
        caches = self._prefilled(self._caches(HeldSession((), 0)), tokens[:first], 0)
        try:
            for at in range(first, len(tokens), PREFILL_TOKENS):
                before = kv_arrays.copy_of(caches)
                with noted_calls(self._loaded.model, caches) as layers:
                    self._prefilled(caches, tokens[: at + PREFILL_TOKENS], at)
                calls: list[NotedRows | NotedState] = [*noted_rows(caches, before, layers)]
                calls += noted_states(caches, before, layers)
                for number, call in enumerate(calls):
                    notice = call.notice(first, draw_seed(tokens, at, number))
                    if notice is not None:
                        note(notice)
        except (RuntimeError, ValueError) as error:  # mlx says so in either way
            raise NotObservable(f"mlx cannot differentiate a layer: {error}") from error
        return [(k.copy(), v.copy()) for k, v in kv_arrays.growing_run(caches, len(tokens))]

    def _caches(self, session: HeldSession) -> Caches:
        return caches_of(self._loaded.model, self._layout, session)


def caches_of(model: Any, layout: KVLayout, session: HeldSession) -> Caches:
    """Make caches of a copy of the session; empty ones of no tokens. Raises ``Mismatch``."""
    if not session.num_tokens:
        return list(make_prompt_cache(model))
    return kv_arrays.rebuild(model, layout, session.run, session.state, session.num_tokens)


def session_of(caches: Caches, num_tokens: int) -> HeldSession:
    """Copy everything that caches of ``num_tokens`` tokens hold."""
    run = [(k.copy(), v.copy()) for k, v in kv_arrays.growing_run(caches, num_tokens)]
    state = copied_state(kv_arrays.state_tree(caches))
    return HeldSession(run, num_tokens, state)


def rope_readers(model: Any, plan: CachePlan, *, windows: bool) -> list[Callable[[], Rope | None]]:
    """One function for each layer that reads off how it turns its keys; None if it turns none.

    ``windows``: of the layers with sliding windows, not of those that grow. Of a model with states
    a layer whose turning is not to be found counts as one without: that costs bits, not truth.

    The functions raise ``ValueError`` if a layer turns its keys in a way that is not understood.
    """
    kept = plan.states.windows if windows and plan.states else None if windows else plan.layout
    if kept is None:
        return []
    layers = _layers_of(model, plan, windows)
    if len(layers) != len(kept.layers):
        if plan.needs_state:
            return [_not_turned for _ in kept.layers]
        raise ValueError("the model's layers are not those of its cache")
    read = _rope_if_found if plan.needs_state else rope_of
    return [
        partial(_rope_of_latent, x, y.value_dim)
        if _keeps_latent(x, y)
        else partial(read, x, y.head_dim)
        for x, y in zip(layers, kept.layers, strict=True)
    ]


def _layers_of(model: Any, plan: CachePlan, windows: bool) -> list[Any]:
    """The model's layers whose caches grow, or are windows; of layers with several caches each."""
    layers, caches = list(model.layers), list(make_prompt_cache(model))
    if len(layers) != len(caches):
        return []
    wanted = packable_window if windows else is_growing
    return [
        x for x, cache in zip(layers, caches, strict=True) for y in leaves([cache]) if wanted(y)
    ]


def _not_turned() -> None:
    return None


def _keeps_latent(layer: Any, kept: KVLayer) -> bool:
    """True if a latent lies where others keep keys, and its turned part in the place of values."""
    attention = _attention_of(layer)
    found = [getattr(attention, x, 0) for x in ("kv_lora_rank", "qk_rope_head_dim")]
    return kept.num_kv_heads == 1 and found == [kept.head_dim, kept.value_dim]


def _attention_of(layer: Any) -> Any:
    return getattr(layer, "self_attn", None) or getattr(layer, "attention", None)


def _rope_of_latent(layer: Any, dim: int) -> Rope | None:
    """Read how a layer rotates the ``dim`` channels beside its latents; None if not found."""
    rope = _rope_if_found(layer, dim)
    return None if rope is None else msgspec.structs.replace(rope, side="values")


def _rope_if_found(layer: Any, head_dim: int) -> Rope | None:
    try:
        return rope_of(layer, head_dim)
    except ValueError:
        return None


def rope_of(layer: Any, head_dim: int) -> Rope | None:
    """Read off how one layer turns its keys. Raises ``ValueError`` where it is not found."""
    attention = _attention_of(layer)
    module = getattr(attention, "rope", None)
    if attention is None or module is None:
        raise ValueError("how this model turns its keys is not to be found")
    # Keys that are unfolded out of latents have their turned channels after the others.
    turned = min(getattr(attention, "qk_rope_head_dim", head_dim), head_dim)

    def matrix(position: int) -> np.ndarray:
        whole = np.eye(head_dim, dtype=np.float32)
        whole[-turned:, -turned:] = _turned(module, turned, position)
        return whole

    return read_rope(matrix)


def _turned(module: Any, dim: int, position: int) -> np.ndarray:
    """The (dim, dim) matrix, float32, by which keys at ``position`` are turned."""
    identity = mx.eye(dim)[:, None, None, :]
    return np.array(module(identity, offset=position).astype(mx.float32)).reshape(dim, dim)
