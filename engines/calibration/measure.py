"""The measurement: prefill once, then go on from each preset's version of that past."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from engines.calibration.cases import Case
from engines.calibration.instrument import Instrument
from engines.calibration.metrics import answers, cosines, drift, relative_error
from engines.calibration.round_trip import RoundTrip, round_trip
from engines.calibration.tally import Tally
from kvstore.codecs.base import Codec
from kvstore.codecs.quality import Quality
from kvstore.shapes import KVRun

logger = logging.getLogger(__name__)


def measure(
    instrument: Instrument,
    codecs: Mapping[str, Codec],
    cases: Iterable[Case],
    chunk_tokens: int,
) -> list[Quality]:
    """One row for each preset and each context length among ``cases``.

    Lossy and exact presets alike go through the same steps, so ``raw`` shows the floor: what is not
    zero there is the model's own noise.
    """
    tallies: dict[tuple[str, int], Tally] = {}
    for case in cases:
        run = instrument.prefill(case.prefix)
        exact = instrument.log_probs(run, case.rest)
        if case.is_needle and not answers(exact, case.rest, case.num_answer):
            logger.info(
                "%s of %d tokens: not even the exact cache answers", case.name, len(case.prefix)
            )
            continue
        for name, codec in codecs.items():
            trip = round_trip(codec, run, instrument.layout, chunk_tokens)
            packed = instrument.log_probs(trip.run, case.rest)
            at = (name, len(case.prefix))
            tally = tallies.setdefault(at, Tally(name, codec.id, len(case.prefix)))
            if case.is_needle:
                tally.needles.append(answers(packed, case.rest, case.num_answer))
            else:
                tally.drifts[case.name] = drift(exact, packed, case.rest)
                _add_sizes(tally, instrument, run, trip)
        logger.info("measured %s of %d tokens", case.name, len(case.prefix))
    return [tally.quality() for tally in tallies.values()]


def _add_sizes(tally: Tally, instrument: Instrument, run: KVRun, trip: RoundTrip) -> None:
    tally.bits.append(trip.bits_per_element)
    layout = instrument.layout
    tally.cos_k.append(cosines(run, trip.run, layout, 0))
    tally.cos_v.append(cosines(run, trip.run, layout, 1))
    tally.error_k.append(relative_error(run, trip.run, layout, 0))
    tally.error_v.append(relative_error(run, trip.run, layout, 1))
