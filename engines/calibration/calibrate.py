"""Calibrates a model: learns a profile of it, then measures each preset at each context."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from engines.calibration.corpus import Text, fit_texts, held_out_texts, texts_of
from engines.calibration.gate.rules import Bound, beyond_measured, decided, refusal
from engines.calibration.instrument import Instrument
from engines.calibration.learn import (
    deal,
    learn,
    look_at_states,
    samples_of,
    short_texts,
    window_samples_of,
)
from engines.calibration.measuring.cases import Case, chain_cases, needle_cases, text_cases
from engines.calibration.measuring.measure import OnProgress, measure, quiet
from engines.calibration.measuring.trials import AnyCodec, least_context
from engines.calibration.scratch import Scratch
from engines.config import CalibrationOrder
from kvstore.codecs.learning.samples import Samples
from kvstore.codecs.learning.sensitivity import StateSensitivities
from kvstore.codecs.names import first_part, is_learned, parts_of, session_presets
from kvstore.codecs.presets import open_codec, warm
from kvstore.codecs.profile import OF_STATES, OF_WINDOWS, Profile
from kvstore.codecs.quality import Quality
from kvstore.codecs.session_codec import open_session_codec
from kvstore.codecs.states import DEALT
from kvstore.errors import UnknownCodec

logger = logging.getLogger(__name__)


class CannotCalibrate(Exception):
    """The order cannot be carried out. The message is one sentence for the operator."""


def calibrate(
    instrument: Instrument,
    order: CalibrationOrder,
    known: Profile | None = None,
    on_progress: OnProgress = quiet,
    folder: Path | None = None,
) -> Profile:
    """Learn and measure what ``order`` asks for; returns the profile with its rows.

    Args:
        known: what presets have learned of this model, which they do not learn again.
        on_progress: called now and then with the progress; may raise, to end it.
        folder: of a file without a name for all that is large; None = it stays in memory.

    Raises:
        CannotCalibrate: no text is long enough, or a context is too short for a state.
        UnknownCodec: a preset does not exist, or cannot pack this model's cache.
        ValueError: the model turns its keys in a way that is not understood.
        OSError: a text cannot be read, or the disk of ``folder`` is full.
    """
    with nullcontext() if folder is None else Scratch(folder) as scratch:
        return _Calibration(instrument, order, on_progress, folder, scratch).profile(known)


@dataclass(frozen=True)
class _Calibration:
    """Carries out one order on one model; ``calibrate`` describes the fields."""

    instrument: Instrument
    order: CalibrationOrder
    on_progress: OnProgress
    folder: Path | None
    scratch: Scratch | None

    def profile(self, known: Profile | None) -> Profile:
        """Learn and measure."""
        order, instrument = self.order, self.instrument
        cases = list(self._cases())
        if known is None or known.layout != instrument.layout or self._turns_otherwise(known):
            known = Profile(instrument.fingerprint, instrument.layout, (), {})
        profile = self._learned(known, order.presets)
        rows = self._measured(profile, order.presets, cases)
        if order.fallbacks and not order.ends_early and not _serves(rows, profile, self._bound):
            profile = self._learned(profile, order.fallbacks)
            more = self._measured(profile, order.fallbacks, cases)
            measured = {(x.preset, x.context) for x in rows}
            rows += [x for x in more if (x.preset, x.context) not in measured]
        return replace(profile, rows=tuple(rows))

    def _turns_otherwise(self, known: Profile) -> bool:
        """True if a profile was learned when the model's rotation was read in another way."""
        return bool(known.ropes) and known.ropes != self.instrument.ropes

    @property
    def _bound(self) -> Bound:
        return Bound(kl=self.order.max_kl)

    # ---- learning

    def _learned(self, profile: Profile, presets: Sequence[str]) -> Profile:
        """Add to a profile what the presets have not learned yet."""
        names = [x for x in dict.fromkeys(map(first_part, presets)) if is_learned(x)]
        profile = self._with_rows(profile, [x for x in names if not self._knows(profile, x)])
        return self._with_windows(profile, [x for x in names if not _knows_windows(profile, x)])

    def _knows(self, profile: Profile, name: str) -> bool:
        """True if a preset has learned the model, and not in another release's way."""
        if name not in profile.learned:
            return False
        try:
            open_codec(name, profile).check(self.instrument.layout)
        except UnknownCodec:
            return False
        return True

    def _with_rows(self, profile: Profile, missing: Sequence[str]) -> Profile:
        """Add the tables of rows, and the costs of errors in states."""
        seen = None if OF_STATES in profile.learned else StateSensitivities()
        states = self.instrument.states
        if self.instrument.layout.layers and missing:
            self.on_progress("reading texts to learn from")
            with self._rows() as rows:
                how = (self.order.probed_share, rows, self.on_progress, seen)
                samples = samples_of(self.instrument, self._dealt, *how)
                for name in missing:
                    profile = self._with(profile, name, self._found(samples, name))
                profile = replace(profile, ropes=samples.ropes)
        elif not self.instrument.layout.layers and states and states.has_matrices and seen:
            self.on_progress("reading texts to see what errors in states cost")
            look_at_states(self.instrument, self._dealt, self.order.probed_share, seen)
        if seen is not None and (costs := seen.learned()):
            profile = self._with(profile, OF_STATES, costs)
        return profile

    def _with_windows(self, profile: Profile, missing: Sequence[str]) -> Profile:
        """Add what presets learn of layers with sliding windows, if the model has any."""
        states = self.instrument.states
        if states is None or states.windows is None or not missing:
            return profile
        order = self.order
        texts = short_texts(self.instrument, self._texts, order.num_windows, order.window_tokens)
        with self._rows() as rows:
            how = (order.probed_share, rows, self.on_progress)
            samples = window_samples_of(self.instrument, texts, *how)
            for name in missing:
                profile = self._with(profile, name + OF_WINDOWS, self._found(samples, name))
        return replace(profile, windows=samples.layout, window_ropes=samples.ropes)

    def _found(self, samples: Samples, name: str) -> Mapping[str, np.ndarray]:
        self.on_progress(f"learning {name}")
        return learn(samples, self.instrument.fingerprint, [name]).learned[name]

    def _with(self, profile: Profile, name: str, learned: Mapping[str, np.ndarray]) -> Profile:
        if self.scratch is not None:
            learned = {key: self.scratch.keep(array) for key, array in learned.items()}
        return replace(profile, learned={**profile.learned, name: learned})

    def _rows(self) -> AbstractContextManager[Scratch | None]:
        """Make the place for the rows of texts, which are freed once all is learned of them."""
        return nullcontext() if self.folder is None else Scratch(self.folder)

    @property
    def _texts(self) -> list[Text]:
        given = self.order.fit_texts
        return texts_of(map(Path, given)) if given else fit_texts()

    @property
    def _dealt(self) -> list[list[int]]:
        order = self.order
        return [*deal(self._texts, self.instrument, order.num_windows, order.window_tokens)]

    # ---- measuring

    def _measured(
        self, profile: Profile, presets: Sequence[str], cases: Sequence[Case]
    ) -> list[Quality]:
        """Measure presets, as ``profile`` has learned them, on all cases, or until they decide."""

        def is_decided(rows: Sequence[Quality]) -> bool:
            return self.order.ends_early and decided(rows, self._bound) is not None

        return measure(
            self.instrument,
            codecs_to_measure(self.instrument, presets, profile),
            cases,
            self.order.chunk_tokens,
            self.on_progress,
            self.folder,
            num_threads=self.order.num_threads,
            is_enough=is_decided,
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
            tokens = (encode(text.content) for text in texts)
            chains = chain_cases(tokens, encode, context, order.num_chains, order.num_scored)
            # One of each kind goes first, since few texts may decide.
            yield of_texts[0]
            yield from needle_cases(texts, encode, context, order.depths)
            yield from itertools.islice(chains, 1)
            yield from of_texts[1:]
            yield from chains

    def _contexts(self) -> list[int]:
        """The contexts to measure. With states they end where a state can rest.

        What lies after it would be computed again, and count as if it had been packed. In one of
        them a session has to sleep as often as it is judged by; an engine's own order takes what
        the engine can hold, and its sessions then sleep less often.
        """
        order, states, step = self.order, self.instrument.states, self.instrument.state_step
        if states is None:
            return list(order.contexts)
        least = least_context(states, step) if order.report_path else step
        if max(order.contexts) < least or min(order.contexts) < step:
            raise CannotCalibrate(
                f"this model's state rests at every {step}th token only; ask for contexts of"
                f" {least} tokens or more (--contexts)"
            )
        return list(dict.fromkeys(x // step * step for x in order.contexts))


def _knows_windows(profile: Profile, name: str) -> bool:
    return name + OF_WINDOWS in profile.learned


def _serves(rows: Sequence[Quality], profile: Profile, bound: Bound) -> bool:
    """Return whether the first preset may serve in any of the forms in which it was measured."""
    first = first_part(rows[0].preset) if rows else ""
    return any(
        not refusal(rows, x.preset, bound) and not beyond_measured(x.preset, profile)
        for x in rows
        if first_part(x.preset) == first
    )


def codecs_to_measure(
    instrument: Instrument, presets: Sequence[str], profile: Profile
) -> dict[str, AnyCodec]:
    """Open the codecs to measure, by preset: of a model with states those of whole sessions.

    Raises:
        UnknownCodec: a preset does not exist, or cannot pack this model's cache.
    """
    layout, states = instrument.layout, instrument.states
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
