"""Scores tokens by a model's predictions after its cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from engines.mlx_worker.cache.layout import Caches


def log_probs(model: Any, caches: Caches, tokens: Sequence[int]) -> mx.array:
    """Feed ``tokens`` after ``caches``; the log-probabilities after each, fp32 (tokens, vocab)."""
    logits = model(mx.array(list(tokens))[None], cache=caches)[0].astype(mx.float32)
    scores: mx.array = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    return scores
