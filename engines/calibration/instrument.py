"""The seam between calibration and an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from kvstore.codecs.pieces.rope import Rope
from kvstore.shapes import KVLayout, KVPair, KVRun


class Instrument(Protocol):
    """A model whose cache can be taken out and put back."""

    @property
    def layout(self) -> KVLayout: ...

    @property
    def fingerprint(self) -> str:
        """The same that the engine gives its cold store."""

    @property
    def ropes(self) -> tuple[Rope | None, ...]:
        """How each layer turns its keys; None where it does not.

        Raises:
            ValueError: it does so in a way that is not understood.
        """

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, without a chat template, with the model's own first token if it
        wants one."""

    def prefill(self, tokens: Sequence[int], past: KVRun = ()) -> KVRun:
        """KV of ``tokens`` at positions 0.., in arrays of the caller's own.

        ``past``: KV of the first of them, which is not computed again; not of all.
        """

    def log_probs(self, run: KVRun, tokens: Sequence[int]) -> np.ndarray:
        """What the model says after each of ``tokens``, which follow those of ``run``.

        fp32 (len(tokens), vocabulary), natural logarithm. ``run`` is not changed.
        """


class NotDifferentiable(Exception):
    """A part of the model has no gradient. The message is one sentence."""


@runtime_checkable
class Differentiable(Protocol):
    """An instrument that can also say what later tokens look at in its cache."""

    def gradients(self, run: KVRun, tokens: Sequence[int]) -> list[KVPair]:
        """Of the loss after each of ``tokens``, which follow those of ``run``, by K and V of it.

        The loss is that of tokens which the model itself draws, so that its output is measured and
        not the text. fp32, shapes as in ``run``, which is not changed.

        Raises:
            NotDifferentiable: this model has no gradients.
        """

    def gradients_done(self) -> None:
        """No more are wanted for now: whatever they needed may go."""
