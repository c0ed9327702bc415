"""The sessions of this server as the directory shows them, and those deleted at other servers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import msgspec

from engines.base import EngineError, SessionRef
from gateway.keys import Tenants
from gateway.models.served_model import ServedModel
from kvstore.directory.entries import Names, Row, page_of
from kvstore.directory.exchange import PageName
from scheduler.session import Observer, SessionView

log = logging.getLogger("thermocline.directory")
AT_ONCE: Final = 8
AGAIN_S: Final = 2.0


class OwnKey(NamedTuple):
    """Names a session of this server."""

    tenant: str
    model: str
    id: str


class OwnRows:
    """Rows by page, as many as the tables of sessions have. ``changed``: pages to be written."""

    def __init__(self, names: Names, clock: Callable[[], int]) -> None:
        """``clock`` returns the reading of the logical clock of ``kvstore.directory.entries``."""
        self._names = names
        self._clock = clock
        self._pages: dict[PageName, dict[OwnKey, Row]] = {}
        self._by_mark: dict[bytes, set[OwnKey]] = {}
        self.changed: set[PageName] = set()

    def put(self, key: OwnKey, view: SessionView, used: float) -> None:
        """Show a session as it is now; one that is new begins at this moment."""
        page = PageName(key.tenant, page_of(key.id))
        listed = self._pages.setdefault(page, {})
        known = listed.get(key)
        if known is None:
            for mark in self._marks(key):
                self._by_mark.setdefault(mark, set()).add(key)
        row = Row(
            model=key.model,
            id=key.id,
            epoch=self._clock() if known is None else known.epoch,
            used=used,
            state=view.state,
            tier=view.tier,
            tokens=view.tokens,
            nbytes=view.bytes,
            pinned=view.pinned,
            kind=view.kind,
            parent=view.parent,
            retain_s=view.retain_s,
        )
        if known is None or not _same(known, row):
            listed[key] = row
            self.changed.add(page)

    def drop(self, key: OwnKey) -> None:
        """Show a session no more."""
        page = PageName(key.tenant, page_of(key.id))
        listed = self._pages.get(page, {})
        if listed.pop(key, None) is None:
            return
        if not listed:
            del self._pages[page]
        for mark in self._marks(key):
            keys = self._by_mark[mark]
            keys.discard(key)
            if not keys:
                del self._by_mark[mark]
        self.changed.add(page)

    def _marks(self, key: OwnKey) -> Iterator[bytes]:
        yield self._names.mark(key.tenant, key.model, key.id)
        yield self._names.mark(key.tenant, "", key.id)

    def row(self, key: OwnKey) -> Row | None:
        """Return the row of a session; None if it has none."""
        return self._pages.get(PageName(key.tenant, page_of(key.id)), {}).get(key)

    def marked(self, mark: bytes, before: int) -> list[OwnKey]:
        """List the sessions that a mark means and that began before an epoch."""
        keys = self._by_mark.get(mark, ())
        return [x for x in keys if (row := self.row(x)) is not None and row.epoch < before]

    def page(self, name: PageName) -> list[Row]:
        """List the rows of a page."""
        return list(self._pages.get(name, {}).values())

    def change_all(self) -> None:
        """Have every page written again."""
        self.changed.update(self._pages)


def _same(row: Row, other: Row) -> bool:
    """Say whether two rows differ in no more than a moment of time."""
    near = abs(row.used - other.used) < 1.0
    return near and msgspec.structs.replace(row, used=other.used, retain_s=other.retain_s) == other


class Changes(Observer):
    """Notes which rows of a model's table have changed."""

    def __init__(self, number: int, changes: dict[tuple[int, str, str], None]) -> None:
        self._number = number
        self._changes = changes

    def row_changed(self, ref: SessionRef) -> None:
        self._changes[self._number, ref.tenant, ref.id] = None


class Removals:
    """The sessions that are still to be removed; an engine that is away is asked again."""

    def __init__(self, models: Sequence[ServedModel], tenants: Tenants, own: OwnRows) -> None:
        self._models = models
        self._tenants = tenants
        self._own = own
        self._owed: dict[OwnKey, int] = {}  # with the epoch of the deletion
        self._removing: asyncio.Task[None] | None = None

    def begin(self, keys: Iterable[OwnKey], epoch: int) -> None:
        """Begin to remove sessions, for a deletion of that epoch."""
        for key in list(keys):
            self._own.drop(key)
            self._owed[key] = epoch
        if self._owed and (self._removing is None or self._removing.done()):
            self._removing = asyncio.create_task(self._remove_all(), name="directory-removals")

    async def done(self) -> None:
        """Wait until all is removed."""
        if self._removing is not None:
            await self._removing

    async def _remove_all(self) -> None:
        while self._owed:
            keys = list(self._owed)
            for i in range(0, len(keys), AT_ONCE):
                await asyncio.gather(*(self._remove(x) for x in keys[i : i + AT_ONCE]))
            if self._owed:
                await asyncio.sleep(AGAIN_S)

    async def _remove(self, key: OwnKey) -> None:
        epoch, row = self._owed[key], self._own.row(key)
        model = next((x for x in self._models if x.label == key.model), None)
        if model is None:
            return  # its engine will say its name
        if row is not None and row.epoch >= epoch:  # a session that began since
            del self._owed[key]
            return
        ref = SessionRef(key.tenant, key.id, self._tenants.salt_of(key.tenant))
        try:
            await model.sessions.forget_deleted(ref)
        except EngineError as error:
            if model.is_there:
                log.warning("a session that was deleted is still to be removed: %s", error)
                return
        except Exception:  # the edge of a task: other sessions are to be removed all the same
            log.exception("a session that was deleted is still to be removed")
            return
        model.prefixes.forget(key.tenant, key.id)
        self._owed.pop(key, None)  # a model that is not loaded forgets it when it is
