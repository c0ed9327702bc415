"""One whole calibration of a model: learn a profile, then measure each preset and context."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from engines.calibration.agreement import Partners
from engines.calibration.corpus import Text, fit_texts, held_out_texts, texts_of
from engines.calibration.footprint import Scratch
from engines.calibration.gate.profiles import make_folder, profile_path, save
from engines.calibration.gate.rules import Bound, beyond_measured, refusal
from engines.calibration.instrument import Instrument, StatefulInstrument, states_of
from engines.calibration.learn import (
    Windows,
    learn,
    look_at_states,
    samples_of,
    window_samples_of,
    yardsticks,
)
from engines.calibration.measuring.cases import Case, chain_cases, needle_cases, text_cases
from engines.calibration.measuring.measure import OnProgress, measure, quiet
from engines.calibration.measuring.trials import AnyCodec, least_context
from engines.calibration.unfinished import Unfinished
from engines.config import CalibrationOrder, CalibrationReport, WaterFilling
from kvstore.codecs.learning.bounds import RateDistortionBound
from kvstore.codecs.learning.sensitivity import StateSensitivities
from kvstore.codecs.names import first_part, is_learned, parts_of, session_presets
from kvstore.codecs.presets import open_codec, warm
from kvstore.codecs.profile import OF_STATES, OF_WINDOWS, Profile, load_profile
from kvstore.codecs.quality import Quality
from kvstore.codecs.session_codec import open_session_codec
from kvstore.codecs.states import DEALT
from kvstore.errors import Corrupt, Mismatch

logger = logging.getLogger(__name__)


class CannotCalibrate(Exception):
    """The order cannot be carried out. The message is one sentence for the operator."""


@dataclass(frozen=True)
class Survey:
    """The result of a calibration: the profile with its rows, and the bounds of theory."""

    profile: Profile
    bounds: tuple[WaterFilling, ...]


def _all_of_it(profile: Profile) -> Profile:
    return profile


def survey_report(
    instrument: Instrument,
    order: CalibrationOrder,
    engine: str,
    unfinished: Unfinished | None = None,
    on_progress: OnProgress = quiet,
    partners: Partners | None = None,
    chosen: Callable[[Profile], Profile] = _all_of_it,
) -> CalibrationReport:
    """Run ``survey``, save the profile and return the report. Raises what ``survey`` raises.

    Where ``partners`` have measured, too, the profile has the figures that all agree on.
    ``chosen`` leaves out of it what is not to be saved.

    If the profile cannot be saved after all, the log says why, and the report is returned.
    """
    try:
        if order.data_path:
            make_folder(Path(order.data_path))
    except OSError as error:
        where = f"nothing can be kept in {order.data_path}; choose another data_dir"
        raise CannotCalibrate(f"{where}: {error.strerror}") from error
    found = survey(instrument, order, unfinished, on_progress)
    profile = chosen(found.profile if partners is None else partners.agree(found.profile))
    path = _kept(profile, order.data_path)
    if unfinished is not None and path:
        unfinished.remove()
    return CalibrationReport(
        fingerprint=instrument.fingerprint,
        engine=engine,
        dtype=instrument.layout.dtype,
        rows=profile.rows,
        bounds=found.bounds,
        profile=path,
    )


def _kept(profile: Profile, data_path: str) -> str:
    """Save the profile; returns its file, or "" if that failed.

    A full disk is no reason to lose the report of a measurement that took minutes.
    """
    try:
        return str(save(profile, Path(data_path))) if data_path else ""
    except OSError as error:
        logger.error("what was learned cannot be kept: %s", error)
        return ""


def survey(
    instrument: Instrument,
    order: CalibrationOrder,
    unfinished: Unfinished | None = None,
    on_progress: OnProgress = quiet,
) -> Survey:
    """Learn and measure what ``order`` asks for.

    Args:
        unfinished: where what was found so far is kept, and is looked for; None = nowhere.
        on_progress: called now and then with the progress; may raise, to end it.

    Raises:
        CannotCalibrate: no text is long enough, or a context is too short for a state.
        UnknownCodec: a preset does not exist, or cannot pack this model's cache.
        ValueError: the model turns its keys in a way that is not understood.
        OSError: a text cannot be read.
    """
    return _Surveyor(instrument, order, unfinished, on_progress).found()


@dataclass(frozen=True)
class _Surveyor:
    """Carries out one order on one model; ``survey`` describes the fields."""

    instrument: Instrument
    order: CalibrationOrder
    unfinished: Unfinished | None
    on_progress: OnProgress

    def found(self) -> Survey:
        """Learn and measure."""
        cases = list(self._cases())
        before = self.unfinished.learned() if self.unfinished is not None else None
        profile, sticks = self._learned(before)
        rows = self._measured(profile, cases, sticks)
        if self.order.fallbacks and not _serves(rows, profile, Bound(kl=self.order.max_kl)):
            presets = self.order.fallbacks
            more = msgspec.structs.replace(self.order, presets=presets, with_bounds=False)
            other = replace(self, order=more)
            profile, _ = other._learned(profile)
            known = {(x.preset, x.context) for x in rows}
            found = other._measured(profile, cases, sticks)
            rows += [x for x in found if (x.preset, x.context) not in known]
        most_bits = max((x.bits_per_element for x in rows if x.residual_error), default=0.0)
        bounds = [_water_filling(x, most_bits) for x in dict.fromkeys(sticks.values())]
        return Survey(replace(profile, rows=tuple(rows)), tuple(bounds))

    # ---- learning

    def _learned(self, before: Profile | None) -> tuple[Profile, dict[str, RateDistortionBound]]:
        """The profile and the bounds; both empty, without a prefill, if no preset has to learn.

        ``before``: a profile of this model to which is added what is missing; None = an empty one.
        """
        names = dict.fromkeys(map(first_part, self.order.presets))
        presets = [name for name in names if is_learned(name)]
        instrument = self.instrument
        empty = Profile(instrument.fingerprint, instrument.layout, (), self._known_costs())
        if not instrument.layout.layers:
            return self._with_windows(self._with_states(before or empty), presets), {}
        profile = before or empty
        missing = [name for name in presets if name not in profile.learned]
        # Bounds are of rows alone, and a session with states is more.
        wants_bounds = self.order.with_bounds and states_of(instrument) is None
        if not missing and not (presets and wants_bounds):
            return self._with_windows(profile, presets), {}
        texts = self._texts
        self.on_progress("reading texts to learn from")
        with self._scratch() as scratch:
            seen = None if OF_STATES in profile.learned else StateSensitivities()
            how = (self._windows, scratch, self.on_progress, seen)
            samples = samples_of(instrument, texts, *how)
            if seen is not None and (costs := seen.learned()):
                profile = replace(profile, learned={**profile.learned, OF_STATES: costs})
            sticks = yardsticks(samples, self.order.presets) if wants_bounds else {}
            for name in missing:
                self.on_progress(f"learning {name}")
                found = learn(samples, instrument.fingerprint, [name])
                profile = replace(
                    found,
                    learned={**profile.learned, **found.learned},
                    windows=profile.windows,
                    window_ropes=profile.window_ropes,
                )
                profile = self._kept(profile)
        return self._with_windows(profile, presets), sticks

    def _known_costs(self) -> dict[str, Mapping[str, np.ndarray]]:
        """Take what errors in states cost from an earlier measurement of the model, if any.

        It is learned once. Codecs of states are named by it, so other values would make the
        sessions unreadable that sleep by them, and the earlier verdict one on codecs that no
        longer exist.
        """
        if not self.order.data_path or states_of(self.instrument) is None:
            return {}
        path = profile_path(Path(self.order.data_path), self.instrument.fingerprint)
        try:
            learned = load_profile(path, mapped=True).learned
        except (OSError, Corrupt, Mismatch):
            return {}
        return {OF_STATES: learned[OF_STATES]} if OF_STATES in learned else {}

    def _with_states(self, profile: Profile) -> Profile:
        """Add what errors in states cost, for a model without rows, if that can be seen."""
        states = states_of(self.instrument)
        if states is None or not states.has_matrices or OF_STATES in profile.learned:
            return profile
        self.on_progress("reading texts to see what errors in states cost")
        seen = StateSensitivities()
        look_at_states(self.instrument, self._texts, self._windows, seen)
        if not (found := seen.learned()):
            return profile
        return self._kept(replace(profile, learned={**profile.learned, OF_STATES: found}))

    def _with_windows(self, profile: Profile, presets: Sequence[str]) -> Profile:
        """Add what the presets learn of layers with sliding windows, if the model has any."""
        states = states_of(self.instrument)
        missing = [x for x in presets if x + OF_WINDOWS not in profile.learned]
        if states is None or states.windows is None or not missing:
            return profile
        texts = self._texts
        with self._scratch() as scratch:
            how = (self._windows, scratch, self.on_progress)
            samples = window_samples_of(self.instrument, texts, *how)
            for name in missing:
                self.on_progress(f"learning {name} for windows")
                found = learn(samples, self.instrument.fingerprint, [name])
                profile = self._kept(profile.with_windows(found))
        return profile

    @property
    def _texts(self) -> list[Text]:
        given = self.order.fit_texts
        return texts_of(map(Path, given)) if given else fit_texts()

    @property
    def _windows(self) -> Windows:
        order = self.order
        return Windows(order.num_windows, order.window_tokens, order.probed_share)

    def _scratch(self) -> AbstractContextManager[Scratch | None]:
        """Keep rows out of memory, beside a model that serves."""
        return nullcontext() if self.unfinished is None else Scratch(self._folder)

    def _kept(self, profile: Profile) -> Profile:
        return profile if self.unfinished is None else self.unfinished.keep_learned(profile)

    @property
    def _folder(self) -> Path | None:
        """The folder of profiles, if there is one."""
        return Path(self.order.data_path) / "profiles" if self.order.data_path else None

    # ---- measuring

    def _measured(
        self,
        profile: Profile,
        cases: Sequence[Case],
        sticks: Mapping[str, RateDistortionBound],
    ) -> list[Quality]:
        """Measure the presets of the order, as ``profile`` has learned them, on all cases."""
        return measure(
            self.instrument,
            codecs_to_measure(self.instrument, self.order.presets, profile),
            cases,
            self.order.chunk_tokens,
            sticks,
            self.unfinished,
            self.on_progress,
            self._folder if self.unfinished is not None else None,
            num_threads=self.order.num_threads,
        )

    def _cases(self) -> Iterator[Case]:
        order = self.order
        texts = texts_of(map(Path, order.eval_texts)) if order.eval_texts else held_out_texts()
        encode = functools.cache(self.instrument.encode)  # a long text takes a second
        for context in self._contexts():
            of_texts = list(text_cases(texts, encode, context, order.num_scored))
            if not of_texts:
                needed = context + order.num_scored
                words = f"no text has {needed} tokens; give longer ones by --eval-text"
                raise CannotCalibrate(words)
            yield from of_texts
            yield from needle_cases(texts, encode, context, order.depths)
            tokens = (encode(text.content) for text in texts)
            yield from chain_cases(tokens, encode, context, order.num_chains, order.num_scored)

    def _contexts(self) -> list[int]:
        """The contexts to measure. With states they end where a state can rest.

        What lies after it would be computed again, and count as if it had been packed.
        """
        contexts = self.order.contexts
        if states_of(self.instrument) is None:
            return list(contexts)
        assert isinstance(self.instrument, StatefulInstrument)
        step = self.instrument.state_step
        if min(contexts) < step:
            raise _too_short(step, step)
        return list(dict.fromkeys(x // step * step for x in contexts))


def _serves(rows: Sequence[Quality], profile: Profile, bound: Bound) -> bool:
    """Return whether the first preset may serve in any of the forms in which it was measured."""
    first = first_part(rows[0].preset) if rows else ""
    return any(
        not refusal(rows, x.preset, bound) and not beyond_measured(x.preset, profile)
        for x in rows
        if first_part(x.preset) == first
    )


def check_contexts(instrument: Instrument, contexts: Sequence[int]) -> None:
    """Refuse contexts in none of which a session can sleep as often as it is judged by.

    An engine's own order takes what it can hold; its sessions then sleep less often.

    Raises ``CannotCalibrate``.
    """
    states = states_of(instrument)
    if states is None:
        return
    assert isinstance(instrument, StatefulInstrument)
    least = least_context(states, instrument.state_step)
    if max(contexts) < least:
        raise _too_short(instrument.state_step, least)


def _too_short(step: int, least: int) -> CannotCalibrate:
    return CannotCalibrate(
        f"this model's state rests at every {step}th token only; ask for contexts of {least} tokens"
        " or more (--contexts)"
    )


def codecs_to_measure(
    instrument: Instrument, presets: Sequence[str], profile: Profile
) -> dict[str, AnyCodec]:
    """Open the codecs to measure, by preset: of a model with states those of whole sessions.

    Raises:
        UnknownCodec: a preset does not exist, or cannot pack this model's cache.
    """
    layout, states = instrument.layout, states_of(instrument)
    found: dict[str, AnyCodec] = {}
    if states is None:
        for name in dict.fromkeys(map(first_part, presets)):
            found[name] = codec = open_codec(name, profile)
            codec.check(layout)
            warm(codec, layout)
        return found
    ways = (bool(layout.layers), states.windows is not None, states.has_matrices)
    deals = OF_STATES in profile.learned
    for name in session_presets(presets, *ways, deals=deals):
        if not deals and parts_of(name).states in DEALT:
            logger.warning("%s is not measured: this engine cannot see what states are for", name)
            continue
        found[name] = session = open_session_codec(name, profile, states)
        session.check(layout, states)
        session.warm(layout, states)
    return found


def _water_filling(stick: RateDistortionBound, most_bits: float) -> WaterFilling:
    bits, errors = zip(*stick.curve(most_bits), strict=True)
    return WaterFilling(scope=str(stick.scope), bits=bits, residual_errors=errors)
