"""Follows the ``$ref`` of a JSON schema."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import unquote

from engines.openai.messages import Json

# Keywords whose values are no schemas.
VALUES: Final = frozenset({"const", "enum", "default", "examples", "example", "required"})


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


def target(root: Json, ref: str) -> Any:
    """Return what a ``$ref`` into its own root points to; None if that is nothing."""
    found: Any = root
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
        elif key not in VALUES and key not in ("$defs", "definitions"):
            yield value
