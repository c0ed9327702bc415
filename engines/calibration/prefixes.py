"""Prefills that go on from the one before, where both begin alike."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from engines.calibration.instrument import Instrument
from kvstore.shapes import KVRun, slice_tokens

LEAST_SHARED = 256  # tokens; fewer are computed again as quickly as they are put back


class Prefixes:
    """Keeps the KV of the last prompt: memory for one."""

    def __init__(self, instrument: Instrument) -> None:
        self._instrument = instrument
        self._tokens: Sequence[int] = ()
        self._run: KVRun = ()

    def run(self, tokens: Sequence[int]) -> KVRun:
        """As ``Instrument.prefill``; never to be written to."""
        shared = common_length(self._tokens, tokens)
        if shared < len(tokens):
            past = slice_tokens(self._run, 0, shared) if shared >= LEAST_SHARED else ()
            self._run = self._instrument.prefill(tokens, past)
            self._tokens = tuple(tokens)
        return slice_tokens(self._run, 0, len(tokens))


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    pairs = zip(a, b, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
