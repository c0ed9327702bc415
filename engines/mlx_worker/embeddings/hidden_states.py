"""Runs a model without its head over one text, and pools what comes out. On the owner thread."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from engines.mlx_worker.embeddings.vectors import Vector

Pooling: TypeAlias = Literal["last", "mean", "first"]
_MODES: dict[str, Pooling] = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "first",
}


def pooling_of(folder: Path | None) -> Pooling:
    """Return how a model's states become one vector.

    What its files say, as sentence-transformers writes them, goes first. Qwen's embedding models
    are known by name, since copies of them often lack that file. Of a model that was made for
    something else, all states say more than its last.
    """
    if folder is None:
        return "mean"
    try:
        modes = json.loads((folder / "1_Pooling" / "config.json").read_bytes())
        for name, pooling in _MODES.items():
            if modes.get(name) is True:
                return pooling
    except (OSError, ValueError, AttributeError):
        pass  # no such file, or none that can be read
    return "last" if "qwen3-embedding" in str(folder).lower() else "mean"


def inner_of(model: Any) -> Any | None:
    """Return the part of a model that gives hidden states; None if it has none of the usual kind.

    mlx_lm's classes of decoders have it as ``model``, under a head; some have another such class
    as their ``language_model``.
    """
    for outer in (model, getattr(model, "language_model", None)):
        inner = getattr(outer, "model", None)
        if callable(inner) and (hasattr(inner, "embed_tokens") or hasattr(inner, "wte")):
            return inner
    return None


class HiddenStates:
    """The states of one text, as far as it has been read."""

    def __init__(self, model: Any, inner: Any, pooling: Pooling) -> None:
        self._model = model
        self._inner = inner
        self._pooling = pooling
        self._caches: Any = None
        self._pooled: mx.array | None = None
        self._num_tokens = 0

    def feed(self, tokens: Sequence[int], *, last: bool) -> None:
        """Read ``tokens``; ``last`` says that no more follow, so that no KV need be kept."""
        if self._caches is None and not last:
            self._caches = make_prompt_cache(self._model)
        states = self._inner(mx.array(list(tokens))[None], cache=self._caches)
        states = states[0].astype(mx.float32)
        before = self._pooled
        if self._pooling == "last":
            self._pooled = states[-1]
        elif self._pooling == "first":
            self._pooled = states[0] if before is None else before
        else:
            total = states.sum(axis=0)
            self._pooled = total if before is None else before + total
        self._num_tokens += len(tokens)
        mx.eval(self._pooled, [x.state for x in self._caches or ()])
        if last:
            self._caches = None
            mx.clear_cache()

    def pooled(self) -> Vector:
        """Return the vector of all that was read; its length is not normalised."""
        assert self._pooled is not None
        vector: Vector = np.array(self._pooled, dtype=np.float32)
        if self._pooling == "mean":
            vector /= np.float32(self._num_tokens)
        return vector
