"""One whole calibration of one model: cases from texts, a row for each preset and context."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from engines.calibration.cases import Case, needle_cases, text_cases
from engines.calibration.corpus import held_out_texts, texts_of
from engines.calibration.instrument import Instrument
from engines.calibration.measure import measure
from engines.calibration.order import Order
from engines.calibration.tally import Quality
from kvstore.codecs.presets import codec_by_name, warm


class CannotCalibrate(Exception):
    """What was ordered cannot be done. The message is one sentence for the operator."""


def survey(instrument: Instrument, order: Order) -> list[Quality]:
    """Raises:
    CannotCalibrate: no text is long enough.
    UnknownCodec: a preset that does not exist, or that cannot pack this model's cache.
    OSError: a text cannot be read.
    """
    codecs = {name: codec_by_name(name) for name in order.presets}
    for codec in codecs.values():
        codec.check(instrument.layout)
        warm(codec, instrument.layout)
    cases = list(_cases(instrument, order))
    for context in order.contexts:
        if not any(len(x.prefix) == context and not x.is_needle for x in cases):
            needed = context + order.num_scored
            raise CannotCalibrate(f"no text has {needed} tokens; give longer ones by --eval-text")
    return measure(instrument, codecs, cases, order.chunk_tokens)


def _cases(instrument: Instrument, order: Order) -> Iterator[Case]:
    chosen = [Path(x) for x in order.eval_texts]
    texts = texts_of(chosen) if chosen else held_out_texts()
    for context in order.contexts:
        yield from text_cases(texts, instrument.encode, context, order.num_scored)
        yield from needle_cases(texts, instrument.encode, context, order.depths)
