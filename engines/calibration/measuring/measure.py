"""The measurement: prefill a prefix once, then go on from each preset's version of it."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Protocol, TypeAlias

import numpy as np

from engines.calibration.instrument import HeldSession, Instrument
from engines.calibration.measuring.cases import Case, in_reading_order
from engines.calibration.measuring.metrics import (
    CaseResult,
    answer_drift,
    answers,
    digest_of,
    drift,
    loss,
    quality_of,
)
from engines.calibration.measuring.stopwatch import Stopwatch
from engines.calibration.measuring.trials import AnyCodec, Speed, Trials, Trip, trials
from kvstore.codecs.learning.bounds import RateDistortionBound
from kvstore.codecs.quality import Quality
from kvstore.shapes import KVLayout

logger = logging.getLogger(__name__)

ANY: Final = ""  # the yardstick of presets that have none of their own
# Called now and then with a few words on how far a measurement is.
OnProgress: TypeAlias = Callable[[str], None]


def quiet(progress: str) -> None:
    """Report to no one."""


class Results(Protocol):
    """A place for results as they come, so that a measurement can go on after a restart."""

    def results(self) -> list[CaseResult]:
        """All that was kept before."""

    def keep_results(self, results: Iterable[CaseResult]) -> None:
        """Keep the results of a case."""


class _Nowhere:
    """Keeps nothing. A ``Results``."""

    def results(self) -> list[CaseResult]:
        return []

    def keep_results(self, results: Iterable[CaseResult]) -> None:
        pass


def measure(
    instrument: Instrument,
    codecs: Mapping[str, AnyCodec],
    cases: Iterable[Case],
    chunk_tokens: int,
    yardsticks: Mapping[str, RateDistortionBound] = MappingProxyType({}),
    kept: Results | None = None,
    on_progress: OnProgress = quiet,
    folder: Path | None = None,
    *,
    num_threads: int = 0,
    stopwatch: Callable[[], Stopwatch] = Stopwatch,
) -> list[Quality]:
    """Measure every case with every codec; returns a row for each preset and context length.

    Exact presets go through the same steps as lossy ones, so that ``raw`` shows the floor: what is
    not zero there is the model's own noise.

    Args:
        codecs: by preset; of an instrument with states ``SessionCodec``s.
        chunk_tokens: of the cold store.
        yardsticks: by preset; that of ``ANY`` is for presets without one.
        kept: results of cases are kept here; those that are known are not measured again.
        on_progress: called with the progress before every case.
        folder: of a file in which a case's KV rests between codecs; None = in memory.
        num_threads: of the cold store, to time what a restore takes; 0 = its default.
    """
    how = trials(instrument, chunk_tokens, num_threads, folder, stopwatch)
    trial = _Trial(instrument.layout, how, codecs, yardsticks, kept or _Nowhere())
    found: defaultdict[tuple[int, str], list[CaseResult]] = defaultdict(list)
    ordered = in_reading_order(cases)
    for number, case in enumerate(ordered):
        on_progress(f"{number} of {len(ordered)} cases")
        for name, result in trial.results(case):
            found[result.context, name].append(result)
        logger.info("measured %s of %d tokens", case.name, len(case.prefix))
    order = {name: number for number, name in enumerate(codecs)}
    rows = sorted(found, key=lambda x: (x[0], order[x[1]]))
    return [quality_of(name, found[context, name]) for context, name in rows]


class _Trial:
    """Measures one case after the other, as far as it was not measured before."""

    def __init__(
        self,
        layout: KVLayout,
        trials: Trials,
        codecs: Mapping[str, AnyCodec],
        yardsticks: Mapping[str, RateDistortionBound],
        kept: Results,
    ) -> None:
        self._layout = layout
        self._trials = trials
        self._codecs = codecs
        self._yardsticks = yardsticks
        self._kept = kept
        self._known = {(x.case, x.codec_id): x for x in kept.results()}

    def results(self, case: Case) -> Iterator[tuple[str, CaseResult]]:
        """Yield the result of each preset; none at all if not even the exact cache answers."""
        digest = digest_of(case)
        if (digest, "") in self._known:
            return
        known = {name: self._known.get((digest, x.id)) for name, x in self._codecs.items()}
        if any(x is None for x in known.values()):
            session = self._trials.session(case.prefix)
            exact = self._trials.log_probs(session, case.rest)
            if case.is_needle and not answers(exact, case.rest, case.num_answer):
                self._give_up(case, digest)
                return
            for name, result in known.items():
                if result is None:
                    known[name] = self._measured(case, digest, name, session, exact)
        yield from ((name, result) for name, result in known.items() if result is not None)

    def _give_up(self, case: Case, digest: str) -> None:
        context = len(case.prefix)
        logger.info("%s of %d tokens: not even the exact cache answers", case.name, context)
        self._kept.keep_results([CaseResult(case=digest, text=case.name, context=context)])

    def _measured(
        self, case: Case, digest: str, name: str, session: HeldSession, exact: np.ndarray
    ) -> CaseResult:
        """Measure a case with one codec, and keep the result.

        ``exact``: log-probabilities with the exact cache, fp32 (len(rest), vocabulary).
        """
        codec = self._codecs[name]
        trip = self._trials.trip(codec, session)
        packed = self._trials.log_probs(trip.session, case.rest)
        result = CaseResult(
            case=digest,
            text=case.name,
            context=len(case.prefix),
            codec_id=codec.id,
            restore_s=trip.rows.restore.seconds,
            restore_waited=trip.rows.restore.waited,
            **_prefill_times(self._trials.prefill),
            **_answered(case, exact, packed),
            **(self._losses(name, session, trip) if case.is_text else {}),
        )
        self._kept.keep_results([result])
        return result

    def _losses(self, name: str, session: HeldSession, trip: Trip) -> dict[str, Any]:
        """The fields of a result that compare KV with KV: rows of every token."""
        run, back = session.run, trip.rows.run
        found: dict[str, Any] = {"bits": trip.rows.bits_per_element}
        if not run:
            return {**found, "cos": (1.0, 1.0)}
        keys, values = (loss(run, back, self._layout, side) for side in (0, 1))
        found |= {"cos": (keys.cosine, values.cosine), "errors": (keys.error, values.error)}
        own = self._yardsticks.get(name)
        if (yardstick := own or self._yardsticks.get(ANY)) is not None:
            found["residual"] = error = yardstick.error(run, back)
            if own is not None and error > 0:
                found["above_bound"] = trip.rows.bits_per_element - own.bits(error)
        return found


def _prefill_times(prefill: Speed | None) -> dict[str, Any]:
    """The fields of a result that are times of its prompt's prefill."""
    if prefill is None:
        return {}
    return {"prefill_s": prefill.seconds, "prefill_waited": prefill.waited}


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
