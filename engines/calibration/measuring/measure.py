"""The measurement: prefill a prefix once, then go on from each preset's version of it."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np

from engines.calibration.instrument import HeldSession, Instrument
from engines.calibration.measuring.cases import Case, in_reading_order
from engines.calibration.measuring.metrics import (
    CaseResult,
    answer_drift,
    answers,
    drift,
    loss,
    quality_of,
)
from engines.calibration.measuring.stopwatch import Stopwatch
from engines.calibration.measuring.trials import AnyCodec, Trials, Trip
from kvstore.codecs.quality import Quality
from kvstore.shapes import KVLayout

logger = logging.getLogger(__name__)

MOST_SHOWN: Final = 4  # presets with interim figures in the words of a progress
# Called now and then with a few words on how far a measurement is.
OnProgress: TypeAlias = Callable[[str], None]


def quiet(progress: str) -> None:
    """Report to no one."""


def never(rows: Sequence[Quality]) -> bool:
    """Measure all cases."""
    return False


def measure(
    instrument: Instrument,
    codecs: Mapping[str, AnyCodec],
    cases: Iterable[Case],
    chunk_tokens: int,
    on_progress: OnProgress = quiet,
    folder: Path | None = None,
    *,
    num_threads: int = 0,
    stopwatch: Callable[[], Stopwatch] = Stopwatch,
    is_enough: Callable[[Sequence[Quality]], bool] = never,
) -> list[Quality]:
    """Measure every case with every codec; returns a row for each preset and context length.

    Exact presets go through the same steps as lossy ones, so that ``raw`` shows the floor: what is
    not zero there is the model's own noise.

    Args:
        codecs: by preset; of an instrument with states ``SessionCodec``s.
        chunk_tokens: of the cold store.
        on_progress: called with the progress and figures so far, for every codec of every case.
        folder: of a file in which a case's KV rests between codecs; None = in memory.
        num_threads: of the cold store, to time what a restore takes; 0 = its default.
        is_enough: given the rows so far after every case; True ends the measurement with them.
    """
    trials = Trials(instrument, chunk_tokens, num_threads, folder, stopwatch)
    found: defaultdict[tuple[int, str], list[CaseResult]] = defaultdict(list)
    ordered = in_reading_order(cases)
    rows: dict[tuple[int, str], Quality] = {}
    for number, case in enumerate(ordered):
        done, context = f"{number} of {len(ordered)} cases", len(case.prefix)
        on_progress(done)
        session = trials.session(case.prefix)
        exact = instrument.log_probs(session, case.rest)
        if case.is_needle and not answers(exact, case.rest, case.num_answer):
            logger.info("%s: not even the exact cache answers", case.name)
            continue
        for name, codec in codecs.items():
            on_progress(f"{done}, {name}{_so_far(rows.values(), context)}")
            trip = trials.trip(codec, session)
            packed = instrument.log_probs(trip.session, case.rest)
            result = CaseResult(
                text=case.name,
                context=context,
                codec_id=codec.id,
                prefill=trials.prefill,
                restore=trip.restore,
                **_answered(case, exact, packed),
                **(_losses(instrument.layout, session, trip) if case.is_text else {}),
            )
            found[context, name].append(result)
            rows[context, name] = quality_of(name, found[context, name])
        logger.info("measured %s of %d tokens", case.name, context)
        if is_enough([*rows.values()]):
            break
    return sorted(rows.values(), key=lambda row: row.context)


def _so_far(rows: Iterable[Quality], context: int) -> str:
    """Say in a few words what was found at this context."""
    judged = [x for x in rows if x.context == context and x.texts][-MOST_SHOWN:]
    return "".join(f"; {x.preset} {x.bits_per_element:.2f} bits, KL {x.kl:.4f}" for x in judged)


def _losses(layout: KVLayout, session: HeldSession, trip: Trip) -> dict[str, Any]:
    """The fields of a result that compare KV with KV: rows of every token."""
    found: dict[str, Any] = {"bits": trip.bits_per_element}
    if not session.run:
        return {**found, "cos": (1.0, 1.0)}
    keys, values = (loss(session.run, trip.session.run, layout, side) for side in (0, 1))
    return {
        **found,
        "cos": (keys.cosine, values.cosine),
        "errors": (keys.error, values.error),
    }


def _answered(case: Case, exact: np.ndarray, packed: np.ndarray) -> dict[str, Any]:
    """The fields of a result that compare answers.

    ``exact`` and ``packed``: log-probabilities, fp32 (len(case.rest), vocabulary).
    """
    if case.is_needle:
        return {"found": answers(packed, case.rest, case.num_answer)}
    if case.is_text:
        return {"moved": drift(exact, packed, case.rest)}
    return {
        "chains": {
            kind: answer_drift(exact, packed, case.rest, places)
            for kind, places in case.answers.items()
        }
    }
