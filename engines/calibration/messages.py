"""The report of a measurement, with the bounds of theory."""

from __future__ import annotations

import msgspec

from kvstore.codecs.quality import Quality


class WaterFilling(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The bound of any transform over a scope, by the spectra of the samples (water-filling).

    Entry i of both tuples is a point of the curve: the least bits per element, gains not counted,
    for that residual error.
    """

    scope: str
    bits: tuple[float, ...]
    residual_errors: tuple[float, ...]


class CalibrationReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The report of a measurement; see ``engines.config.CalibrationOrder``."""

    fingerprint: str  # of the model, as its cold store names it
    engine: str
    dtype: str  # of the live cache
    rows: tuple[Quality, ...]
    bounds: tuple[WaterFilling, ...] = ()  # empty if nothing had to be learned
    profile: str = ""  # the file with the rows and the learned arrays; "" = nowhere
