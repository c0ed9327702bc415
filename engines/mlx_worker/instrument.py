"""``engines.calibration``'s view of an mlx model. Belongs to the thread that loaded it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from engines.calibration.instrument import NotDifferentiable
from engines.mlx_worker import parking
from engines.mlx_worker.fingerprint import fingerprint
from engines.mlx_worker.layout import CachePlan
from engines.mlx_worker.loading import LoadedModel
from engines.mlx_worker.rotary import ropes_of
from engines.mlx_worker.turn import Caches
from kvstore.codecs.pieces.rope import Rope
from kvstore.shapes import KVLayout, KVPair, KVRun

CHUNK_TOKENS = 512  # of a prefill at a time
DRAW = 1  # seed of the tokens that gradients are taken for


class MlxInstrument:
    """Only for models whose cache grows with every token and holds nothing else."""

    def __init__(self, loaded: LoadedModel, plan: CachePlan, folder: Path | None = None) -> None:
        """``folder``: see ``fingerprint``.

        Raises:
            ValueError: this model's cache holds state that no lossy codec may touch.
        """
        if plan.layout is None or plan.needs_state:
            raise ValueError(
                plan.reason or "a part of this model's cache cannot be cut to a length"
            )
        self._loaded = loaded
        self._layout = plan.layout
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
        return [(k.copy(), v.copy()) for k, v in parking.growing_run(caches, len(tokens))]

    def log_probs(self, run: KVRun, tokens: Sequence[int]) -> np.ndarray:
        return np.array(self._scores(self._caches(run, run[0][0].shape[1]), tokens))

    def gradients(self, run: KVRun, tokens: Sequence[int]) -> list[KVPair]:
        num_tokens = run[0][0].shape[1]
        kept = [(leaf.keys, leaf.values) for leaf in self._caches(run, num_tokens)]

        def loss(arrays: list[tuple[mx.array, mx.array]]) -> mx.array:
            caches = make_prompt_cache(self._loaded.model)
            for cache, (keys, values) in zip(caches, arrays, strict=True):
                cache.state = (keys, values, num_tokens)
            scores = self._scores(caches, tokens)
            drawn = mx.random.categorical(mx.stop_gradient(scores), key=mx.random.key(DRAW))
            return -mx.take_along_axis(scores, drawn[:, None], axis=-1).sum()

        try:
            found = mx.grad(loss)(kept)
            mx.eval(found)
        except (RuntimeError, ValueError) as error:  # mlx says so in either way
            raise NotDifferentiable(f"mlx cannot differentiate this model: {error}") from error
        return [(_as_fp32(keys), _as_fp32(values)) for keys, values in found]

    def gradients_done(self) -> None:
        """Nothing is kept for them."""

    def _scores(self, caches: Caches, tokens: Sequence[int]) -> mx.array:
        logits = self._loaded.model(mx.array(list(tokens))[None], cache=caches)[0]
        logits = logits.astype(mx.float32)
        scores: mx.array = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        return scores

    def _caches(self, run: KVRun, num_tokens: int) -> Caches:
        if not num_tokens:
            return list(make_prompt_cache(self._loaded.model))
        return parking.rebuild(self._loaded.model, self._layout, run, None, num_tokens)


def _as_fp32(array: mx.array) -> np.ndarray:
    """Without the axis of the batch."""
    return np.array(array[0].astype(mx.float32))
