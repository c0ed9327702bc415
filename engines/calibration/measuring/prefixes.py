"""Prefills prompts, each going on from the one before where both begin alike."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from engines.calibration.instrument import Instrument
from engines.calibration.measuring.scratch import Scratch
from kvstore.shapes import KVRun, slice_tokens

LEAST_SHARED = 256  # tokens; to compute fewer again is as quick as to put them back


class Prefixes:
    """Keeps the KV of the last prompt, and of no other."""

    def __init__(
        self,
        instrument: Instrument,
        folder: Path | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``folder``: the KV rests in a file there (see ``Scratch``); None = in memory."""
        self._instrument = instrument
        self._folder = folder
        self._clock = clock
        self._tokens: Sequence[int] = ()
        self._run: KVRun = ()
        # Seconds that all tokens of the last prompt took; None if some were of another prompt.
        self._spent_s: float | None = None

    @property
    def prefill_s(self) -> float | None:
        """Seconds for 1,000 tokens of the last prompt that was prefilled; None if not known."""
        return None if self._spent_s is None else 1000 * self._spent_s / len(self._tokens)

    def run(self, tokens: Sequence[int]) -> KVRun:
        """The KV of ``tokens``, as ``Instrument.prefill`` returns it; must not be written to.

        Raises ``OSError`` if the disk of the folder is full.
        """
        shared = common_length(self._tokens, tokens)
        if shared < len(tokens):
            past = slice_tokens(self._run, 0, shared) if shared >= LEAST_SHARED else ()
            before = self._spent_before(shared) if past else 0.0
            began = self._clock()
            computed = self._instrument.prefill(tokens, past)
            took = self._clock() - began
            self._run = self._kept(computed)
            self._spent_s = None if before is None else before + took
            self._tokens = tuple(tokens)
        return slice_tokens(self._run, 0, len(tokens))

    def _kept(self, run: KVRun) -> KVRun:
        if self._folder is None:
            return run
        with Scratch(self._folder) as scratch:
            return [(scratch.keep(k), scratch.keep(v)) for k, v in run]

    def _spent_before(self, shared: int) -> float | None:
        """Seconds that the first tokens of the last prompt took; known of all of them only."""
        return self._spent_s if shared == len(self._tokens) else None


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """The number of equal tokens at the beginning of both."""
    pairs = zip(a, b, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
