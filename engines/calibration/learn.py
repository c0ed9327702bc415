"""Reads the texts from which a profile of a model is learned."""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

import numpy as np

from engines.calibration.corpus import Text
from engines.calibration.instrument import Instrument, LayerNotice, NotObservable, StateNotice
from engines.calibration.measuring.cases import Encode
from engines.calibration.measuring.measure import OnProgress, quiet
from engines.calibration.rope_probe import check_turning
from engines.calibration.scratch import Scratch
from kvstore.blobs.state_packer import rows_of, window_arrays
from kvstore.codecs.learning.samples import Samples
from kvstore.codecs.learning.sensitivity import Sensitivities, StateSensitivities
from kvstore.shapes import KVLayout, KVRun

logger = logging.getLogger(__name__)

PROBED_SHARE: Final = 0.25
MOST_PIECES: Final = 8  # short texts in place of one, for layers with sliding windows
OBSERVED: Final = 2  # of short texts, each second one is observed
LEAST_TOKENS: Final = 64  # of a text
AHEAD: Final = 2  # notices that wait to be added while the model computes the next


class TextReader:
    """Reads each text to learn from once, and measures how much errors in its KV matter.

    Attributes:
        costs_of_states: the costs of errors in recurrent states, by the texts read so far.
    """

    def __init__(
        self,
        instrument: Instrument,
        probed_share: float = PROBED_SHARE,
        scratch: Scratch | None = None,
        on_progress: OnProgress = quiet,
        *,
        of_windows: bool = False,
    ) -> None:
        """Prepare to read; no text is read yet.

        Args:
            probed_share: the last part of each text, as a fraction. Its attention to the tokens
                before it shows how much errors in their KV matter.
            scratch: the file for the texts' rows; None = they stay in memory.
            of_windows: the rows are those of layers with sliding windows.

        Raises:
            ValueError: the model's rotary embedding is not understood.
        """
        states = instrument.states
        layout, self._ropes = instrument.layout, instrument.ropes
        # ``check_turning`` needs equal keys for equal tokens, which a recurrent state prevents.
        can_check = states is None or (states.windows is not None and not states.has_matrices)
        if of_windows:
            assert states is not None and states.windows is not None
            layout, self._ropes = states.windows, instrument.window_ropes()
        elif can_check:
            check_turning(instrument, self._ropes)
        self.costs_of_states = StateSensitivities()
        self._layout: KVLayout = layout
        self._found = Sensitivities(layout, self._ropes)
        self._instrument, self._probed_share = instrument, probed_share
        self._scratch, self._on_progress = scratch, on_progress
        self._of_windows = of_windows
        self._can_observe = self._observes = instrument.sees_states or not of_windows
        self._num_observed = self._num_seen = 0
        self._is_seen = False  # a layer of the present text was observed
        self._samples = Samples(layout, self._ropes, ())

    def samples(self, texts: Sequence[Sequence[int]]) -> Samples:
        """Return the samples of ``texts``, given as token ids.

        They begin with the texts of the last call, which are not read again.

        Raises:
            OSError: the disk of the scratch file is full.
            ValueError: there is no text.
        """
        if not texts:
            raise ValueError(f"no text to learn from has {LEAST_TOKENS} tokens")
        runs, kind = [*self._samples.texts], "short texts" if self._of_windows else "texts"
        if len(runs) == len(texts):
            return self._samples
        for number in range(len(runs), len(texts)):
            self._on_progress(f"{number + 1} of {len(texts)} {kind} to learn from")
            if not self._of_windows or number % OBSERVED == 0:
                run = self._observed(texts[number])
            if self._of_windows:
                run = self._windows_of(texts[number])
            scratch, dtype = self._scratch, self._layout.dtype
            runs.append(run if scratch is None else scratch.keep_stored(run, dtype))
        self._samples = Samples(self._layout, self._ropes, runs, self._metrics())
        return self._samples

    def _windows_of(self, tokens: Sequence[int]) -> KVRun:
        """Return the rows that windows hold after ``tokens``."""
        state = self._instrument.prefill(tokens).state
        run = rows_of([x.array for x in window_arrays(state)], self._layout)
        if run is None:
            raise ValueError("the arrays of sliding windows do not fit the model's layout")
        return [(k.copy(), v.copy()) for k, v in run]

    def _observed(self, tokens: Sequence[int]) -> KVRun:
        """Return the rows of a text, which is observed if the model allows that."""
        if self._observes:
            self._is_seen = False
            first = int(len(tokens) * (1 - self._probed_share))
            try:
                run = self._seen(tokens, first)
            except NotObservable as error:
                logger.warning("no more texts are observed: %s", error)
                self._observes = False
            else:
                self._num_observed += 1
                self._num_seen += self._is_seen
                return run
        return self._instrument.prefill(tokens).run

    def _seen(self, tokens: Sequence[int], first: int) -> KVRun:
        """Observe a text and return its rows. One thread adds the notices, in order."""
        waiting = deque[Future[None]]()

        def note(notice: LayerNotice | StateNotice) -> None:
            waiting.append(adding.submit(self._add, notice))
            if len(waiting) > AHEAD:
                waiting.popleft().result()

        with ThreadPoolExecutor(1) as adding:
            run = self._instrument.observe(tokens, first, note)
            for added in waiting:
                added.result()
        return run

    def _add(self, notice: LayerNotice | StateNotice) -> None:
        if isinstance(notice, StateNotice):
            if not self._of_windows:
                self.costs_of_states.add(notice.number, notice.matrices, notice.gradients)
        elif notice.of_windows == self._of_windows:
            self._is_seen = True
            self._found.add(notice.layer, notice.rows, notice.gradients)

    def _metrics(self) -> list[np.ndarray] | None:
        """Return the metrics for ``Samples``; None if not every layer was observed."""
        metrics = self._found.metrics()
        if metrics is None and self._can_observe:
            logger.warning("all errors in stored KV count alike: not every layer was observed")
        elif metrics is not None:
            logger.info("%d of %d texts were observed", self._num_seen, self._num_observed)
        return metrics


def short_texts(
    instrument: Instrument,
    texts: Sequence[Text],
    encode: Encode,
    num_texts: int,
    num_tokens: int,
) -> list[list[int]]:
    """Return texts, as token ids, so short that sliding windows hold all of their tokens.

    Together they have about as many tokens as ``num_texts`` texts of ``num_tokens``; they are at
    most ``MOST_PIECES`` times as many.
    """
    states, step = instrument.states, instrument.state_step
    assert states is not None
    short = max(min(states.window_tokens, num_tokens), step)  # earlier there is no state
    num_pieces = num_texts * max(1, min(num_tokens // short, MOST_PIECES))
    return list(deal(texts, encode, num_pieces, short, max(min(short, LEAST_TOKENS), step)))


def deal(
    texts: Sequence[Text],
    encode: Encode,
    num_windows: int,
    window_tokens: int,
    least: int = LEAST_TOKENS,
) -> Iterator[list[int]]:
    """Yield the first window of every text, then the second of every text, and so on.

    This order gives many kinds of text, from which more is learned. Only the texts that are needed
    are encoded. A window of fewer than ``least`` tokens is left out.
    """
    dealt, known = 0, list[list[int]]()
    for first in itertools.count(0, window_tokens):
        longer = False
        for number, text in enumerate(texts):
            if dealt == num_windows:
                return
            if number == len(known):
                known.append(encode(text.content))
            window = known[number][first : first + window_tokens]
            longer = longer or len(known[number]) > first
            if len(window) >= least:
                dealt += 1
                yield window
        if not longer:
            return
