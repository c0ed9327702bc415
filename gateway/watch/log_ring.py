"""Keeps the last lines of the log, without anything that looks like a key."""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Callable

import msgspec

MAX_LINES = 2000
MAX_CHARACTERS = 1000  # of a line
_SECRETS = re.compile(
    r"(?i)(\b(?:tc|sk|pk|hf)[-_][A-Za-z0-9_-]{12,}|\bbearer\s+\S+|(?<=://)[^/\s:@]*:[^/\s@]+(?=@)"
    r"|(?<=api_key=)\S+|(?<=password=)\S+|\b[0-9a-f]{64}\b)"
)


class LogLine(msgspec.Struct, frozen=True):
    """A line of the log; numbers only grow."""

    n: int
    at: float
    level: str
    name: str
    text: str


class LogRing(logging.Handler):
    """A handler that holds the last lines. Called on any thread."""

    def __init__(self, max_lines: int = MAX_LINES) -> None:
        super().__init__()
        self._lines: deque[LogLine] = deque(maxlen=max_lines)
        self.text_of: Callable[[str], str] = str  # makes one harmless line of a message
        self._last = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record; ``handle`` holds the lock."""
        try:
            self._keep(record)
        except Exception:  # as in every handler: no record fails its logger's caller
            self.handleError(record)

    def _keep(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            text += f" | {record.exc_info[1]!r}"
        shown = redacted(self.text_of(text))[:MAX_CHARACTERS]
        self._last += 1
        name = record.name.removeprefix("thermocline.")
        level = record.levelname.lower()
        self._lines.append(LogLine(self._last, round(record.created, 3), level, name, shown))

    def lines(self, after: int, most: int) -> list[LogLine]:
        """Return the latest lines after number ``after``, the oldest first."""
        self.acquire()
        try:
            return [x for x in self._lines if x.n > after][-most:]
        finally:
            self.release()


def redacted(text: str) -> str:
    """Replace what looks like a key, a token, a password in a URL or a hash."""
    return _SECRETS.sub("***", text)
