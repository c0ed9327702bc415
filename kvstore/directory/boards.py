"""The boards of servers: each one's report to all others, and who is alive by them.

The other servers read it twice in a second. A board with a lower number than an earlier one of the
same life is a replay, and is ignored. A server lives as long as its board changes: each reader
measures that by its own clock, and by the Redis server's when it sees a board for the first time.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

from kvstore.directory.entries import NUM_SEATS
from kvstore.session import TierName

LIFE_BYTES: Final = 8
HEADER_BYTES: Final = LIFE_BYTES + 8
MAX_BOARD_BYTES: Final = 256 << 10
MAX_RECENT: Final = 256  # deletions
MAX_ORDERS: Final = 64  # and as many answers
LEASE_S: Final = 10.0
_MOST: Final = 2 * NUM_SEATS


class Order(msgspec.Struct, frozen=True, array_like=True):
    """A verb on a session, for the server that has it.

    It addresses one life of that server. ``seen`` is the number of that server's board when the
    order was written: from it the server knows how old the order is, without comparing clocks.
    """

    number: int
    to: bytes  # a life
    seen: int
    verb: str  # demote, prefetch, pin, unpin
    tenant: str
    model: str
    id: str
    tier: TierName | None = None


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """The answer to an order: an HTTP status and a body, as the server itself would answer."""

    to: bytes  # a life
    number: int  # of the order
    status: int
    body: bytes


class Board(msgspec.Struct, frozen=True, array_like=True):
    """Everything that a server reports to the others at one moment."""

    name: str  # the same in all lives
    life: bytes
    number: int  # grows with each writing
    at: float  # seconds of the Redis server's clock
    clock: int  # see ``entries``
    num_deletions: int  # reported so far, the recent ones included
    recent: list[tuple[bytes, int]] = []  # marks and epochs; all others are in its ``deletions``
    orders: list[Order] = []
    answers: list[Answer] = []
    num_homes: int = 0  # reported so far, the latest ones below included
    homes: list[tuple[bytes, bytes]] = []  # marks of sessions, and of the engines that have them

    @property
    def header(self) -> bytes:
        """The unencrypted beginning of the stored value: shows whether the rest is new."""
        return self.life + self.number.to_bytes(8, "big")


_decoder = msgspec.msgpack.Decoder(Board)


def pack(board: Board) -> bytes:
    """Write a board; ``Names.seal`` seals it."""
    return msgspec.msgpack.encode(board)


def unpack(packed: bytes | memoryview, header: bytes) -> Board | None:
    """Read a board that was sealed; None if from another release, or not of this header."""
    try:
        board = _decoder.decode(packed)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return board if board.header == header else None


class Peer(NamedTuple):
    """Another server's latest board, and when it changed by our own clock."""

    board: Board
    changed_at: float


class Peers:
    """The other servers by name."""

    def __init__(self) -> None:
        self._peers: dict[str, Peer] = {}

    def see(self, board: Board, now: float, server_now: float) -> bool:
        """Accept a board; returns False if it is older than one seen before.

        Args:
            now: our own clock, which never jumps.
            server_now: the Redis server's clock.
        """
        known = self._peers.get(board.name)
        age_s = 0.0
        if known is None or known.board.life != board.life:
            age_s = max(0.0, server_now - board.at)
            if known is not None and board.at < known.board.at and self._lives(known, now):
                return False
        elif board.number <= known.board.number:
            return False
        self._peers[board.name] = Peer(board, now - age_s)
        if len(self._peers) > _MOST:
            del self._peers[min(self._peers, key=lambda x: self._peers[x].changed_at)]
        return True

    def lives(self, name: str, now: float) -> bool:
        """Return whether a server's lease holds: its board has changed lately."""
        peer = self._peers.get(name)
        return peer is not None and self._lives(peer, now)

    def _lives(self, peer: Peer, now: float) -> bool:
        return now - peer.changed_at < LEASE_S

    def boards(self) -> list[Board]:
        """List the latest board of each server, also of those whose lease has ended."""
        return [x.board for x in self._peers.values()]

    def by_life(self, life: bytes) -> Board | None:
        """Return the board of a life; None if it is not the latest of any server."""
        return next((x.board for x in self._peers.values() if x.board.life == life), None)
