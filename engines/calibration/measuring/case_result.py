"""The result of one case with one codec, as it is kept while others are still measured."""

from __future__ import annotations

from hashlib import blake2b

import msgspec
import numpy as np

from engines.calibration.measuring.cases import Case
from engines.calibration.measuring.metrics import Drift


class CaseResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Figures of one codec in one case. Without a codec: not even the exact cache answers it."""

    case: str  # digest of its tokens
    text: str  # its name
    context: int  # tokens
    codec_id: str = ""
    found: bool | None = None  # of a needle: it was answered
    # Of a text, all by position: see ``Drift``.
    kl: tuple[float, ...] = ()
    same_top: tuple[bool, ...] = ()
    loss: tuple[float, ...] = ()
    bits: float = 0.0
    cos: tuple[float, float] = (0.0, 0.0)  # of K and V
    errors: tuple[float, float] = (0.0, 0.0)
    residual: float | None = None
    above_bound: float | None = None

    @property
    def drift(self) -> Drift:
        """The drift at every position of a text."""
        return Drift(np.array(self.kl), np.array(self.same_top, bool), np.array(self.loss))


def digest_of(case: Case) -> str:
    """The digest of a case's tokens, in hex."""
    tokens = np.array([*case.prefix, -1, *case.rest, -1, case.num_answer], "<i8")
    return blake2b(tokens.tobytes(), digest_size=12).hexdigest()
