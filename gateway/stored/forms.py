"""The forms of stored objects: what of them is read apart, and how they are put together again.

The output items of a response are items of their own, so that they are found by id, and read
without the rest of it. ``stored_form`` also takes what an older release stored in one piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import msgspec

Kind: TypeAlias = Literal["response", "conversation", "completion"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Label: TypeAlias = tuple[str, str]
Json: TypeAlias = dict[str, Any]


class Item(NamedTuple):
    """One of an object's items; its id is unique within the object."""

    id: str
    body: bytes


class Form(NamedTuple):
    """An object's parts."""

    body: bytes
    about: dict[str, str] = {}  # a few words that are read without the body
    labels: tuple[Label, ...] | None = None  # None: it is in no list
    outputs: Sequence[Item] = ()


class Entry(NamedTuple):
    """An object as a caller stores it."""

    kind: Kind
    id: str
    session: str  # it goes when this session is forgotten
    form: Form


def stored_form(kind: Kind, object: Json) -> Form:
    """Take an object apart."""
    if kind == "completion":
        return Form(msgspec.json.encode(object), labels=_labels(object))
    if kind == "conversation":
        return Form(msgspec.json.encode(object))
    body = {name: x for name, x in object.items() if name != "output"}
    before = object.get("conversation")
    links = {
        "previous": object.get("previous_response_id"),
        "conversation": before.get("id") if isinstance(before, dict) else None,
    }
    about = {name: x for name, x in links.items() if isinstance(x, str)}
    outputs = [Item(x["id"], msgspec.json.encode(x)) for x in object.get("output") or ()]
    return Form(msgspec.json.encode(body), about, None, outputs)


def shown_form(kind: Kind, body: bytes, outputs: Sequence[Item]) -> bytes:
    """Put an object's parts together again."""
    if kind != "response":
        return body
    return b'%b,"output":[%b]}' % (body[:-1], b",".join(x.body for x in outputs))


def row_name(kind: Kind, id: str) -> str:
    """Return the name under which tables keep an object."""
    return f"{kind}:{id}"


def label_of(name: str, value: str) -> Label:
    """Return the label of the objects that have a value in their metadata."""
    return f"metadata.{name}", value


def _labels(object: Json) -> tuple[Label, ...]:
    metadata = object.get("metadata")
    pairs = metadata.items() if isinstance(metadata, dict) else ()
    labels = tuple(label_of(name, x) for name, x in pairs if isinstance(x, str))
    model = object.get("model")
    return (*labels, ("model", model)) if isinstance(model, str) else labels
