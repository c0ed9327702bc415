"""Notes that say which measured profile belongs to a model folder served with these settings.

A profile is named by the model's fingerprint, which only an engine can compute. So a calibration,
and every start of an engine, write the fingerprint into a note; its name is a hash of all that can
be seen of the model and the settings without loading anything.
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
    """Note that this model, as it is now and served with these settings, has that fingerprint."""
    note = _note(effective)
    try:
        note.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        note.write_text(fingerprint)
    except OSError as error:  # then ``find_profile`` finds nothing, and the engine still does
        log.info("%s cannot be written: %s", note, error)


def find_profile(effective: EffectiveSettings) -> Profile | None:
    """The profile of the model as it is now; None if there is none that can be used.

    Raises:
        UsageError, LaunchError: there is no such model.
    """
    try:
        return load_profile(profile_path(effective.folders.data, noted_fingerprint(effective)))
    except OSError:
        return None
    except (Corrupt, Mismatch) as error:
        log.warning(
            "what was measured of this model cannot be used: %s; measure it again: thermocline"
            " calibrate",
            error,
        )
        return None


def noted_fingerprint(effective: EffectiveSettings) -> str:
    """Return the fingerprint of the model when it was served last; "" if it never was."""
    try:
        return _note(effective).read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def _note(effective: EffectiveSettings) -> Path:
    model = find_model(effective.settings.engine.model, effective.folders.cache)
    digest = blake2b(json.dumps(list(_identity(effective, model))).encode(), digest_size=12)
    return effective.folders.data / "profiles" / f"{digest.hexdigest()}.model"


def _identity(effective: EffectiveSettings, model: Model) -> Iterator[object]:
    """All that can be seen without loading the model and changes its fingerprint."""
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
