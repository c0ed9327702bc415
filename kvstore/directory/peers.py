"""The other servers, by their latest boards, and which of them are alive."""

from __future__ import annotations

from typing import Final, NamedTuple

from kvstore.directory.board import LEASE_S, Board
from kvstore.directory.names import NUM_SEATS

_MOST: Final = 2 * NUM_SEATS


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
