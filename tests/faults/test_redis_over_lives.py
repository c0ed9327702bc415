"""One budget over all lives of an engine: a killed one's blobs in Redis count in the next."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
import redis

from kvstore.tenant_bytes import NO_LIMITS
from kvstore.tiers.redis_server.book import BATCH, FILE_NAME, Book, WriterName
from kvstore.tiers.redis_server.fragments import manifest_name, new_manifest, parse_manifest
from kvstore.tiers.redis_server.link import RedisLink
from kvstore.tiers.redis_server.redis_tier import RedisTier
from tests.faults.redis_tiers import blobs, entries_for_ever, names, next_life
from tests.faults.redis_writer import BUDGET, open_far
from tests.redis_server import RedisServer
from tests.waiting import until

pytestmark = pytest.mark.redis

MIB = 1 << 20
LIVES = 4
LEAK_BYTES = 6 * MIB  # the server's needs beside blobs: buffers of links, its own tables
FEW = blobs(8, 300_000)
BOOK = b"thermocline.book:"


def used_bytes(client: redis.Redis) -> int:
    return int(client.info("memory")["used_memory"])


def live_and_be_killed(server: RedisServer, folder: Path, seed: int, num_lines: int) -> bytes:
    """Let an engine write until it was heard so many times; return the key it named last."""
    command = [sys.executable, "-m", "tests.faults.redis_writer", server.url, str(folder)]
    with subprocess.Popen([*command, str(seed)], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        line = ""
        for _ in range(num_lines):
            line = writer.stdout.readline()
        assert line, "the writer ended by itself"
        writer.send_signal(signal.SIGKILL)
    return bytes.fromhex(line)


def test_memory_is_flat_over_kills_in_the_middle_of_writing(server: RedisServer, tmp_path: Path):
    """Each life writes 4 budgets or so. Without the book each one left another budget in use."""
    with redis.Redis.from_url(server.url) as client:
        empty = used_bytes(client)
        after: list[int] = []
        for life in range(LIVES):
            last = live_and_be_killed(server, tmp_path, life, 55 + 3 * life)
            after.append(used_bytes(client) - empty)
        print([round(x / MIB, 1) for x in after])
        assert max(after) < BUDGET + LEAK_BYTES
        tier = next_life(server, tmp_path)
        assert tier.contains_many([last]) == [True]  # the newest blob is still there
        assert used_bytes(client) - empty < BUDGET + LEAK_BYTES
        tier.close()
        # And all that is there is in the book: with a budget for nothing, nothing is left.
        next_life(server, tmp_path, 1).close()
        assert entries_for_ever(client) == []


def test_what_earlier_lives_used_last_stays_longest(server: RedisServer, tmp_path: Path):
    tier = next_life(server, tmp_path)
    for key, blob in FEW.items():
        tier.put_many([(key, blob)])
    first, second, *_ = FEW
    tier.touch([first])
    cost = tier.stats().nbytes // len(FEW)
    tier.close()
    tier = next_life(server, tmp_path, 3 * cost)
    held = [key for key, yes in zip(FEW, tier.contains_many(list(FEW)), strict=True) if yes]
    assert held == [first, *list(FEW)[-2:]]
    tier.put_many([(second, FEW[second])])  # of this life: the newest now
    held = [key for key, yes in zip(FEW, tier.contains_many(list(FEW)), strict=True) if yes]
    assert held == [first, second, list(FEW)[-1]]
    tier.close()


def left_before(server: RedisServer, folder: Path) -> RedisTier:
    """Make the tier of a next life, which has not begun to count; its budget is for three blobs."""
    tier = next_life(server, folder)
    for key, blob in FEW.items():
        tier.put_many([(key, blob)])
    cost = tier.stats().nbytes // len(FEW)
    tier.close()
    return RedisTier(server.url, 3 * cost, deadline_s=10.0, writer=WriterName(folder))


def test_none_is_evicted_before_the_pins_of_earlier_lives_are_known(
    server: RedisServer, tmp_path: Path
):
    tier = left_before(server, tmp_path)
    tier.count_earlier_lives()
    until(lambda: tier.written(b"c") is not None, what="listed")
    assert tier.written(b"c") == list(FEW) and tier.written(b"r") == []
    first, *_, last = FEW
    assert tier.replace(last, FEW[last])  # a write of this life
    assert tier.limit_tenants(NO_LIMITS) is None
    assert tier.contains_many(list(FEW)) == [True] * len(FEW)
    tier.pin([first])
    tier.pins_known()
    until(lambda: tier.knows_earlier_lives, what="counted")
    held = [key for key, yes in zip(FEW, tier.contains_many(list(FEW)), strict=True) if yes]
    assert held == [first, *list(FEW)[-2:]]
    assert tier.stats().nbytes <= tier.stats().capacity_bytes
    assert tier.limit_tenants(NO_LIMITS) == {}
    tier.close()


def test_those_that_are_used_before_they_are_counted_stay(server: RedisServer, tmp_path: Path):
    tier = left_before(server, tmp_path)
    first, second, third, *_ = FEW
    tier.touch([first, second])  # the list of earlier lives is not read yet
    tier.count_earlier_lives()
    until(lambda: tier.written(b"c") is not None, what="listed")
    tier.touch([third])
    tier.pins_known()
    until(lambda: tier.knows_earlier_lives, what="counted")
    held = [key for key, yes in zip(FEW, tier.contains_many(list(FEW)), strict=True) if yes]
    assert held == [first, second, third]
    cost = tier.stats().nbytes // 3
    tier.close()
    tier = next_life(server, tmp_path, 2 * cost)  # also the list on the server has their order
    assert tier.contains_many([first, second, third]) == [True, False, True]
    tier.close()


def test_those_used_early_are_counted_over_many_batches(server: RedisServer, tmp_path: Path):
    many = blobs(2 * BATCH + 100, 100)
    tier = next_life(server, tmp_path)
    tier.put_many(list(reversed(many.items())))  # the end of the chain is the most recent now
    cost = tier.stats().nbytes // len(many)
    tier.close()
    tier = RedisTier(server.url, len(many) * cost, deadline_s=10.0, writer=WriterName(tmp_path))
    chain = list(many)
    tier.touch(chain)
    assert tier.replace(chain[-1], many[chain[-1]])  # used after the chain
    tier.pins_known()
    tier.count_earlier_lives()
    until(lambda: tier.knows_earlier_lives, what="counted")
    assert tier.put_many([(b"new", bytes(100 * cost))]) == 1
    there = tier.contains_many(chain)
    assert there[-1]
    assert 0 < there.count(False) <= 110  # and each is counted once
    assert tier.stats().nbytes <= tier.stats().capacity_bytes
    tier.close()


def test_without_pins_the_budget_is_kept_in_bounded_time(server: RedisServer, tmp_path: Path):
    tier = left_before(server, tmp_path)
    tier.count_earlier_lives(pins_s=0.5)
    until(lambda: tier.knows_earlier_lives, what="counted")
    assert tier.contains_many(list(FEW)) == [False] * 5 + [True] * 3
    tier.close()


def test_another_engine_counts_and_evicts_its_own_alone(server: RedisServer, tmp_path: Path):
    one, two = (next_life(server, tmp_path / name) for name in ("one", "two"))
    mine, yours = list(FEW.items())[:4], list(FEW.items())[4:]
    one.put_many(mine)
    two.put_many(yours)
    two.close()
    two = next_life(server, tmp_path / "two", 1)  # a budget for nothing
    assert two.stats().num_blobs == 0
    assert one.contains_many(list(FEW)) == [True] * 4 + [False] * 4
    assert one.stats().num_blobs == 4
    assert one.get_many([key for key, _ in mine]) == [blob for _, blob in mine]
    one.close()
    two.close()


def test_two_engines_in_one_folder_do_not_go_by_one_name(server: RedisServer, tmp_path: Path):
    one = next_life(server, tmp_path)
    one.put_many(list(FEW.items()))
    two = next_life(server, tmp_path, 1)
    assert one.contains_many(list(FEW)) == [True] * len(FEW)
    two.close()
    one.close()
    again = next_life(server, tmp_path)
    assert again.stats().num_blobs == len(FEW)
    again.close()


def test_a_name_that_is_none_is_written_anew(tmp_path: Path):
    (tmp_path / FILE_NAME).write_bytes(b"../../elsewhere\n")
    name = WriterName(tmp_path)
    name.release()
    again = WriterName(tmp_path)
    assert again.text == name.text == (tmp_path / FILE_NAME).read_text()
    again.release()


def test_a_folder_that_cannot_be_written_costs_nothing_but_the_name(tmp_path: Path):
    (tmp_path / "file").touch()
    one, two = (WriterName(tmp_path / "file" / "folder") for _ in range(2))
    assert one.text != two.text
    (tmp_path / FILE_NAME).symlink_to(tmp_path / "elsewhere")
    assert WriterName(tmp_path).text
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("how", ["hangs", "dead"])
def test_a_server_that_is_away_at_the_start_is_asked_again(tmp_path: Path, how: str):
    with RedisServer("--appendonly", "yes", "--appendfsync", "always") as server:
        tier = next_life(server, tmp_path)
        tier.put_many(list(FEW.items()))
        tier.close()
        (server.stop if how == "hangs" else server.kill)()
        started = time.monotonic()
        writer = WriterName(tmp_path)
        tier = RedisTier(server.url, BUDGET, deadline_s=0.5, writer=writer)
        tier.pins_known()
        tier.count_earlier_lives()
        assert time.monotonic() - started < 20.0  # no call waits for Redis
        until(lambda: tier.stats().errors > 0, what="noticed")
        assert not tier.knows_earlier_lives
        (server.cont if how == "hangs" else server.start)()
        until(lambda: tier.knows_earlier_lives, what="counted")
        assert tier.stats().num_blobs == len(FEW)
        tier.close()


def test_a_server_that_came_back_empty_has_nothing_to_count(tmp_path: Path):
    with RedisServer() as server:
        tier = next_life(server, tmp_path)
        tier.put_many(list(FEW.items()))
        tier.close()
        server.restart()
        tier = next_life(server, tmp_path)
        assert tier.stats().num_blobs == 0
        assert tier.put_many(list(FEW.items())) == len(FEW)
        tier.close()


def test_closing_does_not_wait_for_a_server_that_is_away(server: RedisServer, tmp_path: Path):
    server.kill()
    tier = open_far(server.url, tmp_path)
    until(lambda: tier.stats().errors > 0, what="noticed")
    started = time.monotonic()
    tier.close()
    assert time.monotonic() - started < 20.0


def test_closing_does_not_wait_for_a_long_book(server: RedisServer, tmp_path: Path):
    next_life(server, tmp_path).close()
    with closing(RedisLink(server.url, 10.0)) as link, redis.Redis.from_url(server.url) as client:
        book = Book(link, (tmp_path / FILE_NAME).read_text())
        for first in range(0, 80_000, 1000):
            listed = {b"k%032d" % i: new_manifest(b"") for i in range(first, first + 1000)}
            link.run(book.enter(listed))
        client.config_resetstat()
        open_far(server.url, tmp_path).close()
        num_pages = client.info("commandstats").get("cmdstat_hscan", {"calls": 0})["calls"]
        assert num_pages < 160  # else it has read them all


@pytest.mark.parametrize("length", [10_000, 700_000], ids=["inline", "in fragments"])
def test_a_touch_that_came_late_does_not_cost_the_newer_blob(
    server: RedisServer, tmp_path: Path, length: int
):
    """It lists a blob as used last that another turn has replaced meanwhile."""
    (key, old), (_, new) = blobs(2, length).items()
    tier = next_life(server, tmp_path)
    with closing(RedisLink(server.url, 10.0)) as link, redis.Redis.from_url(server.url) as client:
        tier.replace(key, old)
        late = Book(link, (tmp_path / FILE_NAME).read_text()).enter(
            {key: parse_manifest(client.get(manifest_name(key)))}
        )
        tier.replace(key, new)
        cost = tier.stats().nbytes
        tier.close()
        (name,) = client.scan_iter(BOOK + b"*")
        (command, _, field, value), last = late[0], 2**64 - 1
        client.execute_command(command, name, field, value[:-8] + last.to_bytes(8, "little"))
        tier = next_life(server, tmp_path)
        assert tier.get_many([key]) == [new]
        assert tier.stats().nbytes == cost
        assert client.hlen(name) == 1
        tier.close()
        next_life(server, tmp_path, 1).close()
        assert entries_for_ever(client) == []


@pytest.mark.parametrize("lost", ["manifest", "fragment", "book"])
def test_what_the_server_evicted_meanwhile_does_not_count(
    server: RedisServer, tmp_path: Path, lost: str
):
    tier = next_life(server, tmp_path)
    tier.put_many(list(FEW.items()))
    tier.close()
    with redis.Redis.from_url(server.url) as client:
        kinds = {
            "manifest": [x for x in names(client) if x.endswith(b"}")],
            "fragment": [x for x in names(client) if x.endswith(b":0")],
            "book": [x for x in names(client) if x.startswith(BOOK)],
        }
        client.delete(*kinds[lost])
        tier = next_life(server, tmp_path)
        if lost == "fragment":  # noticed when they are read
            assert tier.get_many(list(FEW)) == [None] * len(FEW)
            assert tier.contains_many(list(FEW)) == [False] * len(FEW)
        assert tier.stats().num_blobs == 0
        tier.put_many([next(iter(FEW.items()))])  # strikes the owed entries, too
        tier.delete_many(FEW)
        if lost != "book":
            assert entries_for_ever(client) == []
        tier.close()


def test_deleted_and_forgotten_blobs_are_not_in_the_book(server: RedisServer, tmp_path: Path):
    tier = next_life(server, tmp_path)
    tier.put_many(list(FEW.items()))
    key = next(iter(FEW))
    for i in range(3):
        assert tier.replace(key, bytes(400_000 + i))
    tier.close()
    tier = open_far(server.url, tmp_path)
    assert tier.delete_many(FEW) == len(FEW)  # perhaps before they are counted
    with redis.Redis.from_url(server.url) as client:
        until(lambda: entries_for_ever(client) == [], what="all is gone")
    tier.close()


def test_with_a_time_to_live_nothing_stays_not_even_the_book(server: RedisServer, tmp_path: Path):
    """An engine that is started in a new folder each time would leave one for ever."""
    first, second, *_ = FEW
    writer = WriterName(tmp_path)
    tier = RedisTier(server.url, BUDGET, deadline_s=10.0, ttl_s=60.0, writer=writer)
    with redis.Redis.from_url(server.url) as client:
        tier.put_many([(first, FEW[first])])
        tier.touch([first])
        assert entries_for_ever(client) == []
        (book,) = client.scan_iter(BOOK + b"*")
        assert client.pttl(book) > max(client.pttl(x) for x in names(client) if x != book)
        tier.close()
        tier = next_life(server, tmp_path)  # without one the book is to stay
        tier.put_many([(second, FEW[second])])
        assert client.ttl(book) == -1
        tier.close()
