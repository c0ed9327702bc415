"""Times a measured model again when the machine was busy at its first measurement.

What a codec loses does not depend on the machine's other work; what it takes does. On a busy
machine a prefill can look so slow that a codec seems quick which is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

import msgspec

from engines.calibration.corpus import held_out_texts
from engines.calibration.gate.rules import is_disturbed
from engines.calibration.instrument import Instrument
from engines.calibration.measuring.stopwatch import Stopwatch
from engines.calibration.measuring.trials import AnyCodec, trials
from kvstore.codecs.quality import Quality

TRIES: Final = 3  # at each context, of which the least disturbed counts


def timed_again(
    instrument: Instrument,
    codecs: Mapping[str, AnyCodec],
    rows: Iterable[Quality],
    *,
    chunk_tokens: int,
    num_threads: int,
    stopwatch: Callable[[], Stopwatch] = Stopwatch,
) -> list[Quality]:
    """Time those of ``rows`` again that were disturbed; returns the ones that were less so now.

    Args:
        codecs: by preset, those of the rows; a row of another codec is left as it is.
    """
    doomed = [x for x in rows if is_disturbed(x) and _is_of(codecs.get(x.preset), x)]
    found: list[Quality] = []
    for context in sorted({x.context for x in doomed}):
        of_context = [x for x in doomed if x.context == context]
        best = {x.preset: x for x in of_context}
        tokens = _tokens(instrument, context + TRIES)
        for number in range(1, TRIES + 1):
            how = trials(instrument, chunk_tokens, num_threads, None, stopwatch)
            # Another beginning each time: an engine may know what it has read before.
            session = how.session(tokens[number : number + context])
            if how.prefill is None or len(tokens) < context + TRIES:
                break
            for name, before in best.items():
                restore = how.trip(codecs[name], session).rows.restore
                waited = max(how.prefill.waited, restore.waited)
                if waited < (before.waited or 0.0):
                    best[name] = msgspec.structs.replace(
                        before,
                        prefill_s=how.prefill.seconds,
                        restore_s=restore.seconds,
                        waited=waited,
                    )
            if not any(map(is_disturbed, best.values())):
                break
        found += [best[x.preset] for x in of_context if best[x.preset] != x]
    return found


def _is_of(codec: AnyCodec | None, row: Quality) -> bool:
    return codec is not None and codec.id == row.codec_id


def _tokens(instrument: Instrument, count: int) -> list[int]:
    """Return the first ``count`` tokens of the texts to judge by, one after the other."""
    found: list[int] = []
    for text in held_out_texts():
        if len(found) >= count:
            break
        found += instrument.encode(text.content)
    return found[:count]
