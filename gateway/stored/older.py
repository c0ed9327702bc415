"""Seals entries that an older release wrote in plain text, where they lie.

An entry that has no head yet is such a one. It is sealed when it is asked for, and all of them are,
one after the other, while the server runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.stored.entry_seal import Head, Seals
from gateway.stored.forms import Item, older_form
from gateway.stored.shelf import SLICE_ITEMS, Change, Kind, Part, Shelf, Span, Steps

_AT_ONCE = 32


class Older:
    """The entries of a shelf that were written before entries were sealed."""

    def __init__(self, shelf: Shelf, seals: Seals) -> None:
        self._shelf = shelf
        self._seals = seals

    def seal_all(self, tenant: str, kind: Kind) -> Steps[None]:
        """Seal and label all of one kind, so that lists are whole."""
        after = ""
        while (ids := self._shelf.old(tenant, kind, after)) and ids[-1] > after:
            yield from self.seal_some([(tenant, kind, id) for id in ids])
            after = ids[-1]

    def seal_some(self, entries: Sequence[tuple[str, Kind, str]]) -> Steps[None]:
        """Seal entries: small ones in one go, since each transaction takes its time."""
        for i in range(0, len(entries), _AT_ONCE):
            large: list[Steps[None]] = []
            with self._shelf.in_one_go():
                for entry in entries[i : i + _AT_ONCE]:
                    steps = self.seal(*entry)
                    if next(steps, None) is not None:
                        large.append(steps)
            yield 0
            for steps in large:
                yield from steps

    def seal(self, tenant: str, kind: Kind, id: str) -> Steps[None]:
        """Seal an entry that an older release wrote, item by item, its head last.

        It may have been begun before. Until there is a head nothing else changes the entry.
        """
        seal = self._seals.entry(tenant, kind, id)
        found, body = self._shelf.find(tenant, kind, id), self._shelf.body(tenant, kind, id)
        if found is None or found.head or body is None:
            return  # another one has done it meanwhile
        form = older_form(kind, body)
        if form is None:
            self._shelf.delete(tenant, kind, id)
            return
        head, after = Head(found.session, about=form.about), None
        sealed: list[Part] = []
        while parts := self._shelf.parts(tenant, kind, id, Span(SLICE_ITEMS, after)):
            if sealed:
                some = Change(b"", b"", rewritten=sealed)
                if not self._shelf.change(tenant, kind, id, some):
                    return
                yield 0
            sealed = []
            for part in parts:
                _, own = seal.open_item(part)
                item = Item(part.id, part.body if own is None else own)
                head, rewritten = seal.with_items(head, [item])
                if own is None:
                    sealed += rewritten
                after = part.id
        head, outputs = seal.with_outputs(head, form.outputs)
        tags = self._seals.tags(tenant, form.labels)
        body = seal.close(form.body, "body")
        last = Change(b"", seal.close_head(head), body, tags, outputs, sealed)
        self._shelf.change(tenant, kind, id, last)
