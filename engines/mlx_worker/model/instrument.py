"""Lets ``engines.calibration`` measure an mlx model. Belongs to the thread that loaded it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from engines.calibration.instrument import NotDifferentiable
from engines.calibration.rope_probe import read_rope
from engines.mlx_worker.cache import kv_arrays
from engines.mlx_worker.cache.layout import CachePlan, Caches
from engines.mlx_worker.model.fingerprint import fingerprint
from engines.mlx_worker.model.loading import LoadedModel
from engines.mlx_worker.model.scoring import gradients, log_probs
from kvstore.codecs.rope import Rope
from kvstore.shapes import KVLayout, KVPair, KVRun

CHUNK_TOKENS = 512  # of a prefill at a time


class MlxInstrument:
    """An ``Instrument`` for models whose cache grows with every token and holds nothing else."""

    def __init__(self, loaded: LoadedModel, plan: CachePlan, folder: Path | None = None) -> None:
        """Look at a loaded model. ``folder``: see ``fingerprint``.

        Raises:
            ValueError: this model's cache holds state that no lossy codec may touch.
        """
        self._layout = growing_layout(plan)
        self._loaded = loaded
        self._fingerprint = fingerprint(loaded, plan, folder)

    @property
    def layout(self) -> KVLayout:
        return self._layout

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    @property
    def ropes(self) -> tuple[Rope | None, ...]:
        return ropes_of(self._loaded.model, [x.head_dim for x in self._layout.layers])

    def encode(self, text: str) -> list[int]:
        return list(self._loaded.tokenizer.encode(text, verbose=False))

    def prefill(self, tokens: Sequence[int], past: KVRun = ()) -> KVRun:
        num_past = past[0][0].shape[1] if past else 0
        caches = self._caches(past, num_past)
        for first in range(num_past, len(tokens), CHUNK_TOKENS):
            part = mx.array(list(tokens[first : first + CHUNK_TOKENS]))[None]
            self._loaded.model(part, cache=caches)
            mx.eval([cache.state for cache in caches])
        return [(k.copy(), v.copy()) for k, v in kv_arrays.growing_run(caches, len(tokens))]

    def log_probs(self, run: KVRun, tokens: Sequence[int]) -> np.ndarray:
        caches = self._caches(run, run[0][0].shape[1])
        return np.array(log_probs(self._loaded.model, caches, tokens))

    def gradients(self, run: KVRun, tokens: Sequence[int]) -> list[KVPair]:
        caches = self._caches(run, run[0][0].shape[1])
        try:
            found = gradients(self._loaded.model, [(x.keys, x.values) for x in caches], tokens)
            mx.eval(found)
        except (RuntimeError, ValueError) as error:  # mlx says so in either way
            raise NotDifferentiable(f"mlx cannot differentiate this model: {error}") from error
        return [(np.array(keys[0]), np.array(values[0])) for keys, values in found]

    def gradients_done(self) -> None:
        """Do nothing: ``gradients`` leaves nothing to release here."""

    def _caches(self, run: KVRun, num_tokens: int) -> Caches:
        if not num_tokens:
            return list(make_prompt_cache(self._loaded.model))
        return kv_arrays.rebuild(self._loaded.model, self._layout, run, None, num_tokens)


def growing_layout(plan: CachePlan) -> KVLayout:
    """The layout of a cache that grows with every token and holds nothing else.

    Raises:
        ValueError: this model's cache holds state that no lossy codec may touch.
    """
    if plan.layout is None or plan.needs_state:
        raise ValueError(plan.reason or "a part of this model's cache cannot be cut to a length")
    return plan.layout


def ropes_of(model: Any, head_dims: list[int]) -> tuple[Rope | None, ...]:
    """Read off how the model turns its keys: one ``Rope`` for each layer, None if it turns none.

    ``head_dims``: channels of each layer's keys.

    Raises:
        ValueError: a layer turns its keys in a way that is not understood.
    """
    layers = list(model.layers)
    if len(layers) != len(head_dims):
        raise ValueError("the model's layers are not those of its cache")
    return tuple(rope_of(x, dim) for x, dim in zip(layers, head_dims, strict=True))


def rope_of(layer: Any, head_dim: int) -> Rope | None:
    """Read off how one layer turns its keys. Raises ``ValueError`` as ``ropes_of`` does."""
    attention = getattr(layer, "self_attn", None) or getattr(layer, "attention", None)
    module = getattr(attention, "rope", None)
    if attention is None or module is None:
        raise ValueError("how this model turns its keys is not to be found")
    return read_rope(lambda position: _turned(module, head_dim, position))


def _turned(module: Any, dim: int, position: int) -> np.ndarray:
    """The (dim, dim) matrix, float32, by which keys at ``position`` are turned."""
    identity = mx.eye(dim)[:, None, None, :]
    return np.array(module(identity, offset=position).astype(mx.float32)).reshape(dim, dim)
