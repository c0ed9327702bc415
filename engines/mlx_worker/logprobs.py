"""From a row of log-probabilities to the event a client sees."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from engines.mlx_worker.generation import Token


def token_event(row: int, token: int, logprobs: mx.array, top: int | None) -> Token:
    """``logprobs`` (vocab,), before temperature; ``top`` = how many alternatives, None = nothing.

    Alternatives are sorted, the likeliest first.
    """
    if top is None:
        return Token(row, token)
    values = np.array(logprobs.astype(mx.float32))
    top = min(top, len(values))
    best = np.argpartition(values, -top)[-top:] if top else np.empty(0, np.intp)
    ranked = sorted(best.tolist(), key=lambda x: (-values[x], x))
    return Token(row, token, float(values[token]), [(x, float(values[x])) for x in ranked])
