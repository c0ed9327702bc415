"""Whether codecs cost on this engine what they cost where they were measured, by two texts.

The verdict on a profile is that of the engine that measured it: many texts, needles and chains.
What may differ here is the engine. So of the held-out texts those two are taken whose cost there
was nearest to the mean, and they have to cost no more here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Final

from engines.calibration.corpus import Text, held_out_texts
from engines.calibration.gate.bound import Bound
from engines.calibration.gate.choice import Choice
from engines.calibration.instrument import Instrument
from engines.calibration.measuring.cases import text_cases
from engines.calibration.measuring.measure import OnProgress, measure
from engines.calibration.measuring.trials import AnyCodec
from engines.config import CalibrationOrder
from kvstore.codecs.quality import Quality

NUM_TEXTS: Final = 2
MOST: Final = 1.5  # times the loss of these texts there, where that is above the bound


def fault(
    instrument: Instrument,
    choices: Sequence[Choice],
    order: CalibrationOrder,
    bound: Bound,
    on_progress: OnProgress,
) -> str:
    """Say what is wrong with codecs that were chosen by another engine's figures; "" if nothing is.

    Args:
        choices: with the figures by text; those that lose nothing are not looked at.
        order: of a measurement of our own: the longest context, the tokens that are scored.
        on_progress: called with the progress; may raise, to end it.
    """
    lossy = [x for x in choices if not x.is_exact]
    if not lossy:
        return ""
    fitting = [x for x in lossy[0].rows if x.context <= max(order.contexts) and x.texts]
    if not fitting:
        return f"it was measured with contexts that are longer than {max(order.contexts)} tokens"
    context = fitting[-1].context
    texts = _usual_texts(fitting[-1])
    cases = list(text_cases(texts, instrument.encode, context, order.num_scored))
    if not cases:
        return "none of the texts that it was measured with is there"
    codecs: dict[str, AnyCodec] = {x.name: x.session or x.codec for x in lossy}
    folder = Path(order.data_path) / "profiles" if order.data_path else None
    rows = measure(
        instrument,
        codecs,
        cases,
        order.chunk_tokens,
        on_progress=lambda words: on_progress(f"trying a profile of another engine, {words}"),
        folder=folder,
        num_threads=order.num_threads,
    )
    published = {x.name: x.rows for x in lossy}
    faults = (difference(x, published[x.preset], bound) for x in rows)
    return next(filter(None, faults), "")


def _usual_texts(row: Quality) -> list[Text]:
    """The texts that cost about as much as all texts did, the nearest first."""
    known = {x.name: x for x in held_out_texts()}
    named = sorted(row.texts, key=lambda x: abs(x.kl - row.kl))
    return [known[x.text] for x in named if x.text in known][:NUM_TEXTS]


def difference(found: Quality, published: Sequence[Quality], bound: Bound) -> str:
    """Compare with the same texts there: two texts alone may cost more than the mean of all."""
    names = {x.text for x in found.texts}
    there = [
        x for row in published if row.context == found.context for x in row.texts if x.text in names
    ]
    most_kl, most_changed = bound.kl, 1 - bound.top1
    if there:
        most_kl = max(most_kl, MOST * fmean(x.kl for x in there))
        most_changed = max(most_changed, MOST * fmean(1 - x.top1 for x in there))
    words = f"{found.preset} at {found.context} tokens"
    if not found.kl <= most_kl:
        return f"{words} has a KL of {found.kl:.4f} here, above {most_kl:.4f}"
    if not 1 - found.top1 <= most_changed + 1e-9:
        least = 1 - most_changed
        return f"{words} keeps {found.top1:.1%} of the most likely tokens here, under {least:.1%}"
    return ""
