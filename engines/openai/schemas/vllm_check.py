"""Writes JSON schemas so that they pass vLLM's own check, which no setting turns off.

If that check (``SamplingParams`` of vLLM 0.32) finds a keyword that it assumes xgrammar does not
support, it asks llguidance, or, if ``patternProperties`` occurs anywhere in the schema, outlines,
which refuses many schemas. Our plug-in compiles all of them with llguidance. The check finds such a
keyword only beside the type that it belongs to, and it finds ``allOf`` with several branches.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, Final

from engines.openai.messages import Json
from engines.openai.schemas.refs import BY_NAME, VALUES
from engines.openai.schemas.xgrammar_keywords import LENGTHS

_WITHOUT_QUOTES: Final = re.compile(r'\[\^(?:\\.|[^\]\\])*"')


def passing(schema: Json) -> Json:
    """Return an equivalent schema that passes the check."""
    nodes = list(_nodes(schema))
    if not any("patternProperties" in x for x in nodes) or not any(map(_is_sent_on, nodes)):
        return schema
    made: Json = _rewritten(schema)
    return made


def excludes_quotes(schema: Json) -> bool:
    """Return whether a pattern excludes quotes, which llguidance 1.7 does not enforce."""
    patterns = (node.get("pattern") for node in _nodes(schema))
    return any(isinstance(x, str) and _WITHOUT_QUOTES.search(x) for x in patterns)


def _nodes(schema: Any) -> Iterator[Json]:
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            yield node
            waiting += node.values()
        elif isinstance(node, list):
            waiting += node


def _is_sent_on(node: Json) -> bool:
    """Return whether the check finds an unsupported keyword in a node."""
    parts = node.get("allOf")
    return _is_found_beside_type(node) or (isinstance(parts, list) and len(parts) > 1)


def _is_found_beside_type(node: Json) -> bool:
    named = node.get("type")
    types = set(map(str, named if isinstance(named, list) else [named]))
    return any(kind in types and is_found(node) for kind, is_found in _FOUND)


def _has_names_beside(node: Json) -> bool:
    patterns = node.get("patternProperties")
    return isinstance(patterns, dict) and ("properties" in node or len(patterns) > 1)


_FOUND: Final[tuple[tuple[str, Callable[[Json], bool]], ...]] = (
    ("integer", lambda node: "multipleOf" in node),
    ("number", lambda node: "multipleOf" in node),
    ("string", lambda node: bool({"pattern", "format"} & node.keys() and LENGTHS & node.keys())),
    ("object", _has_names_beside),
)


def _rewritten(node: Any) -> Any:
    """Return a node with types moved into branches, and each ``allOf`` as a nested chain."""
    if isinstance(node, list):
        return [_rewritten(x) for x in node]
    if not isinstance(node, dict):
        return node
    made = {key: _rewritten_value(key, value) for key, value in node.items()}
    if not _is_sent_on(node):
        return made
    if _is_found_beside_type(node):
        key = "allOf" if "anyOf" in node else "anyOf"  # the latter lets objects be closed
        made[key] = [{"type": made.pop("type")}, *_listed(made.get(key))]
    if isinstance(parts := made.get("allOf"), list) and parts:
        made["allOf"] = [_chained(parts)]
    return made


def _rewritten_value(key: str, value: Any) -> Any:
    if key in BY_NAME and isinstance(value, dict):
        return {name: _rewritten(x) for name, x in value.items()}
    return value if key in VALUES else _rewritten(value)


def _chained(parts: list[Any]) -> Any:
    first, *rest = parts
    if not rest or first is False:
        return first
    if not isinstance(first, dict):
        return _chained(rest)
    return {**first, "allOf": [_chained([*_listed(first.get("allOf")), *rest])]}


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
