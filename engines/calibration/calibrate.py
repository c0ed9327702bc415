"""Calibrates a model: learns its profile, and measures each preset at each context."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from engines.calibration.corpus import fit_texts, held_out_texts, texts_of
from engines.calibration.gate.rules import decided, refusal
from engines.calibration.instrument import Instrument
from engines.calibration.learn import TextReader, deal, short_texts
from engines.calibration.measuring.cases import Case, chain_cases, needle_cases, text_cases
from engines.calibration.measuring.measure import Judge, OnProgress, quiet
from engines.calibration.measuring.trials import AnyCodec, least_context
from engines.calibration.scratch import Scratch
from engines.config import CalibrationOrder
from kvstore.codecs.calibrated import learn_profile
from kvstore.codecs.learning.samples import Samples
from kvstore.codecs.names import first_part, is_learned, parts_of, session_presets
from kvstore.codecs.presets import open_codec, warm
from kvstore.codecs.profile import OF_STATES, OF_WINDOWS, Profile
from kvstore.codecs.quality import Quality
from kvstore.codecs.session_codec import open_session_codec
from kvstore.codecs.states import DEALT
from kvstore.errors import UnknownCodec

logger = logging.getLogger(__name__)


class CannotCalibrate(Exception):
    """The order cannot be carried out; the message is one sentence for the operator."""


def calibrate(instrument: Instrument, order: CalibrationOrder) -> Profile:
    """Return the profile, with its rows, that ``order`` asks for; nothing is written to disk.

    Raises as ``Calibration.profiles`` does.
    """
    with Calibration(instrument) as calibration:
        *_, profile = calibration.profiles(order)
    return profile


class Calibration:
    """Carries out orders on one model; each reuses what the earlier ones have read and computed.

    The orders may differ only in their presets, in the number of texts to learn from, and in
    whether they end early. Use it in a ``with`` block.
    """

    def __init__(
        self,
        instrument: Instrument,
        on_progress: OnProgress = quiet,
        folder: Path | None = None,
        room: int = 0,
    ) -> None:
        """Prepare for orders; the model is not used yet.

        Args:
            on_progress: called with a description of the progress; an exception ends the work.
            folder: the folder for unnamed files with large arrays; None = they stay in memory.
            room: bytes of that folder for the log-probabilities after the exact cache; those beyond
                it are computed again for every preset.
        """
        self._instrument = instrument
        self._on_progress = on_progress
        self._folder, self._room = folder, room
        self._encode = functools.cache(instrument.encode)  # a long text takes a second
        self._readers: dict[bool, TextReader] = {}  # True: for layers with windows
        self._judge: Judge | None = None
        self._file: Scratch | None = None
        self._learning: dict[str, Future[Profile]] = {}  # presets, on threads of their own
        self._closing = ExitStack()

    def __enter__(self) -> Calibration:
        if self._folder is not None:
            self._file = self._closing.enter_context(Scratch(self._folder))
        return self

    def __exit__(self, *error: object) -> None:
        self._closing.close()

    def profiles(self, order: CalibrationOrder, known: Profile | None = None) -> Iterator[Profile]:
        """Learn and measure one preset after the other; yield the profile after each.

        The profile has the rows of all presets measured so far for this order. An order with
        ``ends_early`` ends at the first preset that is not certain to keep the bound.

        Args:
            known: a profile with what presets have learned of this model already.

        Raises:
            CannotCalibrate: no text is long enough, or a context is too short for a state.
            UnknownCodec: a preset does not exist, or cannot pack this model's cache.
            ValueError: the rotary position embedding of the model is not understood.
            OSError: a text cannot be read, or the disk of the folder is full.
        """
        instrument = self._instrument
        judge = self._judge_of(order)
        if known is None or known.layout != instrument.layout or self._has_other_ropes(known):
            known = Profile(instrument.fingerprint, instrument.layout, (), {})
        profile, rows = known, list[Quality]()

        def is_enough(rows: Sequence[Quality]) -> bool:
            return order.ends_early and decided(rows, order.max_kl) is not None

        for presets in (order.presets, order.fallbacks):
            if rows and (order.ends_early or _serves(rows, profile, order.max_kl)):
                return
            names = [*dict.fromkeys(presets)]
            for name, following in itertools.zip_longest(names, names[1:]):
                profile = self._learned(profile, first_part(name), order)
                if following is not None and order.report_path and is_learned(first_part(name)):
                    self._learn_ahead(profile, first_part(following), order)
                measured = {x.preset for x in rows}
                codecs = codecs_to_measure(instrument, [name], profile)
                codecs = {x: codec for x, codec in codecs.items() if x not in measured}
                found = judge.rows(codecs, is_enough)
                if order.ends_early and not decided(found, order.max_kl):
                    return
                found = [msgspec.structs.replace(x, is_early=order.ends_early) for x in found]
                rows = sorted([*rows, *found], key=lambda row: row.context)
                yield replace(profile, rows=tuple(rows))

    def _has_other_ropes(self, known: Profile) -> bool:
        """Return whether a profile was learned with other rotary embeddings than found now."""
        return bool(known.ropes) and known.ropes != self._instrument.ropes

    # ---- learning

    def _learned(self, profile: Profile, name: str, order: CalibrationOrder) -> Profile:
        """Return a profile in which a preset has learned the model's rows, windows and states."""
        layout, states = self._instrument.layout, self._instrument.states
        sees_matrices = states and states.has_matrices and self._instrument.sees_states
        learns_costs = sees_matrices and OF_STATES not in profile.learned
        learns_rows = is_learned(name) and layout.layers and not self._knows(profile, name)
        if learns_rows or (learns_costs and not layout.layers):
            samples = self._samples(order)
            if learns_rows:
                profile = self._with(profile, name, self._learned_arrays(samples, name))
                profile = replace(profile, ropes=samples.ropes)
            if costs := learns_costs and self._readers[False].costs_of_states.learned():
                profile = self._with(profile, OF_STATES, costs)
        has_windows = states is not None and states.windows is not None
        if is_learned(name) and has_windows and name + OF_WINDOWS not in profile.learned:
            samples = self._samples(order, of_windows=True)
            profile = self._with(profile, name + OF_WINDOWS, self._learned_arrays(samples, name))
            profile = replace(profile, windows=samples.layout, window_ropes=samples.ropes)
        return profile

    def _knows(self, profile: Profile, name: str) -> bool:
        """Return whether a profile holds what a preset has learned, in this release's form."""
        if name not in profile.learned:
            return False
        try:
            open_codec(name, profile).check(self._instrument.layout)
        except UnknownCodec:
            return False
        return True

    def _samples(self, order: CalibrationOrder, *, of_windows: bool = False) -> Samples:
        """Return the samples from an order's texts; texts of earlier orders are not read again."""
        if of_windows not in self._readers:
            how = (order.probed_share, self._file, self._on_progress)
            self._readers[of_windows] = TextReader(self._instrument, *how, of_windows=of_windows)
        texts = texts_of(map(Path, order.fit_texts)) if order.fit_texts else fit_texts()
        known = (texts, self._encode, order.num_windows, order.window_tokens)
        dealt = short_texts(self._instrument, *known) if of_windows else [*deal(*known)]
        return self._readers[of_windows].samples(dealt)

    def _learned_arrays(self, samples: Samples, name: str) -> Mapping[str, np.ndarray]:
        self._on_progress(f"learning {name}")
        if name in self._learning:
            found = self._learning.pop(name).result()
        else:
            found = learn_profile(samples, self._instrument.fingerprint, [name])
        logger.info("learned %s (%s)", name, found.ids[name])
        return found.learned[name]

    def _learn_ahead(self, profile: Profile, name: str, order: CalibrationOrder) -> None:
        """Learn a preset on a thread while the one before it is measured; only for a command."""
        if not (is_learned(name) and self._instrument.layout.layers):
            return
        if self._knows(profile, name) or False not in self._readers:
            return  # nothing to learn; or reading texts first would delay the first row
        pool = self._closing.enter_context(ThreadPoolExecutor(1))
        known = (self._samples(order), self._instrument.fingerprint, [name])
        self._learning[name] = pool.submit(learn_profile, *known)

    def _with(self, profile: Profile, name: str, learned: Mapping[str, np.ndarray]) -> Profile:
        if self._file is not None:
            learned = dict(zip(learned, self._file.keep(learned.values()), strict=True))
        return replace(profile, learned={**profile.learned, name: learned})

    # ---- measuring

    def _judge_of(self, order: CalibrationOrder) -> Judge:
        """Return the judge, which has an order's cases; they are the same for all orders."""
        if self._judge is None:
            known = (self._instrument, list(self._cases(order)), self._on_progress)
            files = (self._folder, self._room)
            self._judge = Judge(*known, *files, num_threads=order.num_threads)
        return self._judge

    def _cases(self, order: CalibrationOrder) -> Iterator[Case]:
        texts = texts_of(map(Path, order.eval_texts)) if order.eval_texts else held_out_texts()
        encode = self._encode
        for context in self._contexts(order):
            of_texts = list(text_cases(texts, encode, context, order.num_scored))
            if not of_texts:
                needed = context + order.num_scored
                words = f"no text has {needed} tokens; give longer ones by --eval-text"
                raise CannotCalibrate(words)
            tokens = (encode(text.content) for text in texts)
            chains = chain_cases(tokens, encode, context, order.num_chains, order.num_scored)
            # One case of each kind goes first, since a few cases may decide.
            yield of_texts[0]
            yield from needle_cases(texts, encode, context, order.depths)
            yield from itertools.islice(chains, 1)
            yield from of_texts[1:]
            yield from chains

    def _contexts(self, order: CalibrationOrder) -> list[int]:
        """Return the contexts to measure; with states, they end at a position that has a state.

        Tokens after that position would be computed again, but count as packed. In an order from
        the command line, one context must be long enough for all sleeps of a trial (see
        ``measuring.trials``). In an engine's own order, whose contexts the engine limits, a trial
        may have fewer sleeps.
        """
        states, step = self._instrument.states, self._instrument.state_step
        if states is None:
            return list(order.contexts)
        least = least_context(states, step) if order.report_path else step
        if max(order.contexts) < least or min(order.contexts) < step:
            raise CannotCalibrate(
                f"this model's state can be stored at every {step}th token only; ask for contexts"
                f" of {least} tokens or more (--contexts)"
            )
        return list(dict.fromkeys(x // step * step for x in order.contexts))


def _serves(rows: Sequence[Quality], profile: Profile, max_kl: float) -> bool:
    """Return whether the first preset may serve in any of the forms in which it was measured."""
    first = first_part(rows[0].preset) if rows else ""
    own = {x.preset for x in rows if first_part(x.preset) == first}
    return not all(refusal(rows, x, max_kl, profile) for x in own)


def codecs_to_measure(
    instrument: Instrument, presets: Sequence[str], profile: Profile
) -> dict[str, AnyCodec]:
    """Return the codecs to measure, by preset; for a model with states, those of whole sessions.

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
            logger.warning("%s is not measured: this engine cannot observe recurrent layers", name)
            continue
        found[name] = session = open_session_codec(name, profile, states)
        session.check(layout, states)
        session.warm(layout, states)
    return found
