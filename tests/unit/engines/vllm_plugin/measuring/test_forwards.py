"""Orders from ranks, over a real hub, to an HTTP server and back."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engines.calibration.self_measurement import Interrupted
from engines.vllm_plugin.measuring.forward_client import ForwardClient
from engines.vllm_plugin.messages import (
    Findings,
    ForwardDone,
    FrontHello,
    RankHello,
    RunForward,
    decode_to_front,
    decode_to_rank,
    receive,
)
from engines.vllm_plugin.scheduler.hub import Hub
from engines.vllm_plugin.scheduler.measured_requests import Forwards
from engines.wire import frame
from kvstore.codecs.profile import Profile
from kvstore.codecs.quality import Quality
from kvstore.shapes import KVLayout
from tests.unit.engines.calibration.gate.test_bound import ranked as row
from tests.waiting import until


class Peer:
    """A connection to the hub."""

    def __init__(self, path: str, hello: FrontHello | RankHello) -> None:
        self.link = socket.socket(socket.AF_UNIX)
        self.link.settimeout(60)
        self.link.connect(path)
        self.link.sendall(frame(hello))


class Rank(Peer):
    """A rank with nothing but the measuring thread's client."""

    def __init__(self, path: str, number: int) -> None:
        super().__init__(path, RankHello(number, 1, 1))
        self.client = ForwardClient(number, lambda order: self.link.sendall(frame(order)))
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while True:
            try:
                message = decode_to_rank(receive(self.link))
            except (OSError, EOFError):
                return
            assert isinstance(message, ForwardDone | Findings)
            self.client.receive(message)


class Rig:
    def __init__(self, path: str) -> None:
        self.idle = True
        self.hub = Hub(path, 2, lambda news: self.forwards.receive(news))
        self.forwards = Forwards(self.hub, lambda: self.idle)
        self.hub.start()
        self.ranks = [Rank(path, i) for i in range(2)]
        self.front = Peer(path, FrontHello())
        self.pool = ThreadPoolExecutor(2)
        until(lambda: self.hub.ready and self.hub.num_fronts)

    def order(self, rank: int, tokens: list[int]):
        client = self.ranks[rank].client
        return self.pool.submit(client.order, client.next_number(), tokens, "salt", given=5)

    def taken(self, within_s: float = 60.0) -> RunForward:
        self.front.link.settimeout(within_s)
        run = decode_to_front(receive(self.front.link))
        assert isinstance(run, RunForward)
        return run

    def answer(self, run: RunForward, error: str = "") -> None:
        self.front.link.sendall(frame(ForwardDone(run.order.number, error)))

    def close(self) -> None:
        for rank in self.ranks:
            rank.client.close()
        self.pool.shutdown()
        self.hub.close()
        for peer in (*self.ranks, self.front):
            peer.link.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(str(tmp_path / "hub.sock"))
    yield rig
    rig.close()


def test_a_request_is_put_when_all_ranks_want_it(rig):
    first = rig.order(0, [1, 2])
    with pytest.raises(TimeoutError):
        rig.taken(0.3)
    second = rig.order(1, [1, 2])
    run = rig.taken()
    assert (run.order.tokens, run.order.given) == ((1, 2), 5)
    assert rig.forwards.order_of(run.ticket) == run.order
    assert rig.forwards.order_of("another") is None
    rig.answer(run)
    assert first.result(60) is second.result(60) is None
    assert rig.forwards.order_of(run.ticket) is None, "a ticket is good for one request"


def test_it_waits_while_others_are_served(rig):
    rig.idle = False
    orders = [rig.order(i, [1]) for i in range(2)]
    with pytest.raises(TimeoutError):
        rig.taken(0.3)
    rig.idle = True
    rig.answer(rig.taken())
    assert [x.result(60) for x in orders] == [None, None]


def test_every_rank_gets_the_error(rig):
    orders = [rig.order(i, [1]) for i in range(2)]
    rig.answer(rig.taken(), "out of luck")
    for order in orders:
        with pytest.raises(RuntimeError, match="out of luck"):
            order.result(60)


def test_ranks_that_want_different_requests_get_none(rig):
    orders = [rig.order(i, [i]) for i in range(2)]
    with pytest.raises(TimeoutError):
        rig.taken(0.3)
    for rank in rig.ranks:
        rank.client.close()
    for order in orders:
        with pytest.raises(Interrupted):
            order.result(60)


def test_the_same_order_is_sent_again_but_carried_out_once(rig, monkeypatch):
    monkeypatch.setattr("engines.vllm_plugin.measuring.forward_client.REPEAT_S", 0.02)
    orders = [rig.order(i, [1]) for i in range(2)]
    run = rig.taken()
    with pytest.raises(TimeoutError):
        rig.taken(0.3)
    rig.answer(run)
    assert [x.result(60) for x in orders] == [None, None]


def profile_of(kl: float) -> Profile:
    rows = (row(kl=kl, codec_id=f"codec {kl}"),)
    return Profile("model", KVLayout("float32", ()), (), {}, rows)


def agreed(rig: Rig, *kls: float) -> list[Quality]:
    agree = [x.client.agree for x in rig.ranks]
    waiting = [rig.pool.submit(x, profile_of(kl)) for x, kl in zip(agree, kls, strict=True)]
    return [x.result(60).rows[0] for x in waiting]


def begin_again(rig: Rig) -> None:
    """Begin another measurement on all ranks; its first order is carried out."""
    for rank in rig.ranks:
        rank.client.begin()
    orders = [rig.order(i, [1]) for i in range(2)]
    rig.answer(rig.taken())
    assert [x.result(60) for x in orders] == [None, None]


def test_all_ranks_get_the_worst_that_any_has_found(rig):
    rows = agreed(rig, 0.1, 0.2)
    assert [x.kl for x in rows] == [0.2, 0.2]
    assert [x.codec_id for x in rows] == ["codec 0.1", "codec 0.2"]


def test_another_measurement_has_figures_of_its_own(rig):
    begin_again(rig)
    assert [x.kl for x in agreed(rig, 0.3, 0.4)] == [0.4, 0.4]
    begin_again(rig)
    assert [x.kl for x in agreed(rig, 0.1, 0.2)] == [0.2, 0.2]


def test_a_rank_that_gives_up_ends_all_others(rig, monkeypatch):
    module = "engines.vllm_plugin.measuring.forward_client"
    monkeypatch.setattr(f"{module}.REPEAT_S", 60.0)  # nothing is sent twice
    agreeing = rig.pool.submit(rig.ranks[0].client.agree, profile_of(0.1))
    until(lambda: rig.forwards._findings)  # else the hub would answer it, too, with the news
    rig.ranks[1].client.give_up("it has no text")
    with pytest.raises(RuntimeError, match="it has no text"):
        agreeing.result(60)
    for rank in range(2):  # the news must not come after the next beginning
        with pytest.raises(RuntimeError, match="it has no text"):
            rig.order(rank, [1]).result(60)
    begin_again(rig)
    assert [x.kl for x in agreed(rig, 0.1, 0.2)] == [0.2, 0.2]
