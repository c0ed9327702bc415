"""Fields of a JSON object, such as a model's config.json, several in a line."""

from __future__ import annotations

from ast import literal_eval
from typing import Any


def fields(*rows: str) -> dict[str, Any]:
    """Read rows of ``name=value`` (``a=1 b=[2,3] c=silu``); a value is Python's, or a word."""
    pairs = (pair.partition("=") for row in rows for pair in row.split())
    return {name: _value(text) for name, _, text in pairs}


def _value(text: str) -> Any:
    try:
        return literal_eval(text)
    except (ValueError, SyntaxError):
        return text
