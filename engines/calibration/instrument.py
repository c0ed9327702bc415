"""What calibration needs from an engine: a model whose cache can be taken out and put back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from kvstore.codecs.rope import Rope
from kvstore.shapes import KVLayout, KVPair, KVRun


class Interrupted(Exception):
    """The engine ends, or measuring was given up elsewhere."""


class Instrument(Protocol):
    """A model whose cache can be taken out and put back.

    That of an engine that serves raises ``Interrupted`` from every method once the engine ends.
    """

    @property
    def layout(self) -> KVLayout:
        """Layers, shapes and dtype of the growing cache."""

    @property
    def fingerprint(self) -> str:
        """The model's fingerprint, the same that the engine gives its cold store."""

    @property
    def ropes(self) -> tuple[Rope | None, ...]:
        """The rotary embedding of each layer; None where a layer has none.

        Raises:
            ValueError: a layer turns its keys in a way that is not understood.
        """

    def encode(self, text: str) -> list[int]:
        """The token ids of plain text, without a chat template.

        The first is the model's own first token (BOS) if it wants one.
        """

    def prefill(self, tokens: Sequence[int], past: KVRun = ()) -> KVRun:
        """Compute the KV of ``tokens`` at positions 0..; the caller owns the arrays.

        Args:
            past: KV of the first tokens, but not of all, which is not computed again.
        """

    def log_probs(self, run: KVRun, tokens: Sequence[int]) -> np.ndarray:
        """Log-probabilities of the next token after each of ``tokens``, which follow ``run``.

        fp32 (len(tokens), vocabulary), natural logarithm. ``run`` is not changed.
        """


class NotDifferentiable(Exception):
    """A part of the model has no gradient. The message is one sentence."""


@runtime_checkable
class Differentiable(Protocol):
    """An instrument that can also compute gradients of the loss by the cache."""

    def gradients(self, run: KVRun, tokens: Sequence[int]) -> list[KVPair]:
        """Gradients of the loss after ``tokens``, which follow ``run``, by each K and V of ``run``.

        The loss is that of tokens which the model itself draws, so that its output is measured and
        not the text. fp32, in the shapes of ``run``, which is not changed.

        Raises:
            NotDifferentiable: this model has no gradients.
        """

    def gradients_done(self) -> None:
        """Free what gradients needed; no more of them are wanted for now."""
