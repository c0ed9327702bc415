"""Whether a model's twin in transformers computes what vLLM computes.

Both go on behind the same past, which vLLM computed, with the same tokens: as gradients will be
asked for. What each layer then stores, and what the model says, is compared. Keys are stored
turned, so another way of turning them shows, at the positions in use; another order of heads, too.

bf16 on either side is a relative error of .02 in the worst head of a small Llama, and a KL of .001;
what is wrong is an error of about one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from engines.calibration.instrument import Instrument, NotDifferentiable
from engines.calibration.metrics import drift, widened
from engines.vllm_plugin.twin import Twin
from kvstore.shapes import KVLayer, KVLayout, KVPair, KVRun, slice_tokens

MOST_TOKENS: Final = 256
MOST_ERROR: Final = 0.1  # of a vector's length; of the median token of each head
MOST_KL: Final = 0.05  # of the next token, nats


def check_twin(twin: Twin, instrument: Instrument, run: KVRun, tokens: Sequence[int]) -> None:
    """``run`` and ``tokens``: as gradients are asked for.

    Raises:
        NotDifferentiable: they differ.
    """
    layout = instrument.layout
    if (found := twin.layers()) != layout.layers:
        raise NotDifferentiable(
            f"vLLM caches {_words(layout.layers)}, transformers {_words(found)}"
        )
    tokens = tokens[:MOST_TOKENS]
    num_past = run[0][0].shape[1]
    # Which tokens made the past is in the past itself.
    whole = instrument.prefill([*[0] * num_past, *tokens], run)
    ours = as_fp32(slice_tokens(whole, num_past, num_past + len(tokens)), layout)
    theirs, their_scores = twin.behind(as_fp32(run, layout), tokens)
    check_kv(ours, theirs)
    check_scores(instrument.log_probs(run, tokens), their_scores, tokens)


def check_kv(ours: KVRun, theirs: KVRun) -> None:
    """Both fp32."""
    for layer, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        for side, x, y in zip("KV", a, b, strict=True):
            error = float(_errors(x, y).max())
            if not error <= MOST_ERROR:  # also what is no number
                raise NotDifferentiable(
                    f"transformers computes another {side} than vLLM, {error:.0%} off in layer"
                    f" {layer}"
                )


def check_scores(ours: np.ndarray, theirs: np.ndarray, tokens: Sequence[int]) -> None:
    """Log-probabilities after each of ``tokens``."""
    if ours.shape != theirs.shape:
        raise NotDifferentiable(
            f"vLLM knows {ours.shape[1]} tokens, transformers {theirs.shape[1]}"
        )
    kl = float(drift(ours, theirs, tokens).kl.mean())
    if not kl <= MOST_KL:
        raise NotDifferentiable(
            f"transformers predicts other tokens than vLLM, at a KL of {kl:.2g}"
        )


def as_fp32(run: KVRun, layout: KVLayout) -> list[KVPair]:
    return [(widened(keys, layout), widened(values, layout)) for keys, values in run]


def _errors(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Of the median token of each head: few tokens of a mixture of experts may go another way."""
    lengths = np.linalg.norm(ours, axis=-1)
    missed = np.linalg.norm(ours - theirs, axis=-1)
    # A head that says nothing has no direction to be off from: it is weighed against the others.
    least = max(1e-3 * float(np.median(lengths)), float(np.finfo(np.float32).tiny))
    errors: np.ndarray = np.median(missed / np.maximum(lengths, least), axis=-1)
    return errors


def _words(layers: Sequence[KVLayer]) -> str:
    kinds = sorted({f"{x.num_kv_heads} heads of {x.head_dim}" for x in layers})
    return f"{len(layers)} layers of {' or '.join(kinds)}"
