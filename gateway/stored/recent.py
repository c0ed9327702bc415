"""A cache in memory for stored values that were read last."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Recent(Generic[K, V]):
    """A cache of values that never change; those unused for longest are dropped. Thread-safe."""

    def __init__(self, max_size: int) -> None:
        """
        Args:
            max_size: the largest sum of all values' sizes.
        """
        self._max_size = max_size
        self._size = 0
        self._kept: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: K) -> V | None:
        """Return a value; None if it is not kept."""
        with self._lock:
            if key not in self._kept:
                return None
            self._kept.move_to_end(key)
            return self._kept[key][0]

    def put(self, key: K, value: V, size: int = 1) -> None:
        """Keep a value, unless it is larger than a quarter of ``max_size``."""
        if size > self._max_size // 4:
            return
        with self._lock:
            self._drop(key)
            self._kept[key] = value, size
            self._size += size
            while self._size > self._max_size:
                self._drop(next(iter(self._kept)))

    def forget(self, is_gone: Callable[[K], bool]) -> None:
        """Drop the values whose keys ``is_gone`` is true for."""
        with self._lock:
            for key in [x for x in self._kept if is_gone(x)]:
                self._drop(key)

    def _drop(self, key: K) -> None:
        _, size = self._kept.pop(key, (None, 0))
        self._size -= size
