"""Times a measured model again when the machine was busy at its first measurement, or another one.

What a codec loses does not depend on the machine; what it takes does. On a busy machine a prefill
can look so slow that a codec seems quick which is not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

from engines.calibration.corpus import held_out_texts
from engines.calibration.gate.rules import QUIET, is_doubtful, is_from_here
from engines.calibration.instrument import Instrument
from engines.calibration.measuring.cases import Case
from engines.calibration.measuring.measure import measure
from engines.calibration.measuring.stopwatch import Stopwatch
from engines.calibration.measuring.trials import AnyCodec
from kvstore.codecs.quality import Quality

TRIES: Final = 3  # at each context, of which the least disturbed counts
OF_TIMES: Final = ("prefill_s", "restore_s", "waited", "timed_on")  # fields of a row
SCORED: Final = 2  # tokens after it: as few as a case may have


def timed_again(
    instrument: Instrument,
    codecs: Mapping[str, AnyCodec],
    rows: Sequence[Quality],
    *,
    num_threads: int,
    stopwatch: Callable[[], Stopwatch] = Stopwatch,
) -> list[Quality]:
    """Time those of ``rows`` again that are doubtful.

    Returns all rows, with the times of those that were less disturbed now, or timed elsewhere
    before; none if no row was.

    Args:
        codecs: by preset, those of the rows; a row of another codec is left as it is.
    """
    best = {(x.preset, x.context): x for x in rows}
    tokens = [y for x in held_out_texts() for y in instrument.encode(x.content)]
    for context in sorted({x.context for x in rows}):
        for number in range(1, TRIES + 1):
            doomed = {
                x.preset: codecs[x.preset]
                for x in best.values()
                if x.context == context and is_doubtful(x) and _is_of(codecs.get(x.preset), x)
            }
            # Another beginning each time: an engine may know what it has read before.
            text = tuple(tokens[number : number + context + SCORED])
            if not doomed or len(text) < context + SCORED:
                break
            again = measure(
                instrument,
                doomed,
                [Case("times", text[:context], text[context:])],
                num_threads=num_threads,
                stopwatch=stopwatch,
            )
            for timed in again:
                row = best[timed.preset, context]
                # Where another machine had quiet, this one must have it, too.
                most = max(row.waited or 0.0, 0.0 if is_from_here(row) else QUIET)
                if timed.waited is not None and timed.waited < most:
                    times = {x: getattr(timed, x) for x in OF_TIMES}
                    best[row.preset, context] = msgspec.structs.replace(row, **times)
    found = [best[x.preset, x.context] for x in rows]
    return found if found != [*rows] else []


def _is_of(codec: AnyCodec | None, row: Quality) -> bool:
    return codec is not None and codec.id == row.codec_id
