"""Pages that were read last are kept, within a bound, for their tenant and row alone."""

from __future__ import annotations

from gateway.stored.forms import Item
from gateway.stored.head import Page
from gateway.stored.recent_pages import PageKey, RecentPages

KEY = PageKey("alice", "response:r", 1, Page(0, 10, ("i",)))
SECOND = KEY._replace(page=Page(1, 10, ("i",)))


def items(nbytes: int) -> list[Item]:
    return [Item("i", b"x" * nbytes)]


def test_a_page_is_found_by_its_tenant_row_and_number_only() -> None:
    recent = RecentPages()
    recent.put(KEY, items(10))
    assert recent.get(KEY) == items(10)
    others = [{"tenant": "bob"}, {"name": "response:s"}, {"row": 2}, {"page": SECOND.page}]
    assert not any(recent.get(KEY._replace(**x)) for x in others)


def test_those_unread_for_longest_go_first() -> None:
    recent = RecentPages(max_bytes=10_000)
    keys = [KEY._replace(row=number) for number in range(6)]
    for key in keys[:4]:
        recent.put(key, items(2000))
    assert recent.get(keys[0])
    recent.put(keys[4], items(2000))
    assert [bool(recent.get(x)) for x in keys[:5]] == [True, False, True, True, True]
    recent.put(keys[5], items(5000))  # of a size of which a few would fill it
    assert recent.get(keys[5]) is None
    recent.put(keys[0], items(1))  # in place of what was there
    recent.put(keys[5], items(2000))
    assert [bool(recent.get(x)) for x in keys] == [True, False, True, True, True, True]


def test_a_row_that_is_deleted_is_forgotten() -> None:
    recent = RecentPages()
    other = KEY._replace(name="response:s")
    for key in (KEY, SECOND, other):
        recent.put(key, items(10))
    recent.forget(KEY.tenant, KEY.name)
    assert [recent.get(x) is None for x in (KEY, SECOND, other)] == [True, True, False]
