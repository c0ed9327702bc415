"""Adds a user's own methods to the table, for this process.

A registered method has a name like any other: settings, calibration, the quality gate and the
server accept it. Every process that reads names has to register it, so a server imports the
modules of ``store.codec_modules`` in every process that opens codecs.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

from kvstore.codecs.catalogue import LITERATURE, OWN, CodecEntry, MakeCodec, Parameter, imported
from kvstore.codecs.names import CODECS, FAMILIES
from kvstore.errors import UnknownCodec

# An id has at most 24 characters (``kvstore.blobs.format``), of which a learned codec's version and
# digest take 13.
NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,10}")
MOST_ID: Final = 24
PARAMETER_DIGITS: Final = 11  # characters that parameters other than the usual ones add to an id
SIZED_DIM: Final = 128  # width of rows, and number of tokens, that define ``CodecEntry.bits``


def register(
    name: str,
    make: MakeCodec | None,
    learn: object = None,
    paper: str = "",
    *,
    parameters: Sequence[Parameter] | None = None,
) -> None:
    """Add a method to the table, in this process; replace a registered one of the same name.

    Args:
        name: at most 11 characters: small letters, digits and "_".
        make: a callable that returns a ``kvstore.codecs.base.Codec``, or an import string of one;
            None if only a profile can make it. The first sentence of its docstring describes the
            method.
        learn: a ``kvstore.codecs.calibrated.CalibratedPreset``, or an import string of one, if the
            method learns from a model.
        paper: the source of the method.
        parameters: the numbers that ``make`` takes by name, and the fields of ``learn``; None =
            all its parameters whose defaults are numbers, without bounds. Codecs with parameters
            are dataclasses with a field ``id``.

    Raises:
        ValueError: the name is malformed, or one of the product's; or both ``make`` and ``learn``
            are missing.
        UnknownCodec: ``make`` does not make a codec.
    """
    if not NAME.fullmatch(name):
        raise ValueError(
            f"a method cannot be called {name!r}; use at most 11 small letters, digits and _"
        )
    if name in OWN or name in LITERATURE or name in FAMILIES:
        raise ValueError(f"there is a method {name!r} already; take another name")
    if make is None and learn is None:
        raise ValueError(f"method {name!r} can neither be made nor learned")
    before = CODECS.get(name)
    entry = CodecEntry(math.nan, "", make or "", learn or "", paper=paper)
    CODECS[name] = entry
    try:
        CODECS[name] = _described(name, entry, parameters)
    except BaseException:
        del CODECS[name]
        if before is not None:
            CODECS[name] = before
        raise


def import_registering(modules: Iterable[str]) -> None:
    """Import modules that register methods; importing one a second time has no effect.

    Raises:
        UnknownCodec: a module cannot be imported; the message says why.
    """
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:  # a user's own code
            raise UnknownCodec(
                f"store.codec_modules: {module} cannot be imported: {error}"
            ) from error


def _described(name: str, entry: CodecEntry, parameters: Sequence[Parameter] | None) -> CodecEntry:
    """Return the table's row with the fields that follow from the method itself."""
    from kvstore.codecs.presets import codec_by_name
    from kvstore.shapes import KVLayer, KVLayout

    source = entry.make or entry.learn
    source = imported(name, source) if isinstance(source, str) else source
    if parameters is None:
        parameters = _parameters_of(source)
    entry = entry._replace(sentence=_sentence_of(source), parameters=tuple(parameters))
    if not entry.make:
        return entry
    codec = codec_by_name(name)
    most = MOST_ID - (PARAMETER_DIGITS if parameters else 0)
    if not 0 < len(codec.id) <= most or not codec.id.isascii():
        raise UnknownCodec(f"method {name!r}: the id {codec.id!r} has more than {most} characters")
    layout = KVLayout("bfloat16", (KVLayer(1, SIZED_DIM, SIZED_DIM),))
    past_sinks = 1 << 20
    nbytes = codec.packed_nbytes(layout, SIZED_DIM, past_sinks)
    bits = 8 * nbytes / (SIZED_DIM * layout.elements_per_token)
    if bits <= 0:
        raise UnknownCodec(f"method {name!r} packs {SIZED_DIM} tokens into no bytes")
    return entry._replace(bits=round(bits, 4), exact=codec.exact)


def _sentence_of(source: Any) -> str:
    described = source if callable(source) else type(source)
    text = inspect.getdoc(described) or ""
    sentence, dot, _ = " ".join(text.partition("\n\n")[0].split()).partition(". ")
    return f"{sentence}." if dot else sentence


def _parameters_of(source: Any) -> tuple[Parameter, ...]:
    """Return a callable's parameters, or a dataclass's fields, whose defaults are numbers."""
    usual: dict[str, Any] = {}
    if callable(source):
        usual = {x.name: x.default for x in inspect.signature(source).parameters.values()}
    elif dataclasses.is_dataclass(source):
        usual = {x.name: getattr(source, x.name) for x in dataclasses.fields(source)}
    return tuple(
        Parameter(key, value, is_whole=isinstance(value, int))
        for key, value in usual.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    )
