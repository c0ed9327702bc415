"""The plug-in's parts on real sockets: two ranks with real stores, a gateway, no vLLM."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from engines.control_server import ControlServer
from engines.sockets import MAX_UNSENT_BYTES
from engines.vllm_plugin.hot import HotSessions
from engines.vllm_plugin.hub import Hub
from engines.vllm_plugin.messages import (
    FrontHello,
    RankHello,
    RankLost,
    RankNews,
    Release,
    Stage,
    Staged,
)
from engines.vllm_plugin.messages import frame as message_frame
from engines.vllm_plugin.rank import RankLink, StagingArea
from engines.vllm_plugin.verbs import Verbs
from engines.wire import (
    MAX_FRAME_BYTES,
    Answer,
    CodecReport,
    Demote,
    Done,
    Forget,
    GetStats,
    Hello,
    ListSessions,
    Pin,
    Prefetch,
    Refused,
    Reply,
    Request,
    SessionReport,
    Sessions,
    Stats,
    Unpin,
    Verb,
    Welcome,
    frame,
    read_from_engine,
)
from kvstore.block_store import BlockStore
from kvstore.records import SessionRef
from kvstore.stats import Counters
from tests.block_sessions import BLOCK, hashes, open_store, ram_and_disk, ref, save, served
from tests.unit.engines.vllm_plugin.test_lookup import Pool

CHAIN = hashes(list(range(100)))
WELCOME = Welcome(
    engine="vllm",
    engine_version="0",
    model="m",
    max_context=1,
    codec=CodecReport(name="raw"),
    hibernation=True,
)


async def welcomed() -> Welcome:
    return WELCOME


class Engine:
    """Hub, control connection and two ranks, as in an engine with two workers."""

    def __init__(self, folder: Path) -> None:
        self.saved: list[RankNews] = []
        self.waited: list[str] = []
        self.unsaved = self.endless = ""
        self.settled = threading.Event()
        self.pool = Pool()
        self.hot = HotSessions()
        self.hot.bind(self.pool)
        self.hub = Hub(str(folder / "hub.sock"), 2, self.saved.append)
        self.verbs = Verbs(
            self.hub, self.hot, block_tokens=BLOCK, counters=Counters(), num_requests=lambda: (0, 0)
        )
        self.address = str(folder / "control.sock")
        self.hub.start(ControlServer("secret", welcomed, self.verbs).serve(f"unix:{self.address}"))
        self.stores = [open_store(ram_and_disk(folder / f"disk{i}")) for i in range(2)]
        self.staging = [StagingArea(), StagingArea()]
        self.links = [self._link(i, folder) for i in range(2)]
        wait(lambda: self.hub.ready)

    def _link(self, i: int, folder: Path) -> RankLink:
        store: BlockStore = self.stores[i]
        hello = RankHello(i, "raw.1", 1000, 1000)
        path = str(folder / "hub.sock")
        return RankLink(
            path, hello, store, self.staging[i], store.stats, self._wait_saved, served()
        )

    def _wait_saved(self, session: SessionRef, within_s: float) -> bool:
        """A save of this session ends, as it were, while somebody waits for it."""
        self.waited.append(session.id)
        if self.endless == session.id:
            return False
        if self.unsaved and len(self.waited) == 2:
            self.save(self.unsaved)
            self.settled.set()
        assert not self.unsaved or self.settled.wait(within_s)
        return True

    def close(self) -> None:
        for link, store in zip(self.links, self.stores, strict=True):
            link.close()
            store.close()
        self.hub.close()

    def save(self, session: str = "s", *, ranks: int = 2) -> None:
        for store in self.stores[:ranks]:
            save(store, ref(session), CHAIN)
            assert store.flush(10)

    def stage(self, ticket: int = 1, first: int = 0) -> Staged:
        self.hub.send(Stage(ticket, ref(), first, b"".join(CHAIN)))
        found: list[Staged] = []
        wait(lambda: found.extend(x for x in [self.hub.staged(ticket)] if x) or bool(found))
        return found[0]

    async def verbs_list(self) -> list[SessionReport]:
        """As the control connection asks for it: on the hub's own loop."""
        listing = asyncio.run_coroutine_threadsafe(self.verbs.sessions(), self.hub._loop)
        return await asyncio.wrap_future(listing)

    def ask(self, verb: Verb, token: str = "secret") -> Answer:
        async def conversation() -> Answer:
            reader, writer = await asyncio.open_unix_connection(self.address)
            writer.write(frame(Request(0, Hello(token))) + frame(Request(1, verb)))
            while True:
                message = await read_from_engine(reader)
                if isinstance(message, Reply) and message.number == 1:
                    writer.close()
                    return message.answer

        return asyncio.run(conversation())

    def done(self, verb: Verb) -> Done:
        answer = self.ask(verb)
        assert isinstance(answer, Done), answer
        return answer


def wait(until: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not until():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.002)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(tmp_path)
    yield engine
    engine.close()


def test_all_ranks_stage_and_the_answer_is_theirs(engine):
    engine.save()
    staged = engine.stage()
    assert (staged.end_block, staged.tier, staged.reason) == (25, "ram", None)
    assert engine.hub.staged(1) is None  # told once
    assert [len(x.take(1).pieces) for x in engine.staging] == [7, 7]


def test_the_answer_can_be_waited_for(engine):
    engine.save()
    engine.hub.send(Stage(1, ref(), 0, b"".join(CHAIN)))
    staged = engine.hub.staged(1, 60)
    assert staged is not None and staged.end_block == 25
    assert engine.hub.staged(2, 0.01) is None


def test_the_rank_that_has_least_counts(engine):
    engine.save(ranks=1)
    staged = engine.stage()
    assert (staged.end_block, staged.reason) == (0, "never-stored")


def test_a_part_of_a_block_counts_where_every_rank_has_the_same(engine):
    for store in engine.stores:
        save(store, ref(), CHAIN, (100, 101))
    assert engine.stage().part == (100, 101)
    save(engine.stores[1], ref(), CHAIN, (100,))
    staged = engine.stage(2)
    assert (staged.end_block, staged.part) == (25, ())


def test_the_slowest_tier_counts(engine):
    engine.save()
    engine.stores[1].demote(ref(), "disk")
    assert engine.stage().tier == "disk"


def test_what_is_released_is_dropped_everywhere(engine):
    engine.save()
    engine.stage()
    engine.hub.send(Release(1))
    wait(lambda: not len(engine.staging[0]) and not len(engine.staging[1]))


def test_a_rank_that_went_away_makes_the_hub_unready(engine):
    engine.links[0].close()
    wait(lambda: not engine.hub.ready)
    assert isinstance(engine.ask(ListSessions()), Refused)


def test_a_session_is_cold_only_where_every_rank_has_it(engine):
    engine.save(ranks=1)
    assert engine.ask(ListSessions()) == Sessions([])
    engine.save()
    (report,) = engine.ask(ListSessions()).sessions
    assert (report.id, report.hot, report.tier, report.tokens) == ("s", False, "ram", 100)
    assert report.cold_bytes == sum(x.record(ref()).packed_bytes for x in engine.stores)


def test_demote_waits_for_a_save_that_is_under_way(engine):
    engine.unsaved = "s"
    done = engine.done(Demote(ref(), "disk"))
    assert (done.report.tier, done.kept) == ("disk", "")
    assert engine.waited == ["s", "s"]


def test_demote_waits_until_the_blocks_are_handed_over(engine):
    engine.save()
    engine.hot.begin(ref())
    engine.hot.count_save(ref(), +1)
    engine.hot.end(ref(), CHAIN)
    threading.Timer(0.1, engine.hot.count_save, (ref(), -1)).start()
    assert engine.done(Demote(ref())).kept == ""
    assert not engine.hot.is_saving(("t", "s"))


def test_demote_moves_it_down_on_every_rank(engine):
    engine.save()
    done = engine.done(Demote(ref(), "disk"))
    assert (done.report.tier, done.kept) == ("disk", "")
    assert [x.tier_of(x.record(ref())) for x in engine.stores] == ["disk", "disk"]
    assert engine.done(Prefetch(ref())).report.tier == "ram"


def test_demote_drops_the_live_blocks(engine):
    engine.save()
    engine.hot.begin(ref())
    engine.pool.fill(CHAIN)
    assert engine.done(Demote(ref())).kept == "busy"
    engine.hot.end(ref(), CHAIN)
    assert engine.ask(ListSessions()).sessions[0].hot
    assert not engine.done(Demote(ref())).report.hot
    engine.hot.drop_asked()
    assert not engine.pool.cached


def test_without_a_cold_copy_the_live_one_is_kept(engine):
    engine.hot.begin(ref())
    engine.pool.fill(CHAIN)
    engine.hot.end(ref(), CHAIN)
    done = engine.done(Demote(ref()))
    assert (done.kept, done.report.hot, done.report.tier) == ("no-cold-copy", True, None)


def test_a_pinned_session_is_kept(engine):
    engine.save()
    assert engine.done(Pin(ref())).report.pinned
    assert engine.done(Demote(ref(), "disk")).kept == "pinned"
    assert not engine.done(Unpin(ref())).report.pinned


def test_a_pin_that_one_rank_has_no_room_for_is_refused_by_all(engine):
    engine.save()
    engine.stores[1]._pins._max_bytes = 1000
    refused = engine.ask(Pin(ref()))
    assert isinstance(refused, Refused) and refused.code == "pin_limit"
    assert [x.record(ref()).pinned for x in engine.stores] == [False, False]


def test_a_session_that_one_rank_does_not_have_is_pinned_by_none(engine):
    engine.save(ranks=1)
    assert engine.done(Pin(ref())).report is None
    assert not engine.stores[0].record(ref()).pinned


def test_a_session_is_pinned_only_where_every_rank_has_it_pinned(engine):
    engine.save()
    engine.stores[0].pin(ref(), True)
    (report,) = engine.ask(ListSessions()).sessions
    assert not report.pinned
    assert engine.done(Pin(ref())).report.pinned
    engine.stores[1]._pins._max_bytes = 1000  # less than is pinned
    assert engine.done(Pin(ref())).report.pinned
    assert [x.record(ref()).pinned for x in engine.stores] == [True, True]


def test_forget_tells_what_it_was(engine):
    engine.save()
    assert engine.done(Forget(ref())).report.tokens == 100
    assert engine.done(Forget(ref())).report is None
    assert engine.ask(ListSessions()) == Sessions([])


def test_forget_waits_for_a_save_that_is_under_way(engine):
    engine.unsaved = "s"
    engine.done(Forget(ref()))
    assert engine.waited == ["s", "s"]
    assert [x.record(ref()) for x in engine.stores] == [None, None]
    assert [x.num_blobs for store in engine.stores for x in store.stats().tiers] == [0] * 4


def test_forget_waits_until_the_blocks_are_handed_over(engine):
    engine.save()
    engine.hot.begin(ref())
    engine.hot.count_save(ref(), +1)
    engine.hot.end(ref(), CHAIN)
    order = []

    def hand_over() -> None:
        order.extend(engine.waited)  # no rank was asked yet
        engine.hot.count_save(ref(), -1)

    threading.Timer(0.1, hand_over).start()
    engine.done(Forget(ref()))
    assert order == []
    assert engine.waited == ["s", "s"]


def test_what_cannot_be_forgotten_now_is_said(engine):
    engine.save()
    engine.endless = "s"
    refused = engine.ask(Forget(ref()))
    assert isinstance(refused, Refused) and "does not end" in refused.message
    assert engine.stores[0].record(ref()) is not None


def test_a_turn_that_has_just_ended_is_pinned(engine):
    engine.unsaved = "s"
    assert engine.done(Pin(ref())).report.pinned


def test_a_list_of_any_length_reaches_the_gateway(engine):
    """More than a frame holds; and the link is as good as before."""
    record = None
    for store in engine.stores:
        save(store, ref(), CHAIN[:1])
        record = store.record(ref())
    assert record is not None
    num = 3 * MAX_FRAME_BYTES // 1_000_000
    for store in engine.stores:
        for i in range(num):
            name = f"{i:04}" + "x" * 1_000_000
            store._index.put(msgspec.structs.replace(record, id=name))
    first = engine.ask(ListSessions())
    assert isinstance(first, Sessions) and first.more
    listed = asyncio.run(engine.verbs_list())
    assert len(listed) == num + 1
    assert engine.hub.ready


def test_a_session_that_a_rank_lost_is_told_of(engine):
    engine.links[0].send(RankLost(ref()))
    wait(lambda: engine.saved == [RankLost(ref())])


def test_nobody_is_unknown(engine):
    for verb in (Demote(ref("x")), Prefetch(ref("x")), Pin(ref("x")), Forget(ref("x"))):
        assert engine.done(verb) == Done(None)


def test_stats_add_the_ranks_up(engine):
    engine.save()
    answer = engine.ask(GetStats())
    assert isinstance(answer, Stats)
    assert answer.report.hot_capacity_bytes == 100 * BLOCK * 2000
    ram = next(x for x in answer.report.tiers if x.name == "ram")
    assert ram.num_blobs == 2 * 8  # seven blobs and a record on each rank
    assert answer.report.counters["saves"] == 1  # of the engine, not of each rank


def test_the_gateway_is_served_only_once_the_http_server_has_come(tmp_path):
    hub = Hub(str(tmp_path / "hub.sock"), 1, lambda saved: None)
    hub.start()
    control = tmp_path / "control.sock"
    verbs = Verbs(
        hub, HotSessions(), block_tokens=1, counters=Counters(), num_requests=lambda: (0, 0)
    )
    hub.start_behind_front(ControlServer("secret", welcomed, verbs).serve(f"unix:{control}"))
    time.sleep(0.05)
    assert not control.exists()
    with socket.socket(socket.AF_UNIX) as front:
        front.connect(str(tmp_path / "hub.sock"))
        front.sendall(message_frame(FrontHello()))
        wait(control.exists)
    hub.close()


def test_ranks_may_come_before_the_hub(tmp_path):
    store, staging = open_store(), StagingArea()
    hello = RankHello(0, "raw.1", 1, 1)
    link = RankLink(
        str(tmp_path / "hub.sock"),
        hello,
        store,
        staging,
        store.stats,
        lambda session, s: True,
        served(),
    )
    hub = Hub(str(tmp_path / "hub.sock"), 1, lambda saved: None)
    hub.start()
    wait(lambda: hub.ready)
    link.close()
    store.close()
    hub.close()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    hub = Hub(str(tmp_path / "hub.sock"), 1, lambda news: None)
    hub.start()
    yield hub
    hub.close()


@contextmanager
def peer(tmp_path: Path, hello: RankHello | FrontHello) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(str(tmp_path / "hub.sock"))
        link.sendall(message_frame(hello))
        yield link


MEGABYTE = 1_000_000
MANY = 2 * MAX_UNSENT_BYTES // MEGABYTE


def test_a_rank_that_does_not_read_is_cut_off(hub, tmp_path):
    with peer(tmp_path, RankHello(0, "raw.1", 1, 1)):
        wait(lambda: hub.ready)
        for ticket in range(MANY):
            hub.send(Stage(ticket, None, 0, bytes(MEGABYTE)))
        wait(lambda: not hub.ready)


def test_an_http_server_that_does_not_read_is_cut_off(hub, tmp_path):
    with peer(tmp_path, FrontHello()):
        wait(lambda: bool(hub._fronts))
        for _ in range(MANY):
            hub.admitted("x" * MEGABYTE, "hot")
        wait(lambda: not hub._fronts)


def test_the_socket_is_for_this_user_only(tmp_path):
    path = tmp_path / "hub.sock"
    path.write_text("of a process that was killed")
    hub = Hub(str(path), 1, lambda news: None)
    hub.start()
    assert path.stat().st_mode & 0o777 == 0o600
    hub.close()
    assert not path.exists()
