"""Profiles of learned codecs, by codec id, in the tiers that outlive the process.

The header of a blob names its codec, and the id of a learned one contains a digest of the arrays
that it learned from the model. So any store that has the codec reads the blob. The store that packs
with it keeps the codec's profile beside the data, on disk and in a shared tier, sealed like every
other value, and renews it. A store that finds a codec it does not know looks there for the profile,
verifies that it gives a codec of that very id, keeps it, and reads on.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Final, TypeAlias

from kvstore.blobs.chain import profile_key
from kvstore.blobs.packer import StoreCodecs
from kvstore.codecs.profile import Profile, profile_in
from kvstore.errors import Corrupt, ForeignCodec, Mismatch, UnknownCodec
from kvstore.ledger.stack import GoodCopy, TierStack
from kvstore.session import TIERS
from kvstore.tiers.base import Blob

MAX_PROFILE_BYTES: Final = 256 << 20
MOST: Final = 8  # profiles of our own that are kept, and of others; each has learned arrays
AGAIN_S: Final = 60.0  # until a profile that was not found is looked for again, or written
MAX_AGAIN_S: Final = 1800.0  # between writes that a tier refuses
MAX_ASKED: Final = 64  # that are remembered as asked for
CLOSE_S: Final = 5.0  # for a fetch that runs
# A request waits for a fetch: a profile is read and opened in less, unless kernels are compiled.
FETCH_S: Final = 2.0

# Opens the codecs of a profile that may serve here, compiled; None: none may.
OpenProfile: TypeAlias = Callable[[Profile], StoreCodecs | None]
_log = logging.getLogger(__name__)


def _none_may_serve(profile: Profile) -> StoreCodecs | None:
    return None


class Profiles:
    """Thread-safe.

    Args:
        fingerprint: of the model; a part of every key.
        read_too: replaces the codecs of other stores that can be read; raises ``UnknownCodec`` for
            those of another layout.

    Attributes:
        opened: see ``OpenProfile``. Until it is set, no profile is fetched.
    """

    def __init__(
        self,
        stack: TierStack,
        fingerprint: str,
        read_too: Callable[[Sequence[StoreCodecs]], None],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stack = stack
        self._fingerprint = fingerprint
        self._read_too = read_too
        self._monotonic = monotonic
        self.opened: OpenProfile = _none_may_serve
        self._levels = [i for i, name in enumerate(stack.names) if TIERS[name].outlives_engine]
        self._local = [i for i in self._levels if i not in stack.shared]
        self._lock = threading.Lock()
        self._renewing = threading.Lock()
        # By key, the newest last; codecs: another store's, whose profile stays while they are read.
        self._kept: dict[bytes, Profile | StoreCodecs] = {}
        self._nbytes: dict[int, int] = {}  # of the kept profiles, by tier
        # By tier and key: when a tier that refused a profile is asked again, and after what time.
        self._refusals: dict[tuple[int, bytes], tuple[float, float]] = {}
        self._asked: dict[str, tuple[Future[bool | None], float]] = {}  # by codec id, and when
        self._fetching = ThreadPoolExecutor(1, "kvstore-profiles")
        self._is_closed = False

    def keep(self, codecs: StoreCodecs) -> None:
        """Have the profile of the written codecs in the tiers, from the next ``renew`` on."""
        if codecs.profile is not None:
            self._keep(codecs.written_ids, codecs.profile)

    def _keep(self, codec_ids: Iterable[str], newest: Profile | StoreCodecs) -> None:
        keys = [profile_key(self._fingerprint, x) for x in codec_ids]
        with self._lock:
            kept = {x: y for x, y in self._kept.items() if x not in keys}
            kept |= dict.fromkeys(keys, newest)
            for key in [x for x, y in kept.items() if type(y) is type(newest)][:-MOST]:
                del kept[key]
            self._read_too([x for x in kept.values() if isinstance(x, StoreCodecs)])
            for key in {*kept} ^ {*self._kept}:
                self._stack.pin(key, key in kept)
            self._kept = kept

    def renew(self) -> None:
        """Write the kept profiles to tiers that lack them, and prolong their lives elsewhere."""
        with self._renewing:
            with self._lock:
                kept = self._kept
            self._refusals = {x: y for x, y in self._refusals.items() if x[1] in kept}
            content = functools.cache(Profile.to_bytes)
            for level in self._levels if kept else ():
                held = self._stack.holds(level, list(kept))
                for (key, x), there in zip(kept.items(), held, strict=True):
                    if there and level in self._stack.shared:
                        self._stack.saved_by(level, "", [key])
                    elif not there and isinstance(x, Profile) and self._is_due(level, key):
                        self._write(level, key, content(x))
                lengths = self._stack.lengths(level, list(kept))
                self._nbytes[level] = sum(x or 0 for x in lengths)

    def nbytes(self, level: int) -> int:
        """Return how many bytes of a tier the kept profiles took at the last ``renew``."""
        return self._nbytes.get(level, 0)

    def _is_due(self, level: int, key: bytes) -> bool:
        """True if a tier is up, lacks a profile, and did not refuse it lately."""
        again_s, _ = self._refusals.get((level, key), (-math.inf, 0.0))
        return self._monotonic() >= again_s and not self._stack.may_hold(level, key)

    def _write(self, level: int, key: bytes, content: bytes) -> None:
        """Write a profile to a tier; one that refuses it is asked again after twice the time."""
        before = self._refusals.pop((level, key), None)
        _, wait_s = before or (0.0, AGAIN_S / 2)
        if not self._stack.put(level, [(key, content)]):
            wait_s = min(2 * wait_s, MAX_AGAIN_S)
            if before is None:
                _log.warning(
                    "tier %s does not take the profile of the codec in use, %.0f MB: a server"
                    " that packs with another codec cannot read the sessions there",
                    *(self._stack.names[level], len(content) / 1e6),
                )
            self._refusals[level, key] = self._monotonic() + wait_s, wait_s

    # ---- those of other stores

    def fetch(self, codec_ids: Iterable[str], wait_s: float) -> bool:
        """Fetch profiles of unknown codecs; True if one can be read, or is refused, from now on.

        What takes longer than ``wait_s``, or than ``FETCH_S`` since it was asked first (its kernels
        may have to be compiled), goes on, for the next return.
        """
        with self._lock:
            found = [] if self._is_closed else [self._ask(x) for x in codec_ids]
        left_s = max((since for _, since in found), default=0.0) + FETCH_S - self._monotonic()
        done, _ = wait([future for future, _ in found], max(min(wait_s, left_s), 0.0))
        return any(not x.cancelled() and x.result() is not None for x in done)

    def is_refused(self, codec_id: str) -> bool:
        """True if its profile was looked for lately, and there is none that may serve here."""
        with self._lock:
            future, since = self._asked.get(codec_id, (None, 0.0))
        if self._is_closed or future is None or not future.done():
            return False
        return future.result() is False and self._monotonic() - since <= AGAIN_S

    def _ask(self, codec_id: str) -> tuple[Future[bool | None], float]:
        """Begin to fetch a profile, unless that was done lately; return also when it was begun.

        The caller holds the lock.
        """
        now = self._monotonic()
        future, since = self._asked.get(codec_id, (None, 0.0))
        if future is None or (future.done() and (future.result() or now - since > AGAIN_S)):
            future, since = self._fetching.submit(self._fetch, codec_id), now
            self._asked.pop(codec_id, None)  # to the end
            self._asked[codec_id] = future, since
            while len(self._asked) > MAX_ASKED:
                del self._asked[next(iter(self._asked))]
        return future, since

    def _fetch(self, codec_id: str) -> bool | None:
        """Return whether the codec can be read now; None if a tier was down."""
        key = profile_key(self._fingerprint, codec_id)
        lengths = ((i, self._stack.lengths(i, [key])[0]) for i in self._levels)
        levels = [i for i, n in lengths if n is None or n <= MAX_PROFILE_BYTES]
        try:
            found = self._stack.good_copy(key, levels, functools.partial(self._use, codec_id))
        except Exception:  # the outermost frame of this thread: a bad profile is a miss
            _log.exception("a profile could not be used")
            return False
        return None if found == "unavailable" else isinstance(found, GoodCopy)

    def _use(self, codec_id: str, content: Blob) -> None:
        try:
            profile = profile_in(content)
            codecs = self.opened(profile)
        except (Mismatch, UnknownCodec) as error:
            raise ForeignCodec(str(error)) from error
        if codecs is None or self._is_closed:
            raise ForeignCodec(f"codec {codec_id!r} may not serve here")
        if codec_id not in codecs.written_ids:
            raise Corrupt(f"the profile of {codec_id!r} is another codec's")
        try:
            self._keep([codec_id], codecs)
        except UnknownCodec as error:
            raise ForeignCodec(str(error)) from error
        for level in self._local:
            self._stack.put(level, [(profile_key(self._fingerprint, codec_id), content)])
        _log.info("codec %s of another server can be read from now on", codec_id)

    def close(self) -> None:
        """End what is being fetched; kernels may be compiled to their end after that."""
        with self._lock:
            self._is_closed = True
            running = [future for future, _ in self._asked.values()]
        self._fetching.shutdown(wait=False, cancel_futures=True)
        for future in running:
            if future.cancelled():
                future.set_running_or_notify_cancel()  # ends ``wait``
        wait(running, CLOSE_S)
