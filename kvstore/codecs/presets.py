"""Opens codecs by name; imports only the one that was chosen.

Some presets need to know the model: they are opened with its profile (see ``calibrated``);
``dense3`` also works without one. A name outside the table of ``names`` may be the import string,
``module:Attr``, of a user's own codec, or of a callable that returns one.
"""

from __future__ import annotations

import dataclasses
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

from kvstore.codecs.base import Codec, as_codec
from kvstore.codecs.catalogue import STATES, WINDOWS, MakeCodec, imported, is_import_string
from kvstore.codecs.names import (
    CODECS,
    canonical,
    family_of,
    is_learned,
    parameters_of,
    parts_of,
    unknown,
)
from kvstore.errors import UnknownCodec

if TYPE_CHECKING:
    from kvstore.codecs.profile import Profile
    from kvstore.shapes import KVLayout


ID_DIGITS: Final = 10  # of a digest of parameters, in a codec's id


def canonical_name(name: str) -> str:
    """Return the canonical form of a preset's name; ``tq:bits=4`` is ``tq4``.

    Raises:
        UnknownCodec: it names no codec, or sets parameters that the codec does not take.
    """
    try:
        return canonical(name)
    except ValueError as error:
        raise UnknownCodec(str(error)) from error


def open_codec(name: str, profile: Profile | None = None) -> Codec:
    """Return the codec of that name: the one learned in ``profile``, else one without a profile.

    Raises:
        UnknownCodec: no such name, or it needs a missing profile; the message names a remedy.
    """
    name = canonical_name(name)
    if profile is not None and name in profile.learned and is_learned(name):
        from kvstore.codecs.calibrated import calibrated_codec

        return calibrated_codec(name, profile)
    return codec_by_name(name)


def codec_by_name(name: str) -> Codec:
    """Return a preset that needs no profile, or the codec that an import string names.

    Raises:
        UnknownCodec: no such name, or it needs a profile, or the named object is not a codec.
    """
    name = canonical_name(name)
    family = family_of(name)
    if family not in CODECS:
        if not is_import_string(name):
            raise UnknownCodec(unknown(name))
        return _imported(name, name, {})
    if not CODECS[family].make:
        preset = f" --presets {name}" if family != name else ""
        raise UnknownCodec(
            f"codec {name!r} needs a profile of the model: run thermocline calibrate{preset}"
        )
    if family == name:
        return _imported(name, CODECS[name].make, {})
    codec: Any = _imported(name, CODECS[family].make, parameters_of(name))
    digest = blake2b(name.encode(), digest_size=ID_DIGITS // 2).hexdigest()
    try:
        found: Codec = dataclasses.replace(codec, id=f"{codec.id}-{digest}")
    except TypeError as error:  # a user's own codec
        raise UnknownCodec(
            f"codec {family!r} takes parameters, so it has to be a dataclass with a field id"
        ) from error
    return found


def _imported(name: str, target: MakeCodec, parameters: dict[str, float]) -> Codec:
    """Return the object that ``target`` names, or the result of a call with ``parameters``."""
    found = imported(name, target) if isinstance(target, str) else target
    try:
        codec: object = found(**parameters) if callable(found) else found
    except Exception as error:  # third-party code, perhaps named by mistake
        raise UnknownCodec(f"codec {name!r} cannot be made: {error}") from error
    return as_codec(codec, f"codec {name!r}")


def check_name(name: str) -> None:
    """Raise ``UnknownCodec`` if no codec has this name, with or without a profile.

    It may also name ways to pack windows and states, as in ``dense3+window4+state8``.
    """
    parts = parts_of(name)
    rows, _, states = parts
    if (states and states not in STATES) or parts.name != name:
        ways = ", ".join((*WINDOWS, *STATES))
        raise UnknownCodec(
            f"{name!r} names no way to pack windows or states after its +; there are {ways}"
        )
    rows = canonical_name(rows)
    if family_of(rows) not in CODECS:
        codec_by_name(rows)


def is_exact(name: str) -> bool:
    """Return whether the codec of that name restores every bit, on any model.

    Raises:
        UnknownCodec: there is no such codec.
    """
    rows, *ways = parts_of(canonical_name(name))
    rows = family_of(rows)
    return not any(ways) and (CODECS[rows].exact if rows in CODECS else codec_by_name(rows).exact)


def warm(codec: Codec, layout: KVLayout) -> None:
    """Compile the kernels that ``layout`` needs before the first request. Takes seconds, once."""
    run = layout.empty(1)
    for key, value in run:
        key.fill(1)
        value.fill(1)
    past_sinks = 1 << 20
    codec.decode(memoryview(codec.encode(run, layout, past_sinks)), layout, past_sinks, run)
