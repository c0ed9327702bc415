"""Writes the events of responses: each with its type as its name, and a rising number."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec

from engines.openai.messages import Json

_encode = msgspec.json.Encoder().encode


class EventWriter:
    """Numbers the events of one stream."""

    def __init__(self) -> None:
        self._number = 0

    def write(self, events: Iterable[Json], after: int = -1) -> bytes:
        """Write events as they go out; those with numbers up to ``after`` are only counted."""
        lines = []
        for event in events:
            event["sequence_number"] = self._number
            self._number += 1
            if event["sequence_number"] > after:
                lines.append(b"event: %b\ndata: %b\n\n" % (event["type"].encode(), _encode(event)))
        return b"".join(lines)

    def write_again(self, events: Collection[Json]) -> bytes:
        """Write the last events anew, with the numbers that they had."""
        self._number -= len(events)
        return self.write(events)
