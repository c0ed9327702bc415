"""What was measured of a model, found without loading it.

A profile is named by the model's content, which only an engine can tell. So a calibration, and
every start of an engine, leave a note that joins a model's folder and settings with that name.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from engines.calibration.choice import Choice, choose, exact
from engines.calibration.profiles import profile_path
from engines.packed_budget import HOT_CODECS
from kvstore.codecs.packed_array import PackedLayout
from kvstore.codecs.profile import Profile, load_profile
from kvstore.errors import Corrupt, Mismatch
from kvstore.shapes import KVLayout
from launch.effective import Effective
from launch.families import cache_shape
from launch.model import Model, find_model
from launch.plan import live_dtype

log = logging.getLogger("thermocline.launch")

MEASURABLE = ("mlx", "vllm")


def remember(effective: Effective, fingerprint: str) -> None:
    """This model, as it is now and served like this, is the one of that fingerprint."""
    note = _note(effective, _model(effective))
    try:
        note.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        note.write_text(fingerprint)
    except OSError as error:  # only who asks without an engine misses it
        log.info("%s cannot be written: %s", note, error)


def recall(effective: Effective) -> Profile | None:
    """None if nothing was measured here of the model as it is now.

    Raises ``UsageError`` or ``LaunchError``: there is no such model.
    """
    try:
        fingerprint = _note(effective, _model(effective)).read_text()
        return load_profile(profile_path(effective.folders.data, fingerprint))
    except (OSError, UnicodeDecodeError):
        return None
    except (Corrupt, Mismatch) as error:
        log.warning(
            "what was measured of this model cannot be used: %s; measure it again: thermocline"
            " calibrate",
            error,
        )
        return None


def likely_choice(effective: Effective) -> Choice:
    """What the engine would choose for ``store.codec`` at its start. See ``likely_choices``."""
    return likely_choices(effective)[effective.settings.store.codec]


def likely_choices(effective: Effective) -> Mapping[str, Choice]:
    """What the engine would choose at its start, by the name that the settings have: first that of
    ``store.codec``, then those that a tier has of its own.

    Raises:
        CodecRefused, UnknownCodec: see ``choose``.
        NotUnderstood: the model's cache.
        UsageError, LaunchError: there is no such model.
    """
    engine, store = effective.settings.engine, effective.settings.store
    named = (store.codec, store.disk_codec, store.redis_codec)
    names = tuple(dict.fromkeys(x or store.codec for x in named))
    content = _model(effective).config()
    shape, profile = cache_shape(content), recall(effective)
    if shape.exact_only:
        return dict.fromkeys(names, exact(shape.exact_only))
    layout = KVLayout(live_dtype(engine, content, effective.widens), shape.growing)
    if profile is not None:
        layout = profile.layout  # of one rank
    if num_bits := HOT_CODECS.get(engine.hot_codec):
        layout = PackedLayout(dtype=layout.dtype, layers=layout.layers, num_bits=num_bits)
    unmeasurable = "windows and recurrent state" if shape.needs_state else ""
    return {x: choose(x, store, layout, profile, unmeasurable) for x in names}


def _model(effective: Effective) -> Model:
    return find_model(effective.settings.engine.model, effective.folders.cache)


def _note(effective: Effective, model: Model) -> Path:
    digest = blake2b(json.dumps(list(_identity(effective, model))).encode(), digest_size=12)
    return effective.folders.data / "profiles" / f"{digest.hexdigest()}.model"


def _identity(effective: Effective, model: Model) -> Iterator[object]:
    """All that can be seen from outside and makes another model of it, or another cache."""
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
