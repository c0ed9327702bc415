"""The codecs of a running engine: chosen at its start, and again when a profile was written.

A model is measured more than once, and each time tiers may get other codecs. What was packed before
is never packed again, since its rows would lose twice. The names of the codecs that packed last are
kept in ``FINGERPRINT.packed`` beside the profiles, one in a line; they stay readable.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import msgspec

from engines.calibration.first_order import DENSEST
from engines.calibration.gate.choice import Choice, choose, exact
from engines.calibration.gate.profiles import profile_path
from engines.calibration.gate.rules import is_disturbed
from engines.wire import CodecReport
from kvstore.blobs.packer import StoreCodecs
from kvstore.codecs.names import EXACT, OWN, first_part
from kvstore.codecs.presets import warm
from kvstore.codecs.profile import BEFORE, UNFINISHED, Profile, load_profile
from kvstore.codecs.quality import Quality
from kvstore.codecs.registration import import_registering
from kvstore.codecs.session_codec import SessionCodec
from kvstore.config import AUTO, StoreConfig
from kvstore.errors import CodecRefused, Corrupt, Mismatch, UnknownCodec
from kvstore.shapes import KVLayout, StateLayout

logger = logging.getLogger(__name__)

MOST: Final = 4  # codecs; each takes memory for its learned arrays
MAX_OTHERS = 40  # rows of codecs that are not in use; a report goes out every second


class PackedBy:
    """The ids of codecs that packed sessions of a model, the newest last. One thread at a time."""

    def __init__(self, data: Path, fingerprint: str) -> None:
        self._path = data / "profiles" / f"{fingerprint}.packed"

    def ids(self) -> list[str]:
        """Read the ids; none if there is no such file."""
        try:
            return self._path.read_text("ascii").split()
        except (OSError, UnicodeDecodeError):
            return []

    def add(self, ids: Iterable[str]) -> None:
        """Note codecs that pack from now on. A full disk costs what is packed with them later."""
        before = self.ids()
        added = list(dict.fromkeys(ids))
        now = [*(x for x in before if x not in added), *added][-MOST:]
        if now == before:
            return
        whole = self._path.with_name(f"{self._path.name}.{os.getpid()}{UNFINISHED}")
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            whole.write_text("\n".join(now), "ascii")
            whole.replace(self._path)
        except OSError as error:
            logger.info("it cannot be noted which codecs pack: %s", error)


def earlier_codecs(
    ids: Sequence[str],
    config: StoreConfig,
    layout: KVLayout,
    profile: Profile,
    states: StateLayout | None,
) -> list[Choice]:
    """The codecs of these ids that are known to ``profile`` and may serve, the newest first."""
    found: dict[str, Choice] = {}
    for known in (profile, profile.before()):
        wanted = {x.codec_id: x.preset for x in known.rows if x.codec_id in ids}
        for codec_id, name in wanted.items():
            if name.startswith(BEFORE) or codec_id in found:
                continue
            try:
                choice = choose(name, config, layout, known, "", states)
            except (CodecRefused, UnknownCodec):
                continue
            if choice.id == codec_id and not choice.is_exact:
                found[codec_id] = choice
    return [found[x] for x in reversed(ids) if x in found]


class AdoptCodecs(Protocol):
    """The method ``adopt`` of a store."""

    def __call__(self, codecs: StoreCodecs, *, keep: bool) -> None: ...


@dataclass(frozen=True)
class _Chosen:
    choice: Choice
    measured: tuple[Quality, ...] = ()  # all rows of the model's profile
    earlier: tuple[Choice, ...] = ()  # packed before, and may still be read
    profile: Profile | None = None  # of the choice, for other servers

    @functools.cached_property
    def codecs(self) -> StoreCodecs:
        codecs = StoreCodecs(self.choice.codec, _lossy_session(self.choice))
        if codecs.exact:
            return codecs
        # From before the measurement, and from before other measurements.
        sessions = [x for x in map(_lossy_session, self.earlier) if x is not None]
        rows = (exact("").codec, *(x.codec for x in self.earlier))
        own = self.profile
        return replace(codecs, readable=rows, readable_sessions=tuple(sessions), profile=own)


def _lossy_session(choice: Choice) -> SessionCodec | None:
    """Return how a choice packs states, if it does not keep them exactly."""
    return None if choice.session is None or choice.session.exact else choice.session


def _short(row: Quality) -> Quality:
    return msgspec.structs.replace(row, texts=(), chains=())


class MeasuredModel(NamedTuple):
    """The model whose profile counts: the served one, laid out as it is when it is measured."""

    fingerprint: str
    layout: KVLayout


class ServedCodecs:
    """Chooses codecs by the model's profile and has the store adopt them. Thread-safe.

    Args:
        fingerprint: of the model, as its store names it.
        data: the data folder with the profiles; None = there are none.
        unmeasurable, states: see ``choose``.
        measured: the model that was measured, if its live cache was another one, which gives the
            model another fingerprint and layout; None = the same.

    Raises:
        CodecRefused: a codec that was named must not serve; the message has the figures.
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
        self._packed_by = PackedBy(data, fingerprint) if data is not None else None
        self._chosen = self._choose()
        self._note_packing()
        self._say()

    @property
    def codecs(self) -> StoreCodecs:
        """The codecs that the store packs with, and others that it may read."""
        return self._chosen.codecs

    @property
    def choice(self) -> Choice:
        """The codec that is written, and why."""
        return self._chosen.choice

    @property
    def report(self) -> CodecReport:
        """The codecs and the reasons for them, as they are reported to the gateway."""
        chosen, choice = self._chosen, self._chosen.choice
        others = [_short(row) for row in chosen.measured if row not in choice.rows]
        return CodecReport(
            name=choice.name,
            id=choice.id,
            why=choice.why,
            rows=tuple(_short(row) for row in choice.rows),
            others=tuple(others[:MAX_OTHERS]),
            unmeasured=choice.unmeasured,
            fingerprint=self.fingerprint,
            max_kl=self._config.max_kl,
        )

    def renew(self, adopt: AdoptCodecs) -> None:
        """Choose again by the newest profile, and have the store ``adopt`` the result.

        Compiles the kernels of new codecs, which takes seconds. A codec that is now refused gives
        way to an exact one: a running server does not end for it.
        """
        with self._lock:
            chosen = self._choose_again()
            adopt(chosen.codecs, keep=self._stands(chosen))
            before, self._chosen = self._chosen, chosen
            self._note_packing()
            if chosen.codecs != before.codecs:
                self._say()

    def _choose_again(self) -> _Chosen:
        try:
            return self._choose()
        except (CodecRefused, UnknownCodec) as error:
            logger.error("%s; from now on nothing is packed with loss", error)
            return _Chosen(exact(str(error)))

    def _choose(self) -> _Chosen:
        profile = self.profile()
        chosen = _Chosen(self._choice_by(profile))
        if profile is not None and self._data is not None:
            rows = tuple(x for x in profile.rows if not x.preset.startswith(BEFORE))
            earlier = self._earlier(chosen, profile)
            own = profile.only(chosen.choice.name)
            chosen = replace(chosen, measured=rows, earlier=earlier, profile=own)
        for choice in (chosen.choice, *chosen.earlier):
            self._warm(choice)
        return chosen

    def _warm(self, choice: Choice) -> None:
        if choice.session is not None and self._states is not None:
            choice.session.warm(self.layout, self._states)
        elif self.layout.layers:
            warm(choice.codec, self.layout)

    def opened(self, profile: Profile) -> StoreCodecs | None:
        """Open the codecs of another server's profile, if they may serve here.

        Where this server has measured them itself, its own figures count, and it can read them if
        they keep the bound.
        """
        own = self.profile()
        ids = dict.fromkeys(x.codec_id for x in profile.rows)
        is_known = own is not None and any(x.codec_id in ids for x in own.rows)
        if is_known or self._config.codec == EXACT or not self.is_of_this_model(profile):
            return None
        found = earlier_codecs(list(ids), self._config, self.layout, profile, self._states)
        if not found:
            return None
        self._warm(found[0])
        return StoreCodecs(found[0].codec, _lossy_session(found[0]))

    def _choice_by(self, profile: Profile | None) -> Choice:
        """The codec by this profile of the model. Raises ``CodecRefused`` and ``UnknownCodec``."""
        name, known = self._config.codec, (self._config, self.layout, profile, self._unmeasurable)
        return choose(name, *known, self._states)

    def _earlier(self, chosen: _Chosen, profile: Profile) -> tuple[Choice, ...]:
        """The codecs that packed before this choice, if they may still serve."""
        used = chosen.choice.id
        ids = [x for x in self._packed_by.ids() if x != used] if self._packed_by else []
        return tuple(earlier_codecs(ids, self._config, self.layout, profile, self._states))

    def _note_packing(self) -> None:
        if self._packed_by is not None and not self.choice.is_exact:
            self._packed_by.add([self.choice.id])

    @property
    def learns_on(self) -> bool:
        """True if more is to be learned of this model once it is measured: the densest preset."""
        store, states = self._config, self._states
        if not (store.calibrate and store.learn_on) or self._unmeasurable:
            return False
        has_rows = bool(self.layout.layers) or (states is not None and states.windows is not None)
        measured = {first_part(x.preset) for x in self._chosen.measured}
        return has_rows and store.codec == AUTO and DENSEST not in measured

    @property
    def times_again(self) -> bool:
        """True if ``auto`` chose by times that other work on the machine disturbed."""
        if not (self._config.calibrate and self._config.codec == AUTO) or self._unmeasurable:
            return False
        rows = [x for x in self._chosen.measured if first_part(x.preset) in OWN]
        return any(map(is_disturbed, rows))

    @property
    def has_open_questions(self) -> bool:
        """True if a measurement would add something to this model's profile."""
        return self.choice.unmeasured or self.learns_on or self.times_again

    def _stands(self, after: _Chosen) -> bool:
        """True if the codec that packed before may still serve.

        Another may suit the model better now; but if it was taken back, its blobs must go, too.
        """
        before = self.choice
        if before.is_exact or before.name == after.choice.name:
            return True
        try:
            known = (self._config, self.layout, self.profile(), self._unmeasurable, self._states)
            choice = choose(before.name, *known)
        except (CodecRefused, UnknownCodec):
            return False
        return choice.name == before.name

    def profile(self) -> Profile | None:
        """The model's profile as it is now; None if there is none that can be used."""
        if self._data is None:
            return None
        path = profile_path(self._data, self.measured.fingerprint)
        try:
            # All presets were learned, and one or two serve: only those get memory.
            profile = load_profile(path, mapped=True)
        except FileNotFoundError:
            return None
        except (OSError, Corrupt, Mismatch) as error:
            logger.warning("what was measured on this model cannot be used: %s", error)
            return None
        if not self.is_of_this_model(profile):
            logger.warning("%s is of another model", path)
            return None
        return profile

    def is_of_this_model(self, profile: Profile) -> bool:
        """Say whether a profile is of the model that is served, with its cache laid out alike."""
        return (profile.fingerprint, profile.layout) == self.measured

    def _say(self) -> None:
        report = self.report
        logger.info("sessions are packed with %s: %s", report.id, report.why)
