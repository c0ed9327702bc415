"""The measurement: prefill a prefix once, then go on from each preset's version of its KV."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Final

import numpy as np

from engines.calibration.instrument import Instrument
from engines.calibration.measuring.cases import Case, in_reading_order
from engines.calibration.measuring.metrics import answer_drift, answers, drift, loss
from engines.calibration.measuring.prefixes import Prefixes
from engines.calibration.measuring.round_trip import RoundTrip, round_trip
from engines.calibration.measuring.tally import Tally
from kvstore.codecs.base import Codec
from kvstore.codecs.learning.bounds import RateDistortionBound
from kvstore.codecs.quality import Quality
from kvstore.shapes import KVLayout, KVRun

logger = logging.getLogger(__name__)

ANY: Final = ""  # the yardstick of presets that have none of their own


def measure(
    instrument: Instrument,
    codecs: Mapping[str, Codec],
    cases: Iterable[Case],
    chunk_tokens: int,
    yardsticks: Mapping[str, RateDistortionBound] = MappingProxyType({}),
    *,
    num_threads: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Quality]:
    """Measure every case with every codec; returns a row for each preset and context length.

    Exact presets go through the same steps as lossy ones, so that ``raw`` shows the floor: what is
    not zero there is the model's own noise.

    Args:
        codecs: by preset.
        chunk_tokens: of the cold store.
        yardsticks: by preset; that of ``ANY`` is for presets without one.
        num_threads: of the cold store, to time what a restore takes; 0 = its default.
    """
    tallies: dict[tuple[int, str], Tally] = {}
    prefixes = Prefixes(instrument, clock)
    for case in in_reading_order(cases):
        run = prefixes.run(case.prefix)
        exact = instrument.log_probs(run, case.rest)
        context = len(case.prefix)
        if case.is_needle and not answers(exact, case.rest, case.num_answer):
            logger.info("%s of %d tokens: not even the exact cache answers", case.name, context)
            continue
        for name, codec in codecs.items():
            trip = round_trip(
                codec, run, instrument.layout, chunk_tokens, num_threads=num_threads, clock=clock
            )
            packed = instrument.log_probs(trip.run, case.rest)
            tally = tallies.setdefault((context, name), Tally(name, codec.id, context))
            _add_answers(tally, case, exact, packed)
            tally.restore_s.append(trip.restore_s)
            if prefixes.prefill_s is not None:
                tally.prefill_s.append(prefixes.prefill_s)
            if case.is_text:
                _add_sizes(tally, instrument.layout, run, trip)
                _add_residual(tally, yardsticks, run, trip)
        logger.info("measured %s of %d tokens", case.name, context)
    order = {name: number for number, name in enumerate(codecs)}
    found = sorted(tallies, key=lambda x: (x[0], order[x[1]]))
    return [tallies[x].quality() for x in found]


def _add_answers(tally: Tally, case: Case, exact: np.ndarray, packed: np.ndarray) -> None:
    """``exact`` and ``packed``: fp32 (len(case.rest), vocabulary), logarithms."""
    if case.is_needle:
        tally.needles.append(answers(packed, case.rest, case.num_answer))
    elif case.is_chains:
        for kind, places in case.answers.items():
            found = answer_drift(exact, packed, case.rest, places)
            tally.chains.setdefault(kind, []).append(found)
    else:
        tally.drifts[case.name] = drift(exact, packed, case.rest)


def _add_sizes(tally: Tally, layout: KVLayout, run: KVRun, trip: RoundTrip) -> None:
    tally.bits.append(trip.bits_per_element)
    keys, values = (loss(run, trip.run, layout, side) for side in (0, 1))
    tally.cos_k.append(keys.cosine)
    tally.cos_v.append(values.cosine)
    tally.error_k.append(keys.error)
    tally.error_v.append(values.error)


def _add_residual(
    tally: Tally, yardsticks: Mapping[str, RateDistortionBound], run: KVRun, trip: RoundTrip
) -> None:
    own = yardsticks.get(tally.preset)
    if (yardstick := own or yardsticks.get(ANY)) is None:
        return
    error = yardstick.error(run, trip.run)
    tally.residual.append(error)
    if own is not None and error > 0:
        tally.above_bound.append(trip.bits_per_element - own.bits(error))
