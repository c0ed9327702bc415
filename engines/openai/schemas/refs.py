"""Follows the refs of a JSON schema that lead to its root or to a definition at its root."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from typing import Any, Final, TypeAlias
from urllib.parse import quote, unquote

from engines.openai.messages import Json
from engines.openai.schemas.keywords import DEFINITIONS

Place: TypeAlias = tuple[str, ...]  # () the root, else the definitions' keyword and a name

_ROOT: Final[Place] = ()


class Refs:
    """The refs of one schema."""

    def __init__(self, root: Json) -> None:
        self._root = root

    def place(self, ref: object) -> Place | None:
        """Return the place that a ref leads to; None if it is neither the root nor a definition.

        None also if any part of the schema has an ``$id``, since its refs would start from there.
        """
        steps = unquote(ref).split("/") if isinstance(ref, str) else []
        if self._has_addresses or not steps or steps[0] != "#" or len(steps) not in (1, 3):
            return None
        if len(steps) == 1:
            return _ROOT
        _, where, step = steps
        name = step.replace("~1", "/").replace("~0", "~")
        return (where, name) if (where, name) in self._targets else None

    @property
    def go_round(self) -> bool:
        """True if the schema is recursive."""
        return _circle(self._reached) is not None

    @property
    def endless(self) -> str:
        """A ref that every value would have to obey within itself, without end; "" if none."""
        reached, waiting = {_ROOT}, [_ROOT]
        while waiting:
            new = self._reached[waiting.pop()] - reached
            reached |= new
            waiting += new
        found = _circle({x: self._led_to(_needed(self._targets[x])) for x in reached})
        return "" if found is None else ref_to(found)

    @cached_property
    def _targets(self) -> dict[Place, Any]:
        inner = {key: x for key, x in self._root.items() if key not in DEFINITIONS}
        named = {x: self._root.get(x) for x in DEFINITIONS}
        return {_ROOT: inner} | {
            (where, name): x
            for where, parts in named.items()
            if isinstance(parts, dict)
            for name, x in parts.items()
        }

    @cached_property
    def _reached(self) -> dict[Place, set[Place]]:
        """The places to which the refs in each place lead, by place."""
        return {
            place: self._led_to(x.get("$ref") for x in _nodes(part))
            for place, part in self._targets.items()
        }

    def _led_to(self, refs: Iterable[object]) -> set[Place]:
        return {place for ref in refs if (place := self.place(ref)) is not None}

    @cached_property
    def _has_addresses(self) -> bool:
        return any(
            isinstance(x.get("$id"), str) and x is not self._root for x in _nodes(self._root)
        )


def ref_to(place: Place, *, in_calls: bool = False) -> str:
    """Return the ref to a place; xgrammar reads no percent escapes."""
    if place == _ROOT:
        return "#"
    where, name = place
    step = escaped(name)
    return f"#/{where}/{step if in_calls else quote(step, '~')}"


def escaped(name: str) -> str:
    """Return a name escaped as in a JSON pointer (RFC 6901)."""
    return name.replace("~", "~0").replace("/", "~1")


def _circle(leads: Mapping[Place, set[Place]]) -> Place | None:
    try:
        TopologicalSorter[Hashable](leads).prepare()
    except CycleError as error:
        found: Place = error.args[1][0]
        return found
    return None


def _nodes(part: Any) -> Iterator[Json]:
    """Yield all JSON objects in a part. Not recursive, since schemas may be deep."""
    waiting = [part]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            yield node
            waiting += node.values()
        elif isinstance(node, list):
            waiting += node


def _needed(node: Any) -> set[object]:
    """Return the refs that every value of a written schema, or a part of it, has to obey."""
    if not isinstance(node, dict):
        return set()
    made = {node.get("$ref")}.union(*map(_needed, node.get("allOf", [])))
    for key in ("anyOf", "oneOf"):
        if key in node:
            made |= set.intersection(*map(_needed, node[key]))
    parts = []
    if node.get("type") == "object":
        required = set(node.get("required", []))  # which may repeat a name
        parts += [x for name, x in node.get("properties", {}).items() if name in required]
    if node.get("type") == "array" and (least := node.get("minItems", 0)):
        first = node.get("prefixItems", [])
        parts += first[:least] + [node.get("items")] * (least > len(first))
    return made.union(*map(_needed, parts))
