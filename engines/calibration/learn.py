"""Learns a profile of a model from the KV of some texts."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np

from engines.calibration.corpus import Text
from engines.calibration.footprint import Scratch
from engines.calibration.instrument import (
    Instrument,
    LayerNotice,
    NotObservable,
    Observing,
    StatefulInstrument,
    StateNotice,
    states_of,
)
from engines.calibration.measuring.measure import ANY, OnProgress, quiet
from engines.calibration.rope_probe import check_turning
from kvstore.blobs.state_packer import rows_of, window_arrays
from kvstore.codecs.calibrated import calibrated_preset, learn_profile
from kvstore.codecs.learning.bounds import RateDistortionBound
from kvstore.codecs.learning.samples import Samples, element_means
from kvstore.codecs.learning.sensitivity import Sensitivities, StateSensitivities
from kvstore.codecs.names import is_learned
from kvstore.codecs.profile import Profile
from kvstore.codecs.stacks.stack_shape import Scope
from kvstore.shapes import KVRun

logger = logging.getLogger(__name__)

LAYER: Final = Scope("layer")
PROBED_SHARE: Final = 0.25
MOST_PIECES: Final = 8  # of a window, where sliding windows are shorter
OBSERVED: Final = 2  # one of so many pieces is observed
LEAST_WINDOW = 64  # tokens; a text that leaves fewer after the last window is cut there


class Windows(NamedTuple):
    """The texts to learn from: ``num`` windows of ``tokens`` tokens each.

    ``probed_share``: the last part of each window, whose attention to the tokens before it shows
    which errors in their KV matter.
    """

    num: int
    tokens: int
    probed_share: float = PROBED_SHARE

    def first_probed(self, window: Sequence[int]) -> int:
        """Return the number of the first token of that last part."""
        return int(len(window) * (1 - self.probed_share))


def samples_of(
    instrument: Instrument,
    texts: Sequence[Text],
    wanted: Windows,
    scratch: Scratch | None = None,
    on_progress: OnProgress = quiet,
    of_states: StateSensitivities | None = None,
) -> Samples:
    """Prefill windows of ``texts``, and learn which errors matter, if the engine can show it.

    Args:
        scratch: where the windows' rows are kept; None = in memory.
        on_progress: called with the progress at every window.
        of_states: collects the cost of errors in recurrent states.

    Raises:
        OSError: the disk of ``scratch`` is full.
        ValueError: no text is long enough, or the model rotates its keys in a way that is not
            understood.
    """
    windows = list(deal(texts, instrument, wanted.num, wanted.tokens))
    if not windows:
        raise ValueError(f"no text to learn from has {LEAST_WINDOW} tokens")
    return samples_of_tokens(
        instrument, windows, wanted.probed_share, scratch, on_progress, of_states
    )


def samples_of_tokens(
    instrument: Instrument,
    windows: Sequence[Sequence[int]],
    probed_share: float = PROBED_SHARE,
    scratch: Scratch | None = None,
    on_progress: OnProgress = quiet,
    of_states: StateSensitivities | None = None,
) -> Samples:
    """Do the same as ``samples_of`` for windows of token ids."""
    ropes = instrument.ropes
    states = states_of(instrument)
    # After a recurrent state, if only of a convolution, equal tokens have unequal keys.
    if states is None or (states.windows is not None and not states.has_matrices):
        check_turning(instrument, ropes)
    runs: list[KVRun] = []
    look = _Look(instrument, Sensitivities(instrument.layout, ropes), of_states)
    dtype = instrument.layout.dtype
    for number, window in enumerate(windows, 1):
        on_progress(f"{number - 1} of {len(windows)} texts to learn from")
        run = look.prefill(window, int(len(window) * (1 - probed_share)))
        runs.append(scratch.keep_stored(run, dtype) if scratch is not None else run)
        del run
        logger.info("read %d of %d windows to learn from", number, len(windows))
    return Samples(instrument.layout, ropes, runs, look.metrics())


class _Look:
    """Prefills texts, and adds up what the engine's layers notice of errors."""

    def __init__(
        self,
        instrument: Instrument,
        found: Sensitivities,
        of_states: StateSensitivities | None = None,
        *,
        of_windows: bool = False,
    ) -> None:
        self._of_states = of_states
        self._instrument = instrument
        self._found = found
        self._of_windows = of_windows
        self._can_observe = self._observes = isinstance(instrument, Observing) and (
            instrument.sees_states or not of_windows
        )
        self._num_texts = 0
        self._num_seen = 0
        self._is_seen = False  # the text that is being read

    def prefill(self, tokens: Sequence[int], first: int) -> KVRun:
        """Do the same as ``Instrument.prefill``; tokens from ``first`` on look back."""
        if self._observes:
            assert isinstance(self._instrument, Observing)
            self._is_seen = False
            try:
                run = self._instrument.observe(tokens, first, self._add)
            except NotObservable as error:
                logger.warning("no more texts are looked back on: %s", error)
                self._observes = False
            else:
                self._num_texts += 1
                self._num_seen += self._is_seen
                return run
        return self._instrument.prefill(tokens)

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


def look_at_states(
    instrument: Instrument, texts: Sequence[Text], wanted: Windows, of_states: StateSensitivities
) -> None:
    """See what errors in recurrent states cost, of a model that keeps no rows of every token."""
    if not isinstance(instrument, Observing) or not instrument.sees_states:
        return
    look = _Look(instrument, Sensitivities(instrument.layout, ()), of_states)
    for window in deal(texts, instrument, wanted.num, wanted.tokens):
        look.prefill(window, wanted.first_probed(window))


def window_samples_of(
    instrument: Instrument,
    texts: Sequence[Text],
    wanted: Windows,
    scratch: Scratch | None = None,
    on_progress: OnProgress = quiet,
) -> Samples:
    """Prefill short texts that sliding windows hold from the first token on; see ``samples_of``.

    There are as many tokens in all as ``samples_of`` would read, in at most ``MOST_PIECES`` pieces
    for each of its windows.
    """
    assert isinstance(instrument, StatefulInstrument)
    states = instrument.states
    assert states is not None and states.windows is not None
    step = instrument.state_step  # a shorter text has no state that could be read
    short = max(min(states.window_tokens, wanted.tokens), step)
    num_pieces = wanted.num * max(1, min(wanted.tokens // short, MOST_PIECES))
    runs: list[KVRun] = []
    ropes = instrument.window_ropes()
    look = _Look(instrument, Sensitivities(states.windows, ropes), of_windows=True)
    least = max(min(short, LEAST_WINDOW), step)
    pieces = list(deal(texts, instrument, num_pieces, short, least))
    for number, piece in enumerate(pieces):
        on_progress(f"{number} of {len(pieces)} short texts to learn from")
        if number % OBSERVED == 0:
            look.prefill(piece, wanted.first_probed(piece))
        session = instrument.prefill_whole(piece)
        run = rows_of([x.array for x in window_arrays(session.state)], states.windows)
        if run is None:
            raise ValueError("the layers with sliding windows are not what they were")
        layout = states.windows
        kept = [(k.copy(), v.copy()) for k, v in run]
        runs.append(scratch.keep_stored(kept, layout.dtype) if scratch is not None else kept)
    return Samples(states.windows, ropes, runs, look.metrics())


def learn(samples: Samples, fingerprint: str, presets: Sequence[str]) -> Profile:
    """Fit the parameters of each preset to the samples."""
    profile = learn_profile(samples, fingerprint, presets)
    logger.info("learned %s", ", ".join(f"{name} ({id})" for name, id in profile.ids.items()))
    return profile


def yardsticks(samples: Samples, presets: Sequence[str]) -> dict[str, RateDistortionBound]:
    """A bound for each preset with a scope of its own; a layer's (``ANY``) for all others."""
    learned = {name: calibrated_preset(name) for name in presets if is_learned(name)}
    scopes = {name: getattr(learned.get(name), "scope", None) for name in presets}
    of_scope: dict[Scope, RateDistortionBound] = {}
    means = element_means(samples)
    for scope in (LAYER, *scopes.values()):
        if scope is not None and scope not in of_scope:
            of_scope[scope] = RateDistortionBound(samples, scope, means)
            logger.info("found the bounds of a transform over %s", scope)
    found = {name: of_scope[scope] for name, scope in scopes.items() if scope is not None}
    return {**found, ANY: of_scope[LAYER]}


def deal(
    texts: Sequence[Text],
    instrument: Instrument,
    num_windows: int,
    window_tokens: int,
    least: int = LEAST_WINDOW,
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
