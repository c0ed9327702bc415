"""Combines the codecs of all parts of a session: rows of every token, window rows, matrices.

The name of a preset for a model with states names them, as in ``dense3+state8``. Window rows are
packed by the same preset as all other rows, which has learned these layers separately, or by a
codec with more bits that learns nothing, as in ``dense3+window4``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from kvstore.codecs.base import Codec
from kvstore.codecs.catalogue import STATES, WINDOWS
from kvstore.codecs.names import parts_of
from kvstore.codecs.presets import open_codec, warm
from kvstore.codecs.profile import OF_STATES
from kvstore.codecs.states import (
    ARITHMETIC,
    DEALT,
    DEALT_ARITHMETIC,
    DealtCodec,
    MatrixCodec,
    dealt_codec,
    matrix_codec,
)
from kvstore.errors import UnknownCodec
from kvstore.shapes import KVLayout, StateLayout

if TYPE_CHECKING:
    from kvstore.codecs.profile import Profile


AnyMatrixCodec: TypeAlias = MatrixCodec | DealtCodec


@dataclass(frozen=True)
class SessionCodec:
    """The codecs of one preset. ``windows``: packs window rows; None = they are stored exactly."""

    kv: Codec
    windows: Codec | None
    matrices: AnyMatrixCodec

    @property
    def id(self) -> str:
        """The ids of all codecs, since quality was measured with all of them together."""
        windows = f"windows {self.windows.id}" if self.windows is not None else ""
        matrices = "" if self.matrices.exact else self.matrices.id
        return "+".join(filter(None, [self.kv.id, windows, matrices]))

    @property
    def exact(self) -> bool:
        """True if the whole session is restored bit for bit."""
        return self.kv.exact and self.windows is None and self.matrices.exact

    def check(self, layout: KVLayout, states: StateLayout) -> None:
        """Raise ``UnknownCodec`` if this model's rows cannot be packed by these codecs."""
        self.kv.check(layout)
        if self.windows is not None and states.windows is not None:
            self.windows.check(states.windows)

    def warm(self, layout: KVLayout, states: StateLayout) -> None:
        """Compile the kernels that this model needs. Takes seconds, once."""
        if layout.layers:
            warm(self.kv, layout)
        if self.windows is not None and states.windows is not None:
            warm(self.windows, states.windows)


def open_session_codec(name: str, profile: Profile | None, states: StateLayout) -> SessionCodec:
    """Return the preset of that name for a model with states; ``profile`` as for ``open_codec``.

    Raises:
        UnknownCodec: no such name, or it has to learn from the model first.
    """
    kv_name, window_name, state_name = parts_of(name)
    rows = profile is None or bool(profile.layout.layers)
    # For a model without layers that keep every token the profile has no arrays of such layers.
    kv = open_codec(kv_name, profile) if rows or not states.windows else open_codec("raw")
    windows = None
    if states.windows is not None:
        if window_name:
            windows = open_codec(WINDOWS[window_name])
        else:
            codec = open_codec(kv_name, profile.of_windows() if profile is not None else None)
            windows = None if codec.exact else codec
    return SessionCodec(kv, windows, _matrices(state_name if states.has_matrices else "", profile))


def _matrices(name: str, profile: Profile | None) -> AnyMatrixCodec:
    if name not in DEALT:
        return matrix_codec(name)
    if profile is None:  # for a plan, which packs nothing
        return dealt_codec(name, None, "")
    if OF_STATES not in profile.learned:
        raise UnknownCodec(f"nothing is known of this model's states for {name!r}; calibrate it")
    return dealt_codec(name, profile.learned[OF_STATES], profile.ids[OF_STATES])


def matrix_codec_of(codec_id: str) -> AnyMatrixCodec:
    """Return the codec that reads blobs with this id. Raises ``UnknownCodec``."""
    name, _, version = codec_id.partition(".")
    arithmetic, _, digits = version.partition("-")
    known = str(DEALT_ARITHMETIC if name in DEALT else ARITHMETIC)
    if name not in STATES or arithmetic != known or bool(digits) != (name in DEALT):
        raise UnknownCodec(f"states are packed with {codec_id!r}, of another release")
    return dealt_codec(name, None, digits) if name in DEALT else matrix_codec(name)
