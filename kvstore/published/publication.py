"""A profile that an engine has published: its description, and its names on the server.

    thermocline:profiles:1:{KEY}:MODEL:STAGE             a sealed ``Publication``
                                :MODEL:STAGE:DIGEST:N    a sealed piece of its file, N from 0

KEY identifies the engines' common secret without revealing it; its braces keep all keys in one slot
of a cluster. MODEL is a keyed hash of everything that must be alike. All values are encrypted with
AES-256-GCM, with a key derived from the secret, and the name is bound in: a value that was changed
or moved counts as damaged.
"""

from __future__ import annotations

import hmac
from typing import Annotated, Final, Literal, TypeAlias

import msgspec

from kvstore.codecs.calibrated import ARITHMETIC
from kvstore.codecs.profile import VERSION
from kvstore.errors import Corrupt
from kvstore.shapes import KVLayout
from kvstore.tiers.seal import SEAL_BYTES, Seal

# A profile learned from a few texts, and one learned from more of them afterwards.
Stage: TypeAlias = Literal["first", "further"]

PIECE_BYTES: Final = 256 << 10
MAX_BYTES: Final = 256 << 20  # of a file
MAX_NOTICE_BYTES: Final = 16 << 10  # of a sealed ``Publication``
MAX_NAME: Final = 100  # of an engine's machine
DIGEST_BYTES: Final = 32


class Publication(msgspec.Struct, frozen=True):
    """Describes a profile that an engine publishes.

    ``ids``: see ``Profile.ids``. ``digest``: BLAKE2b of the file.
    """

    by: Annotated[str, msgspec.Meta(max_length=MAX_NAME)]  # the machine
    nbytes: Annotated[int, msgspec.Meta(gt=0, le=MAX_BYTES)]
    digest: Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
    ids: dict[str, str]

    @property
    def num_pieces(self) -> int:
        return -(-self.nbytes // PIECE_BYTES)

    def piece_bytes(self, number: int) -> int:
        """Bytes of a piece before it is sealed."""
        return min(PIECE_BYTES, self.nbytes - number * PIECE_BYTES)


class PublishedNames:
    """Names and seals of the publications of one model. Thread-safe.

    Args:
        secret: the engines' common one.
        fingerprint: of the model, as its cold store names it.
        layout: of the growing part of its cache.
    """

    def __init__(self, secret: bytes, fingerprint: str, layout: KVLayout) -> None:
        self._seal = Seal(secret, "profiles", encrypt=True)
        alike = msgspec.json.encode((fingerprint, ARITHMETIC, VERSION, layout))
        key = self._seal.key_name
        model = hmac.digest(secret, b"thermocline profiles of " + alike, "sha256")[:16]
        self._prefix = f"thermocline:profiles:1:{{{key.hex()}}}:{model.hex()}"

    def notice(self, stage: Stage) -> bytes:
        return f"{self._prefix}:{stage}".encode()

    def pieces(self, stage: Stage, publication: Publication) -> list[bytes]:
        digest = publication.digest[:8].hex()
        return [
            f"{self._prefix}:{stage}:{digest}:{number}".encode()
            for number in range(publication.num_pieces)
        ]

    def close(self, name: bytes, content: bytes) -> bytes:
        """Seal the value of a name."""
        return bytes(self._seal.close(name, content))

    def open(self, name: bytes, sealed: bytes) -> bytes:
        """Open the value of a name. Raises ``Corrupt``: it was not sealed this way."""
        return bytes(self._seal.open(name, sealed))

    def open_notice(self, name: bytes, sealed: bytes) -> Publication:
        """Read an engine's notice. Raises ``Corrupt``."""
        try:
            return msgspec.msgpack.decode(self.open(name, sealed), type=Publication)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Corrupt(f"what is said of it is not to be read: {error}") from error


def sealed_bytes(nbytes: int) -> int:
    """Return the size of a number of bytes once they are sealed."""
    return nbytes + SEAL_BYTES
