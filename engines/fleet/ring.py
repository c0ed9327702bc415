"""The order in which a session's key looks for a replica; the same in every gateway.

Each replica has ``POINTS`` points on a ring, by a hash of its name. A key walks from its own point
on. So a replica that is away gives its sessions to many others, and no other session moves. To hash
a thousand names for each session takes milliseconds; to find a point takes microseconds.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import chain
from typing import Final

POINTS: Final = 128
_POINT_BYTES: Final = 8
_AT_ONCE: Final = 64 // _POINT_BYTES  # points of one hash


class Ring:
    """Replicas, by their numbers, around a circle of 64 bits."""

    def __init__(self, names: Sequence[str]) -> None:
        """``names``: of the replicas; a replica's number is its place in them."""
        points = sorted((point, i) for i, name in enumerate(names) for point in _points(name))
        self._points = [point for point, _ in points]
        self._numbers = [number for _, number in points]
        self._num_replicas = len(names)

    def walk(self, key: str) -> Iterator[int]:
        """Yield the number of each replica once, the nearest to the key first."""
        digest = blake2b(key.encode(), digest_size=_POINT_BYTES, person=b"session").digest()
        start = bisect(self._points, int.from_bytes(digest, "big"))
        seen: set[int] = set()
        for at in chain(range(start, len(self._points)), range(start)):
            number = self._numbers[at]
            if number not in seen:
                yield number
                seen.add(number)
                if len(seen) == self._num_replicas:
                    return


def _points(name: str) -> Iterator[int]:
    for i in range(POINTS // _AT_ONCE):
        digest = blake2b(f"{i} {name}".encode(), digest_size=64, person=b"replica").digest()
        for at in range(0, len(digest), _POINT_BYTES):
            yield int.from_bytes(digest[at : at + _POINT_BYTES], "big")
