"""The scheduler side as a whole, with a rank and a gateway on real sockets."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from engines.vllm_plugin.config import PluginSettings
from engines.vllm_plugin.groups import DENSE
from engines.vllm_plugin.inventory import BlocksRemoved, BlocksStored, event_note
from engines.vllm_plugin.messages import (
    FrontHello,
    RankHello,
    RankLost,
    RankSaved,
    Wake,
    decode_to_front,
    receive,
)
from engines.vllm_plugin.scheduler.scheduler_side import SchedulerSide
from engines.vllm_plugin.worker.resting_watch import RestingWatch
from engines.wire import (
    ALL_CHANGED,
    ControlReply,
    ControlRequest,
    Demote,
    Forget,
    FromEngine,
    Hello,
    KVSize,
    Notice,
    SessionRef,
    Welcome,
    frame,
)
from engines.wire import frame as frame_of_plugin
from kvstore.config import StoreConfig
from kvstore.ledger.record import SessionRecord
from kvstore.tiers.ram_tier import RamTier
from tests.block_sessions import BLOCK, PER_CHUNK, hashes, open_store, ref, save, tokens_of
from tests.unit.engines.vllm_plugin.hub_engine import link_to
from tests.unit.engines.vllm_plugin.scheduler.scheduler_bench import Pool
from tests.waiting import until


class Bench:
    def __init__(self, folder: Path, *, events: bool = False) -> None:
        settings = PluginSettings(
            store=StoreConfig(), runtime_dir=str(folder), disk_path=str(folder), token="secret"
        )
        config = SimpleNamespace(
            cache_config=SimpleNamespace(block_size=BLOCK),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=8 * BLOCK),
            parallel_config=SimpleNamespace(world_size=1, worker_extension_cls=""),
            model_config=SimpleNamespace(
                model="m", max_model_len=1000, skip_tokenizer_init=False, logits_processors=None
            ),
            device_config=SimpleNamespace(device_type="cpu"),
            kv_events_config=SimpleNamespace(enable_kv_cache_events=events),
        )
        self.hub_path = settings.hub_path
        self.side = SchedulerSide(settings, config, DENSE, "0")
        self.pool = Pool()
        self.side.bind(self.pool)
        self.store = open_store([RamTier(1_600_000)])  # room for two sessions
        hello = RankHello(0, 1000, 1000, KVSize(1000), KVSize(500))
        self.link = link_to(settings.hub_path, self.store, hello=hello)
        if events:
            self.link.watch(RestingWatch(self.store, BLOCK, self.link.send))
        self.store.listen(lambda left: self.link.send(RankLost(*left)))
        until(lambda: self.side.hub.ready)
        self.gateway = socket.socket(socket.AF_UNIX)
        self.gateway.settimeout(30)
        self.gateway.connect(settings.control_address.removeprefix("unix:"))
        self.gateway.sendall(frame(ControlRequest(0, Hello("secret"))))
        reply = self.receive()
        assert isinstance(reply, ControlReply) and isinstance(reply.answer, Welcome)
        self.welcome = reply.answer

    def receive(self) -> FromEngine:
        message: FromEngine = msgspec.msgpack.decode(receive(self.gateway), type=FromEngine)
        return message

    def close(self) -> None:
        self.gateway.close()
        self.link.close()
        self.store.close()
        self.side.hub.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.close()


def test_the_gateway_hears_of_a_session_that_was_evicted(bench: Bench) -> None:
    for i, session in enumerate(("first", "second", "third")):
        save(bench.store, ref(session), hashes(tokens_of(24, first=1000 * i)))
    for _ in range(2):
        bench.store.expire()
    heard = bench.receive()
    assert (heard.cause, heard.session.id) == ("lost", "second")  # the first one is kept
    assert (heard.session.hot, heard.session.tier) == (False, None)


def test_a_session_that_was_saved_anew_meanwhile_is_not_lost(bench: Bench) -> None:
    save(bench.store, ref("back"), hashes(tokens_of(24)))
    bench.link.send(RankLost(ref("back")))
    bench.link.send(RankLost(ref("gone")))
    heard = bench.receive()
    assert heard.session.id == "gone"


def test_the_gateway_lists_all_again_where_the_ranks_do_not_say_what_changed(bench: Bench) -> None:
    bench.link.close()
    until(lambda: not bench.side.hub.ready)
    news = (RankLost(ref("b"), "packed", is_gone=False), RankLost(ref("c")))
    with socket.socket(socket.AF_UNIX) as rank:  # says what it has to say, and answers nothing
        rank.connect(bench.hub_path)
        for one in news:
            rank.sendall(frame_of_plugin(one))
        heard = [bench.receive() for _ in news]
    notices = [(x.cause, x.why) for x in heard if isinstance(x, Notice)]
    assert notices == [("moved", ALL_CHANGED)] * 2


def test_the_gateway_hears_of_saved_sessions_and_not_of_skipped_ones(bench: Bench) -> None:
    for session in ("skipped", "kept"):
        save(bench.store, ref(session), hashes(tokens_of(24)))
    bench.link.send(RankSaved(1, ref("skipped"), False))
    bench.link.send(RankSaved(2, ref("kept"), True))
    heard = bench.receive()
    assert (heard.cause, heard.session.id, heard.session.tier) == ("saved", "kept", "ram")


def test_an_older_look_at_a_session_is_not_reported_after_a_newer_one(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that found nothing at a turn's end may answer after the turn was saved."""
    found_nothing, go_on, record = threading.Event(), threading.Event(), bench.store.record

    def slow_at_first(session: SessionRef) -> SessionRecord | None:
        found = record(session)
        if not found_nothing.is_set():
            found_nothing.set()
            assert go_on.wait(30)
        return found

    monkeypatch.setattr(bench.store, "record", slow_at_first)
    bench.side._resident.begin(ref("slow"))
    bench.side.hub.spawn(partial(bench.side._notify, "turn", ref("slow")))
    assert found_nothing.wait(30)
    for job, session in enumerate(("slow", "other")):
        save(bench.store, ref(session), hashes(tokens_of(24)))
        bench.link.send(RankSaved(job, ref(session), True))
    heard = [bench.receive()]
    go_on.set()
    heard += [bench.receive(), bench.receive()]
    of_slow = [(x.cause, x.session.tier) for x in heard if x.session.id == "slow"]
    assert of_slow == [("turn", None), ("saved", "ram")]


def test_the_welcome_has_the_size_of_kv_in_bf16_too(bench: Bench) -> None:
    assert (bench.welcome.live_kv, bench.welcome.bf16_kv) == (KVSize(1000), KVSize(500))


def test_the_gateway_hears_that_a_session_takes_less_room(bench: Bench) -> None:
    save(bench.store, ref("packed"), hashes(tokens_of(24)))
    bench.link.send(RankLost(ref("packed"), "packed", is_gone=False))
    heard = bench.receive()
    assert (heard.cause, heard.session.id, heard.why) == ("moved", "packed", "packed")


def test_without_kv_events_nothing_is_kept_for_them(bench: Bench) -> None:
    save(bench.store, ref(), hashes(tokens_of(24)))
    assert bench.side.inventory is None
    assert not bench.side.has_work


def test_readers_hear_where_a_session_rests_before_its_blocks_leave(tmp_path: Path) -> None:
    """An idle engine is woken for it, by an HTTP server that the test stands for."""
    bench = Bench(tmp_path, events=True)
    front = socket.socket(socket.AF_UNIX)
    front.settimeout(30)
    front.connect(str(tmp_path / "hub.sock"))
    front.sendall(frame_of_plugin(FrontHello()))
    inventory = bench.side.inventory
    assert inventory is not None
    try:
        chain = hashes(tokens_of(24))
        bench.pool.fill(chain)
        bench.side._resident.begin(ref())
        bench.side._resident.end(ref(), chain)
        save(bench.store, ref(), chain, event_note(chain, bytes(4 * BLOCK * 24), PER_CHUNK))
        bench.gateway.sendall(frame(ControlRequest(1, Demote(ref(), None))))
        assert isinstance(decode_to_front(receive(front)), Wake)
        assert bench.side.has_work
        assert not bench.side._resident.has_drops  # the copy was not reported yet
        (stored,) = inventory.take()  # vLLM's step
        assert isinstance(stored, BlocksStored)
        assert (stored.medium, stored.hashes) == ("CPU", chain)
        until(lambda: bench.side._resident.has_drops)
        assert bench.side.has_work  # and now the engine is to drop the blocks, and to say so
        bench.side.tracker.take_step([], [])
        assert not bench.pool.cached
        assert not bench.side.has_work
        bench.gateway.sendall(frame(ControlRequest(2, Forget(ref()))))
        until(lambda: inventory.has_news)
        (removed,) = inventory.take()
        assert isinstance(removed, BlocksRemoved)
        assert {*removed.hashes} == {*chain}
    finally:
        front.close()
        bench.close()
