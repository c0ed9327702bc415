"""Reads the lossy copies that a session was restored from, so that no row is packed twice."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kvstore.blobs.packer import Packer
from kvstore.blobs.segments import Segment
from kvstore.errors import TierUnavailable, Unusable
from kvstore.ledger.stack import TierStack
from kvstore.store.spans import Span
from kvstore.tiers.base import Blob


class OlderRun(NamedTuple):
    """A stored span whose rows another blob continues.

    ``shared_end``: the tokens of the two differ from this one on.
    """

    span: Span
    shared_end: int


class OlderCopies:
    """Finds packed rows and windows in the tiers, as they are; none of lost blobs. Thread-safe."""

    def __init__(self, stack: TierStack, packer: Packer) -> None:
        self._stack = stack
        self._packer = packer

    def rows(self, runs: Iterable[OlderRun], codec_id: str) -> list[Segment]:
        """List the segments of these runs that were packed with loss.

        Of several copies the one in the codec of this id is preferred.
        """
        return [x for run in runs for x in self._rows(run, codec_id)]

    def windows(self, span: Span) -> list[Segment]:
        """List the packed windows of a stored state."""
        level = self._stack.locate([span.key]).levels[0]
        if level is None:
            return []
        try:
            blob = self._stack.get(level, [span.key])[0]
            if blob is None:
                return []
            return self._packer.segments_of(blob, span.key, span.first_token, span.num_tokens)
        except (Unusable, TierUnavailable):
            return []

    def _rows(self, run: OlderRun, codec_id: str) -> list[Segment]:
        first: list[Segment] = []
        for level in range(len(self._stack)):
            blob = self._stack.find(level, [run.span.key])[0]
            try:
                found = self._shared_segments(blob, run) if blob is not None else []
            except Unusable:  # a restore finds that, too, and removes the copy
                continue
            if found and all(x.codec_id == codec_id for x in found):
                return found
            first = first or found
        return first

    def _shared_segments(self, blob: Blob, run: OlderRun) -> list[Segment]:
        span, end = run
        found = self._packer.lossy_segments(blob, span.key, span.first_token, span.num_tokens)
        return [x.cut(end) for x in found if x.first < end]
