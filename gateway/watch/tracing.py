"""Follows W3C's trace context: what a client sends goes on to the engine, with spans of our own.

Without the extra ``otlp`` a client's ``traceparent`` is passed on as it is, so that the engine's
spans join the client's trace. With it (``gateway.watch.otlp``) each turn is a span in between.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Protocol, TypeAlias

Attributes: TypeAlias = Mapping[str, str | int | float]
_PARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_MOST_STATE = 512  # characters of tracestate


class TurnTrace(Protocol):
    """The trace of one turn."""

    def headers(self) -> dict[str, str]:
        """Return the trace's headers for the engine; {} if there is none."""

    def end(self, attributes: Attributes, error: str) -> None:
        """End the turn. ``error`` is a word of few, "" for a good end; called once."""


class Tracing(Protocol):
    """Begins the traces of turns."""

    def begin(self, name: str, context: Mapping[str, str]) -> TurnTrace:
        """Begin a turn's trace; ``context`` is the result of ``context_of`` for its request."""

    def close(self) -> None:
        """Send what is still to be sent; may take a few seconds."""


class PassOn:
    """Makes no spans."""

    def begin(self, name: str, context: Mapping[str, str]) -> TurnTrace:
        return _Passed(context)

    def close(self) -> None:
        pass


class _Passed:
    def __init__(self, context: Mapping[str, str]) -> None:
        self._context = context

    def headers(self) -> dict[str, str]:
        return dict(self._context)

    def end(self, attributes: Attributes, error: str) -> None:
        pass


def context_of(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Read the trace context of a request; {} if there is none or it is not well formed."""
    found = {name: value for name, value in headers if name in (b"traceparent", b"tracestate")}
    parent = found.get(b"traceparent", b"").decode("latin-1")
    if not _PARENT.fullmatch(parent):
        return {}
    state = found.get(b"tracestate", b"").decode("latin-1")
    sane = 0 < len(state) <= _MOST_STATE and state.isascii() and state.isprintable()
    return {"traceparent": parent} | ({"tracestate": state} if sane else {})
