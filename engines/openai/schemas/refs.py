"""Follows the ``$ref`` of a JSON schema, and writes it for the compiler that reads it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
from itertools import pairwise
from typing import Any, Final
from urllib.parse import quote, unquote, urldefrag, urljoin

from engines.openai.messages import Json

# Keywords whose values are no schemas.
VALUES: Final = frozenset({"const", "enum", "default", "examples", "example", "required"})
ANNOTATIONS: Final = frozenset({"default", "examples", "example"})  # of these, what holds nothing
_IN_REFS: Final = "/~$:?@!&'()*+,;="  # need no escapes
DEFINITIONS: Final = ("$defs", "definitions")


class Refs:
    """The refs of one schema. All are taken to be relative to its root's address."""

    def __init__(self, root: Json) -> None:
        self._root = root
        given = root.get("$id")
        self._base = given if isinstance(given, str) else ""

    def for_llguidance(self, ref: str) -> str | None:
        """Return a ref with the escapes of an address; None if it leads out of the schema."""
        try:
            url, fragment = urldefrag(urljoin(self._base, ref))
        except ValueError:
            return None
        if fragment and not fragment.startswith("/"):
            leads_in = f"{url}#{fragment}" in self._addresses
        else:
            leads_in = _is_schema(target(self._addresses.get(url), f"#{fragment}"))
        return f"{ref.partition('#')[0]}#{quote(unquote(fragment), _IN_REFS)}" if leads_in else None

    def for_xgrammar(self, ref: str) -> str | None:
        """Return a ref as xgrammar finds it, which knows no escapes; None if it does not.

        Definitions have to be named by ``escaped``.
        """
        steps = unquote(ref).split("/")
        if steps[0] != "#" or not _is_schema(target(self._root, ref)):
            return None
        names = [x for before, x in pairwise(steps) if before not in DEFINITIONS]
        return None if any("~" in x for x in names) else "/".join(steps)

    @cached_property
    def _addresses(self) -> dict[str, Any]:
        """The schemas that have an address of their own, or an anchor."""
        found: dict[str, Any] = {self._base: self._root}
        waiting: list[tuple[Any, str]] = [(self._root, self._base)]
        while waiting:
            node, base = waiting.pop()
            if isinstance(node, list):
                waiting += [(x, base) for x in node]
            elif isinstance(node, dict):
                if isinstance(own := node.get("$id"), str):
                    with suppress(ValueError):
                        base = urljoin(base, own)
                        found[base] = node
                if isinstance(anchor := node.get("$anchor"), str):
                    found[f"{base}#{anchor}"] = node
                waiting += [(x, base) for key, x in node.items() if key not in VALUES]
        return found


def _is_schema(node: object) -> bool:
    return isinstance(node, dict | bool)


def escaped(name: str) -> str:
    """Return a name as a ref has it."""
    return name.replace("~", "~0").replace("/", "~1")


def endless_ref(schema: Json) -> str:
    """Return a ``$ref`` that leads back to itself without a value between; "" if none does."""
    waiting: list[Any] = [schema]
    nodes: dict[int, Json] = {}
    targets: dict[int, list[int]] = {}
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting += node
        elif isinstance(node, dict) and id(node) not in nodes:
            nodes[id(node)] = node
            same = [x for x in same_place(schema, node) if isinstance(x, dict)]
            targets[id(node)] = [id(x) for x in same]
            waiting += same
            waiting += _parts(node)
    return _circle(nodes, targets)


def _circle(nodes: dict[int, Json], targets: dict[int, list[int]]) -> str:
    """Take away, again and again, what leads nowhere; what is left goes round."""
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


def same_place(root: Json, node: Json) -> Iterator[Any]:
    """Yield the schemas that a value has to obey together with this one."""
    if isinstance(ref := node.get("$ref"), str) and ref.startswith("#"):
        yield target(root, ref)
    if isinstance(parts := node.get("allOf"), list):
        yield from parts


def target(root: Any, ref: str) -> Any:
    """Return what a ``$ref`` into its own root points to; None if that is nothing."""
    found = root
    for step in filter(None, unquote(ref[1:]).split("/")):
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found.get(name)
        elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            return None
    return found


def _parts(node: Json) -> Iterator[Any]:
    """Yield the schemas inside one that its values can reach."""
    for key, value in node.items():
        if key in ("properties", "patternProperties") and isinstance(value, dict):
            yield from value.values()
        elif key not in VALUES and key not in DEFINITIONS:
            yield value
