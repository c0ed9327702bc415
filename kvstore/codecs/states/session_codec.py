"""How all parts of a session are packed: rows of every token, rows of windows, matrices.

A preset of a model with states names them, as in ``dense3+state8``. Windows' rows go through the
same preset as all others, which has learned these layers by themselves, or through a finer codec
that learns nothing, as in ``dense3+window4``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.codecs.base import Codec
from kvstore.codecs.names import WINDOWS, parts_of
from kvstore.codecs.presets import open_codec, warm
from kvstore.codecs.states.matrices import MatrixCodec, matrix_codec
from kvstore.shapes import KVLayout, StateLayout

if TYPE_CHECKING:
    from kvstore.codecs.profile import Profile


@dataclass(frozen=True)
class SessionCodec:
    """The codecs of one preset. ``windows``: of windows' rows; None = they are kept as they are."""

    kv: Codec
    windows: Codec | None
    matrices: MatrixCodec

    @property
    def id(self) -> str:
        """The ids of all of them: what was measured was measured with all."""
        windows = f"windows {self.windows.id}" if self.windows is not None else ""
        matrices = "" if self.matrices.exact else self.matrices.id
        return "+".join(filter(None, [self.kv.id, windows, matrices]))

    @property
    def exact(self) -> bool:
        """True if the whole session comes back bit for bit."""
        return self.kv.exact and self.windows is None and self.matrices.exact

    def check(self, layout: KVLayout, states: StateLayout) -> None:
        """Raise ``UnknownCodec`` if this model's rows cannot be packed so."""
        self.kv.check(layout)
        if self.windows is not None and states.windows is not None:
            self.windows.check(states.windows)

    def warm(self, layout: KVLayout, states: StateLayout) -> None:
        """Compile what this model needs. Takes seconds once."""
        if layout.layers:
            warm(self.kv, layout)
        if self.windows is not None and states.windows is not None:
            warm(self.windows, states.windows)


def open_session_codec(name: str, profile: Profile | None, states: StateLayout) -> SessionCodec:
    """Return the preset of that name for a model with states; ``profile`` as for ``open_codec``.

    Raises:
        UnknownCodec: no such name, or it has to learn the model first.
    """
    kv_name, window_name, state_name = parts_of(name)
    rows = profile is None or bool(profile.layout.layers)
    # A model without growing rows never learned any.
    kv = open_codec(kv_name, profile) if rows or not states.windows else open_codec("raw")
    windows = None
    if states.windows is not None:
        if window_name:
            windows = open_codec(WINDOWS[window_name])
        else:
            codec = open_codec(kv_name, profile.of_windows() if profile is not None else None)
            windows = None if codec.exact else codec
    return SessionCodec(kv, windows, matrix_codec(state_name if states.has_matrices else ""))
