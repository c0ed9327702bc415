"""Learns a profile of a model from the KV of some texts."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from engines.calibration.corpus import Text
from engines.calibration.instrument import (
    Differentiable,
    DifferentiableSessions,
    Instrument,
    NotDifferentiable,
    StatefulInstrument,
    states_of,
)
from engines.calibration.measuring.measure import ANY, Tell, quiet
from engines.calibration.measuring.scratch import Scratch
from engines.calibration.rope_probe import check_turning
from kvstore.blobs.state_packer import rows_of, window_arrays
from kvstore.codecs.calibrated import calibrated_preset, learn_profile
from kvstore.codecs.learning.bounds import RateDistortionBound
from kvstore.codecs.learning.samples import Samples
from kvstore.codecs.learning.sensitivity import head_metrics
from kvstore.codecs.learning.statistics import element_means
from kvstore.codecs.names import LEARNABLE
from kvstore.codecs.profile import Profile
from kvstore.codecs.stacks.stack_shape import Scope
from kvstore.shapes import KVRun, slice_tokens

logger = logging.getLogger(__name__)

LAYER: Final = Scope("layer")
PROBED_SHARE: Final = 0.25
MOST_PIECES: Final = 8  # of a window, where sliding windows are shorter
LEAST_WINDOW = 64  # tokens; a text that leaves fewer behind the last window is cut there


class Windows(NamedTuple):
    """The texts to learn from: ``num`` windows of them, of ``tokens`` each.

    ``probed_share``: of each; the gradients of its end say which errors before it matter.
    """

    num: int
    tokens: int
    probed_share: float = PROBED_SHARE

    def first_probed(self, window: Sequence[int]) -> int:
        """Return the number of the first token whose loss gives gradients."""
        return int(len(window) * (1 - self.probed_share))


def samples_of(
    instrument: Instrument,
    texts: Sequence[Text],
    wanted: Windows,
    scratch: Scratch | None = None,
    tell: Tell = quiet,
) -> Samples:
    """Prefill windows of ``texts``, with gradients where the engine has them.

    Args:
        scratch: where the windows' rows are kept; None = in memory.
        tell: told of every window.

    Raises:
        OSError: the disk of ``scratch`` is full.
        ValueError: no text is long enough, or the model turns its keys in a way that is not
            understood.
    """
    windows = list(deal(texts, instrument, wanted.num, wanted.tokens))
    if not windows:
        raise ValueError(f"no text to learn from has {LEAST_WINDOW} tokens")
    ropes = instrument.ropes
    states = states_of(instrument)
    # Behind a recurrent state, if only of a convolution, equal tokens have unequal keys.
    if states is None or (states.windows is not None and not states.has_matrices):
        check_turning(instrument, ropes)
    runs: list[KVRun] = []
    dtype = instrument.layout.dtype
    for number, window in enumerate(windows, 1):
        tell(f"{number - 1} of {len(windows)} texts to learn from")
        run = instrument.prefill(window)
        runs.append(scratch.keep_stored(run, dtype) if scratch is not None else run)
        del run
        logger.info("read %d of %d windows to learn from", number, len(windows))
    samples = Samples(instrument.layout, ropes, runs)
    if states is not None:
        return _with_session_metrics(instrument, samples, windows, wanted, 0, tell)
    if isinstance(instrument, Differentiable):
        return _with_metrics(instrument, samples, windows, wanted, tell)
    return samples


def _with_session_metrics(
    instrument: Instrument,
    samples: Samples,
    windows: Sequence[Sequence[int]],
    wanted: Windows,
    part: int,
    tell: Tell,
) -> Samples:
    """Samples with metrics, if the engine can differentiate by parts of a session.

    ``part``: 0 = by rows of every token, 1 = by rows of windows.
    """
    if not isinstance(instrument, DifferentiableSessions):
        logger.warning("all errors in stored KV count alike: no gradients of models with states")
        return samples

    def found() -> Iterator[KVRun]:
        for number, window in enumerate(windows):
            tell(f"{number} of {len(windows)} texts looked back on")
            first = wanted.first_probed(window)
            yield instrument.session_gradients(window[:first], window[first:])[part]

    try:
        return replace(samples, metrics=head_metrics(samples, found()))
    except NotDifferentiable as error:
        logger.warning("all errors in stored KV count alike: %s", error)
        return samples


def window_samples_of(
    instrument: Instrument,
    texts: Sequence[Text],
    wanted: Windows,
    scratch: Scratch | None = None,
    tell: Tell = quiet,
) -> Samples:
    """Prefill short texts that sliding windows hold from the first token on; see ``samples_of``.

    There are as many tokens in all as ``samples_of`` would read, in at most ``MOST_PIECES`` pieces
    for each of its windows.
    """
    assert isinstance(instrument, StatefulInstrument)
    states = instrument.states
    assert states is not None and states.windows is not None
    short = min(states.window_tokens, wanted.tokens)
    num_pieces = wanted.num * min(wanted.tokens // short, MOST_PIECES)
    runs: list[KVRun] = []
    pieces = list(deal(texts, instrument, num_pieces, short, min(short, LEAST_WINDOW)))
    for number, piece in enumerate(pieces):
        tell(f"{number} of {len(pieces)} short texts to learn from")
        session = instrument.prefill_whole(piece)
        run = rows_of([x.array for x in window_arrays(session.state)], states.windows)
        if run is None:
            raise ValueError("the layers with sliding windows are not what they were")
        layout = states.windows
        kept = [(k.copy(), v.copy()) for k, v in run]
        runs.append(scratch.keep_stored(kept, layout.dtype) if scratch is not None else kept)
    samples = Samples(states.windows, instrument.window_ropes(), runs)
    return _with_session_metrics(instrument, samples, pieces, wanted, 1, tell)


def learn(samples: Samples, fingerprint: str, presets: Sequence[str]) -> Profile:
    """Fit the parameters of each preset to the samples."""
    profile = learn_profile(samples, fingerprint, presets)
    logger.info("learned %s", ", ".join(f"{name} ({id})" for name, id in profile.ids.items()))
    return profile


def _with_metrics(
    instrument: Differentiable,
    samples: Samples,
    windows: Sequence[Sequence[int]],
    wanted: Windows,
    tell: Tell,
) -> Samples:
    try:
        metrics = head_metrics(samples, _gradients(instrument, samples, windows, wanted, tell))
    except NotDifferentiable as error:
        logger.warning("all errors in stored KV count alike: %s", error)
        return samples
    finally:
        instrument.gradients_done()
    return replace(samples, metrics=metrics)


def _gradients(
    instrument: Differentiable,
    samples: Samples,
    windows: Sequence[Sequence[int]],
    wanted: Windows,
    tell: Tell,
) -> Iterator[KVRun]:
    """Gradients of the loss at the end of each window by the KV before it."""
    for number, (text, window) in enumerate(zip(samples.texts, windows, strict=True), 1):
        tell(f"{number - 1} of {len(windows)} texts looked back on")
        first = wanted.first_probed(window)
        run = samples.as_engine_has(slice_tokens(text, 0, first))
        yield instrument.gradients(run, window[first:])
        logger.info("looked back from the end of %d of %d windows", number, len(windows))


def yardsticks(samples: Samples, presets: Sequence[str]) -> dict[str, RateDistortionBound]:
    """A bound for each preset with a scope of its own; a layer's (``ANY``) for all others."""
    learned = {name: calibrated_preset(name) for name in presets if name in LEARNABLE}
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
