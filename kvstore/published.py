"""Profiles that engines publish on a Redis server for engines with the same secret.

    thermocline:profiles:1:{KEY}:MODEL:STAGE             a sealed ``Publication``
                                :MODEL:STAGE:DIGEST:N    a sealed piece of its file, N from 0

KEY identifies the engines' common secret without revealing it; its braces keep all keys in one slot
of a cluster. MODEL is a keyed hash of everything that must be alike. All values are encrypted with
AES-256-GCM, with a key derived from the secret, and the name is bound in: a value that was changed
or moved counts as damaged.

A notice is written once, by the first engine, and only after all pieces exist. Pieces are named
after their file, so no engine changes another engine's pieces. Both expire some time after the last
engine that uses them was there.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal, TypeAlias

import msgspec

from kvstore.codecs.calibrated import ARITHMETIC
from kvstore.codecs.profile import VERSION
from kvstore.errors import Corrupt, TierUnavailable
from kvstore.shapes import KVLayout
from kvstore.tiers.seal import SEAL_BYTES, Seal

if TYPE_CHECKING:
    from kvstore.tiers.redis_server.link import Command, RedisLink, Reply

# A profile learned from a few texts, and one learned from more of them afterwards.
Stage: TypeAlias = Literal["first", "further"]

PIECE_BYTES: Final = 256 << 10
MAX_BYTES: Final = 256 << 20  # of a file
MAX_NOTICE_BYTES: Final = 16 << 10  # of a sealed ``Publication``
MAX_NAME: Final = 100  # of an engine's machine
DIGEST_BYTES: Final = 32
TTL_MS: Final = 30 * 86_400_000
UNFINISHED_MS: Final = 600_000  # pieces whose notice never came expire by themselves
BATCH: Final = 8  # pieces that travel together


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


class Shelf:
    """The profiles of one model on one server. Thread-safe.

    Every method that asks the server raises ``TierUnavailable`` if it does not answer or refuses.

    Args:
        link: owned by this object.
    """

    def __init__(self, link: RedisLink, names: PublishedNames) -> None:
        self._link = link
        self._names = names

    def look(self, stage: Stage) -> Publication | None:
        """Read the published notice; None if there is none. Raises ``Corrupt`` if it is damaged."""
        name = self._names.notice(stage)
        (raw,) = self._run([("GETRANGE", name, 0, MAX_NOTICE_BYTES)])
        if not raw:
            return None
        return self._names.open_notice(name, raw)

    def fetch(self, stage: Stage, publication: Publication, path: Path) -> None:
        """Write the published profile to a file.

        Raises:
            Corrupt: a piece is missing or damaged.
            OSError: the file cannot be written.
        """
        names = self._names.pieces(stage, publication)
        digest = blake2b(digest_size=DIGEST_BYTES)
        with path.open("wb") as file:
            for numbers in _batches(len(names)):
                sizes = [sealed_bytes(publication.piece_bytes(x)) for x in numbers]
                asked = zip(numbers, sizes, strict=True)
                replies = self._run([("GETRANGE", names[x], 0, size) for x, size in asked])
                for number, raw in zip(numbers, replies, strict=True):
                    if not raw:
                        raise Corrupt(f"{_piece(number, names)} is missing")
                    piece = self._names.open(names[number], raw)
                    digest.update(piece)
                    file.write(piece)
        if digest.digest() != publication.digest:
            raise Corrupt("its pieces are not those of one file")

    def publish(self, stage: Stage, publication: Publication, path: Path, *, anew: bool) -> bool:
        """Publish a file; False: another one was published before.

        Args:
            publication: made by ``described`` from the same file.
            anew: replace the existing one, since it is damaged.

        Raises ``OSError``: the file cannot be read.
        """
        notice = self._names.notice(stage)
        if not anew and self._run([("EXISTS", notice)])[0]:
            return False
        names = self._names.pieces(stage, publication)
        with path.open("rb") as file:
            for numbers in _batches(len(names)):
                pieces = [file.read(publication.piece_bytes(x)) for x in numbers]
                self._run(
                    [
                        ("SET", names[x], self._names.close(names[x], piece), "PX", UNFINISHED_MS)
                        for x, piece in zip(numbers, pieces, strict=True)
                    ]
                )
        sealed = self._names.close(notice, msgspec.msgpack.encode(publication))
        only_first = () if anew else ("NX",)
        (reply,) = self._run([("SET", notice, sealed, "PX", TTL_MS, *only_first)])
        if reply is None:  # another engine was first; our pieces expire
            return False
        self.refresh(stage, publication)
        return True

    def refresh(self, stage: Stage, publication: Publication) -> bool:
        """Extend the expiry of the published profile; False: a part of it is gone."""
        names = [self._names.notice(stage), *self._names.pieces(stage, publication)]
        return all(x == 1 for x in self._run([("PEXPIRE", x, TTL_MS) for x in names]))

    def close(self) -> None:
        """End the connection; a thread that waits for it gets ``TierUnavailable``."""
        self._link.close()

    def _run(self, commands: Sequence[Command]) -> list[Reply]:
        replies = self._link.run(commands)
        for reply in replies:
            if isinstance(reply, Exception):
                if str(reply).startswith("WRONGTYPE"):
                    raise Corrupt("something else lies in its place")
                raise TierUnavailable(f"redis: {reply}")
        return replies


def described(path: Path, by: str, ids: dict[str, str]) -> Publication:
    """Describe a profile's file for publication.

    Raises:
        ValueError: it is larger than the limit; the message says so.
        OSError: it cannot be read.
    """
    nbytes = path.stat().st_size
    if not 0 < nbytes <= MAX_BYTES:
        raise ValueError(f"it has {nbytes >> 20} MiB, more than {MAX_BYTES >> 20}")
    digest = blake2b(digest_size=DIGEST_BYTES)
    with path.open("rb") as file:
        while block := file.read(PIECE_BYTES):
            digest.update(block)
    return Publication(by[:MAX_NAME], nbytes, digest.digest(), ids)


def _batches(count: int) -> Iterator[list[int]]:
    yield from (list(range(x, min(x + BATCH, count))) for x in range(0, count, BATCH))


def _piece(number: int, names: Sequence[bytes]) -> str:
    return f"piece {number + 1} of {len(names)}"
