"""Engines that write the same keys: each counts and removes its own entries only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from kvstore.errors import Corrupt, ForeignCodec, Unusable
from kvstore.ledger.reading import CopyReader
from kvstore.ledger.stack import TierStack
from kvstore.stats import Counters
from kvstore.tiers.base import Blob
from kvstore.tiers.ram_tier import RamTier
from kvstore.tiers.redis_server.fragments import manifest_name
from tests.faults.redis_tiers import AMPLE, blobs, entries_for_ever, names, next_life
from tests.redis_server import RedisServer

pytestmark = pytest.mark.redis

LENGTHS = pytest.mark.parametrize("length", [10_000, 700_000], ids=["inline", "in fragments"])
WITHOUT_SCRIPTS = ("--rename-command", "EVAL", "")


@LENGTHS
@pytest.mark.parametrize("options", [(), WITHOUT_SCRIPTS], ids=["scripts", "no scripts"])
def test_an_engine_does_not_evict_what_another_put_in_place_of_its_own(
    tmp_path: Path, length: int, options: tuple[str, ...]
):
    """So it is with the record of a session that went to sleep in one, and woke in the other."""
    (key, old), (_, new), *more = blobs(6, length).items()
    with RedisServer(*options) as server, redis.Redis.from_url(server.url) as client:
        one = next_life(server, tmp_path / "one", 3 * (length + 1500))
        two = next_life(server, tmp_path / "two")
        assert one.replace(key, old)
        assert two.replace(key, new)
        for item in more:
            one.put_many([item])
        assert one.contains_many([x for x, _ in more[:1]]) == [False]  # it evicts
        assert two.get_many([key]) == [new]
        assert one.get_many([key]) == [new]
        two.close()
        next_life(server, tmp_path / "two", 1).close()  # a budget for nothing
        assert one.contains_many([key]) == [False]
        one.close()
        next_life(server, tmp_path / "one", 1).close()
        assert entries_for_ever(client) == []


def test_fragments_go_whose_manifest_the_server_evicted(server: RedisServer, tmp_path: Path):
    """Two of three are noticed in the same life; one of them is written again."""
    kept, again, gone, late = blobs(4)
    items = blobs(4)
    tier = next_life(server, tmp_path)
    tier.put_many(list(items.items()))
    with redis.Redis.from_url(server.url) as client:

        def lose(*keys: bytes) -> None:
            client.delete(*(manifest_name(key) for key in keys))

        lose(again, gone)
        assert tier.contains_many([kept, again, gone]) == [True, False, False]
        assert tier.put_many([(again, items[again])]) == 1
        assert tier.get_many([kept, again, gone]) == [items[kept], items[again], None]
        lose(late)
        tier.close()
        tier = next_life(server, tmp_path)
        assert tier.stats().num_blobs == 2
        left = [x for x in entries_for_ever(client) if not x.startswith(b"thermocline.book:")]
        assert len(left) == 2 * (1 + 3)
        assert tier.delete_many([kept, again]) == 2
        tier.put_many([(kept, b"")])  # strikes the owed entries
        tier.delete_many([kept])
        tier.close()
        next_life(server, tmp_path, 1).close()
        assert entries_for_ever(client) == []


def test_a_book_does_not_grow_while_two_engines_replace_in_turns(
    server: RedisServer, tmp_path: Path
):
    (key, blob), (_, other) = blobs(2).items()
    one, two = (next_life(server, tmp_path / name) for name in ("one", "two"))
    for _ in range(5):
        assert one.replace(key, blob)
        assert two.replace(key, other)
    assert one.replace(key, blob)
    with redis.Redis.from_url(server.url) as client:
        books = [x for x in names(client) if x.startswith(b"thermocline.book:")]
        assert [client.hlen(x) for x in books] == [2, 2]  # owed entries go with the next batch
    assert two.get_many([key]) == [blob]
    one.close()
    two.close()


def test_what_only_another_engine_can_read_is_left_to_it(server: RedisServer, tmp_path: Path):
    """In memory of its own it goes: there it would keep a readable one from being stored."""
    key, near = b"c" + bytes(32), RamTier(AMPLE)
    tier = next_life(server, tmp_path)
    stack = TierStack([near, tier], Counters())
    reader = CopyReader(stack, Counters())

    def refused(by: type[Unusable]) -> Callable[[Blob], bytes]:
        def use(blob: Blob) -> bytes:
            raise by("no")

        return use

    for level in (0, 1):
        stack.put(level, [(key, b"segments")])
    assert reader.read(key, [0, 1], refused(ForeignCodec)) == "fingerprint"
    assert near.get_many([key]) == [None]
    assert tier.get_many([key]) == [b"segments"]
    assert reader.read(key, [1], refused(Corrupt)) == "corrupt"
    assert tier.get_many([key]) == [None]
    tier.close()
