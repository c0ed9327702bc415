"""One suite for both tables: stored objects are found, bounded, and hidden from others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import redis

from gateway.stored.objects import (
    MAX_ITEMS,
    PAGE_BYTES,
    ObjectList,
    Objects,
    ObjectStore,
    Outgrown,
    Query,
)
from gateway.stored.rows import KINDS
from gateway.stored.table import StoredLimits, Write
from tests.clock import Clock
from tests.redis_server import RedisServer
from tests.stored_objects import (
    KEY_OF,
    anew,
    done,
    entry,
    ids_of,
    items,
    objects_in,
    page,
    put,
    read_all,
    redis_objects,
    rows_of,
    shown,
    text,
)

LIMITS = StoredLimits(tenant_bytes=20_000, max_age_s=1000.0)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def opened(request: pytest.FixtureRequest, limits: StoredLimits, clock: Clock) -> Objects:
    if request.param == "sqlite":
        folder: Path = request.getfixturevalue("tmp_path")
        return objects_in(folder / "stored" / "objects.sqlite", limits, clock)
    server: RedisServer = request.getfixturevalue("server")
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
    return redis_objects(server, limits, clock)


BOTH = ["sqlite", pytest.param("redis", marks=pytest.mark.redis)]


@pytest.fixture(params=BOTH)
def objects(request: pytest.FixtureRequest, clock: Clock) -> Iterator[Objects]:
    """A tenant may store little."""
    made = opened(request, LIMITS, clock)
    yield made
    made.table.close()


@pytest.fixture(params=BOTH)
def roomy(request: pytest.FixtureRequest, clock: Clock) -> Iterator[Objects]:
    made = opened(request, StoredLimits(1 << 28, 1000.0), clock)
    yield made
    made.table.close()


def test_an_object_is_found_until_it_is_replaced_or_deleted(objects: Objects) -> None:
    for object, ids in (({"x": 1}, ["h"]), ({"y": 1}, ["i", "j"])):
        assert put(objects, entry("1", **object), items(*ids))
        assert shown(objects, "1") == {"id": "1", **object}
        assert ids_of(objects, "1") == read_all(objects, "1") == ids
    assert done(objects.find_item("h")) is None
    assert done(objects.delete("conversation", "1"))
    assert not done(objects.delete("conversation", "1"))
    assert shown(objects, "1") is None
    assert page(objects, "1") is None
    assert done(objects.find_item("i")) is None


def test_another_tenant_and_another_kind_find_nothing(objects: Objects) -> None:
    put(objects, entry("1"), items("i"))
    other = anew(objects, "b")
    for asked, kind in ((other, KINDS[1]), (objects, KINDS[0])):
        assert asked.find(kind, "1") is None
        assert not done(asked.delete(kind, "1"))
        assert not done(asked.append(kind, "1", items("x")))
        assert not done(asked.remove_item(kind, "1", "i"))
        assert done(asked.relabel(kind, "1", {})) is None
    assert done(other.find_item("i")) is None
    assert done(other.forget("s")) == 0
    assert done(objects.find_item("i")) == items("i")[0].body
    assert other.latest("conversation", "s") is None


def test_items_are_added_and_removed(objects: Objects) -> None:
    put(objects, entry("1"), items("i"))
    assert done(objects.append("conversation", "1", items("j", "k"))) == items("j", "k")
    assert ids_of(objects, "1") == read_all(objects, "1") == ["i", "j", "k"]
    assert done(objects.remove_item("conversation", "1", "j"))
    assert done(objects.remove_item("conversation", "1", "nope"))
    assert ids_of(objects, "1") == read_all(objects, "1") == ["i", "k"]
    assert done(objects.append("conversation", "1", items("j")))
    assert read_all(objects, "1") == ["i", "k", "j"]


def test_an_item_whose_id_is_there_already_gets_another(objects: Objects) -> None:
    """A client that calls all its messages alike loses none of them."""
    put(objects, entry("1"), items("i", text="Ann"))
    added = done(objects.append("conversation", "1", items("i", text="Rex")))
    assert added is not None and added[0].id.startswith("i-")
    assert msgspec.json.decode(added[0].body) == {"id": added[0].id, "text": "Rex"}
    assert read_all(objects, "1") == ["i", added[0].id]


def test_an_answer_is_put_together_again_and_its_items_are_found(objects: Objects) -> None:
    output = [{"id": "msg_1", "type": "message"}, {"id": "rs_1", "type": "reasoning"}]
    about = {"previous_response_id": "0", "conversation": {"id": "c"}}
    response = {"id": "r", "metadata": {}, "output": output, **about}
    put(objects, entry(kind="response", **response), items("i", "j"))
    assert shown(objects, "r", "response") == response
    for query in (Query(9), Query(9, ascending=False)):
        assert {x.id for x in page(objects, "r", query, "response").rows} == {"i", "j"}
    assert read_all(objects, "r", "response") == ["i", "j", "msg_1", "rs_1"]
    assert b"reasoning" in (done(objects.find_item("rs_1")) or b"")
    assert done(anew(objects, "b").find_item("rs_1")) is None
    object = objects.find("response", "r")
    assert object.head.about == {"previous": "0", "conversation": "c"}
    assert done(objects.delete("response", "r"))
    assert done(objects.find_item("rs_1")) is None


def test_of_several_that_have_an_item_the_latest_is_asked(objects: Objects) -> None:
    for id in "123":
        put(objects, entry(id), items("i", text=id))
    assert done(objects.find_item("i")) == items("i", text="3")[0].body
    done(objects.delete("conversation", "3"))
    assert done(objects.find_item("i")) == items("i", text="2")[0].body


PAGES = [
    (Query(9), "abcde", False),
    (Query(2), "ab", True),
    (Query(2, "b"), "cd", True),
    (Query(3, "b"), "cde", False),
    (Query(2, ascending=False), "ed", True),
    (Query(9, "c", ascending=False), "ba", False),
    (Query(9, "nope"), "", False),
    (Query(0), "", True),
]


def chats(
    objects: Objects, query: Query | None = None, model: str | None = None, **metadata: str
) -> ObjectList:
    like = {"model": model, "metadata": metadata}
    return done(objects.listed("completion", like, query or Query(100)))


@pytest.mark.parametrize(("query", "ids", "more"), PAGES)
def test_pages_of_items_and_of_objects(objects, query: Query, ids: str, more: bool) -> None:
    put(objects, entry("1"), items(*"abcde"))
    for id in "aXbYcde":
        metadata = {"wanted": "yes"} if id.islower() else {}
        put(objects, entry(id, kind="completion", metadata=metadata, model="m"))
    put(objects, entry("b", kind="conversation"))
    for found in (page(objects, "1", query), chats(objects, query, wanted="yes")):
        assert ("".join(x.id for x in found.rows), found.more) == (ids, more)


def test_entries_are_found_by_all_that_they_are_labelled_with(objects: Objects) -> None:
    for i in range(8):
        metadata = {"parity": str(i % 2), "half": str(i // 4)}
        put(objects, entry(str(i), kind="completion", metadata=metadata, model=f"m{i % 4}"))

    def ids(**like: str) -> str:
        return "".join(x.id for x in chats(objects, **like).rows)  # type: ignore[arg-type]

    assert ids() == "01234567"
    assert (ids(parity="1"), ids(parity="1", half="1")) == ("1357", "57")
    assert (ids(model="m1"), ids(parity="1", half="1", model="m1")) == ("15", "5")
    assert ids(parity="2") == ids(half="") == ids(model="1") == ids(m1="model") == ""
    assert done(objects.relabel("completion", "1", {"parity": "2"}))
    assert (ids(parity="1"), ids(parity="2"), ids(model="m1")) == ("357", "1", "15")
    assert ids() == "01234567"
    done(objects.delete("completion", "3"))
    assert (ids(parity="1"), ids()) == ("57", "0124567")
    assert chats(objects, Query(9, "3"), parity="1").rows == []


def test_a_list_of_many_is_looked_through_in_steps(roomy: Objects) -> None:
    for i in range(1300):
        metadata = {"all": "1", "rare": str(i)}
        put(roomy, entry(str(i), kind="completion", metadata=metadata))
    like = {"metadata": {"all": "1", "rare": "1299"}}
    assert len(list(roomy.listed("completion", like, Query(9)))) >= 3  # others have turns between
    assert [x.id for x in chats(roomy, all="1", rare="1299").rows] == ["1299"]


def test_a_page_holds_no_more_bytes_than_a_page_may(roomy: Objects) -> None:
    put(roomy, entry("1"))
    for i in range(12):
        added = items(str(i), text=text(PAGE_BYTES // 10))
        assert done(roomy.append("conversation", "1", added))
        put(roomy, entry(str(i), kind="completion", text=text(PAGE_BYTES // 8)))
    seen: list[str] = []
    while True:
        found = page(roomy, "1", Query(100, seen[-1] if seen else None))
        assert sum(len(x.body) for x in found.rows) < 1.5 * PAGE_BYTES
        seen += [x.id for x in found.rows]
        if not found.more:
            break
    assert seen == [str(i) for i in range(12)]
    some = chats(roomy)
    assert some.more and len(some.rows) < 12
    assert [x.id for x in chats(roomy, Query(99, some.rows[-1].id)).rows][-1] == "11"


def test_a_large_conversation_is_read_and_deleted_in_steps(roomy: Objects) -> None:
    put(roomy, entry("1"))
    for i in range(4):
        added = items(*(f"{i}-{n}" for n in range(500)), text=text(2000))
        done(roomy.append("conversation", "1", added))
    object = roomy.find("conversation", "1")
    assert object is not None
    assert sum(roomy.page("conversation", "1", Query(9))) >= 9 * 2000  # said before it is held
    reading = list(roomy.read_all(object))
    assert len(reading) >= object.head.nbytes // (1 << 20)
    steps = roomy.delete("conversation", "1")
    assert next(steps, 0) == 0
    assert shown(roomy, "1") is None  # for all others it is gone at once
    num_steps = len(list(steps))
    assert num_steps >= 3 or roomy.table.place == "redis"  # which frees it in the background
    assert done(roomy.find_item("0-0")) is None


def test_an_answer_is_shown_slice_by_slice(roomy: Objects, monkeypatch) -> None:
    output = [{"id": f"o{i}", "text": text(200_000)} for i in range(10)]
    put(roomy, entry("r", kind="response", output=output))
    asked, pages = list[int](), roomy.table.pages

    def counted(tenant: str, name: str, numbers: list[int]) -> list[bytes | None]:
        asked.append(len(numbers))
        return pages(tenant, name, numbers)

    monkeypatch.setattr(roomy.table, "pages", counted)
    steps = list(roomy.show("response", "r"))
    assert (len(steps) >= 5, steps[0] >= 2_000_000, max(asked)) == (True, True, 1)
    assert shown(roomy, "r", "response")["output"] == output


@pytest.mark.parametrize(("num", "nbytes", "turns"), [(2000, 1000, 4), (5, 300_000, 5)])
def test_pages_are_removed_in_few_short_transactions(tmp_path, num, nbytes, turns) -> None:
    path = tmp_path / "objects.sqlite"
    table = objects_in(path, StoredLimits(1 << 28, max_age_s=1e12)).table
    pages = {i: bytes(nbytes) for i in range(num)}
    table.write("a", "conversation:1", Write(None, b"head", num * nbytes, pages))
    assert table.delete("a", ["conversation:1"]) == 1
    assert [table.tidy("a") for _ in range(turns + 1)] == [*[True] * turns, False]
    assert rows_of(path, "SELECT (SELECT count(*) FROM objects), nbytes FROM totals") == [(0, 0)]
    table.close()


def test_an_object_has_so_many_items_and_no_more(roomy: Objects) -> None:
    put(roomy, entry("1"), items(*(str(i) for i in range(MAX_ITEMS - 1))))
    with pytest.raises(Outgrown):
        done(roomy.append("conversation", "1", items("x", "y")))
    assert done(roomy.append("conversation", "1", items("x")))


def test_a_session_is_forgotten_as_a_whole(objects: Objects) -> None:
    put(objects, entry("1"), items("i"))
    put(objects, entry("2"))
    put(objects, entry("3", session="other"))
    put(objects, entry("4", kind="completion"))
    assert objects.latest("conversation", "s") == "2"
    assert objects.latest("response", "s") is None
    assert anew(objects, "b").latest("conversation", "s") is None
    assert done(objects.forget("s")) == 3
    assert objects.latest("conversation", "s") is None
    assert shown(objects, "1") is None and chats(objects).rows == []
    assert shown(objects, "3") is not None


def test_the_longest_unused_make_room(objects: Objects, clock: Clock) -> None:
    for id in "1234":
        clock.now += 100
        assert put(objects, entry(id, text=text(1800)), items("i", text=text(1800)))
    assert shown(objects, "1")
    clock.now += 100
    assert put(objects, entry("5", text=text(4000)))
    assert put(objects, entry("1", text=text(18_000)), tenant="b")
    there = [id for id in "12345" if shown(objects, id)]
    assert there == ["1", "3", "4", "5"]


def test_an_object_larger_than_the_budget_is_not_stored(objects: Objects) -> None:
    """Its ids count, too: all others would go, and then itself."""
    put(objects, entry("1"))
    assert not put(objects, entry("2"), items(*(str(i) * 125 for i in range(10, 37))))
    assert not put(objects, entry("2", text=text(30_000)))
    assert not put(objects, entry("3"), items("i", text=text(30_000)))
    assert shown(objects, "1") is not None


def test_the_budget_holds_over_changes(objects: Objects) -> None:
    """Every way to add and remove bytes is counted, or the budget would drift."""
    for round in range(30):
        put(objects, entry("kept", kind="completion"), items(*"ij"))
        done(objects.relabel("completion", "kept", {"text": text(2500)}))
        put(objects, entry("talk"))
        done(objects.append("conversation", "talk", items(f"{round}", text=text(3000))))
        done(objects.remove_item("conversation", "talk", f"{round}"))
    assert put(objects, entry("other", text=text(10_000)))
    assert shown(objects, "kept", "completion") is not None


def test_old_entries_go(objects: Objects, clock: Clock) -> None:
    put(objects, entry("1"), items("i"))
    put(objects, entry("2"))
    clock.now += 900
    assert shown(objects, "2")
    clock.now += 200
    put(objects, entry("3"))
    assert shown(objects, "1") is None
    assert done(objects.find_item("i")) is None
    assert shown(objects, "2") is not None


def test_another_change_between_is_no_loss(objects: Objects) -> None:
    """Two append at once, each after having looked at the conversation as it was."""
    put(objects, entry("1"), items("i"))
    write = objects.table.write
    others = iter([items("other")])

    class Slow:
        """Lets another one in after the first look."""

        place = objects.table.place

        def __getattr__(self, name: str) -> object:
            return getattr(objects.table, name)

        def write(self, *args: object) -> bool:
            for added in others:
                assert done(objects.append("conversation", "1", added))
            return write(*args)  # type: ignore[arg-type]

    slow = ObjectStore(Slow(), KEY_OF).of("a")  # type: ignore[arg-type]
    assert done(slow.append("conversation", "1", items("mine")))
    assert read_all(objects, "1") == ["i", "other", "mine"]
