"""What calibration needs from an engine: a model whose cache can be taken out and put back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from kvstore.blobs.snapshot import StateTree
from kvstore.codecs.rope import Rope
from kvstore.shapes import KVLayout, KVPair, KVRun, StateLayout


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


@dataclass(frozen=True)
class HeldSession:
    """All that an engine keeps of ``num_tokens`` tokens: rows of every token, and its state.

    ``state``: as the engine hands it to a cold store; None where rows are all there is.
    """

    run: KVRun
    num_tokens: int
    state: StateTree = None


@runtime_checkable
class StatefulInstrument(Protocol):
    """An instrument that can also take out and put back windows and recurrent states."""

    @property
    def states(self) -> StateLayout | None:
        """Layout of all that the model keeps besides rows of every token; None = nothing."""

    def window_ropes(self) -> tuple[Rope | None, ...]:
        """The same as ``Instrument.ropes``, of the layers with windows."""

    @property
    def state_step(self) -> int:
        """The number of tokens from one possible state to the next: states are at multiples."""

    def prefill_whole(self, tokens: Sequence[int], past: HeldSession | None = None) -> HeldSession:
        """Compute a whole session of ``tokens``, up to the last state; the caller owns the arrays.

        Args:
            past: a session of the first tokens, but not of all, to go on from; it is not changed.
        """

    def log_probs_whole(self, session: HeldSession, tokens: Sequence[int]) -> np.ndarray:
        """The same as ``Instrument.log_probs``, behind a whole session, which is not changed."""


def states_of(instrument: Instrument) -> StateLayout | None:
    """Tell what there is besides rows in a session of this instrument; None = nothing."""
    return instrument.states if isinstance(instrument, StatefulInstrument) else None


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


@runtime_checkable
class DifferentiableSessions(Protocol):
    """A ``StatefulInstrument`` that can also compute gradients of the loss by rows of a session."""

    def session_gradients(
        self, prefix: Sequence[int], tokens: Sequence[int]
    ) -> tuple[list[KVPair], list[KVPair]]:
        """Gradients of the loss after ``tokens``, by the rows of ``prefix`` before them.

        By rows of every token, and by those of windows; see ``Differentiable.gradients``. States
        count as given.

        Raises:
            NotDifferentiable: this model has no gradients.
        """
