"""Reading one blob: the first copy of it, from the fast tiers to the slow, that is good."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvstore.errors import ForeignCodec, TierUnavailable, Unusable
from kvstore.ledger.stack import TierStack
from kvstore.session import MissReason
from kvstore.stats import Counters
from kvstore.tiers.base import Blob

T = TypeVar("T")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GoodCopy(Generic[T]):
    """The copy that was accepted, the level of its tier, and what was made of it."""

    blob: Blob
    level: int
    value: T


class CopyReader:
    """Falls back from tier to tier, and removes copies that cannot be used. Thread-safe."""

    def __init__(self, stack: TierStack, counters: Counters) -> None:
        self._stack = stack
        self._counters = counters

    def read(
        self,
        key: bytes,
        levels: Iterable[int],
        use: Callable[[Blob], T],
        asked: Callable[[int], Blob | None] | None = None,
    ) -> GoodCopy[T] | MissReason:
        """Give ``use`` one copy of the blob after the other until it accepts one.

        Args:
            levels: tiers to ask, in this order.
            use: verifies the copy, and perhaps unpacks it; raises ``Unusable`` if it is no good.
            asked: replaces the reading of a tier, where a copy was read before; raises
                ``TierUnavailable`` as a tier does.

        Returns:
            The good copy, or why there is none.
        """
        reason: MissReason = "evicted"
        get = asked or (lambda level: self._stack.get(level, [key])[0])
        for level in levels:
            try:
                blob = get(level)
                if blob is not None:
                    return GoodCopy(blob, level, use(blob))
            except TierUnavailable:
                reason = "unavailable" if reason == "evicted" else reason
            except ForeignCodec as error:  # it would only keep a readable one from being stored
                reason = "fingerprint"
                self._drop(level, key, error)
            except Unusable as error:
                reason = "corrupt"
                self._counters.add("corrupt")
                self._drop(level, key, error)
        return reason

    def _drop(self, level: int, key: bytes, error: Unusable) -> None:
        _log.warning("dropped a blob from %s: %s", self._stack.name(level), error)
        self._stack.delete(level, [key])
