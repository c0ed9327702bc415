"""Guards the disk tier's calls: none runs after ``close``, and LMDB's errors become ours."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import lmdb

from kvstore.errors import TierUnavailable

log = logging.getLogger(__name__)

# EIO: LMDB's error for a write that a full file system cut short.
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
_DAMAGE = (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.PanicError)


def is_want_of_room(error: lmdb.Error) -> bool:
    """True if an error means that the map or the file system is full."""
    return isinstance(error, lmdb.MapFullError) or error.code in _NO_ROOM


class CallGuard:
    """Lets calls in until it is closed. Thread-safe.

    Closing an LMDB environment unmaps the file; a thread still reading would crash the process,
    so ``close`` waits until all calls have ended.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._closed = False
        self._damaged = False
        self._mending = False
        self._num_errors = 0

    @property
    def num_errors(self) -> int:
        """The number of errors counted so far."""
        return self._num_errors

    @property
    def damaged(self) -> bool:
        """True if a call found the tree damaged; later ones are refused until it is mended."""
        return self._damaged

    @contextmanager
    def mend(self) -> Iterator[bool]:
        """Keep all calls out while a damaged file is replaced.

        Yields False if there is nothing to mend. If the block raises, the damage remains.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._mending)
            self._mending = self._damaged and not self._closed
            if not self._mending:
                yield False
                return
            self._changed.wait_for(lambda: self._inside == 0)
        try:
            yield True
            self._damaged = False
        finally:
            with self._changed:
                self._mending = False
                self._changed.notify_all()

    @contextmanager
    def call(self) -> Iterator[None]:
        """Guard one use of the LMDB environment; every use must be inside such a call.

        Raises:
            TierUnavailable: closed, found damaged earlier, or LMDB or the file system failed now.
        """
        self._enter()
        try:
            yield
        except (lmdb.Error, OSError) as error:
            self.count(error)
            raise TierUnavailable(f"disk tier: {error}") from error
        finally:
            self._leave()

    def _enter(self) -> None:
        with self._changed:
            if self._closed:
                raise TierUnavailable("disk tier: closed")
            if self._damaged:
                raise TierUnavailable("disk tier: damaged; it starts empty at the next write")
            self._inside += 1

    def _leave(self) -> None:
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()

    def count(self, error: lmdb.Error | OSError) -> None:
        """Count an error; the first one, and the first sign of damage, are logged as well."""
        with self._changed:
            self._num_errors += 1
            damage = isinstance(error, _DAMAGE) and not self._damaged
            self._damaged = self._damaged or damage
            first = self._num_errors == 1
        if first or damage:
            log.warning("disk tier: %s (further errors are only counted)", error)

    def close(self) -> bool:
        """Refuse further calls and wait for those inside; False if it was closed before."""
        with self._changed:
            if self._closed:
                return False
            self._closed = True
            self._changed.wait_for(lambda: self._inside == 0 and not self._mending)
            return True
