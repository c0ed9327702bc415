"""The order of early uses, and that they are bounded."""

from __future__ import annotations

from kvstore.tiers.redis_server.early_uses import MOST_KEYS, EarlyUses


def test_the_last_use_counts_and_the_first_of_a_chain_is_the_most_recent():
    uses = EarlyUses()
    uses.note([b"a", b"b"])
    uses.note([b"c"])
    uses.note([b"b"])
    assert uses.all() == [b"b", b"c", b"a"]
    assert uses.among([b"a", b"x", b"c"]) == [b"c", b"a"]
    uses.end()
    uses.note([b"a"])
    assert uses.all() == uses.among([b"a"]) == []


def test_the_longest_unused_are_dropped():
    uses = EarlyUses()
    uses.note([b"old", b"older"])
    uses.note([b"%d" % i for i in range(MOST_KEYS - 1)])
    assert uses.all()[0] == b"0" and uses.all()[-1] == b"old" and len(uses.all()) == MOST_KEYS
