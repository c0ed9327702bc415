"""Learns a profile of a model from the KV of some texts."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from engines.calibration.corpus import Text
from engines.calibration.instrument import Instrument, LayerNotice, NotObservable, StateNotice
from engines.calibration.measuring.measure import OnProgress, quiet
from engines.calibration.rope_probe import check_turning
from engines.calibration.scratch import Scratch
from kvstore.blobs.state_packer import rows_of, window_arrays
from kvstore.codecs.calibrated import learn_profile
from kvstore.codecs.learning.samples import Samples
from kvstore.codecs.learning.sensitivity import Sensitivities, StateSensitivities
from kvstore.codecs.profile import Profile
from kvstore.shapes import KVRun

logger = logging.getLogger(__name__)

PROBED_SHARE: Final = 0.25
MOST_PIECES: Final = 8  # of a text, where sliding windows are shorter
OBSERVED: Final = 2  # one of so many pieces is observed
LEAST_TOKENS: Final = 64  # of a text


def samples_of(
    instrument: Instrument,
    texts: Sequence[Sequence[int]],
    probed_share: float = PROBED_SHARE,
    scratch: Scratch | None = None,
    on_progress: OnProgress = quiet,
    of_states: StateSensitivities | None = None,
) -> Samples:
    """Prefill texts, and learn which errors matter, if the engine can show it.

    Args:
        texts: their token ids.
        probed_share: the last part of each text, whose attention to the tokens before it shows
            which errors in their KV matter.
        scratch: where the texts' rows are kept; None = in memory.
        on_progress: called with the progress at every text.
        of_states: collects the cost of errors in recurrent states.

    Raises:
        OSError: the disk of ``scratch`` is full.
        ValueError: there is no text, or the model rotates its keys in a way that is not understood.
    """
    if not texts:
        raise ValueError(f"no text to learn from has {LEAST_TOKENS} tokens")
    ropes, states, layout = instrument.ropes, instrument.states, instrument.layout
    # After a recurrent state, if only of a convolution, equal tokens have unequal keys.
    if states is None or (states.windows is not None and not states.has_matrices):
        check_turning(instrument, ropes)
    look = _Look(instrument, Sensitivities(layout, ropes), probed_share, of_states)
    runs: list[KVRun] = []
    for number, text in enumerate(texts, 1):
        on_progress(f"{number} of {len(texts)} texts to learn from")
        run = look.prefill(text)
        runs.append(run if scratch is None else scratch.keep_stored(run, layout.dtype))
    return Samples(layout, ropes, runs, look.metrics())


def look_at_states(
    instrument: Instrument,
    texts: Sequence[Sequence[int]],
    probed_share: float,
    of_states: StateSensitivities,
) -> None:
    """See what errors in recurrent states cost, of a model that keeps no rows of every token."""
    if instrument.sees_states:
        look = _Look(instrument, Sensitivities(instrument.layout, ()), probed_share, of_states)
        for text in texts:
            look.prefill(text)


def window_samples_of(
    instrument: Instrument,
    texts: Sequence[Sequence[int]],
    probed_share: float = PROBED_SHARE,
    scratch: Scratch | None = None,
    on_progress: OnProgress = quiet,
) -> Samples:
    """Do the same as ``samples_of`` for layers with sliding windows, of texts that these hold."""
    states, ropes = instrument.states, instrument.window_ropes()
    assert states is not None and states.windows is not None
    layout = states.windows
    look = _Look(instrument, Sensitivities(layout, ropes), probed_share, of_windows=True)
    runs: list[KVRun] = []
    for number, text in enumerate(texts):
        on_progress(f"{number} of {len(texts)} short texts to learn from")
        if number % OBSERVED == 0:
            look.prefill(text)
        state = instrument.prefill(text).state
        run = rows_of([x.array for x in window_arrays(state)], layout)
        if run is None:
            raise ValueError("the layers with sliding windows are not what they were")
        kept = [(k.copy(), v.copy()) for k, v in run]
        runs.append(kept if scratch is None else scratch.keep_stored(kept, layout.dtype))
    return Samples(layout, ropes, runs, look.metrics())


def short_texts(
    instrument: Instrument, texts: Sequence[Text], num_texts: int, num_tokens: int
) -> list[list[int]]:
    """Deal texts that sliding windows hold from the first token on.

    There are as many tokens in all as ``num_texts`` texts of ``num_tokens`` have, in at most
    ``MOST_PIECES`` times as many texts.
    """
    states, step = instrument.states, instrument.state_step
    assert states is not None
    short = max(min(states.window_tokens, num_tokens), step)  # no state is there before a step
    num_pieces = num_texts * max(1, min(num_tokens // short, MOST_PIECES))
    return list(deal(texts, instrument, num_pieces, short, max(min(short, LEAST_TOKENS), step)))


class _Look:
    """Prefills texts, and adds up what the engine's layers notice of errors."""

    def __init__(
        self,
        instrument: Instrument,
        found: Sensitivities,
        probed_share: float,
        of_states: StateSensitivities | None = None,
        *,
        of_windows: bool = False,
    ) -> None:
        self._probed_share = probed_share
        self._of_states = of_states
        self._instrument = instrument
        self._found = found
        self._of_windows = of_windows
        self._can_observe = self._observes = instrument.sees_states or not of_windows
        self._num_texts = self._num_seen = 0
        self._is_seen = False  # the text that is being read

    def prefill(self, tokens: Sequence[int]) -> KVRun:
        """Return the rows of ``tokens``, the last of which look back."""
        if self._observes:
            self._is_seen = False
            first = int(len(tokens) * (1 - self._probed_share))
            try:
                run = self._instrument.observe(tokens, first, self._add)
            except NotObservable as error:
                logger.warning("no more texts are looked back on: %s", error)
                self._observes = False
            else:
                self._num_texts += 1
                self._num_seen += self._is_seen
                return run
        return self._instrument.prefill(tokens).run

    def _add(self, notice: LayerNotice | StateNotice) -> None:
        if isinstance(notice, StateNotice):
            if self._of_states is not None:
                self._of_states.add(notice.number, notice.matrices, notice.gradients)
        elif notice.of_windows == self._of_windows:
            self._is_seen = True
            self._found.add(notice.layer, notice.rows, notice.gradients)

    def metrics(self) -> list[np.ndarray] | None:
        """Return what ``Samples`` takes; None if nothing, or not all, was seen."""
        metrics = self._found.metrics()
        if metrics is None and self._can_observe:
            logger.warning("all errors in stored KV count alike: not every layer was seen")
        elif metrics is not None:
            logger.info("%d of %d texts were looked back on", self._num_seen, self._num_texts)
        return metrics


def learn(samples: Samples, fingerprint: str, presets: Sequence[str]) -> Profile:
    """Fit the parameters of each preset to the samples."""
    profile = learn_profile(samples, fingerprint, presets)
    logger.info("learned %s", ", ".join(f"{name} ({id})" for name, id in profile.ids.items()))
    return profile


def deal(
    texts: Sequence[Text],
    instrument: Instrument,
    num_windows: int,
    window_tokens: int,
    least: int = LEAST_TOKENS,
) -> Iterator[list[int]]:
    """Yield the first window of every text, then the second of every text, and so on.

    Many kinds of text teach more than much of one. No more texts are read than are needed. A
    window of fewer than ``least`` tokens is left out.
    """
    dealt, known = 0, list[list[int]]()
    for first in itertools.count(0, window_tokens):
        longer = False
        for number, text in enumerate(texts):
            if dealt == num_windows:
                return
            if number == len(known):
                known.append(instrument.encode(text.content))
            window = known[number][first : first + window_tokens]
            longer = longer or len(known[number]) > first
            if len(window) >= least:
                dealt += 1
                yield window
        if not longer:
            return
