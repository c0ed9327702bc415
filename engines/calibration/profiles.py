"""Where profiles lie: one file for each model, in a folder of the data folder."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from kvstore.codecs.profile import Profile, load_profile
from kvstore.errors import Corrupt, Mismatch

logger = logging.getLogger(__name__)


def profile_path(data: Path, fingerprint: str) -> Path:
    return data / "profiles" / f"{fingerprint}.tcpf"


def save(profile: Profile, data: Path) -> Path:
    """Presets that this profile knows nothing of stay as an older one of the model has them: what
    was packed by them must be found again. Raises ``OSError``."""
    path = profile_path(data, profile.fingerprint)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.exists():
        profile = _with_older(profile, path)
    profile.save(path)
    return path


def _with_older(profile: Profile, path: Path) -> Profile:
    try:
        older = load_profile(path)
    except (Corrupt, Mismatch) as error:
        logger.info("%s is replaced: %s", path, error)
        return profile
    ropes = profile.ropes or older.ropes
    if older.layout != profile.layout or older.ropes not in ((), ropes):
        return profile
    fresh = {(row.preset, row.context) for row in profile.rows}
    kept = [
        row
        for row in older.rows
        if row.preset not in profile.learned and (row.preset, row.context) not in fresh
    ]
    learned = {**older.learned, **profile.learned}
    return replace(profile, ropes=ropes, learned=learned, rows=(*kept, *profile.rows))
