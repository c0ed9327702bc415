"""Reads and writes the directory on a Redis server: one round of short batches, twice in a second.

Every read states how many bytes it takes at most, so a larger value written by another server costs
no more. No script runs on the server, and values are trusted only by their seals.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

from kvstore.directory import boards as boards
from kvstore.directory import entries
from kvstore.directory.boards import Board
from kvstore.directory.entries import NUM_SEATS, Names, Row
from kvstore.errors import Corrupt, TierUnavailable

KEPT_MS: Final = 24 * 3600 * 1000  # a server's values expire this long after their last writing
_SEAL_BYTES: Final = 64
_FREE_AFTER_S: Final = 60.0  # a seat whose board did not change for this long may be taken

Command: TypeAlias = tuple[bytes | str | int | memoryview, ...]


class Server(Protocol):
    """Runs commands; ``kvstore.tiers.redis_server.link.RedisLink`` runs them on a Redis server."""

    def run(self, commands: Sequence[Command]) -> list[Any]:
        """Return the replies in order, errors among them. Raises ``TierUnavailable``."""


class PageName(NamedTuple):
    """A page of a tenant's rows, by its number."""

    tenant: str
    page: int


class Seen(NamedTuple):
    """The result of one round."""

    now: float  # seconds of the Redis server's clock
    boards: list[Board]  # those that changed
    deletions: list[tuple[bytes, int]]
    is_new: bool  # the server has no data of ours, for instance because it was emptied


class Exchange:
    """One server's part of the directory. One thread at a time calls ``round``, any ``rows``."""

    def __init__(self, server: Server, names: Names, name: str, life: bytes) -> None:
        """Prepare an exchange without contacting the server.

        Args:
            name: of this gateway, the same in all its lives.
            life: of this process; ``boards.LIFE_BYTES`` random bytes.
        """
        self._server = server
        self._names = names
        self._name = name
        self._life = life
        self._seat: int | None = None
        self._headers: list[bytes] = [b""] * NUM_SEATS
        self._boards: dict[int, Board] = {}  # by seat
        self._num_deletions: dict[bytes, int] = {}  # read so far, by life
        self._written = b""  # the header of our own board

    def round(
        self,
        board: Board | None,
        pages: Mapping[PageName, list[Row]],
        known_deletions: bytes | None,
    ) -> Seen:
        """Write the given values, then read everything that is new.

        Args:
            board: our own; None if it is unchanged.
            pages: those of our own that changed; an empty one is removed.
            known_deletions: all that we know, packed; None if they are unchanged.

        Raises:
            TierUnavailable: the server does not answer; pass the same values again.
        """
        self._run(self._writes(pages, known_deletions))
        time, *headers = self._run(self._looks())
        if not time:
            raise TierUnavailable("the directory's server does not say what time it is")
        now = int(time[0]) + int(time[1]) / 1e6
        changed = [i for i, x in enumerate(headers) if x != self._headers[i]]
        found = dict(self._read_boards(changed, headers))
        self._headers = headers
        self._boards = {i: x for i, x in self._boards.items() if i not in changed} | found
        is_new = self._sit(board, now)
        others = [x for x in found.values() if x.life != self._life]
        return Seen(now, others, list(self._read_deletions(others)), is_new)

    def _writes(
        self, pages: Mapping[PageName, list[Row]], known: bytes | None
    ) -> Iterator[Command]:
        for (tenant, number), page in pages.items():
            name = self._names.rows(self._life, tenant, number)
            if page:
                sealed = self._names.seal(tenant).close(name.encode(), entries.pack(page))
                yield "SET", name, memoryview(sealed), "PX", KEPT_MS
            else:
                yield "UNLINK", name
        if known is not None:
            name = self._names.deletions(self._life)
            sealed = self._names.seal().close(name.encode(), known)
            yield "SET", name, memoryview(sealed), "PX", KEPT_MS

    def _looks(self) -> Iterator[Command]:
        yield ("TIME",)
        for seat in range(NUM_SEATS):
            yield "GETRANGE", self._names.board(seat), 0, boards.HEADER_BYTES - 1

    def _read_boards(
        self, seats: Sequence[int], headers: Sequence[bytes]
    ) -> Iterator[tuple[int, Board]]:
        there = [i for i in seats if headers[i] and headers[i] != self._written]
        last = boards.MAX_BOARD_BYTES + boards.HEADER_BYTES + _SEAL_BYTES
        wholes = self._run(("GETRANGE", self._names.board(i), 0, last) for i in there)
        for seat, whole in zip(there, wholes, strict=True):
            header, sealed = whole[: boards.HEADER_BYTES], whole[boards.HEADER_BYTES :]
            place = self._names.board(seat).encode() + header
            try:
                board = boards.unpack(self._names.seal().open(place, sealed), header)
            except Corrupt:
                continue
            if board is not None:
                yield seat, board

    def _read_deletions(self, found: Iterable[Board]) -> Iterator[tuple[bytes, int]]:
        """Yield the deletions on the boards; if some were missed, all deletions of that server."""
        for board in found:
            known = self._num_deletions.get(board.life)
            if known is None or board.num_deletions - len(board.recent) > known:
                yield from self._all_deletions(board.life)
            self._num_deletions[board.life] = board.num_deletions
            yield from board.recent
        lives = {x.life for x in self._boards.values()}
        self._num_deletions = {x: n for x, n in self._num_deletions.items() if x in lives}

    def _all_deletions(self, life: bytes) -> Iterator[tuple[bytes, int]]:
        name = self._names.deletions(life)
        (sealed,) = self._run([("GETRANGE", name, 0, entries.MAX_BYTES + _SEAL_BYTES)])
        if sealed:
            try:
                yield from entries.deletions_in(self._names.seal().open(name.encode(), sealed))
            except Corrupt:
                return

    # ---- our own board

    def _sit(self, board: Board | None, now: float) -> bool:
        """Write our board at our seat; returns True if the server had no board of ours."""
        is_new = self._seat is None or self._headers[self._seat] != self._written
        if is_new and self._seat is not None and self._headers[self._seat]:
            self._seat = None  # another server has taken it
        if self._seat is None:
            self._seat = self._free_seat(now)
        if board is not None and self._seat is not None:
            place = self._names.board(self._seat).encode() + board.header
            sealed = board.header + self._names.seal().close(place, boards.pack(board))
            self._run([("SET", self._names.board(self._seat), sealed, "PX", KEPT_MS)])
            self._written = self._headers[self._seat] = board.header
        return is_new

    def _free_seat(self, now: float) -> int | None:
        """Return the seat of our last life, else an empty one, else an abandoned one."""

        def rank(seat: int) -> tuple[int, float]:
            board = self._boards.get(seat)
            if board is not None and board.name == self._name:
                return 0, 0.0
            if not self._headers[seat]:
                return 1, float(seat)
            return (2, board.at) if board is not None else (3, 0.0)

        best = min(range(NUM_SEATS), key=rank)
        kind, since = rank(best)
        return None if kind == 2 and now - since < _FREE_AFTER_S else best

    @property
    def former_lives(self) -> list[bytes]:
        """The lives of this gateway before the present one, as far as their boards were seen."""
        return [x.life for x in self._boards.values() if x.name == self._name]

    # ---- rows

    def rows(
        self, lives: Sequence[bytes], tenant: str, session_id: str | None = None
    ) -> list[tuple[bytes, Row]]:
        """Read the rows of a tenant, or of one of its sessions, with the lives that wrote them.

        Raises ``TierUnavailable``.
        """
        numbers = range(entries.NUM_PAGES) if session_id is None else [entries.page_of(session_id)]
        seal, found = self._names.seal(tenant), []
        for life in lives:
            names = [self._names.rows(life, tenant, x) for x in numbers]
            last = entries.MAX_PAGE_BYTES + _SEAL_BYTES
            for name, sealed in zip(
                names, self._run(("GETRANGE", x, 0, last) for x in names), strict=True
            ):
                if not sealed:
                    continue
                try:
                    page = entries.rows_of(seal.open(name.encode(), sealed))
                except Corrupt:
                    continue
                found += [(life, x) for x in page if session_id in (None, x.id)]
        return found

    def _run(self, commands: Iterable[Command]) -> list[Any]:
        """Run commands; replies that are errors (refused, or of another type) become empty."""
        listed = list(commands)
        replies = self._server.run(listed) if listed else []
        return [b"" if isinstance(x, Exception) else x for x in replies]
