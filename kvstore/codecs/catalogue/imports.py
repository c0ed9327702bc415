"""Resolves import strings, ``module:Attr``, of the functions that make codecs."""

from __future__ import annotations

import importlib
from typing import Any

from kvstore.errors import UnknownCodec


def is_import_string(text: str) -> bool:
    """Returns whether ``text`` has the form ``module:Attr``."""
    module_name, _, attribute = text.partition(":")
    return bool(attribute) and all(part.isidentifier() for part in module_name.split("."))


def imported(name: str, target: str) -> Any:
    """Returns the object that the import string ``target`` names, for the codec ``name``.

    Raises:
        UnknownCodec: ``target`` is no import string, or its object cannot be imported.
    """
    if not is_import_string(target):
        raise UnknownCodec(f"codec {name!r}: {target!r} is no import string, module:Attr")
    module_name, _, attribute = target.partition(":")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise UnknownCodec(f"codec {name!r} cannot be imported: {error}") from error
