"""A rank whole: saves under way on one side, the hub's verbs on the other."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from engines.vllm_plugin.host_blocks import HostBlocks
from engines.vllm_plugin.hot import HotSessions
from engines.vllm_plugin.hub import Hub
from engines.vllm_plugin.messages import RankHello
from engines.vllm_plugin.plan import Save
from engines.vllm_plugin.rank import RankLink, StagingArea
from engines.vllm_plugin.transfer import Transfer
from engines.vllm_plugin.verbs import Verbs
from kvstore.shapes import KVPair
from kvstore.stats import Counters
from tests.block_sessions import BLOCK, hashes, open_store, ram_and_disk, ref
from tests.unit.engines.vllm_plugin.numpy_blocks import NoStream, NumpyBlocks
from tests.unit.engines.vllm_plugin.test_hub import wait
from tests.unit.engines.vllm_plugin.test_lookup import Pool

CHAIN = hashes(list(range(100)))
IDS = list(range(len(CHAIN)))


class SlowBlocks(NumpyBlocks):
    """Reading them takes until the test lets it go on."""

    def __init__(self) -> None:
        super().__init__()
        self.reading, self.go_on = threading.Event(), threading.Event()

    def read(self, block_ids: Sequence[int]) -> list[KVPair]:
        self.reading.set()
        assert self.go_on.wait(30)
        return super().read(block_ids)


class Rank:
    def __init__(self, folder: Path) -> None:
        self.blocks = SlowBlocks()
        self.store = open_store(ram_and_disk(folder))
        staging = StagingArea()
        host = HostBlocks(self.blocks, self.store, NoStream())
        self.transfer = Transfer(host, self.store, staging, 1 << 30)
        self.hub = Hub(str(folder / "hub.sock"), 1, lambda news: None)
        self.hub.start()
        hot = HotSessions()
        hot.bind(Pool())
        self.verbs = Verbs(
            self.hub, hot, block_tokens=BLOCK, counters=Counters(), num_requests=lambda: (0, 0)
        )
        self.link = RankLink(
            str(folder / "hub.sock"),
            RankHello(0, "raw.1", 1000, 1000),
            self.store,
            staging,
            self.store.stats,
            self.transfer.wait_saved,
        )
        wait(lambda: self.hub.ready)

    def close(self) -> None:
        self.blocks.go_on.set()
        self.transfer.close()
        self.link.close()
        self.store.close()
        self.hub.close()


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    rank = Rank(tmp_path)
    yield rank
    rank.close()


def test_a_session_that_is_deleted_while_it_is_saved_leaves_nothing(rank: Rank) -> None:
    rank.blocks.compute(CHAIN, IDS)
    rank.transfer.save(Save(1, ref(), CHAIN, IDS), lambda record: None)
    assert rank.blocks.reading.wait(10)
    forgetting = asyncio.run_coroutine_threadsafe(rank.verbs.forget(ref()), rank.hub._loop)
    with pytest.raises(TimeoutError):
        forgetting.result(0.2)  # it waits
    rank.blocks.go_on.set()
    forgetting.result(30)
    assert rank.store.record(ref()) is None
    assert [x.num_blobs for x in rank.store.stats().tiers] == [0, 0]


def test_saves_of_other_sessions_hold_up_no_delete(rank: Rank) -> None:
    rank.blocks.compute(CHAIN, IDS)
    rank.transfer.save(Save(1, ref("other"), CHAIN, IDS), lambda record: None)
    assert rank.blocks.reading.wait(10)
    forgetting = asyncio.run_coroutine_threadsafe(rank.verbs.forget(ref()), rank.hub._loop)
    assert forgetting.result(30).report is None
