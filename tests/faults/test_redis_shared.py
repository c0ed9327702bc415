"""Engines that write the same keys: each counts and removes what it wrote itself, and no more."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis

from tests.faults.redis_tiers import blobs, entries_for_ever, next_life
from tests.redis_server import RedisServer, find_binary

pytestmark = [
    pytest.mark.redis,
    pytest.mark.skipif(find_binary() is None, reason="no redis-server"),
]

LENGTHS = pytest.mark.parametrize("length", [10_000, 700_000], ids=["inline", "in fragments"])
WITHOUT_SCRIPTS = ("--rename-command", "EVAL", "")


@LENGTHS
@pytest.mark.parametrize("options", [(), WITHOUT_SCRIPTS], ids=["scripts", "no scripts"])
def test_an_engine_does_not_evict_what_another_put_in_place_of_its_own(
    tmp_path: Path, length: int, options: tuple[str, ...]
) -> None:
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
