"""Finds an object and all before it in few questions to the table.

Each object names the one before it. So a line that was found once is asked for piece by piece the
next time, by the names that it had; what each object says now still counts.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

from gateway.stored.forms import Kind
from gateway.stored.head import Head, Object
from gateway.stored.table import Steps

AT_ONCE: Final = 32  # objects that one question asks for
MAX_KNOWN: Final = 1 << 14  # objects of which the one before is remembered


class LineFinder:
    """Remembers which objects follow each other; the longest unused go first. Thread-safe."""

    def __init__(self) -> None:
        self._before: OrderedDict[tuple[str, Kind, str], str] = OrderedDict()
        self._lock = threading.Lock()

    def line(
        self,
        place: tuple[str, Kind],
        id: str,
        find: Callable[[Sequence[str]], Sequence[Object | None]],
        take: Callable[[Head], None],
    ) -> Steps[list[Object] | None]:
        """Find an object and all before it, the last one first; None if one is not there.

        Args:
            place: their tenant and kind.
            find: asks for objects by their ids.
            take: called with the head of each; an error that it raises ends the line.
        """
        line: list[Object] = []
        following: str | None = id
        while following is not None:
            asked = self._known(place, following)
            for id, object in zip(asked, find(asked), strict=True):
                if id != following:  # it goes on from another one than it did
                    break
                if object is None:
                    return None
                take(object.head)
                line.append(object)
                following = object.head.about.get("previous")
                self._note(place, id, following)
            yield 0
        return line

    def _known(self, place: tuple[str, Kind], id: str) -> list[str]:
        """Return an id, and those that came before it as far as is known."""
        ids = [id]
        with self._lock:
            while len(ids) < AT_ONCE and (before := self._before.get((*place, ids[-1]))):
                ids.append(before)
        return ids

    def _note(self, place: tuple[str, Kind], id: str, before: str | None) -> None:
        with self._lock:
            self._before.pop((*place, id), None)
            if before is not None:
                self._before[*place, id] = before
            if len(self._before) > MAX_KNOWN:
                self._before.popitem(last=False)
