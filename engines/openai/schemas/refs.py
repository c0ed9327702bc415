"""Follows the ``$ref`` of a JSON schema, and writes it for the compiler that reads it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
from itertools import pairwise
from typing import Any, Final
from urllib.parse import quote, unquote, urldefrag, urljoin

from engines.openai.messages import Json

# Keywords whose values are not schemas.
VALUES: Final = frozenset({"const", "enum", "default", "examples", "example", "required"})
ANNOTATIONS: Final = frozenset({"default", "examples", "example"})  # those that constrain nothing
_IN_REFS: Final = "/~$:?@!&'()*+,;="  # characters that need no escapes
DEFINITIONS: Final = ("$defs", "definitions")
# The keywords whose values are objects of schemas, and lists of schemas.
BY_NAME: Final = ("properties", "patternProperties", *DEFINITIONS, "dependentSchemas")
LISTED: Final = ("anyOf", "oneOf", "allOf", "prefixItems")


class Refs:
    """The refs of one schema; all are assumed to be relative to its root's address."""

    def __init__(self, root: Json, lost: frozenset[str] = frozenset()) -> None:
        """``lost``: keywords that are left out or renamed, so no ref may lead into them."""
        self._root = root
        self._lost = lost
        given = root.get("$id")
        self._base = given if isinstance(given, str) else ""

    def target(self, ref: str) -> Any:
        """Return the schema that a ref leads to; None if that is not in this schema."""
        try:
            url, fragment = urldefrag(urljoin(self._base, ref))
        except ValueError:
            return None
        if fragment and not fragment.startswith("/"):
            return self._addresses.get(f"{url}#{fragment}")
        found = target(self._addresses.get(url), f"#{fragment}")
        return found if isinstance(found, dict | bool) else None

    def for_llguidance(self, ref: str) -> str | None:
        """Return a ref with a URL's escapes, for llguidance; None if it cannot be followed."""
        url, _, fragment = ref.partition("#")
        if self.target(ref) is None or self._lost & set(_crossed(fragment)):
            return None
        return f"{url}#{quote(unquote(fragment), _IN_REFS)}"

    def for_xgrammar(self, ref: str) -> str | None:
        """Return a ref in the form for xgrammar; None if xgrammar could not follow it.

        xgrammar supports no escapes, lists or addresses in refs. Definitions must be named by
        ``escaped``.
        """
        steps = unquote(ref).split("/")
        if steps[0] != "#" or self.target(ref) is None or self._has_addresses:
            return None
        if (self._lost | set(LISTED)) & set(_crossed(ref[1:])):
            return None
        names = [x for before, x in pairwise(steps) if before not in DEFINITIONS]
        return None if any("~" in x for x in names) else "/".join(steps)

    def leads_back(self, node: Json) -> bool:
        """Return whether a node's ref is recursive, directly or through other refs."""
        group = self._groups.get(id(node))
        return group is not None and group == self._groups.get(id(self.target(node["$ref"])))

    @cached_property
    def _groups(self) -> dict[int, int]:
        """The group of each node, by ``id``: the nodes that can reach each other.

        They are found by Tarjan's algorithm for strongly connected components, without recursion,
        as schemas may be deep.
        """
        groups: dict[int, int] = {}
        numbers: dict[int, int] = {}
        lowest: dict[int, int] = {}
        open_nodes: list[int] = []
        way = [(self._root, self._reached(self._root))]
        numbers[id(self._root)] = lowest[id(self._root)] = 0
        open_nodes.append(id(self._root))
        while way:
            node, reached = way[-1]
            for other in reached:
                if id(other) not in numbers:
                    numbers[id(other)] = lowest[id(other)] = len(numbers)
                    open_nodes.append(id(other))
                    way.append((other, self._reached(other)))
                    break
                if id(other) not in groups:
                    lowest[id(node)] = min(lowest[id(node)], numbers[id(other)])
            else:
                way.pop()
                if way:
                    before = id(way[-1][0])
                    lowest[before] = min(lowest[before], lowest[id(node)])
                if lowest[id(node)] == numbers[id(node)]:
                    found = -1
                    while found != id(node):
                        found = open_nodes.pop()
                        groups[found] = id(node)
        return groups

    @property
    def nodes(self) -> Iterator[Json]:
        """All objects in the schema that are schemas, or may be."""
        waiting: list[Any] = [self._root]
        while waiting:
            node = waiting.pop()
            if isinstance(node, dict):
                yield node
                waiting += inner_schemas(node)

    def _reached(self, node: Json) -> Iterator[Json]:
        """Yield the nodes inside a node, and the one that its ref leads to."""
        yield from (x for x in inner_schemas(node) if isinstance(x, dict))
        if isinstance(ref := node.get("$ref"), str) and isinstance(to := self.target(ref), dict):
            yield to

    @cached_property
    def _has_addresses(self) -> bool:
        """True if a part has an address of its own, to which its refs are relative."""
        return any("#" not in url for url in self._addresses if url != self._base)

    @cached_property
    def _addresses(self) -> dict[str, Any]:
        """The parts with an address of their own or an anchor, by address."""
        found: dict[str, Any] = {self._base: self._root}
        waiting: list[tuple[Any, str]] = [(self._root, self._base)]
        while waiting:
            node, base = waiting.pop()
            if isinstance(node, dict):
                if isinstance(own := node.get("$id"), str) and "#" not in own:
                    with suppress(ValueError):
                        base = urljoin(base, own)
                        found[base] = node
                if isinstance(anchor := node.get("$anchor"), str):
                    found[f"{base}#{anchor}"] = node
                waiting += [(x, base) for x in inner_schemas(node)]
        return found


def inner_schemas(node: Json) -> Iterator[Any]:
    """Yield the values in a schema that may be schemas, for any keyword."""
    for key, value in node.items():
        if key in BY_NAME and isinstance(value, dict):
            yield from value.values()
        elif isinstance(value, list) and key not in VALUES:
            yield from value
        elif key not in VALUES:
            yield value


def _crossed(fragment: str) -> Iterator[str]:
    """Yield the keywords in a ref's path, without the names and indices that follow some."""
    is_name = False
    for step in unquote(fragment).split("/")[1:]:
        if not is_name:
            yield step
        is_name = not is_name and step in (*BY_NAME, *LISTED)


def escaped(name: str) -> str:
    """Return a name escaped as in a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def endless_ref(schema: Json) -> str:
    """Return a ``$ref`` that every value would follow without end; "" if there is none."""
    refs = Refs(schema)
    waiting: list[Any] = [schema]
    nodes: dict[int, Json] = {}
    targets: dict[int, list[int]] = {}
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting += node
        elif isinstance(node, dict) and id(node) not in nodes:
            nodes[id(node)] = node
            needed = [*same_place(refs, node), *_needed(node)]
            targets[id(node)] = [id(x) for x in needed if isinstance(x, dict)]
            waiting += needed
            waiting += _parts(node)
    return _circle(nodes, targets)


def _circle(nodes: dict[int, Json], targets: dict[int, list[int]]) -> str:
    """Return a ref of a cycle; "" if there is none.

    Nodes without targets are removed repeatedly; the nodes that stay lead into cycles.
    """
    before: dict[int, list[int]] = {x: [] for x in nodes}
    for one, others in targets.items():
        for other in others:
            before[other].append(one)
    left = {x: len(others) for x, others in targets.items()}
    ends = [x for x, number in left.items() if not number]
    while ends:
        end = ends.pop()
        del left[end]
        for one in before[end]:
            left[one] -= 1
            if not left[one]:
                ends.append(one)
    return next((str(nodes[x]["$ref"]) for x in left if "$ref" in nodes[x]), "")


def same_place(refs: Refs, node: Json) -> Iterator[Any]:
    """Yield the schemas that a value has to obey together with this one."""
    if isinstance(ref := node.get("$ref"), str):
        yield refs.target(ref)
    for key in ("allOf", "anyOf", "oneOf"):
        parts = node.get(key)
        if isinstance(parts, list) and (key == "allOf" or len(parts) == 1):
            yield from parts


def _needed(node: Json) -> Iterator[Any]:
    """Yield the schemas of the inner values that every value of a schema must contain."""
    named, required = node.get("properties"), node.get("required")
    if node.get("type") == "object" and isinstance(named, dict) and isinstance(required, list):
        yield from (named[x] for x in required if isinstance(x, str) and x in named)
    if node.get("type") == "array" and node.get("minItems") not in (None, 0):
        yield node.get("items")


def target(root: Any, ref: str) -> Any:
    """Return the value that a ``$ref`` into its own root points to; None if there is none."""
    found = root
    for step in unquote(ref[1:]).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found.get(name)
        elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            return None
    return found


def _parts(node: Json) -> Iterator[Any]:
    """Yield the schemas inside a schema that its values use, without definitions."""
    for key, value in node.items():
        if key in ("properties", "patternProperties") and isinstance(value, dict):
            yield from value.values()
        elif key not in VALUES and key not in DEFINITIONS:
            yield value
