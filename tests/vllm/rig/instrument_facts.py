"""What ``rig.instrument`` sees of KV that it takes out of a serving vLLM, and puts back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from engines.calibration.instrument import HeldSession
from engines.calibration.rope_probe import check_turning
from kvstore.shapes import KVRun, slice_tokens

CONTEXT = 1024
TOKENS = [(37 * i * i + 11 * i + 3) % 1000 for i in range(CONTEXT + 64)]


def look(instrument: Any) -> dict[str, object]:
    session = instrument.prefill(TOKENS[:CONTEXT])
    run = session.run
    # No whole number of blocks.
    short = HeldSession(slice_tokens(run, 0, 1000), 1000, prompt=tuple(TOKENS[:1000]))
    # From token 1000 on: once after the short past, once after a longer one.
    whole = instrument.log_probs(short, TOKENS[1000:])
    split = instrument.log_probs(session, TOKENS[CONTEXT:])
    again = instrument.log_probs(short, TOKENS[1000:])
    other = instrument.log_probs(replace(short, run=slice_tokens(run, 24, CONTEXT)), TOKENS[1000:])
    rope, _ = instrument.ropes
    check_turning(instrument, instrument.ropes)
    return {
        "layout": [run[0][0].shape, len(run), instrument.layout.dtype],
        "shape": whole.shape,
        "probabilities": float(np.exp(whole).sum(1).max()),
        "split": float(np.abs(whole[CONTEXT - 1000 :] - split).max()),
        "again": float(np.abs(whole - again).max()),
        "other past": float(np.abs(whole - other).max()),
        "continued": _difference(run, instrument.prefill(TOKENS[:CONTEXT], short).run),
        "frequencies": rope.frequencies if rope else (),
        "interleaved": rope is not None and rope.interleaved,
    }


def _difference(a: KVRun, b: KVRun) -> float:
    pairs = [pair for p, q in zip(a, b, strict=True) for pair in zip(p, q, strict=True)]
    return max(float(np.abs(x - y).max()) for x, y in pairs)
