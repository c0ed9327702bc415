"""One whole calibration of one model: cases from texts, a row for each preset and context."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from engines.calibration.cases import Case, needle_cases, text_cases
from engines.calibration.corpus import fit_texts, held_out_texts, texts_of
from engines.calibration.instrument import Instrument
from engines.calibration.learn import learn, samples_of, yardsticks
from engines.calibration.measure import measure
from engines.calibration.order import Order, Report, WaterFilling
from engines.calibration.profiles import make_folder, save
from kvstore.codecs.bounds import Yardstick
from kvstore.codecs.calibrated import LEARNABLE
from kvstore.codecs.presets import open_codec, warm
from kvstore.codecs.profile import Profile

logger = logging.getLogger(__name__)


class CannotCalibrate(Exception):
    """What was ordered cannot be done. The message is one sentence for the operator."""


@dataclass(frozen=True)
class Survey:
    """What was measured, and what was learned for the presets that have to know the model."""

    profile: Profile
    bounds: tuple[WaterFilling, ...]


def survey_report(instrument: Instrument, order: Order, engine: str) -> Report:
    """``survey``, kept as the model's profile, and told. Raises what it does.

    Where it cannot be kept after all, the log says why, and it is told.
    """
    try:
        if order.data_path:
            make_folder(Path(order.data_path))
    except OSError as error:
        where = f"nothing can be kept in {order.data_path}; choose another data_dir"
        raise CannotCalibrate(f"{where}: {error.strerror}") from error
    found = survey(instrument, order)
    profile = found.profile
    return Report(
        fingerprint=instrument.fingerprint,
        engine=engine,
        dtype=instrument.layout.dtype,
        rows=profile.rows,
        bounds=found.bounds,
        profile=_kept(profile, order.data_path),
    )


def _kept(profile: Profile, data_path: str) -> str:
    """The file; "" if there is none. A disk that is full by now is no reason to tell nothing of
    what took minutes."""
    try:
        return str(save(profile, Path(data_path))) if data_path else ""
    except OSError as error:
        logger.error("what was learned cannot be kept: %s", error)
        return ""


def survey(instrument: Instrument, order: Order) -> Survey:
    """One whole calibration.

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
    profile, sticks = _learned(instrument, order)
    codecs = {name: open_codec(name, profile) for name in order.presets}
    for codec in codecs.values():
        codec.check(instrument.layout)
        warm(codec, instrument.layout)
    rows = measure(instrument, codecs, cases, order.chunk_tokens, sticks)
    most_bits = max((x.bits_per_element for x in rows if x.residual_error), default=0.0)
    bounds = [_water_filling(x, most_bits) for x in dict.fromkeys(sticks.values())]
    return Survey(replace(profile, rows=tuple(rows)), tuple(bounds))


def _learned(instrument: Instrument, order: Order) -> tuple[Profile, dict[str, Yardstick]]:
    """Nothing, without a prefill, if no preset has to know the model."""
    presets = [name for name in order.presets if name in LEARNABLE]
    if not presets:
        return Profile(instrument.fingerprint, instrument.layout, (), {}), {}
    texts = texts_of(map(Path, order.fit_texts)) if order.fit_texts else fit_texts()
    samples = samples_of(instrument, texts, order.num_windows, order.window_tokens)
    sticks = yardsticks(samples, order.presets) if order.with_bounds else {}
    return learn(samples, instrument.fingerprint, presets), sticks


def _water_filling(stick: Yardstick, most_bits: float) -> WaterFilling:
    bits, errors = zip(*stick.curve(most_bits), strict=True)
    return WaterFilling(scope=str(stick.scope), bits=bits, residual_errors=errors)


def _cases(instrument: Instrument, order: Order) -> Iterator[Case]:
    texts = texts_of(map(Path, order.eval_texts)) if order.eval_texts else held_out_texts()
    encode = functools.cache(instrument.encode)  # a long text takes a second
    for context in order.contexts:
        yield from text_cases(texts, encode, context, order.num_scored)
        yield from needle_cases(texts, encode, context, order.depths)
