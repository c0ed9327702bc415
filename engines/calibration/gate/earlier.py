"""Codecs of earlier verdicts, which stay readable while sessions may rest in them.

A model is measured more than once, and each time tiers may get other codecs. What was packed before
is never packed again, since its rows would lose twice. The names of the codecs that packed last are
kept in ``FINGERPRINT.packed`` beside the profiles, one in a line.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from engines.calibration.gate.choice import Choice, choose
from kvstore.codecs.profile import BEFORE, UNFINISHED, Profile
from kvstore.config import StoreConfig
from kvstore.errors import CodecRefused, UnknownCodec
from kvstore.shapes import KVLayout, StateLayout

logger = logging.getLogger(__name__)

MOST: Final = 4  # codecs; each takes memory for its learned arrays


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
