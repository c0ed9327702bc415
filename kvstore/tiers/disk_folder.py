"""The folder of a disk tier: private, owned by one process, verified before it is opened.

    owner.lock    held with flock while the tier is open; the kernel drops it with the process
    data.mdb      the LMDB file; lock.mdb is its reader table
    closed        written at a clean close: size and modification time of data.mdb then

LMDB trusts its file: a wrong page number in a damaged tree, or a file that ends too early, is not
reported as an error but aborts the engine or ends it with SIGBUS. So a file whose size and time
differ from those in ``closed`` is first checked by py-lmdb's verifier, which uses plain reads and
trusts nothing (about 0.5 s per GB). A file that fails is deleted, and so is one in the layout of
another release; the tier then starts empty. A file of another program is left alone, and the folder
is not used. The verifier does not check the blobs; the store verifies their checksums on every
read.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import shutil
import time
from pathlib import Path

import lmdb
from lmdb.verify import VerifyError
from lmdb.verify import verify as verify_pages

from kvstore.errors import TierInUse, TierUnavailable
from kvstore.tiers.lmdb_blobs import DATABASES

log = logging.getLogger(__name__)

_DAMAGED = (
    lmdb.CorruptedError,
    lmdb.InvalidError,
    lmdb.PageNotFoundError,
)
SPARE_MAP_BYTES = 64 << 20  # for deletions from a file that is too long: they need new pages, too
_OURS = re.compile(rb"(index|pieces)\.\d+")  # databases of any release


class DiskFolder:
    """Exclusive ownership of one folder, from construction until ``release``.

    Raises:
        TierInUse: another process owns it.
        TierUnavailable: it cannot be created or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.chmod(0o700)
            self._lock_fd = self._take()
        except OSError as error:
            raise TierUnavailable(
                f"the disk tier cannot use {path}: {error.strerror or error}; "
                "choose another folder with disk_path, or set disk_bytes to 0"
            ) from error

    @property
    def data(self) -> Path:
        """The path of the LMDB file."""
        return self.path / "data.mdb"

    def _take(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(self.path / "owner.lock", flags, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.read(fd, 32).decode("ascii", "replace").strip() or "unknown"
            os.close(fd)
            raise TierInUse(
                f"{self.path} is in use by another process (pid {owner}): two engines cannot "
                "share one disk tier; stop that one, or give this one another disk_path"
            ) from error
        os.ftruncate(fd, 0)
        os.write(fd, b"%d\n" % os.getpid())
        return fd

    def open(self, map_bytes: int) -> lmdb.Environment:
        """Open the database after verifying it, or a new one if the file is damaged.

        A file longer than ``map_bytes`` (the budget was lowered) gets a map that holds it, so that
        the tier can evict and then call ``compact``.

        Raises:
            TierUnavailable: the file system refuses.
        """
        if self.data.is_symlink():
            raise TierUnavailable(f"{self.data} is a symbolic link; remove it to use this folder")
        shutil.rmtree(self.path / "compact", ignore_errors=True)
        # It is the reader table of a process that has ended, since only this one owns the folder.
        (self.path / "lock.mdb").unlink(missing_ok=True)
        if damage := self._damage():
            self._discard(damage)
        (self.path / "closed").unlink(missing_ok=True)
        try:
            try:
                env = self._open(map_bytes)
            except lmdb.Error as error:
                self._discard(self._damage_of(error))
                env = self._open(map_bytes)
        except (lmdb.Error, OSError) as error:
            raise TierUnavailable(f"the disk tier cannot open {self.data}: {error}") from error
        return env

    def _open(self, map_bytes: int) -> lmdb.Environment:
        if self.data.exists() and self.data.stat().st_size > map_bytes:
            map_bytes = self.data.stat().st_size + SPARE_MAP_BYTES
        # metasync=False: one fdatasync per commit, which covers the blobs of this commit and the
        # root page of the one before. A kill loses nothing; a power cut loses the last commit and
        # never the file. (sync=False writes about 2.5 times as fast and risks the whole file.)
        env = lmdb.Environment(
            str(self.path),
            map_size=map_bytes,
            metasync=False,
            mode=0o600,
            max_dbs=len(DATABASES),
            max_spare_txns=4,
        )
        try:
            with env.begin() as txn:
                names = [name for name, _ in txn.cursor()]
            strange = [name for name in names if name not in DATABASES]
            if strange and all(map(_OURS.fullmatch, strange)):
                raise lmdb.InvalidError("it has the layout of another release")
            if strange and (len(strange) < len(names) or self._verify()):
                raise lmdb.InvalidError(f"it has an unknown database {strange[0]!r}")
            if strange:  # a whole file without any database of ours
                raise TierUnavailable(
                    f"{self.data} is another program's: it holds {strange[0]!r}; choose another "
                    "folder with disk_path"
                )
        except (lmdb.Error, TierUnavailable):
            env.close()
            raise
        return env

    def _damage(self) -> str:
        """Return why data.mdb must not be opened; "" if it may be."""
        if not self.data.exists() or self._size_and_time_at_close() == self._size_and_time():
            return ""
        return self._verify()

    def _damage_of(self, error: lmdb.Error) -> str:
        """Return the damage to the file that caused an error.

        Raises:
            lmdb.Error: the file is undamaged; the disk or the memory may be full.
        """
        if isinstance(error, _DAMAGED):
            return str(error)
        if problem := self._verify():
            return f"{error}: {problem}"
        raise error

    def _verify(self) -> str:
        """Return the first problem that the verifier finds in data.mdb; "" if there is none."""
        started = time.monotonic()
        try:
            problems: list[str] = verify_pages(str(self.path))  # type: ignore[no-untyped-call]
        except VerifyError as error:
            return str(error)
        except OSError as error:
            if error.errno == errno.EIO:  # the disk is faulty; other errors may be temporary
                return str(error)
            raise TierUnavailable(f"the disk tier cannot read {self.data}: {error}") from error
        elapsed_s = time.monotonic() - started
        log.info("verified %s, not closed cleanly last time, in %.1f s", self.data, elapsed_s)
        return problems[0] if problems else ""

    def _discard(self, why: str) -> None:
        if not self.data.exists():  # an earlier attempt stopped at this point
            return
        nbytes = self.data.stat().st_size
        log.warning("the disk tier starts empty: %s, %d bytes, deleted: %s", self.data, nbytes, why)
        self.data.unlink()

    def start_over_if_damaged(
        self, env: lmdb.Environment, map_bytes: int, error: lmdb.Error
    ) -> lmdb.Environment:
        """Close ``env``, and open an empty file if damage to the present one caused ``error``.

        Raises:
            lmdb.Error: ``error`` itself, since the file is undamaged.
        """
        env.close()
        return self.start_over(env, map_bytes, why=self._damage_of(error))

    def start_over(self, env: lmdb.Environment, map_bytes: int, why: str) -> lmdb.Environment:
        """Close ``env``, delete its file, and open an empty one."""
        env.close()
        self._discard(why)
        return self.open(map_bytes)

    def compact(self, env: lmdb.Environment, map_bytes: int) -> lmdb.Environment:
        """Close ``env``, rewrite its file without free pages, and open the new file.

        LMDB files never shrink by themselves. If the new file exceeds ``map_bytes`` or cannot be
        written (perhaps because the disk is full), an empty one is opened instead.
        """
        target = self.path / "compact"
        target.mkdir(mode=0o700)
        try:
            env.copy(str(target), compact=True)
            copy = target / "data.mdb"
            if copy.stat().st_size > map_bytes:
                return self.start_over(env, map_bytes, why="it cannot be shrunk")
            copy.chmod(0o600)
            env.close()
            copy.replace(self.data)
            return self.open(map_bytes)
        except lmdb.Error as error:
            return self.start_over(env, map_bytes, why=f"it cannot be shrunk: {error}")
        finally:
            shutil.rmtree(target, ignore_errors=True)

    def _size_and_time(self) -> bytes:
        stat = self.data.stat()
        return b"%d %d" % (stat.st_size, stat.st_mtime_ns)

    def _size_and_time_at_close(self) -> bytes:
        try:
            return (self.path / "closed").read_bytes()
        except OSError:
            return b""

    def release(self, *, clean: bool) -> None:
        """Give up ownership of the folder.

        Args:
            clean: whether the database was synced and closed without an error.
        """
        if clean:
            with contextlib.suppress(OSError):  # a failure costs the next start a verification
                closed = self.path / "closed"
                closed.touch(mode=0o600)
                closed.write_bytes(self._size_and_time())
        os.close(self._lock_fd)
