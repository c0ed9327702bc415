"""The protocol through which an engine's model is measured."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final, NamedTuple, Protocol, TypeAlias

import numpy as np

from kvstore.blobs.state_tree import StateTree, arrays_of
from kvstore.shapes import KVLayout, KVPair, KVRun, Rope, StateLayout


class Interrupted(Exception):
    """The measurement must stop: the engine ends, or another rank has given up."""


class NotObservable(Exception):
    """A layer's use of stored KV cannot be observed; the message is one sentence."""


@dataclass(frozen=True)
class HeldSession:
    """The KV of ``num_tokens`` tokens: the rows of every token, and the state.

    Attributes:
        run: K and V of each layer that keeps all rows.
        state: the state in the form for the cold store; None if the model has none.
        prompt: the prompt of which these are the first tokens, if the engine needs it to continue.
    """

    run: KVRun
    num_tokens: int
    state: StateTree = None
    prompt: tuple[int, ...] = ()

    @property
    def arrays(self) -> list[np.ndarray]:
        """K and V of each layer, then those of the state."""
        return [*itertools.chain(*self.run), *(x.array for x in arrays_of(self.state))]


NOTHING: Final = HeldSession((), 0)


class Instrument(Protocol):
    """A model whose sessions' KV can be read out and given back.

    In a serving engine, every method raises ``Interrupted`` once the engine ends.
    """

    @property
    def layout(self) -> KVLayout:
        """Layers, shapes and dtype of the growing cache."""

    @property
    def fingerprint(self) -> str:
        """The model's fingerprint in the engine's cold store."""

    @property
    def states(self) -> StateLayout | None:
        """The layout of the model's states, besides the rows of every token; None = it has none."""

    @property
    def state_step(self) -> int:
        """The distance of possible states in tokens: states are at multiples of it."""

    @property
    def waited_s(self) -> float:
        """Total seconds that measuring has waited for users' requests or lost to them."""

    @property
    def ropes(self) -> tuple[Rope | None, ...]:
        """The rotary embedding of each layer that keeps all rows; None where a layer has none.

        Raises:
            ValueError: the rotary embedding of a layer is not understood.
        """

    def window_ropes(self) -> tuple[Rope | None, ...]:
        """Return the rotary embedding of each layer with a window; like ``ropes``."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of plain text, after the model's own first token (BOS), if any."""

    def prefill(self, tokens: Sequence[int], past: HeldSession = NOTHING) -> HeldSession:
        """Return the session of ``tokens``, up to the last state; the caller owns the arrays.

        ``past``: the session of some first tokens, but not all, to continue from; not changed.
        """

    def log_probs(self, session: HeldSession, tokens: Sequence[int]) -> np.ndarray:
        """Return the next token's log-probabilities after each of ``tokens``, after ``session``.

        fp32 (len(tokens), vocabulary), natural logarithm. ``session`` is not changed.
        """

    @property
    def sees_states(self) -> bool:
        """True if layers with windows and recurrent layers are observed, too."""

    def observe(self, tokens: Sequence[int], first: int, note: Note) -> KVRun:
        """Return the KV of ``tokens``; call ``note`` with each layer's use of earlier tokens.

        Layers with windows are included only if they still hold the first token, recurrent layers
        only if they can be differentiated.

        Raises:
            NotObservable: this model cannot be observed.
        """


class LayerNotice(NamedTuple):
    """The effect of errors in the K and V before some tokens on the output of one layer.

    Attributes:
        of_windows: the layer keeps only the newest tokens; it is numbered among such layers.
        layer: its number.
        rows: its K and V of a text's tokens, in the engine's dtype.
        gradients: with respect to K and V of the first tokens, of random projections of the layer's
            addition to the residual stream, divided by the size of the stream: fp32 (draws, KV
            heads, tokens, dim).
    """

    of_windows: bool
    layer: int
    rows: KVPair
    gradients: KVPair


class StateNotice(NamedTuple):
    """The effect of errors in one array of matrices of its state on a recurrent layer's output.

    Attributes:
        number: number of the array among those of a session's state that a codec may pack.
        matrices: the state before some tokens, fp32 (..., rows, width).
        gradients: with respect to the matrices, of random projections of the layer's addition to
            the residual stream at these tokens, divided by the size of the stream: fp32 (draws,
            ..., rows, width).
    """

    number: int
    matrices: np.ndarray
    gradients: np.ndarray


Note: TypeAlias = Callable[[LayerNotice | StateNotice], None]

NUM_DRAWS: Final = 3  # random projections of a layer's output, for each text
SEED_BYTES: Final = 6


def draw_seed(tokens: Sequence[int], at: int, number: int) -> int:
    """Return the seed of the random draws for a text, the same in every process.

    Args:
        at: index of the step's first token.
        number: number of the layer's call in the step.
    """
    known = np.array([*tokens, at, number], "<i8").tobytes()
    return int.from_bytes(blake2b(known, digest_size=SEED_BYTES).digest(), "little")
