"""Codecs by name: imports what was chosen, and nothing else.

Some presets have to know the model: they are opened with its profile (see ``calibrated``), and
``dense3`` knows how to do without. A name outside the table of ``names`` may be the import string
of one's own, ``module:Attr``: a codec, or something that returns one when called.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from kvstore.codecs.base import Codec
from kvstore.codecs.names import CODECS, LEARNABLE, STATES, WINDOWS, parts_of
from kvstore.errors import UnknownCodec

if TYPE_CHECKING:
    from kvstore.codecs.profile import Profile
    from kvstore.shapes import KVLayout


def open_codec(name: str, profile: Profile | None = None) -> Codec:
    """Returns the calibrated preset of that name if ``profile`` has one, else what needs none.

    Raises:
        UnknownCodec: no such name, or it needs a profile that there is none of; says what to do.
    """
    if profile is not None and name in profile.learned and name in LEARNABLE:
        from kvstore.codecs.calibrated import calibrated_codec

        return calibrated_codec(name, profile)
    if name in LEARNABLE and not CODECS[name].make:
        raise UnknownCodec(
            f"codec {name!r} needs a profile of the model: run thermocline calibrate"
        )
    return codec_by_name(name)


def codec_by_name(name: str) -> Codec:
    """Returns a preset that needs no profile, or the codec that an import string names.

    Raises:
        UnknownCodec: no such name, or what it names is no codec; says which names there are.
    """
    target = CODECS[name].make or name if name in CODECS else name
    module_name, _, attribute = target.partition(":")
    if not attribute or not all(part.isidentifier() for part in module_name.split(".")):
        raise UnknownCodec(f"no codec named {name!r}; there are {', '.join(CODECS)}")
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise UnknownCodec(f"codec {name!r} cannot be imported: {error}") from error
    try:
        codec: object = found() if callable(found) else found
    except Exception as error:  # somebody else's code, named by mistake perhaps
        raise UnknownCodec(f"codec {name!r} cannot be made: {error}") from error
    if not isinstance(codec, Codec):
        raise UnknownCodec(f"codec {name!r} is a {type(codec).__name__}, which is no codec")
    return codec


def check_name(name: str) -> None:
    """Raise ``UnknownCodec`` if no codec has this name, with or without a profile.

    It may name ways to keep windows and states, too, as in ``dense3+window4+state8``.
    """
    parts = parts_of(name)
    rows, _, states = parts
    if (states and states not in STATES) or parts.name != name:
        ways = ", ".join((*WINDOWS, *STATES))
        raise UnknownCodec(
            f"{name!r} names no way of windows or states behind its +; there are {ways}"
        )
    if rows not in CODECS:
        codec_by_name(rows)


def is_exact(name: str) -> bool:
    """Says whether the codec of that name loses nothing, on any model.

    Raises:
        UnknownCodec: there is none.
    """
    rows, *ways = parts_of(name)
    return not any(ways) and (CODECS[rows].exact if rows in CODECS else codec_by_name(rows).exact)


def warm(codec: Codec, layout: KVLayout) -> None:
    """Compiles what ``layout`` needs, ahead of the first request. Takes seconds once."""
    run = layout.empty(1)
    for key, value in run:
        key.fill(1)
        value.fill(1)
    past_sinks = 1 << 20
    codec.decode(memoryview(codec.encode(run, layout, past_sinks)), layout, past_sinks, run)
