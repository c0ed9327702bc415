"""The table of codecs by name.

Some presets have to know the model: they are opened with its profile (see ``calibrated``), and
``dense3`` knows how to do without. A name outside the table may be the import string of one's own,
``module:Attr``: a codec, or something that returns one when called.
"""

from __future__ import annotations

import importlib

from kvstore.codecs.base import Codec
from kvstore.codecs.calibrated import LEARNABLE, calibrated_codec
from kvstore.codecs.plain_rows import PlainRows
from kvstore.codecs.profile import Profile
from kvstore.codecs.raw import RawCodec
from kvstore.codecs.rotated_rows import RotatedRows
from kvstore.codecs.row_codec import RowCodec
from kvstore.codecs.seeds import SEEDS
from kvstore.errors import UnknownCodec
from kvstore.shapes import KVLayout

PRESETS = {
    "raw": "kvstore.codecs.presets:raw",
    "lm3": "kvstore.codecs.presets:lm3",
    "tq3": "kvstore.codecs.presets:tq3",
    "tq4": "kvstore.codecs.presets:tq4",
    "dense3": "kvstore.codecs.presets:dense3",
}


def raw() -> Codec:
    """As the engine has it: 1x."""
    return RawCodec()


def lm3() -> Codec:
    """Three bits without rotation, the control: 5.12x over bf16 at 256 values per row."""
    return RowCodec("lm3.1", PlainRows())


def tq3() -> Codec:
    """Three bits, rotated: 4.92x over bf16 at 64 values per row, 5.12x at 128."""
    return RowCodec("tq3.2", RotatedRows(3))


def tq4() -> Codec:
    """Four bits, rotated: 3.76x over bf16 at 64 values per row, 3.88x at 128."""
    return RowCodec("tq4.2", RotatedRows(4))


def dense3() -> Codec:
    """Three bits for a model nothing is known of: the arithmetic of ``tq3``."""
    return RowCodec("dense3.2", RotatedRows(3))


def open_codec(name: str, profile: Profile | None = None) -> Codec:
    """The calibrated preset of that name if ``profile`` has one, else what needs no profile.

    Raises:
        UnknownCodec: no such name, or it needs a profile that there is none of; says what to do.
    """
    if profile is not None and name in profile.learned and name in LEARNABLE:
        return calibrated_codec(name, profile)
    if name in LEARNABLE and name not in PRESETS:
        raise UnknownCodec(
            f"codec {name!r} needs a profile of the model: run thermocline calibrate"
        )
    return codec_by_name(name)


def codec_by_name(name: str) -> Codec:
    """A preset, or whatever an import string names.

    Raises:
        UnknownCodec: no such name, or what it names is no codec; says which names there are.
    """
    known = PRESETS | SEEDS
    target = known.get(name, name)
    module_name, _, attribute = target.partition(":")
    if not attribute or not all(part.isidentifier() for part in module_name.split(".")):
        names = ", ".join(dict.fromkeys([*PRESETS, *LEARNABLE, *SEEDS]))
        raise UnknownCodec(f"no codec named {name!r}; there are {names}")
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


def warm(codec: Codec, layout: KVLayout) -> None:
    """Compile what ``layout`` needs, ahead of the first request. Takes seconds once."""
    run = layout.empty(1)
    for key, value in run:
        key.fill(1)
        value.fill(1)
    past_sinks = 1 << 20
    codec.decode(memoryview(codec.encode(run, layout, past_sinks)), layout, past_sinks, run)
