"""The errors of cold KV.

    ColdError
    +-- Unusable          this blob must not be offered; the caller recomputes
    |   +-- Corrupt       checksum, length or structure is wrong
    |   +-- Mismatch      undamaged, but for another model, layout or version
    |       +-- ForeignCodec      packed by a codec or a profile that this store does not have
    |           +-- RefusedCodec  packed by a codec that was withdrawn or may not serve here
    +-- TierUnavailable   the tier did not answer (down, deadline, breaker open)
    |   +-- TierInUse     the tier's folder belongs to another process
    +-- StoreClosed       the store is shutting down
    +-- UnknownCodec      no codec has that name, or the codec does not support this layout
    +-- CodecRefused      the codec was not measured on this model, or its loss exceeds the bound

Only the last two ever reach a user: an engine whose settings name such a codec does not start. Each
of the others costs at most a recompute.
"""

from __future__ import annotations


class ColdError(Exception):
    """Root of all errors that the cold store raises on purpose."""


class Unusable(ColdError):
    pass


class Corrupt(Unusable):
    """Checksum, length or structure of packed bytes is wrong."""


class Mismatch(Unusable):
    """Packed bytes are undamaged, but of another model, codec, layout or version."""


class ForeignCodec(Mismatch):
    """Packed bytes are of a codec that this store does not have.

    Args:
        codec_id: the id of that codec; "" if it could not be read.
    """

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
    """No codec has this name, or the codec does not support this layout."""


class CodecRefused(ColdError):
    pass
