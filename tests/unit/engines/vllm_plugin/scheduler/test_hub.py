"""The hub between ranks: staging, and links that come, go and hang."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engines.host.control_server import MAX_UNSENT_BYTES, ControlServer
from engines.vllm_plugin.messages import (
    FrontHello,
    RankHello,
    RankSaved,
    Release,
    RequestAdmitted,
    Stage,
)
from engines.vllm_plugin.scheduler.hub import MAX_OPEN, Hub, SaveAcks
from engines.vllm_plugin.scheduler.resident_sessions import ResidentSessions
from engines.vllm_plugin.scheduler.restores import Restores
from engines.vllm_plugin.scheduler.tracked_request import TokenBlocks, TrackedRequest
from engines.vllm_plugin.worker.rank import StagingArea
from engines.wire import (
    ListSessions,
    Refused,
)
from engines.wire import frame as message_frame
from tests.block_sessions import BLOCK, open_store, ref, save, tokens_of
from tests.unit.engines.vllm_plugin.hub_engine import CHAIN, link_to, verbs_of, welcomed
from tests.unit.engines.vllm_plugin.scheduler.scheduler_bench import Request
from tests.waiting import until


def test_all_ranks_stage_and_the_answer_is_theirs(engine):
    engine.save()
    staged = engine.stage()
    assert (staged.end_block, staged.tier, staged.reason) == (24, "ram", None)
    assert engine.hub.staged(1) is None  # returned once
    assert [len(x.take(1).fetched.blobs) for x in engine.staging] == [12, 12]


def test_the_rank_that_has_least_counts(engine):
    engine.save(ranks=1)
    staged = engine.stage()
    assert (staged.end_block, staged.reason) == (0, "never-stored")


def test_the_slowest_tier_counts(engine):
    engine.save()
    engine.stores[1].demote(ref(), "disk")
    assert engine.stage().tier == "disk"


def test_a_released_ticket_is_dropped_everywhere(engine):
    engine.save()
    engine.stage()
    engine.hub.send(Release(1))
    until(lambda: not len(engine.staging[0]) and not len(engine.staging[1]))


def test_a_rank_that_went_away_makes_the_hub_unready(engine):
    engine.links[0].close()
    until(lambda: not engine.hub.ready)
    assert isinstance(engine.ask(ListSessions()), Refused)


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


def test_the_gateway_is_served_only_once_the_http_server_has_come(hub, tmp_path):
    control = tmp_path / "control.sock"
    verbs = verbs_of(hub, ResidentSessions())
    hub.start_after_front(ControlServer("secret", welcomed, verbs).serve(f"unix:{control}"))
    time.sleep(0.05)
    assert not control.exists()
    with peer(tmp_path, FrontHello()):
        until(control.exists)


MEGABYTE = 1_000_000
MANY = 2 * MAX_UNSENT_BYTES // MEGABYTE


def test_a_rank_that_does_not_read_is_cut_off(hub, tmp_path):
    with peer(tmp_path, RankHello(0, 1, 1)):
        until(lambda: hub.ready)
        for ticket in range(MANY):
            hub.send(Stage(ticket, None, 0, bytes(MEGABYTE)))
        until(lambda: not hub.ready)


def test_an_http_server_that_does_not_read_is_cut_off(hub, tmp_path):
    with peer(tmp_path, FrontHello()):
        until(lambda: hub.num_fronts == 1)
        for _ in range(MANY):
            hub.send(RequestAdmitted("x" * MEGABYTE, "hot"))
        until(lambda: not hub.num_fronts)


def test_the_socket_is_for_this_user_only(tmp_path):
    path = tmp_path / "hub.sock"
    path.write_text("of a process that was killed")
    hub = Hub(str(path), 1, lambda news: None)
    hub.start()
    assert path.stat().st_mode & 0o777 == 0o600
    hub.close()
    assert not path.exists()


def completed(acks: SaveAcks, job: int, *kept: bool) -> list[bool]:
    return [acks.completes(RankSaved(job, ref(), x)) for x in kept]


def test_a_save_is_complete_once_the_last_rank_has_kept_it() -> None:
    acks = SaveAcks(3)
    assert completed(acks, 1, False, True, True) == [False, False, False]
    assert completed(acks, 2, True, False, False) == [False, False, False]
    assert completed(acks, 3, True, True, True) == [False, False, True]
    assert len(acks) == 0


def test_saves_that_a_lost_rank_never_reports_are_bounded() -> None:
    acks = SaveAcks(2)
    for job in range(2 * MAX_OPEN):
        completed(acks, job, True)
    assert len(acks) == MAX_OPEN
    assert completed(acks, 2 * MAX_OPEN - 1, True) == [True]


def test_a_request_does_not_wait_for_a_rank_that_is_silent(tmp_path: Path) -> None:
    """One rank has all of the session, and the other one, which is connected, says nothing."""
    hub = Hub(str(tmp_path / "hub.sock"), 2, lambda news: None)
    hub.start()
    store, staging = open_store(), StagingArea()
    link = link_to(str(tmp_path / "hub.sock"), store, staging, hello=RankHello(0, 1, 1))
    save(store, ref(), CHAIN)
    tokens = tokens_of(24, 1)
    restores = Restores(hub, TokenBlocks(BLOCK), deadline_s=0.2, max_staged_bytes=200)
    first, second = (TrackedRequest(Request(tokens, name=x), ref()) for x in ("r1", "r2"))
    with peer(tmp_path, RankHello(1, 1, 1)):
        until(lambda: hub.ready)
        assert restores.match(first, 0, idle=True) == (None, False)
        assert restores.match(second, 0, idle=True) == (None, False)  # there is no room for it
        until(lambda: restores.match(first, 0, idle=True) == (0, False))
        assert restores.match(second, 0, idle=True) == (0, False)
        said = {x.outcome(0).header() for x in (first, second)}
        assert said == {"miss; tokens=0; reason=deadline"}
        until(lambda: not len(staging))
    link.close()
    store.close()
    hub.close()
