"""Notes that map a model folder and its settings to the profile that was measured for them.

A profile is named by the model's fingerprint, which only an engine can compute. So each calibration
and each start of an engine writes the fingerprint into a note. The name of the note is a hash of
the model's files (name, size, time) and the settings that affect the fingerprint.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from engines.calibration.gate.profiles import profile_path
from kvstore.codecs.profile import Profile, load_profile
from kvstore.errors import Corrupt, Mismatch
from launch.model.find import Model, find_model
from launch.settings.effective_settings import EffectiveSettings

log = logging.getLogger("thermocline.launch")


def write_note(effective: EffectiveSettings, fingerprint: str) -> None:
    """Write the note with the fingerprint of this model for these settings."""
    note = _note(effective)
    try:
        note.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        note.write_text(fingerprint)
    except OSError as error:  # without the note only ``find_profile`` fails; engines do not need it
        log.info("%s cannot be written: %s", note, error)


def find_profile(effective: EffectiveSettings) -> Profile | None:
    """Return the model's profile; None if it was not measured, or the profile cannot be used.

    Raises:
        UsageError, LaunchError: there is no such model.
    """
    try:
        return load_profile(profile_path(effective.folders.data, noted_fingerprint(effective)))
    except OSError:
        return None
    except (Corrupt, Mismatch) as error:
        log.warning(
            "this model's profile cannot be used: %s; measure again: thermocline calibrate",
            error,
        )
        return None


def noted_fingerprint(effective: EffectiveSettings) -> str:
    """Return the fingerprint of the model from its note; "" if it was never served like this."""
    try:
        return _note(effective).read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def _note(effective: EffectiveSettings) -> Path:
    model = find_model(effective.settings.engine.model, effective.folders.cache)
    digest = blake2b(json.dumps(list(_identity(effective, model))).encode(), digest_size=12)
    return effective.folders.data / "profiles" / f"{digest.hexdigest()}.model"


def _identity(effective: EffectiveSettings, model: Model) -> Iterator[object]:
    """Yield the values that affect the fingerprint and are known without loading the model."""
    engine, kind = effective.settings.engine, effective.engine_kind
    yield (kind, model.path, engine.dtype)
    if kind == "mlx":
        yield [_version(name) for name in ("mlx", "mlx-lm")]
    else:
        own = engine.vllm
        yield (own.python, own.block_tokens, own.tensor_parallel, own.args)
    for file in sorted(model.folder.iterdir() if model.folder else ()):
        if file.suffix in (".safetensors", ".json"):
            found = file.stat()
            yield (file.name, found.st_size, found.st_mtime_ns)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
