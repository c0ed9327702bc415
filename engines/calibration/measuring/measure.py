"""Measures codecs by a model's answers after a restored prefix and after the exact one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeAlias

import msgspec
import numpy as np

from engines.calibration.corpus import held_out_texts
from engines.calibration.gate.rules import QUIET, is_doubtful, is_from_here
from engines.calibration.instrument import Instrument
from engines.calibration.measuring.cases import Case
from engines.calibration.measuring.metrics import LossTally, answers, drift, row_loss
from engines.calibration.measuring.stopwatch import Stopwatch
from engines.calibration.measuring.trials import AnyCodec, Exact, Trials
from engines.calibration.scratch import Scratch
from kvstore.codecs.quality import Quality

logger = logging.getLogger(__name__)

MOST_SHOWN: Final = 4  # presets with interim figures in a progress message
TRIES: Final = 3  # when timing again at a context; the least disturbed try counts
OF_TIMES: Final = ("prefill_s", "restore_s", "waited", "timed_on")  # fields of a row
SCORED: Final = 2  # tokens after a timed prefix, the fewest that a case may have
# Called repeatedly with a few words on the progress of a measurement.
OnProgress: TypeAlias = Callable[[str], None]


def quiet(progress: str) -> None:
    """Ignore the progress."""


# A prompt, and the log-probabilities after its exact cache: fp32 (len(case.rest), vocabulary).
_Reference: TypeAlias = tuple[Exact, np.ndarray]


class Judge:
    """Measures codecs by the same cases; log-probabilities after the exact cache are reused."""

    def __init__(
        self,
        instrument: Instrument,
        cases: Iterable[Case],
        on_progress: OnProgress = quiet,
        folder: Path | None = None,
        room: int = 0,
        *,
        num_threads: int = 0,
        stopwatch: Callable[[], Stopwatch] = Stopwatch,
    ) -> None:
        """Prepare to measure; the model is not used yet.

        Args:
            on_progress: called for every codec of every case, with the figures so far.
            folder: the folder for unnamed files, in which log-probabilities after the exact cache
                stay from one call of ``rows`` to the next; None = they are computed again.
            room: the most bytes of these files.
            num_threads: the threads with which a restore is timed; 0 = the cold store's default.
        """
        self._instrument = instrument
        self._cases = list(cases)
        self._trials = Trials(instrument, num_threads, folder, stopwatch)
        self._on_progress = on_progress
        self._folder = folder
        self._kept: dict[int, _Reference | None] = {}  # by number of the case
        self._room = room

    def rows(
        self,
        codecs: Mapping[str, AnyCodec],
        is_enough: Callable[[Sequence[Quality]], bool] = lambda rows: False,
    ) -> list[Quality]:
        """Measure codecs, and return a row for each preset and context length.

        Exact presets go through the same steps as lossy ones: the errors of ``raw`` are the model's
        own noise.

        Args:
            codecs: by preset; for an instrument with states, of ``SessionCodec``.
            is_enough: called after every case with the rows so far; True ends the measurement.
        """
        found: dict[tuple[int, str], LossTally] = {}
        rows: dict[tuple[int, str], Quality] = {}
        for number, case in enumerate(self._cases):
            done, context = f"{number} of {len(self._cases)} cases", len(case.prefix)
            self._on_progress(done)
            if (reference := self._reference(number, case)) is None:
                continue
            for name, codec in codecs.items():
                self._on_progress(f"{done}, {name}{_so_far(rows.values(), context)}")
                tally = found.setdefault((context, name), LossTally(name, codec.id, context))
                self._judge(case, *reference, codec, tally)
                rows[context, name] = tally.quality()
            logger.info("measured %s of %d tokens", case.name, context)
            if is_enough([*rows.values()]):
                break
        return sorted(rows.values(), key=lambda row: row.context)

    def _reference(self, number: int, case: Case) -> _Reference | None:
        """Return a case's reference; None if the model does not find its needle even exactly."""
        if number in self._kept:
            return self._kept[number]
        exact = self._trials.exact(case.prefix)
        log_probs = self._instrument.log_probs(exact.session, case.rest)
        if case.is_needle and not answers(log_probs, case.rest, case.num_answer):
            logger.info("%s: not answered even after the exact cache", case.name)
            self._kept[number] = None
            return None
        nbytes = exact.nbytes + log_probs.nbytes
        if self._folder is not None and nbytes <= self._room:
            self._room -= nbytes
            with Scratch(self._folder) as scratch:
                (log_probs,) = scratch.keep([log_probs])
            self._kept[number] = exact, log_probs
        return exact, log_probs

    def _judge(
        self, case: Case, prompt: Exact, exact: np.ndarray, codec: AnyCodec, tally: LossTally
    ) -> None:
        """Measure a codec by a case; ``exact``: the log-probabilities after the exact cache."""
        trip = self._trials.trip(codec, prompt)
        packed = self._instrument.log_probs(trip.session, case.rest)
        tally.prefills.append(prompt.prefill)
        tally.restores.append(trip.restore)
        if case.is_text:
            layout, bits = self._instrument.layout, trip.bits_per_element
            tally.texts.append((case.name, drift(exact, packed, case.rest[1:])))
            tally.rows.append(row_loss(prompt.session.run, trip.session.run, layout, bits))
        if case.is_needle:
            tally.needles.append(answers(packed, case.rest, case.num_answer))
        for kind, places in case.answers.items():
            before = np.array(places) - 1  # the first token is never an answer
            following = [case.rest[x] for x in places]
            moved = drift(exact[before], packed[before], following)
            tally.chains.setdefault(kind, []).append(moved)


def _so_far(rows: Iterable[Quality], context: int) -> str:
    """Return the latest presets' figures at this context, in a few words."""
    judged = [x for x in rows if x.context == context and x.texts][-MOST_SHOWN:]
    return "".join(f"; {x.preset} {x.bits_per_element:.2f} bits, KL {x.kl:.4f}" for x in judged)


def timed_again(
    instrument: Instrument,
    codecs: Mapping[str, AnyCodec],
    rows: Sequence[Quality],
    *,
    num_threads: int,
    stopwatch: Callable[[], Stopwatch] = Stopwatch,
) -> list[Quality]:
    """Time those of ``rows`` again that were timed on a busy machine, or on another one.

    A codec's loss does not depend on the machine; its time does. On a busy machine a prefill may
    be so slow that a slow codec seems quick.

    Returns all rows, with new times for those that were less disturbed this time, or were timed on
    another machine before; [] if no row has new times.

    Args:
        codecs: by preset, those of the rows; a row of another codec is left as it is.
    """
    known = {x.id: x for x in codecs.values()}
    best = {(x.preset, x.context): x for x in rows}
    tokens = [y for x in held_out_texts() for y in instrument.encode(x.content)]
    for context in sorted({x.context for x in rows}):
        for number in range(1, TRIES + 1):
            doubtful = [x for x in best.values() if x.context == context and is_doubtful(x)]
            again = {x.preset: codec for x in doubtful if (codec := known.get(x.codec_id))}
            # Another beginning each time, since an engine may have cached the last one.
            text = tuple(tokens[number : number + context + SCORED])
            if not again or len(text) < context + SCORED:
                break
            case = Case("times", text[:context], text[context:])
            judge = Judge(instrument, [case], num_threads=num_threads, stopwatch=stopwatch)
            for timed in judge.rows(again):
                row = best[timed.preset, context]
                # A row of another machine is replaced only by times of a quiet moment.
                most = max(row.waited or 0.0, 0.0 if is_from_here(row) else QUIET)
                if timed.waited is not None and timed.waited < most:
                    times = {x: getattr(timed, x) for x in OF_TIMES}
                    best[row.preset, context] = msgspec.structs.replace(row, **times)
    found = [best[x.preset, x.context] for x in rows]
    return found if found != [*rows] else []
