"""A rank whole: saves under way on one side, the hub's verbs on the other."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from engines.calibration.gate.profiles import save as write_profile
from engines.calibration.gate.served_codecs import ServedCodecs
from engines.vllm_plugin.messages import (
    RankNews,
    Stage,
    Staged,
    receive,
)
from engines.vllm_plugin.plan import Save
from engines.vllm_plugin.scheduler.hub import Hub
from engines.vllm_plugin.scheduler.resident_sessions import ResidentSessions
from engines.vllm_plugin.worker.rank import packed_bytes_per_token
from engines.wire import MAX_FRAME_BYTES
from kvstore.codecs.profile import Profile
from tests.block_sessions import (
    FINGERPRINT,
    LAYOUT,
    chain_of,
    check_rows,
    fetch,
    hashes,
    open_store,
    ram_and_disk,
    ref,
    save,
    served,
    tokens_of,
)
from tests.faulty_tier import FaultyTier
from tests.qualities import GOOD
from tests.unit.engines.vllm_plugin.hub_engine import link_to, verbs_of
from tests.unit.engines.vllm_plugin.scheduler.scheduler_bench import Pool
from tests.unit.engines.vllm_plugin.worker.rank_rig import CHAIN, IDS, Rank
from tests.waiting import until

OTHER = hashes(tokens_of(24, first=5000))


class LinkedRank(Rank):
    """A rank with a hub, on tiers that a test can hang; its blocks are read once it lets them."""

    def __init__(self, folder: Path, codecs: ServedCodecs | None = None) -> None:
        self.ram, self.disk = (FaultyTier(x) for x in ram_and_disk(folder / "disk"))
        super().__init__([self.ram, self.disk])
        self.go_on, self.reading = self.pages.hold_reads()
        self.news: list[RankNews] = []
        self.path = str(folder / "hub.sock")
        self.hub = self._open_hub()
        hot = ResidentSessions()
        hot.bind(Pool())
        self.verbs = verbs_of(self.hub, hot)
        self.link = link_to(self.path, self.store, self.staging, codecs=codecs)
        until(lambda: self.hub.ready)

    def _open_hub(self) -> Hub:
        hub = Hub(self.path, 1, self.news.append)
        hub.start()
        return hub

    def restart_hub(self) -> None:
        self.hub.close()
        self.hub = self._open_hub()
        until(lambda: self.hub.ready)

    def begin_save(self, session: str = "s") -> None:
        """Begin a save that reads its blocks until the test lets it go on."""
        self.begin(Save(1, ref(session), CHAIN, IDS))
        assert self.reading.wait(10)

    def ask_to_stage(self, ticket: int, chain: list[bytes]) -> None:
        self.hub.send(Stage(ticket, ref(), 0, b"".join(chain)))

    def staged(self, ticket: int, chain: list[bytes]) -> Staged:
        self.ask_to_stage(ticket, chain)
        staged = self.hub.staged(ticket, 30)
        assert staged is not None
        return staged

    def close(self) -> None:
        """End all parts in the order in which a worker does."""
        self.go_on.set()
        self.ram.go_on.set()
        self.disk.go_on.set()
        self.transfer.close()
        self.link.close()
        self.store.close()
        self.hub.close()


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[LinkedRank]:
    rank = LinkedRank(tmp_path)
    yield rank
    rank.close()


def test_saves_of_other_sessions_hold_up_no_delete(rank: LinkedRank) -> None:
    rank.begin_save("other")
    forgetting = rank.hub.submit(rank.verbs.forget(ref()))
    assert forgetting.result(30).report is None


def test_a_codec_is_adopted_once_it_was_measured(tmp_path: Path) -> None:
    rank = LinkedRank(tmp_path, served("tq3", tmp_path))
    save(rank.store, ref(), CHAIN)
    waiting = rank.hub.submit(rank.verbs.codec()).result(30)
    assert (waiting.name, waiting.unmeasured) == ("raw", True)
    row = msgspec.structs.replace(GOOD, codec_id="tq3.2")
    write_profile(Profile(FINGERPRINT, LAYOUT, (), {}, (row,)), tmp_path)
    adopted = rank.hub.submit(rank.verbs.adopt()).result(120)  # its loops may be compiled
    assert (adopted.name, adopted.id, adopted.unmeasured) == ("tq3", "tq3.2", False)
    assert rank.store.codecs.rows.id == "tq3.2"
    until(lambda: rank.hub.packed_bytes_per_token == packed_bytes_per_token(rank.store))
    save(rank.store, ref("new"), OTHER)
    records = {x.id: x.packed_bytes for x in rank.store.records()}
    assert records["new"] < 0.5 * records["s"]
    check_rows(rank.store, CHAIN, fetch(rank.store, CHAIN))  # exact, as it was saved
    rank.close()


# ---- the end


def test_a_tier_that_hangs_keeps_no_rank_from_its_last_flush(rank: LinkedRank) -> None:
    rank.disk.hanging = "put_many"
    rank.disk.go_on.clear()
    save(rank.store, ref(), CHAIN)
    assert rank.disk.entered.wait(10)
    rank.ram.go_on.clear()
    rank.ask_to_stage(1, CHAIN)
    assert rank.ram.entered.wait(10)
    rank.transfer.close()
    rank.link.close()
    assert rank.staging.take(1) is None  # no load has waited for it
    closing = threading.Thread(target=rank.store.close)
    closing.start()
    rank.disk.go_on.set()
    keys = [x.key for x in rank.store.keys.chunks(chain_of(rank.store, CHAIN))]
    until(lambda: all(rank.disk.inner.contains_many(keys)))
    assert not rank.ram.go_on.is_set()
    rank.ram.go_on.set()
    closing.join(30)
    assert not closing.is_alive()


def test_a_verb_that_waits_holds_up_no_end(rank: LinkedRank) -> None:
    rank.begin_save()
    forgetting = rank.hub.submit(rank.verbs.forget(ref()))
    with pytest.raises(TimeoutError):
        forgetting.result(0.2)  # it waits
    rank.link.close()
    assert not rank.store.is_saved  # the save that it waits for is still under way


# ---- a hub that comes anew


def test_blobs_staged_for_an_earlier_hub_are_dropped(rank: LinkedRank) -> None:
    save(rank.store, ref(), CHAIN)
    assert rank.staged(1, CHAIN).end_block == len(CHAIN)
    assert len(rank.staging) == 1
    rank.restart_hub()
    assert len(rank.staging) == 0
    assert rank.staging.take(1) is None
    assert rank.staged(1, CHAIN).end_block == len(CHAIN)


def test_a_request_of_an_earlier_hub_does_not_answer_a_later_one(rank: LinkedRank) -> None:
    """It counts its tickets from 1 again: these blobs would be another prompt's."""
    save(rank.store, ref(), CHAIN)
    rank.ram.go_on.clear()
    rank.ask_to_stage(1, CHAIN)
    assert rank.ram.entered.wait(10)
    rank.restart_hub()
    assert rank.staged(1, OTHER).end_block == 0
    rank.ram.go_on.set()
    until(lambda: not rank.link.num_staging)
    assert rank.staging.take(1).fetched.blobs == []


@pytest.mark.parametrize("words", [(MAX_FRAME_BYTES + 1).to_bytes(4, "big"), b"\0\0\0\2no", b""])
def test_a_hub_that_talks_nonsense_is_called_again(tmp_path: Path, words: bytes) -> None:
    store = open_store()
    with socket.socket(socket.AF_UNIX) as hub:
        hub.settimeout(10)
        hub.bind(str(tmp_path / "hub.sock"))
        hub.listen()
        link = link_to(str(tmp_path / "hub.sock"), store)
        for _ in range(2):
            with hub.accept()[0] as rank:
                assert receive(rank)
                rank.sendall(words)
        link.close()
    store.close()
