"""Prefills prompts, each going on from the one before where both begin alike."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from engines.calibration.instrument import Instrument
from engines.calibration.scratch import Scratch
from kvstore.shapes import KVRun, slice_tokens

LEAST_SHARED = 256  # tokens; to compute fewer again is as quick as to put them back


class Prefixes:
    """Keeps the KV of the last prompt, and of no other."""

    def __init__(self, instrument: Instrument, folder: Path | None = None) -> None:
        """``folder``: the KV rests in a file there (see ``Scratch``); None = in memory."""
        self._instrument = instrument
        self._folder = folder
        self._tokens: Sequence[int] = ()
        self._run: KVRun = ()

    def run(self, tokens: Sequence[int]) -> KVRun:
        """The KV of ``tokens``, as ``Instrument.prefill`` returns it; must not be written to.

        Raises ``OSError`` if the disk of the folder is full.
        """
        shared = common_length(self._tokens, tokens)
        if shared < len(tokens):
            past = slice_tokens(self._run, 0, shared) if shared >= LEAST_SHARED else ()
            self._run = self._kept(self._instrument.prefill(tokens, past))
            self._tokens = tuple(tokens)
        return slice_tokens(self._run, 0, len(tokens))

    def _kept(self, run: KVRun) -> KVRun:
        if self._folder is None:
            return run
        with Scratch(self._folder) as scratch:
            return [(scratch.keep(k), scratch.keep(v)) for k, v in run]


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """The number of equal tokens at the beginning of both."""
    pairs = zip(a, b, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
