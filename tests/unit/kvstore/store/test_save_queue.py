from __future__ import annotations

import threading
from collections.abc import Sequence

from kvstore.blobs.chain import Piece
from kvstore.ledger.index import Claims
from kvstore.store.save_queue import Offered, SaveJob, SaveQueue
from kvstore.tiers.base import Blob
from tests.kv_sessions import ref


class Source:
    """Rows that are never asked for."""

    def __init__(self) -> None:
        self.is_released = False

    def is_restored(self, piece: Piece) -> bool:
        return False

    def pack(self, pieces: Sequence[Piece]) -> list[Blob]:
        raise AssertionError

    def release(self) -> None:
        self.is_released = True


def job(name: str, nbytes: int = 10) -> SaveJob:
    return SaveJob(name.encode(), ref(name), [bytes(32)], Source(), nbytes)


def test_oldest_first_and_one_per_session():
    queue = SaveQueue(100, Claims())
    older = job("a")
    assert queue.offer(older) is Offered.QUEUED
    assert queue.offer(job("b")) is Offered.QUEUED
    newer = job("a", 30)
    assert queue.offer(newer) is Offered.SUPERSEDED
    assert older.source.is_released and not newer.source.is_released
    assert queue.nbytes == 40
    assert queue.take(0) is newer  # in the place of the one it replaced
    assert queue.take(0).key == b"b"
    assert queue.take(0) is None


def test_the_bound_counts_waiting_and_running_saves():
    queue = SaveQueue(25, Claims())
    assert queue.offer(job("a", 1000)) is Offered.QUEUED  # one always fits
    running = queue.take(0)
    assert queue.offer(job("b")) is Offered.REFUSED
    queue.packed(running)
    assert queue.nbytes == 0 and running.source.is_released
    assert queue.offer(job("b", 20)) is Offered.QUEUED
    assert queue.offer(job("c", 20)) is Offered.REFUSED
    assert queue.offer(job("c", 20), always=True) is Offered.QUEUED
    assert queue.drop(b"c")
    assert queue.offer(job("b", 25)) is Offered.SUPERSEDED
    assert queue.offer(job("b", 26)) is Offered.SUPERSEDED  # alone it fits, at any size
    queue.settle(running)
    assert queue.nbytes == 26


def test_a_session_is_saved_by_one_at_a_time():
    queue = SaveQueue(100, Claims())
    queue.offer(job("a"))
    first = queue.take(0)
    queue.offer(job("a"))
    queue.offer(job("b"))
    assert queue.take(0).key == b"b"
    assert queue.take(0) is None
    queue.settle(first)
    assert queue.take(0).key == b"a"


def test_a_claim_waits_for_the_running_save_and_holds_the_next_back():
    claims = Claims()
    queue = SaveQueue(100, claims)
    queue.offer(job("a"))
    running = queue.take(0)
    claimed, release = threading.Event(), threading.Event()

    def claim() -> None:
        with claims.claim(b"a"):
            claimed.set()
            release.wait(10)

    thread = threading.Thread(target=claim)
    thread.start()
    assert not claimed.wait(0.05)
    queue.settle(running)
    assert claimed.wait(10)
    queue.offer(job("a"))
    assert queue.take(0) is None
    assert not queue.settled(b"a")
    release.set()
    thread.join()
    assert queue.take(0).key == b"a"


def test_a_save_that_waits_can_be_taken_out():
    queue = SaveQueue(100, Claims())
    waiting = job("a")
    queue.offer(waiting)
    assert queue.is_waiting(b"a")
    assert queue.drop(b"a") is waiting and waiting.source.is_released
    assert queue.drop(b"a") is None and not queue.is_waiting(b"a")
    assert queue.nbytes == 0
    assert queue.wait_idle(0)


def test_closed_it_refuses_and_wakes_who_waits():
    queue = SaveQueue(100, Claims())
    queue.offer(job("a"))
    (waiting,) = queue.close()
    assert waiting.key == b"a" and waiting.source.is_released
    assert queue.offer(job("b")) is Offered.REFUSED
    assert queue.take(10) is None
    assert queue.nbytes == 0
