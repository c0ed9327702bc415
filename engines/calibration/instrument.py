"""The protocol by which an engine is measured: its cache is taken out, packed, and put back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np

from kvstore.blobs.state_tree import StateTree
from kvstore.shapes import KVLayout, KVPair, KVRun, Rope, StateLayout


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
        """The same as ``Instrument.log_probs``, after a whole session, which is not changed."""


def states_of(instrument: Instrument) -> StateLayout | None:
    """Return the layout of the states in this instrument's sessions; None = they are rows only."""
    return instrument.states if isinstance(instrument, StatefulInstrument) else None


class NotObservable(Exception):
    """A layer's use of stored KV cannot be observed. The message is one sentence."""


class LayerNotice(NamedTuple):
    """Says what one layer notices of errors in the K and V before some tokens.

    Attributes:
        of_windows: the layer keeps the newest tokens only; it is numbered among such layers.
        rows: its K and V of a text's first tokens, as the engine holds them.
        gradients: by the first of them, of random parts of the layer's addition to the residual
            stream, divided by the size of the stream: fp32 (draws, KV heads, tokens, dim).
    """

    of_windows: bool
    layer: int
    rows: KVPair
    gradients: KVPair


class StateNotice(NamedTuple):
    """Says what a recurrent layer notices of errors in one array of matrices of its state.

    Attributes:
        number: of the array among those of a session's state that a codec may pack.
        matrices: fp32 (..., rows, width), before some tokens.
        gradients: by the matrices, of random parts of the layer's addition to the residual stream
            at these tokens, divided by the size of the stream: fp32 (draws, ..., rows, width).
    """

    number: int
    matrices: np.ndarray
    gradients: np.ndarray


Note: TypeAlias = Callable[[LayerNotice | StateNotice], None]

NUM_DRAWS: Final = 3  # random parts of a layer's output, for each text
SEED_BYTES: Final = 6


def draw_seed(tokens: Sequence[int], at: int, number: int) -> int:
    """Make the seed of the random draws for a text: the same in every process that reads it.

    Args:
        at: the first token that looks back in the step.
        number: of the layer's call in the step.
    """
    known = np.array([*tokens, at, number], "<i8").tobytes()
    return int.from_bytes(blake2b(known, digest_size=SEED_BYTES).digest(), "little")


@runtime_checkable
class Observing(Protocol):
    """An instrument that also sees what single layers make of stored KV."""

    @property
    def sees_states(self) -> bool:
        """True if it notes layers with windows and recurrent layers, too."""

    def observe(self, tokens: Sequence[int], first: int, note: Note) -> KVRun:
        """Do the same as ``prefill``, and note what each layer notices from ``tokens[first]`` on.

        Of layers with windows only those that still hold the first token are noted, of recurrent
        layers those that can be differentiated.

        Raises:
            NotObservable: nothing can be seen of this model.
        """
