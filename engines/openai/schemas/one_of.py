"""Decides whether the branches of a ``oneOf`` exclude each other.

Compilers treat ``oneOf`` as ``anyOf``. Both mean the same if no value obeys two branches: they have
different types, different constants, or are objects that differ in a property. Branches that are
not shown to differ in this way count as overlapping. The work is bounded, as schemas come from
clients.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import combinations
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from engines.openai.messages import Json
from engines.openai.schemas.refs import Refs, same_place

_MAX_PAIRED: Final = 16  # branches compared in pairs; more must all differ in one property
_MAX_PARTS: Final = 8  # schemas that apply together: a chain of ``$ref``, an ``allOf``
_MAX_TAGS: Final = 32  # required properties that are examined
_MAX_CONSTANTS: Final = 128  # constants of a branch that are examined
_KIND_OF: Final = {str: "string", int: "number", float: "number", bool: "boolean"} | {
    dict: "object",
    list: "array",
    type(None): "null",
}
_KINDS: Final = frozenset(_KIND_OF.values())
_OBJECT: Final = frozenset({"object"})

Constants: TypeAlias = frozenset[Hashable] | None  # None: any value


class _Branch(NamedTuple):
    """The properties that all values of one branch share."""

    kinds: frozenset[str] = _KINDS
    constants: Constants = None
    tags: dict[str, _Branch] = {}  # the same for each property that an object must have
    closed_to: tuple[frozenset[str], ...] = ()  # the names that objects are limited to

    def joined(self, other: _Branch) -> _Branch:
        """Return the properties of values that obey both branches."""
        return _Branch(
            self.kinds & other.kinds,
            _merged(self.constants, other.constants),
            {**self.tags, **other.tags} if self.tags and other.tags else self.tags or other.tags,
            self.closed_to + other.closed_to,
        )

    def excludes(self, other: _Branch) -> bool:
        kinds = self.kinds & other.kinds
        if not kinds:
            return True
        if self.constants is not None and other.constants is not None:
            return self.constants.isdisjoint(other.constants)
        if kinds != _OBJECT:
            return False
        if any(not other.tags.keys() <= names for names in self.closed_to):
            return True
        if any(not self.tags.keys() <= names for names in other.closed_to):
            return True
        return any(tag.excludes(other.tags[x]) for x, tag in self.tags.items() if x in other.tags)


class Branches:
    """The branches of one schema; each part is examined only once, even if many refer to it."""

    def __init__(self, root: Json) -> None:
        """``root``: the schema that refs point into."""
        self._refs = Refs(root)
        self._known: dict[tuple[int, bool], _Branch] = {}

    def exclude_each_other(self, node: Json) -> bool:
        """Return whether certainly no value obeys two branches of a node's ``oneOf``."""
        kinds = _Branch(_named_kinds(node))
        seen = [self._of(x).joined(kinds) for x in node["oneOf"]]
        if len(seen) <= _MAX_PAIRED:
            return all(one.excludes(other) for one, other in combinations(seen, 2))
        if _are_distinct([x.constants for x in seen]):
            return True
        if any(x.kinds != _OBJECT for x in seen):
            return False
        shared = set(seen[0].tags).intersection(*(x.tags for x in seen))
        return any(_are_distinct([x.tags[name].constants for x in seen]) for name in shared)

    def _of(self, node: Any, with_tags: bool = True) -> _Branch:
        found, waiting, branch = 0, [node], _Branch()
        while waiting and found < _MAX_PARTS:
            part = waiting.pop()
            if part is False:
                return _Branch(frozenset())
            if isinstance(part, dict):
                found += 1
                key = id(part), with_tags
                if key not in self._known:
                    self._known[key] = self._alone(part, with_tags)
                branch = branch.joined(self._known[key])
                waiting += same_place(self._refs, part)
        return branch

    def _alone(self, part: Json, with_tags: bool) -> _Branch:
        branch = _Branch(_named_kinds(part))
        for listed in (part.get("enum"), [part["const"]] if "const" in part else None):
            if isinstance(listed, list) and len(listed) <= _MAX_CONSTANTS:
                kinds = frozenset(_KIND_OF[type(x)] for x in listed)
                branch = branch.joined(_Branch(kinds, frozenset(map(_constant, listed))))
        named, needed = part.get("properties"), part.get("required")
        if not with_tags or not isinstance(named, dict):
            return branch
        names = [x for x in needed if isinstance(x, str)] if isinstance(needed, list) else []
        names.sort(key=lambda x: not {"const", "enum"} & _keys(named.get(x)))
        tags = {x: self._of(named.get(x), with_tags=False) for x in names[:_MAX_TAGS]}
        is_closed = part.get("additionalProperties") is False and "patternProperties" not in part
        return branch.joined(_Branch(tags=tags, closed_to=(frozenset(named),) * is_closed))


def _named_kinds(node: Json) -> frozenset[str]:
    named = node.get("type")
    if named is None:
        return _KINDS
    kinds = named if isinstance(named, list) else [named]
    return frozenset("number" if x == "integer" else x for x in kinds if isinstance(x, str))


def _are_distinct(sets: Sequence[Constants]) -> bool:
    known = [x for x in sets if x is not None]
    return len(known) == len(sets) and len(frozenset().union(*known)) == sum(map(len, known))


def _merged(one: Constants, other: Constants) -> Constants:
    if one is None or other is None:
        return one if other is None else other
    return one & other


def _constant(value: Any) -> Hashable:
    """Return a key that is equal for equal JSON values, such as 1 and 1.0."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number else msgspec.json.encode(value, order="sorted")


def _keys(node: Any) -> set[str]:
    return set(node) if isinstance(node, dict) else set()
