"""Cuts a stream of server-sent events into whole events: bytes in, the same bytes out.

Only whole events go out, so that a stream which breaks can be ended with an event of ours and a
client never sees half of one. Only the last few events are ever parsed, at the end.
"""

from __future__ import annotations

from collections import deque

import msgspec

from gateway.errors import Failure
from gateway.metrics import Usage

# An event larger than this is passed on before it is whole.
MAX_HELD_BYTES = 1 << 20
# A stream ends with finish reason, usage and [DONE]; a chunk holds at least one event.
KEPT_CHUNKS = 6
KEPT_LINES = 4  # [DONE], the empty line after it, and a comment perhaps


class SseFramer:
    """Takes chunks with any boundaries, gives whole events, and remembers how the stream ended."""

    def __init__(self) -> None:
        self._held = b""
        self._last: deque[bytes] = deque(maxlen=KEPT_CHUNKS)
        self.begun = False  # an event (not just a keep-alive comment) has gone out

    def feed(self, chunk: bytes) -> bytes:
        """Take the next bytes; return all events that are whole now, b"" if there are none."""
        if self._held or not chunk.endswith(b"\n\n"):
            chunk = self._whole_events(self._held + chunk)
            if not chunk:
                return chunk
        self._last.append(chunk)
        if not self.begun and b"data:" in chunk:
            self.begun = True
        return chunk

    def opening(self) -> bytes:
        """Return nothing: the engine says all there is to say."""
        return b""

    def ending(self, failure: Failure | None) -> bytes:
        """Return an event that reports ``failure``; nothing more if there was none."""
        return failure.event() if failure else b""

    def _whole_events(self, data: bytes) -> bytes:
        cut = max(_end_of_last(data, b"\n\n"), _end_of_last(data, b"\r\n\r\n"))
        if len(data) - cut > MAX_HELD_BYTES:
            cut = len(data)
        self._held = data[cut:]
        return data[:cut]

    @property
    def complete(self) -> bool:
        """True if [DONE] came on a line of its own; the text of an answer may contain it, too."""
        return b"data: [DONE]" in b"".join(self._last).splitlines()[-KEPT_LINES:]

    def usage(self) -> Usage | None:
        """Read the token counts in the last events; None if they hold none."""
        for line in reversed(b"".join(self._last).splitlines()):
            if line.startswith(b"data: {") and b'"usage"' in line:
                usage = parse_usage(line[len(b"data: ") :])
                if usage is not None:
                    return usage
        return None

    @property
    def failed(self) -> bool:
        """True if the engine itself reported an error in the stream."""
        return b'data: {"error"' in b"".join(self._last)


class _WithUsage(msgspec.Struct, frozen=True):
    usage: Usage | None = None


_with_usage = msgspec.json.Decoder(_WithUsage)


def parse_usage(body: bytes) -> Usage | None:
    """Read ``usage`` of an answer's or event's JSON; None if it has none that can be read."""
    try:
        return _with_usage.decode(body).usage
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _end_of_last(data: bytes, boundary: bytes) -> int:
    found = data.rfind(boundary)
    return found + len(boundary) if found >= 0 else 0
