"""Profiles of learned codecs, by codec id, in the tiers that outlive the process.

The header of a blob names its codec by id, and the id of a learned codec contains a digest of the
arrays that it learned from the model. A store needs these arrays, the profile, to read the blob. So
the store that packs with a learned codec also writes the profile to the disk and to a shared tier,
sealed like every other value, and renews it. A store that finds a blob of an unknown codec reads
the profile there, verifies that its codec has this id, and keeps it.
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
MOST: Final = 8  # profiles of this store that are kept in memory, and as many of other stores
AGAIN_S: Final = 60.0  # before a profile that was not found, or was refused by a tier, is retried
MAX_AGAIN_S: Final = 1800.0  # the longest time between writes to a tier that refuses a profile
MAX_ASKED: Final = 64  # fetches that are remembered
CLOSE_S: Final = 5.0  # how long ``close`` waits for a running fetch
# The longest that requests wait for a fetch. It suffices, unless kernels have to be compiled.
FETCH_S: Final = 2.0

# Returns the codecs of a profile, with compiled kernels; None if they may not serve here.
OpenProfile: TypeAlias = Callable[[Profile], StoreCodecs | None]
_log = logging.getLogger(__name__)


def _none_may_serve(profile: Profile) -> StoreCodecs | None:
    return None


class Profiles:
    """Keeps this store's profiles in the tiers and fetches those of other stores. Thread-safe.

    Args:
        fingerprint: the model's; it enters every key.
        read_too: sets which codecs of other stores can be read, in place of those set before;
            raises ``UnknownCodec`` for codecs of another layout.

    Attributes:
        opened: see ``OpenProfile``. Until it is set, every fetched profile is refused.
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
        # By key, the newest last: this store's profiles, and the opened codecs of other stores.
        self._kept: dict[bytes, Profile | StoreCodecs] = {}
        self._nbytes: dict[int, int] = {}  # bytes of the kept profiles, by tier
        # By tier and key of a refused profile: when it is written again, and the last wait.
        self._refusals: dict[tuple[int, bytes], tuple[float, float]] = {}
        # By codec id: the fetch of its profile, and when that was begun.
        self._asked: dict[str, tuple[Future[bool | None], float]] = {}
        self._fetching = ThreadPoolExecutor(1, "kvstore-profiles")
        self._is_closed = False

    def keep(self, codecs: StoreCodecs) -> None:
        """Remember the profile of these codecs; the next ``renew`` writes it to the tiers."""
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
        """Write the kept profiles to tiers that lack them, and extend their time to live."""
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
        """Return whether a tier answers, lacks a profile, and has not refused it lately."""
        again_s, _ = self._refusals.get((level, key), (-math.inf, 0.0))
        return self._monotonic() >= again_s and not self._stack.may_hold(level, key)

    def _write(self, level: int, key: bytes, content: bytes) -> None:
        """Write a profile to a tier. Each refusal doubles the time until it is written again."""
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

    # ---- profiles of other stores

    def fetch(self, codec_ids: Iterable[str], wait_s: float) -> bool:
        """Fetch the profiles of unknown codecs; return whether one is now readable or refused.

        Waits at most ``wait_s``, and at most until ``FETCH_S`` after a fetch was begun. A fetch
        that takes longer, since its kernels have to be compiled, goes on for the next return.
        """
        with self._lock:
            found = [] if self._is_closed else [self._ask(x) for x in codec_ids]
        left_s = max((since for _, since in found), default=0.0) + FETCH_S - self._monotonic()
        done, _ = wait([future for future, _ in found], max(min(wait_s, left_s), 0.0))
        return any(not x.cancelled() and x.result() is not None for x in done)

    def is_refused(self, codec_id: str) -> bool:
        """Return whether a recent fetch found no profile of the codec that may serve here."""
        with self._lock:
            future, since = self._asked.get(codec_id, (None, 0.0))
        if self._is_closed or future is None or not future.done():
            return False
        return future.result() is False and self._monotonic() - since <= AGAIN_S

    def _ask(self, codec_id: str) -> tuple[Future[bool | None], float]:
        """Begin to fetch a profile, unless a fetch runs, succeeded or was begun lately.

        The caller holds the lock. Returns the fetch and when it was begun.
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
        """Open a profile, make its codec readable, and keep a copy in the local tiers.

        Raises:
            ForeignCodec: no codec of the profile may serve here.
            Corrupt: the profile is not that of ``codec_id``.
        """
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
        _log.info(
            "codec %s, learned earlier or by another server, can be read from now on", codec_id
        )

    def close(self) -> None:
        """Wait at most ``CLOSE_S`` for a running fetch; cancel the others.

        A compilation that takes longer goes on until it is done.
        """
        with self._lock:
            self._is_closed = True
            running = [future for future, _ in self._asked.values()]
        self._fetching.shutdown(wait=False, cancel_futures=True)
        for future in running:
            if future.cancelled():
                future.set_running_or_notify_cancel()  # ends ``wait``
        wait(running, CLOSE_S)
