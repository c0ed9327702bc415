"""The errors of cold KV.

    ColdError
    +-- Unusable          this blob must not be offered; the caller recomputes
    |   +-- Corrupt       checksum, length or structure is wrong
    |   +-- Mismatch      whole, but for another model, layout or version
    |       +-- ForeignCodec      in a codec, or by a profile, that is not known here
    |           +-- RefusedCodec  in one that was taken back, or may not serve
    +-- TierUnavailable   the tier did not answer (down, deadline, breaker open)
    |   +-- TierInUse     its folder belongs to another process
    +-- StoreClosed       the store is shutting down
    +-- UnknownCodec      no codec of that name, or it cannot take this layout
    +-- CodecRefused      it was not measured on this model, or costs it more than the bound

Only the last two ever reach a user, by ending the start of an engine whose codec was named: the
worst outcome of each other one is a recompute.
"""

from __future__ import annotations


class ColdError(Exception):
    """Root of all errors that the cold store raises on purpose."""


class Unusable(ColdError):
    pass


class Corrupt(Unusable):
    """Checksum, length or structure of packed bytes is wrong."""


class Mismatch(Unusable):
    """Packed bytes are whole, but of another model, codec, layout or version."""


class ForeignCodec(Mismatch):
    """``codec_id``: of the codec that is not known."""

    def __init__(self, message: str, codec_id: str = "") -> None:
        super().__init__(message)
        self.codec_id = codec_id


class RefusedCodec(ForeignCodec):
    pass


class TierUnavailable(ColdError):
    pass


class TierInUse(TierUnavailable):
    pass


class StoreClosed(ColdError):
    pass


class UnknownCodec(ColdError):
    """No codec has this name, or it cannot take this layout."""


class CodecRefused(ColdError):
    pass
