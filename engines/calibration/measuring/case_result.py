"""The result of one case with one codec, as it is kept while others are still measured."""

from __future__ import annotations

from hashlib import blake2b

import msgspec
import numpy as np

from engines.calibration.measuring.cases import Case
from engines.calibration.measuring.metrics import Drift


class Positions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A ``Drift``, as it is kept."""

    kl: tuple[float, ...]
    same_top: tuple[bool, ...]
    loss: tuple[float, ...]
    delta_p: tuple[float, ...]

    @property
    def drift(self) -> Drift:
        return Drift(
            kl=np.array(self.kl),
            same_top=np.array(self.same_top, bool),
            loss=np.array(self.loss),
            delta_p=np.array(self.delta_p),
        )


def positions_of(drift: Drift) -> Positions:
    """The drift in the form in which it is kept."""
    return Positions(
        kl=tuple(drift.kl.tolist()),
        same_top=tuple(drift.same_top.tolist()),
        loss=tuple(drift.loss.tolist()),
        delta_p=tuple(drift.delta_p.tolist()),
    )


class CaseResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Figures of one codec in one case. Without a codec: not even the exact cache answers it."""

    case: str  # digest of its tokens
    text: str  # its name
    context: int  # tokens
    codec_id: str = ""
    found: bool | None = None  # of a needle: it was answered
    chains: dict[str, Positions] = {}  # of chains: at the answers, by kind of problem
    # For 1,000 tokens; None if it could not be timed.
    prefill_s: float | None = None
    restore_s: float | None = None
    # Of a text alone:
    moved: Positions | None = None
    bits: float = 0.0
    cos: tuple[float, float] = (0.0, 0.0)  # of K and V
    errors: tuple[float, float] = (0.0, 0.0)
    residual: float | None = None
    above_bound: float | None = None


def digest_of(case: Case) -> str:
    """The digest of a case's tokens, in hex."""
    tokens = np.array([*case.prefix, -1, *case.rest, -1, case.num_answer], "<i8")
    return blake2b(tokens.tobytes(), digest_size=12).hexdigest()
