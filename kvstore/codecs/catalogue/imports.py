"""Resolves import strings, ``module:Attr``, of the functions that make codecs."""

from __future__ import annotations

import importlib
from typing import Any

from kvstore.codecs.names import unknown
from kvstore.errors import UnknownCodec


def imported(name: str, target: str) -> Any:
    """Returns the object that the import string ``target`` names, for the codec ``name``.

    Raises:
        UnknownCodec: ``target`` is no import string, or its object cannot be imported.
    """
    module_name, _, attribute = target.partition(":")
    if not attribute or not all(part.isidentifier() for part in module_name.split(".")):
        raise UnknownCodec(unknown(name))
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise UnknownCodec(f"codec {name!r} cannot be imported: {error}") from error
