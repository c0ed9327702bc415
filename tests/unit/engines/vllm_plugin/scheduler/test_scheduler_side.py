"""The scheduler side as a whole, with a rank and a gateway on real sockets."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from engines.vllm_plugin.config import PluginSettings
from engines.vllm_plugin.groups import DENSE
from engines.vllm_plugin.messages import RankHello, RankLost, RankSaved, receive
from engines.vllm_plugin.scheduler.scheduler_side import SchedulerSide
from engines.vllm_plugin.worker.rank import RankLink, StagingArea
from engines.wire import (
    ControlReply,
    ControlRequest,
    FromEngine,
    Hello,
    KVSize,
    Notice,
    Welcome,
    frame,
)
from kvstore.config import StoreConfig
from kvstore.tiers.ram_tier import RamTier
from tests.block_sessions import BLOCK, hashes, open_store, ref, save, served
from tests.unit.engines.vllm_plugin.hub_engine import Unmeasured, wait
from tests.unit.engines.vllm_plugin.scheduler.scheduler_bench import Pool


class Bench:
    def __init__(self, folder: Path) -> None:
        settings = PluginSettings(
            store=StoreConfig(), runtime_dir=str(folder), disk_path=str(folder), token="secret"
        )
        config = SimpleNamespace(
            cache_config=SimpleNamespace(block_size=BLOCK),
            parallel_config=SimpleNamespace(world_size=1, worker_extension_cls=""),
            model_config=SimpleNamespace(
                model="m", max_model_len=1000, skip_tokenizer_init=False, logits_processors=None
            ),
            device_config=SimpleNamespace(device_type="cpu"),
        )
        self.side = SchedulerSide(settings, config, DENSE, "0")
        self.side.bind(Pool())
        self.store = open_store([RamTier(450_000)])  # room for two sessions
        self.link = RankLink(
            settings.hub_path,
            RankHello(0, "raw.1", 1000, 1000, KVSize(1000), KVSize(500)),
            self.store,
            StagingArea(),
            self.store.stats,
            lambda session, within_s: True,
            served(),
            Unmeasured(),
        )
        self.store.listen(lambda left: self.link.send(RankLost(*left)))
        wait(lambda: self.side.ready)
        self.gateway = socket.socket(socket.AF_UNIX)
        self.gateway.settimeout(30)
        self.gateway.connect(settings.control_address.removeprefix("unix:"))
        self.gateway.sendall(frame(ControlRequest(0, Hello("secret"))))
        reply = self.hear()
        assert isinstance(reply, ControlReply) and isinstance(reply.answer, Welcome)
        self.welcome = reply.answer

    def hear(self) -> FromEngine:
        message: FromEngine = msgspec.msgpack.decode(receive(self.gateway), type=FromEngine)
        return message

    def close(self) -> None:
        self.gateway.close()
        self.link.close()
        self.store.close()
        self.side.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.close()


def test_the_gateway_hears_of_a_session_that_was_evicted(bench: Bench) -> None:
    for i, session in enumerate(("first", "second", "third")):
        save(bench.store, ref(session), hashes(list(range(1000 * i, 1000 * i + 100))))
    for _ in range(2):
        bench.store.expire()
    heard = bench.hear()
    assert isinstance(heard, Notice)
    assert (heard.cause, heard.session.id) == ("lost", "first")
    assert (heard.session.hot, heard.session.tier) == (False, None)


def test_what_was_saved_anew_meanwhile_is_not_lost(bench: Bench) -> None:
    save(bench.store, ref("back"), hashes(list(range(100))))
    bench.link.send(RankLost(ref("back")))
    bench.link.send(RankLost(ref("gone")))
    heard = bench.hear()
    assert isinstance(heard, Notice) and heard.session.id == "gone"


def test_the_gateway_hears_of_what_was_saved_and_not_of_what_was_skipped(bench: Bench) -> None:
    for session in ("skipped", "kept"):
        save(bench.store, ref(session), hashes(list(range(100))))
    bench.link.send(RankSaved(1, ref("skipped"), False))
    bench.link.send(RankSaved(2, ref("kept"), True))
    heard = bench.hear()
    assert isinstance(heard, Notice)
    assert (heard.cause, heard.session.id, heard.session.tier) == ("saved", "kept", "ram")


def test_the_welcome_says_what_kv_takes_in_bf16_too(bench: Bench) -> None:
    assert (bench.welcome.live_kv, bench.welcome.bf16_kv) == (KVSize(1000), KVSize(500))
