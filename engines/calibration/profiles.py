"""Where profiles lie: one file for each model, in a folder of the data folder."""

from __future__ import annotations

from pathlib import Path

from kvstore.codecs.profile import Profile


def profile_path(data: Path, fingerprint: str) -> Path:
    return data / "profiles" / f"{fingerprint}.tcpf"


def save(profile: Profile, data: Path) -> Path:
    """In the place of an older one of the same model. Raises ``OSError``."""
    path = profile_path(data, profile.fingerprint)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    profile.save(path)
    return path
