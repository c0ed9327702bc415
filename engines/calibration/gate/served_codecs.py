"""The codecs of a running engine: chosen at its start, and again when a profile was written."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, get_args

import msgspec

from engines.calibration.gate.choice import Choice, choose, exact
from engines.calibration.gate.profiles import profile_path
from engines.wire import CodecReport, TierName
from kvstore.blobs.codec_set import CodecSet, open_codecs
from kvstore.codecs.base import Codec
from kvstore.codecs.presets import warm
from kvstore.codecs.profile import Profile, load_profile
from kvstore.config import StoreConfig
from kvstore.errors import CodecRefused, Corrupt, Mismatch, UnknownCodec
from kvstore.shapes import KVLayout

logger = logging.getLogger(__name__)


class AdoptCodecs(Protocol):
    """The method ``adopt`` of a store."""

    def __call__(self, codecs: CodecSet, *, keep: bool) -> None: ...


@dataclass(frozen=True)
class _Chosen:
    codecs: CodecSet
    choices: Mapping[str, Choice]  # by the name that the settings have


def _all_exact(codecs: CodecSet) -> bool:
    return all(x.exact for x in codecs.written)


def _stands(before: _Chosen, after: _Chosen) -> bool:
    """True if no lossy codec was dropped; if one was, its blobs must go, too."""
    return all(
        choice.codec.exact or choice.name == after.choices[name].name
        for name, choice in before.choices.items()
    )


class ServedCodecs:
    """Chooses codecs by the model's profile and has the store adopt them. Thread-safe.

    Args:
        fingerprint: of the model, as its store names it.
        data: the data folder with the profiles; None = there are none.
        unmeasurable: see ``choose``.

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
    ) -> None:
        self._config = config
        self._layout = layout
        self._fingerprint = fingerprint
        self._data = data
        self._unmeasurable = unmeasurable
        self._lock = threading.Lock()
        self._chosen = self._choose()
        self._say()

    @property
    def codecs(self) -> CodecSet:
        """The codecs that the store packs with, and others that it may read."""
        return self._chosen.codecs

    @property
    def report(self) -> CodecReport:
        """The codecs and the reasons for them, as the gateway is told."""
        chosen = self._chosen
        first, codecs = chosen.choices[self._config.codec], chosen.codecs
        tiers: tuple[TierName, ...] = get_args(TierName)
        return CodecReport(
            name=first.name,
            id=first.codec.id,
            tiers={tier: codecs.of(tier).id for tier in tiers},
            why="; ".join(dict.fromkeys(x.why for x in chosen.choices.values())),
            rows=tuple(
                msgspec.structs.replace(row, texts=())
                for choice in chosen.choices.values()
                for row in choice.rows
            ),
            unmeasured=any(x.unmeasured for x in chosen.choices.values()),
            fingerprint=self._fingerprint,
        )

    def renew(self, adopt: AdoptCodecs) -> None:
        """Choose again by the newest profile, and have the store ``adopt`` the result.

        Compiles the kernels of new codecs, which takes seconds. A codec that is now refused gives
        way to an exact one: a running server does not end for it.
        """
        with self._lock:
            chosen = self._choose_again()
            adopt(chosen.codecs, keep=_stands(self._chosen, chosen))
            before, self._chosen = self._chosen, chosen
            if self._chosen.codecs != before.codecs:
                self._say()

    def _choose_again(self) -> _Chosen:
        try:
            return self._choose()
        except (CodecRefused, UnknownCodec) as error:
            logger.error("%s; from now on nothing is packed with loss", error)
            choices = {name: exact(str(error)) for name in self._chosen.choices}
            return _Chosen(CodecSet.one(exact("").codec), choices)

    def _choose(self) -> _Chosen:
        choices: dict[str, Choice] = {}
        profile = self._load()

        def open_one(name: str) -> Codec:
            choice = choose(name, self._config, self._layout, profile, self._unmeasurable)
            if self._layout.layers:
                warm(choice.codec, self._layout)
            choices[name] = choice
            return choice.codec

        codecs = open_codecs(self._config, open_one)
        if not _all_exact(codecs):  # blobs from before the measurement are exact
            codecs = replace(codecs, readable=(exact("").codec,))
        return _Chosen(codecs, choices)

    def _load(self) -> Profile | None:
        """The model's profile; None if there is none that can be used."""
        if self._data is None:
            return None
        path = profile_path(self._data, self._fingerprint)
        try:
            profile = load_profile(path)
        except FileNotFoundError:
            return None
        except (OSError, Corrupt, Mismatch) as error:
            logger.warning("what was measured on this model cannot be used: %s", error)
            return None
        if profile.fingerprint != self._fingerprint or profile.layout != self._layout:
            logger.warning("%s is of another model", path)
            return None
        return profile

    def _say(self) -> None:
        report = self.report
        used = ", ".join(dict.fromkeys([report.id, *report.tiers.values()]))
        logger.info("sessions are packed with %s: %s", used, report.why)
