"""Finds stop strings, across any number of tokens, without showing a part of one first."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Lets text through up to the first stop string.

    Text that may be the beginning of a stop string is held back until the next text settles it.
    Positions count characters from the start of the answer.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max((len(x) for x in stops), default=0)
        self._held = ""
        self.num_passed = 0  # characters let through so far
        self.found: str | None = None

    @property
    def hit(self) -> bool:
        """True once a stop string was found."""
        return self.found is not None

    def feed(self, text: str) -> str:
        """Take more text; return the text that is now safe to show: none after a hit."""
        if self.hit:
            return ""
        text = self._held + text
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        cut, self.found = min(found) if found else (len(text) - self._num_undecided(text), None)
        self._held = text[cut:]
        return self._pass(text[:cut])

    def flush(self) -> str:
        """Let out what was held back: at the answer's end it began no stop string after all."""
        return "" if self.hit else self._pass(self._held)

    def _pass(self, text: str) -> str:
        self.num_passed += len(text)
        return text

    def _num_undecided(self, text: str) -> int:
        """The length of the longest end of ``text`` that is a stop string's beginning."""
        for size in range(min(len(text), self._longest - 1), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                return size
        return 0
