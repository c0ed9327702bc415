"""What was read last is kept, within a bound."""

from __future__ import annotations

from gateway.stored.recent import Recent


def test_those_unused_for_longest_go_first_and_what_is_deleted_at_once() -> None:
    recent = Recent[str, str](10)
    for key in "abcde":
        recent.put(key, key.upper(), 2)
    assert recent.get("a") == "A"
    recent.put("f", "F", 2)
    recent.put("g", "G", 3)  # a few of its size would fill it
    assert [recent.get(x) for x in "abcdefg"] == ["A", None, *"CDEF", None]
    recent.put("a", "new", 1)
    recent.put("h", "H", 1)
    recent.forget(lambda key: key in "cd")
    assert [recent.get(x) for x in "acdefh"] == ["new", None, None, "E", "F", "H"]
