"""The protocol by which an engine is measured: sessions are taken out, packed, and put back."""

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
    """The engine ends, or measuring was given up elsewhere."""


class NotObservable(Exception):
    """A layer's use of stored KV cannot be observed. The message is one sentence."""


@dataclass(frozen=True)
class HeldSession:
    """All that an engine keeps of ``num_tokens`` tokens: rows of every token, and its state.

    Attributes:
        state: as the engine hands it to a cold store; None where rows are all there is.
        prompt: the prompt that these tokens begin, where an engine needs it to go on from them.
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
    """A model whose sessions can be taken out and put back.

    That of an engine that serves raises ``Interrupted`` from every method once the engine ends.
    """

    @property
    def layout(self) -> KVLayout:
        """Layers, shapes and dtype of the growing cache."""

    @property
    def fingerprint(self) -> str:
        """The same that the engine gives its cold store."""

    @property
    def states(self) -> StateLayout | None:
        """Layout of all that the model keeps besides rows of every token; None = nothing."""

    @property
    def state_step(self) -> int:
        """The number of tokens from one possible state to the next: states are at multiples."""

    @property
    def waited_s(self) -> float:
        """Seconds, since the start, that work given to it stood still or was lost for requests."""

    @property
    def ropes(self) -> tuple[Rope | None, ...]:
        """The rotary embedding of each layer that keeps all rows; None where a layer has none.

        Raises:
            ValueError: a layer turns its keys in a way that is not understood.
        """

    def window_ropes(self) -> tuple[Rope | None, ...]:
        """The same of the layers with windows."""

    def encode(self, text: str) -> list[int]:
        """The token ids of plain text, after the model's own first token (BOS) if it wants one."""

    def prefill(self, tokens: Sequence[int], past: HeldSession = NOTHING) -> HeldSession:
        """Compute the session of ``tokens``, up to the last state; the caller owns the arrays.

        ``past``: of the first tokens, but not of all, to go on from; it is not changed.
        """

    def log_probs(self, session: HeldSession, tokens: Sequence[int]) -> np.ndarray:
        """Log-probabilities of the next token after each of ``tokens``, which follow ``session``.

        fp32 (len(tokens), vocabulary), natural logarithm. ``session`` is not changed.
        """

    @property
    def sees_states(self) -> bool:
        """True if layers with windows and recurrent layers are observed, too."""

    def observe(self, tokens: Sequence[int], first: int, note: Note) -> KVRun:
        """Compute the KV of ``tokens``, noting what each layer notices from ``tokens[first]`` on.

        Of layers with windows only those that still hold the first token are noted, of recurrent
        layers those that can be differentiated.

        Raises:
            NotObservable: nothing can be seen of this model.
        """


class LayerNotice(NamedTuple):
    """Reports how errors in the K and V before some tokens move one layer.

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
    """Reports how errors in one array of matrices of its state move a recurrent layer.

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
