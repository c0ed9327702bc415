"""One whole calibration of one model: cases from texts, a row for each preset and context."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from engines.calibration.cases import Case, needle_cases, text_cases
from engines.calibration.corpus import fit_texts, held_out_texts, texts_of
from engines.calibration.instrument import Instrument
from engines.calibration.learn import learn
from engines.calibration.measure import measure
from engines.calibration.order import Order, Report
from engines.calibration.profiles import save
from kvstore.codecs.calibrated import LEARNABLE
from kvstore.codecs.presets import open_codec, warm
from kvstore.codecs.profile import Profile


class CannotCalibrate(Exception):
    """What was ordered cannot be done. The message is one sentence for the operator."""


def survey_report(instrument: Instrument, order: Order, engine: str) -> Report:
    """``survey``, kept as the model's profile, and told. Raises what it does."""
    profile = survey(instrument, order)
    return Report(
        fingerprint=instrument.fingerprint,
        engine=engine,
        dtype=instrument.layout.dtype,
        rows=profile.rows,
        profile=str(save(profile, Path(order.data_path))) if order.data_path else "",
    )


def survey(instrument: Instrument, order: Order) -> Profile:
    """What was measured, and what was learned for the presets that have to know the model.

    Raises:
        CannotCalibrate: no text is long enough.
        UnknownCodec: a preset that does not exist, or that cannot pack this model's cache.
        ValueError: the model turns its keys in a way that is not understood.
        OSError: a text cannot be read.
    """
    cases = list(_cases(instrument, order))
    for context in order.contexts:
        if not any(len(x.prefix) == context and not x.is_needle for x in cases):
            needed = context + order.num_scored
            raise CannotCalibrate(f"no text has {needed} tokens; give longer ones by --eval-text")
    profile = _profile(instrument, order)
    codecs = {name: open_codec(name, profile) for name in order.presets}
    for codec in codecs.values():
        codec.check(instrument.layout)
        warm(codec, instrument.layout)
    rows = measure(instrument, codecs, cases, order.chunk_tokens)
    return replace(profile, rows=tuple(rows))


def _profile(instrument: Instrument, order: Order) -> Profile:
    presets = [name for name in order.presets if name in LEARNABLE]
    if not presets:
        return Profile(instrument.fingerprint, instrument.layout, (), {})
    texts = texts_of(map(Path, order.fit_texts)) if order.fit_texts else fit_texts()
    return learn(instrument, texts, presets, order.num_windows, order.window_tokens)


def _cases(instrument: Instrument, order: Order) -> Iterator[Case]:
    texts = texts_of(map(Path, order.eval_texts)) if order.eval_texts else held_out_texts()
    for context in order.contexts:
        yield from text_cases(texts, instrument.encode, context, order.num_scored)
        yield from needle_cases(texts, instrument.encode, context, order.depths)
