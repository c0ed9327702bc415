"""The codecs of a running engine: chosen at its start, and again when a profile was written.

Blobs of an earlier codec are read with the profile that is stored beside them under the codec's id
(``opened``).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from engines.calibration.gate.choice import Choice, choose, exact
from engines.calibration.gate.profiles import load, profile_path
from engines.calibration.gate.rules import is_doubtful
from engines.calibration.orders import DENSEST
from engines.wire import CodecReport
from kvstore.blobs.packer import StoreCodecs
from kvstore.codecs.names import EXACT, first_part
from kvstore.codecs.presets import warm
from kvstore.codecs.profile import Profile
from kvstore.codecs.quality import Quality, short_row
from kvstore.codecs.registration import import_registering
from kvstore.codecs.stacks.fused import packing_later
from kvstore.config import AUTO, StoreConfig
from kvstore.errors import CodecRefused, UnknownCodec
from kvstore.shapes import KVLayout, StateLayout
from kvstore.workers import in_background

logger = logging.getLogger(__name__)

MAX_OTHERS = 40  # rows of other codecs in a report, which is sent every second


class _Chosen(NamedTuple):
    choice: Choice
    measured: tuple[Quality, ...] = ()  # all rows of the model's profile


def _never(call: Callable[[], None]) -> None:
    pass


class MeasuredModel(NamedTuple):
    """The fingerprint and the layout that the served model had when it was measured."""

    fingerprint: str
    layout: KVLayout


class ServedCodecs:
    """Chooses codecs by the model's profile, and makes the store adopt them; thread-safe.

    At the start, only the kernels for restoring are compiled and checked. ``compile_rest`` compiles
    those for packing; until then numpy packs, ten times slower.

    Args:
        fingerprint: the model's fingerprint in the store.
        data: the data folder with the profiles; None = there are none.
        unmeasurable, states: see ``choose``.
        measured: the model as it was measured, if its live cache was another kind and so its
            fingerprint and layout differ; None = the same.

    Raises:
        CodecRefused: the codec of the settings must not serve; the message has the figures.
        UnknownCodec: it does not exist, or cannot pack this layout.
    """

    def __init__(
        self,
        config: StoreConfig,
        layout: KVLayout,
        fingerprint: str,
        data: Path | None,
        unmeasurable: str = "",
        states: StateLayout | None = None,
        measured: MeasuredModel | None = None,
    ) -> None:
        import_registering(config.codec_modules)
        self._states = states
        self._config = config
        self.layout = layout
        self.fingerprint = fingerprint
        self.measured = measured or MeasuredModel(fingerprint, layout)
        self._data = data
        self._unmeasurable = unmeasurable
        self._lock = threading.Lock()
        self._rest: list[Callable[[], None]] = []  # functions that compile the remaining kernels
        with packing_later(self._rest.append):
            self._chosen = self._choose()
        self._log_choice()

    @property
    def codecs(self) -> StoreCodecs:
        """The codecs that the store packs with, and others that it may read."""
        return self._chosen.choice.codecs

    @property
    def report(self) -> CodecReport:
        """The report to the gateway: the codec that packs, and the reasons for it."""
        choice, measured = self._chosen
        others = [short_row(row) for row in measured if row not in choice.rows]
        return CodecReport(
            name=choice.name,
            id=choice.id,
            why=choice.why,
            rows=tuple(short_row(row) for row in choice.rows),
            others=tuple(others[:MAX_OTHERS]),
            unmeasured=choice.unmeasured,
            fingerprint=self.fingerprint,
            max_kl=self._config.max_kl,
        )

    def renew(self, adopt: Callable[..., None]) -> None:
        """Choose again by the newest profile, and pass the result to ``adopt`` of the store.

        It compiles the kernels of new codecs, which takes seconds. A codec that is refused now is
        replaced by an exact one, since a running server must not end.
        """
        with self._lock, in_background():
            try:
                chosen = self._choose()
            except (CodecRefused, UnknownCodec) as error:
                logger.error("%s; from now on sessions are packed without loss", error)
                chosen = _Chosen(exact(str(error)))
            before, after = self.codecs, chosen.choice.codecs
            adopt(after, keep=self._may_still_serve(chosen.choice))
            self._chosen = chosen
            if after != before:
                self._log_choice()

    def compile_rest(self) -> None:
        """Start to compile the kernels for packing on a thread, once all others are compiled.

        numba compiles one function at a time, so kernels needed first would have to wait. The
        thread has normal priority, since the end of the first turn needs the kernels.
        """
        threading.Thread(target=self._compile_rest, name="thermocline-compile").start()

    def _compile_rest(self) -> None:
        with in_background():
            while self._rest and threading.main_thread().is_alive():  # stop if the process ends
                self._rest.pop()()

    def _choose(self) -> _Chosen:
        profile = self.profile()
        choice = self._choice_of(self._config.codec, profile)
        self._warm(choice)
        return _Chosen(choice, profile.rows if profile is not None else ())

    def _choice_of(self, name: str, profile: Profile | None) -> Choice:
        known = (self._config, self.layout, profile, self._unmeasurable, self._states)
        return choose(name, *known)

    def _warm(self, choice: Choice) -> None:
        if choice.session is not None and self._states is not None:
            choice.session.warm(self.layout, self._states)
        elif self.layout.layers:
            warm(choice.codec, self.layout)

    def opened(self, profile: Profile) -> StoreCodecs | None:
        """Return the codecs of a profile that is stored beside blobs; None if they must not serve.

        If this server has measured such a codec itself, its own figures decide.
        """
        if self._config.codec == EXACT or not self.is_of_this_model(profile):
            return None
        own, ids = self.profile(), {x.codec_id for x in profile.rows}
        judged = tuple(x for x in own.rows if x.codec_id in ids) if own is not None else ()
        known = replace(profile, rows=judged or profile.rows)
        for name in dict.fromkeys(x.preset for x in known.rows):
            try:
                with packing_later(_never):  # these codecs only read
                    choice = self._choice_of(name, known)
            except (CodecRefused, UnknownCodec):
                continue
            if not choice.is_exact:
                self._warm(choice)
                return replace(choice.codecs, readable=(), profile=None)
        return None

    @property
    def unmeasured(self) -> bool:
        """True if a measurement may change the choice: none was made, or one with few texts."""
        choice = self._chosen.choice
        is_early = bool(choice.rows) and all(x.is_early for x in choice.rows)
        return choice.unmeasured or (is_early and not self._unmeasurable)

    @property
    def learns_on(self) -> bool:
        """True if the densest preset is still to be learned, once this model is measured."""
        store, states = self._config, self._states
        if not (store.calibrate and store.learn_on) or self._unmeasurable:
            return False
        has_rows = bool(self.layout.layers) or (states is not None and states.windows is not None)
        measured = {first_part(x.preset) for x in self._chosen.measured}
        return has_rows and store.codec == AUTO and DENSEST not in measured

    @property
    def times_again(self) -> bool:
        """True if ``auto`` chose by times that are doubtful; see ``is_doubtful``."""
        is_asked = self._config.calibrate and not self._unmeasurable
        return is_asked and any(map(is_doubtful, self._chosen.choice.compared))

    @property
    def has_open_questions(self) -> bool:
        """True if a measurement would add something to this model's profile."""
        return self.unmeasured or self.learns_on or self.times_again

    def _may_still_serve(self, after: Choice) -> bool:
        """Return whether the codec that packed until now may still serve.

        If another codec is merely better, its blobs stay; if it is refused now, they must go.
        """
        before = self._chosen.choice
        if before.is_exact or before.name == after.name:
            return True
        try:
            return self._choice_of(before.name, self.profile()).name == before.name
        except (CodecRefused, UnknownCodec):
            return False

    def profile(self) -> Profile | None:
        """Read and return the model's profile; None if there is none that can be used."""
        if self._data is None:
            return None
        profile = load(self._data, self.measured.fingerprint)
        if profile is None:
            return None
        if not self.is_of_this_model(profile):
            path = profile_path(self._data, self.measured.fingerprint)
            logger.warning("%s belongs to another model", path)
            return None
        return profile

    def is_of_this_model(self, profile: Profile) -> bool:
        """Return whether a profile has the fingerprint and the layout of the served model."""
        return (profile.fingerprint, profile.layout) == self.measured

    def _log_choice(self) -> None:
        report = self.report
        how = "stored exactly, by" if report.name == EXACT else "packed with"
        logger.info("sessions are %s %s: %s", how, report.id, report.why)
