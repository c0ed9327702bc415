"""Telemetry besides metrics: the server's log, its last lines for admins, and traces of turns.

2026-01-31T12:00:00.000Z info gateway: POST /v1/chat/completions 200 ...

The log has one line per event, on standard error. The lines that are kept for admins are redacted:
anything that looks like a key is replaced.

Traces follow W3C's trace context. Without the extra ``otlp``, a client's ``traceparent`` is passed
on unchanged, so that the engine's spans join the client's trace. With it (``gateway.watch.otlp``),
each turn adds a span between the client's and the engine's.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping

import msgspec

from gateway.watch.requests import LiveRequest

# Line ends, escape sequences and other controls come from clients and engines; in a log they
# would forge lines or steer a terminal.
_ESCAPED = {code: f"\\x{code:02x}" for code in [*range(32), *range(0x7F, 0xA0)]}
_PARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_MOST_STATE = 512  # characters of tracestate


_ESCAPED |= {ord("\n"): " | ", ord("\t"): " ", 0x2028: " | ", 0x2029: " | "}
# Bidirectional overrides make a text look different from its characters.
_ESCAPED |= {code: f"\\u{code:04x}" for code in [*range(0x202A, 0x202F), *range(0x2066, 0x206A)]}
MAX_LINES = 2000
MAX_CHARACTERS = 1000  # of a line
_SECRETS = re.compile(
    r"(?i)(\b(?:tc|sk|pk|hf)[-_][A-Za-z0-9_-]{12,}|\bbearer\s+\S+|(?<=://)[^/\s:@]*:[^/\s@]+(?=@)"
    r"|(?<=api_key=)\S+|(?<=password=)\S+|\b[0-9a-f]{64}\b)"
)
_QUIET = ("uvicorn", "uvicorn.error", "asyncio", "aiohttp")


class OneLine(logging.Formatter):
    """Formats a record as one line, with control characters escaped."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        name = record.name.removeprefix("thermocline.")
        text = record.getMessage()
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        level = record.levelname.lower()
        return f"{stamp}.{record.msecs:03.0f}Z {level:7} {name}: {text.translate(_ESCAPED)}"


class OneObject(logging.Formatter):
    """Formats a record as one JSON object, with fields for the ids of request and session."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "at": round(record.created, 3),
            "level": record.levelname.lower(),
            "name": record.name.removeprefix("thermocline."),
            "message": record.getMessage(),
        }
        for name in ("request_id", "session"):
            if (value := getattr(record, name, None)) is not None:
                line[name] = value
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def keep_lines(ring: LogRing) -> None:
    """Add ``ring`` to the root logger, so that it keeps the last lines for admins."""
    logging.getLogger().addHandler(ring)


def configure_logging(level: str, form: str = "text") -> None:
    """Set up the root logger of this process. Called once, when the server starts.

    ``form``: "text", or "json" for an object on each line.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneObject() if form == "json" else OneLine())
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    logging.captureWarnings(True)
    for name in _QUIET:  # at INFO these repeat our own lines
        logging.getLogger(name).setLevel(logging.WARNING)


class LogLine(msgspec.Struct, frozen=True):
    """A line of the log; ``n`` grows from line to line."""

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
        self._last = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record; ``handle`` holds the lock."""
        try:
            self._keep(record)
        except Exception:  # as in every handler: logging must not fail its caller
            self.handleError(record)

    def _keep(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            text += f" | {record.exc_info[1]!r}"
        shown = redacted(text.translate(_ESCAPED))[:MAX_CHARACTERS]
        self._last += 1
        name = record.name.removeprefix("thermocline.")
        level = record.levelname.lower()
        self._lines.append(LogLine(self._last, round(record.created, 3), level, name, shown))

    def lines(self, after: int, most: int) -> list[LogLine]:
        """Return at most ``most`` of the latest lines after number ``after``, the oldest first."""
        self.acquire()
        try:
            return [x for x in self._lines if x.n > after][-most:]
        finally:
            self.release()


def redacted(text: str) -> str:
    """Replace anything that looks like a key, a token, a password in a URL or a hash."""
    return _SECRETS.sub("***", text)


class TurnTrace:
    """The trace of one turn; this class passes the client's trace on, without a span."""

    def __init__(self, context: Mapping[str, str]) -> None:
        self._context = context

    def headers(self) -> Mapping[str, str]:
        """Return the trace's headers for the engine; {} if there is none."""
        return self._context

    def end(self, turn: LiveRequest) -> None:
        """End the turn's span; called once."""


class Tracing:
    """Begins the traces of turns; this class makes no spans."""

    def begin(self, name: str, context: Mapping[str, str]) -> TurnTrace:
        """Begin a turn's trace; ``context`` is the result of ``context_of`` for its request."""
        return TurnTrace(context)

    def close(self) -> None:
        """Send the spans that are left; may take a few seconds."""


def context_of(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Return the trace context of a request; {} if there is none or it is malformed."""
    found = {name: value for name, value in headers if name in (b"traceparent", b"tracestate")}
    parent = found.get(b"traceparent", b"").decode("latin-1")
    if not _PARENT.fullmatch(parent):
        return {}
    state = found.get(b"tracestate", b"").decode("latin-1")
    sane = 0 < len(state) <= _MOST_STATE and state.isascii() and state.isprintable()
    return {"traceparent": parent} | ({"tracestate": state} if sane else {})
