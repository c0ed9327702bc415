"""A cache in which no tenant can push out what others hold."""

from __future__ import annotations

from engines.host.tenant_cache import TenantCache


def test_the_tenant_that_holds_the_most_loses_its_oldest_entry():
    cache = TenantCache[str](max_entries=4)
    for key in [("quiet", b"1"), *(("busy", bytes([i])) for i in range(10))]:
        cache.add(key, f"{key}")
    assert len(cache) == 4
    assert cache.find(("quiet", b"1")) is not None
    assert [i for i in range(10) if cache.find(("busy", bytes([i])))] == [7, 8, 9]


def test_bytes_are_bounded_and_the_latest_used_stay():
    cache = TenantCache[str](max_entries=10, max_bytes=100)
    for name in (b"a", b"b"):
        cache.add(("one", name), "x", nbytes=40)
    cache.add(("other", b"c"), "x", nbytes=10)
    assert cache.find(("one", b"a"))
    cache.add(("one", b"b2"), "x", nbytes=30)
    found = [name for name in (b"a", b"b", b"b2") if cache.find(("one", name))]
    assert found == [b"a", b"b2"] and cache.find(("other", b"c"))
    cache.add(("one", b"a"), "y", nbytes=90)  # in place of its older value
    assert cache.find(("one", b"a")) == "y" and cache.find(("other", b"c"))
