"""Checks that the reference model in transformers computes what vLLM computes.

Both models are given the same KV, computed by vLLM, and go on with the same tokens, as when
gradients are asked for. The KV that each layer then stores and the predictions are compared. Keys
are stored rotated (RoPE), so another rotation shows at the positions in use, and so does another
order of heads.

With bf16 on either side, the worst head of a small Llama has a relative error of .02, and the KL is
.001; a wrong model has errors of about one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from engines.calibration.instrument import Instrument, NotDifferentiable
from engines.calibration.measuring.metrics import drift, widened
from engines.vllm_plugin.calibration.reference_model import ReferenceModel
from kvstore.shapes import KVLayer, KVLayout, KVPair, KVRun, slice_tokens

MOST_TOKENS: Final = 256
MOST_ERROR: Final = 0.1  # relative to a vector's length; for the median token of each head
MOST_KL: Final = 0.05  # between predictions of the next token, in nats


def check_reference(
    reference: ReferenceModel, instrument: Instrument, run: KVRun, tokens: Sequence[int]
) -> None:
    """Compare both models on ``tokens`` behind the KV of ``run``.

    Raises ``NotDifferentiable``: they compute different things.
    """
    layout = instrument.layout
    if (found := reference.layers()) != layout.layers:
        raise NotDifferentiable(
            f"vLLM caches {_words(layout.layers)}, transformers {_words(found)}"
        )
    tokens = tokens[:MOST_TOKENS]
    num_past = run[0][0].shape[1]
    # The past's KV says all about its tokens; vLLM needs only their number.
    whole = instrument.prefill([*[0] * num_past, *tokens], run)
    ours = as_fp32(slice_tokens(whole, num_past, num_past + len(tokens)), layout)
    theirs, their_scores = reference.behind(as_fp32(run, layout), tokens)
    check_kv(ours, theirs)
    check_scores(instrument.log_probs(run, tokens), their_scores, tokens)


def check_kv(ours: KVRun, theirs: KVRun) -> None:
    """Compare the KV that both models stored, as fp32.

    Raises ``NotDifferentiable``: K or V of some layer differs by more than ``MOST_ERROR``.
    """
    for layer, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        for side, x, y in zip("KV", a, b, strict=True):
            error = float(_errors(x, y).max())
            if not error <= MOST_ERROR:  # also what is no number
                raise NotDifferentiable(
                    f"transformers computes another {side} than vLLM, {error:.0%} off in layer"
                    f" {layer}"
                )


def check_scores(ours: np.ndarray, theirs: np.ndarray, tokens: Sequence[int]) -> None:
    """Compare log-probabilities after each of ``tokens``: (num_tokens, vocabulary), fp32.

    Raises ``NotDifferentiable``: they differ by more than ``MOST_KL``, or in their shapes.
    """
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
    """The run with all arrays widened to fp32."""
    return [(widened(keys, layout), widened(values, layout)) for keys, values in run]


def _errors(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Relative errors of the median token of each head: (num_kv_heads,), fp32.

    The median, because in a mixture of experts a few tokens may be routed differently.
    """
    lengths = np.linalg.norm(ours, axis=-1)
    missed = np.linalg.norm(ours - theirs, axis=-1)
    # A vector of length zero has no relative error: its error is taken relative to the others.
    least = max(1e-3 * float(np.median(lengths)), float(np.finfo(np.float32).tiny))
    errors: np.ndarray = np.median(missed / np.maximum(lengths, least), axis=-1)
    return errors


def _words(layers: Sequence[KVLayer]) -> str:
    kinds = sorted({f"{x.num_kv_heads} heads of {x.head_dim}" for x in layers})
    return f"{len(layers)} layers of {' or '.join(kinds)}"
