"""A worker's cold store at work: staging for loads, saving after turns, answering the hub."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final

import msgspec

from engines.calibration.served import ServedCodecs
from engines.vllm_plugin.messages import (
    Ask,
    Look,
    Message,
    Peek,
    RankAnswer,
    RankHello,
    RankSession,
    Release,
    Stage,
    Staged,
    ToRank,
    decode_to_rank,
    frame,
    pages,
    receive,
)
from engines.wire import Adopt, Demote, Forget, GetStats, ListSessions, Pin, Prefetch, Unpin, Verb
from kvstore.block_records import BlockRecord, split_hashes
from kvstore.block_store import BlockStore, Fetched
from kvstore.errors import PinLimit, StoreClosed
from kvstore.records import SessionRef
from kvstore.stats import StoreStats

logger = logging.getLogger("thermocline.vllm")

RETRY_S: Final = 0.1
# Restores that read at the same time; more wait in line, so that none starves.
NUM_STAGERS: Final = 4
NUM_SERVANTS: Final = 8  # some wait for saves
# What a verb may wait for saves to end; both below the asker's patience.
SETTLE_S: Final = 5.0
FORGET_S: Final = 60.0


def packed_bytes_per_token(store: BlockStore) -> int:
    """Cold, in memory; about, and without what states take."""
    num_tokens = store.keys.chunk_blocks * store.keys.block_tokens
    return store.packer.chunk_nbytes(0, num_tokens) // num_tokens


class StagingArea:
    """Verified blobs between the offer and the load. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted: set[int] = set()
        self._fetched: dict[int, Fetched] = {}

    def expect(self, ticket: int) -> None:
        with self._lock:
            self._wanted.add(ticket)

    def clear(self) -> None:
        """Nobody wants anything any more."""
        with self._lock:
            self._wanted.clear()
            self._fetched.clear()

    def put(self, ticket: int, fetched: Fetched) -> None:
        """Dropped if nobody wants it any more."""
        with self._lock:
            if ticket in self._wanted:
                self._fetched[ticket] = fetched

    def take(self, ticket: int) -> Fetched | None:
        """For good: the ticket is done."""
        with self._lock:
            self._wanted.discard(ticket)
            return self._fetched.pop(ticket, None)

    def is_wanted(self, ticket: int) -> bool:
        with self._lock:
            return ticket in self._wanted

    def __len__(self) -> int:
        with self._lock:
            return len(self._wanted)


class RankLink:
    """The connection to the hub: one thread that listens, a few that serve."""

    def __init__(
        self,
        path: str,
        hello: RankHello,
        store: BlockStore,
        staging: StagingArea,
        stats: Callable[[], StoreStats],
        wait_saved: Callable[[SessionRef, float], bool],
        codecs: ServedCodecs,
    ) -> None:
        self._path = path
        self._hello = hello
        self._store = store
        self._staging = staging
        self._stats = stats
        self._wait_saved = wait_saved
        self._codecs = codecs
        self._sending = threading.Lock()
        self._connection: socket.socket | None = None
        self._closed = False
        self._stagers = ThreadPoolExecutor(NUM_STAGERS, "thermocline-stage")
        self._servants = ThreadPoolExecutor(NUM_SERVANTS, "thermocline-verbs")
        self._thread = threading.Thread(target=self._run, name="thermocline-rank", daemon=True)
        self._thread.start()

    def send(self, message: Message) -> None:
        """Dropped while there is no connection: whoever waits for it gives up by its deadline."""
        self._send_on(self._connection, message)

    def close(self) -> None:
        """Waits for nobody: a tier that hangs must not keep the store from its last flush.

        What still runs is heard by no one, and ends as the store closes.
        """
        self._closed = True
        if (connection := self._connection) is not None:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._stagers.shutdown(wait=False, cancel_futures=True)
        self._servants.shutdown(wait=False, cancel_futures=True)

    def session(self, record: BlockRecord) -> RankSession:
        tier = self._store.tier_of(record)
        return RankSession(
            record.tenant,
            record.id,
            tier,
            record.num_tokens,
            record.packed_bytes,
            record.last_used_s,
            record.pinned,
        )

    def _run(self) -> None:
        """The hub starts later than the workers, and may come again."""
        while not self._closed:
            try:
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                    connection.connect(self._path)
                    self._listen(connection)
            except (OSError, EOFError):
                pass  # no hub yet, or none any more
            except Exception:  # the edge of this thread: without it no session comes back
                if not self._closed:
                    logger.exception("the connection to the hub failed and is made anew")
            finally:
                self._connection = None
            if not self._closed:
                time.sleep(RETRY_S)

    def _listen(self, connection: socket.socket) -> None:
        """One connection, to its end. What an earlier one asked for, nobody will ask for again."""
        with self._sending:
            self._staging.clear()
            connection.sendall(frame(self._hello))
            self._connection = connection
        while not self._closed:
            self._hear(decode_to_rank(receive(connection)), connection)

    def _hear(self, message: ToRank, connection: socket.socket) -> None:
        match message:
            case Stage():
                self._staging.expect(message.ticket)
                self._stagers.submit(self._stage, message, connection)
            case Peek():
                self._servants.submit(self._peek, message, connection)
            case Release():
                self._staging.take(message.ticket)
            case Ask():
                self._servants.submit(self._answer, message, connection)

    def _send_on(self, connection: socket.socket | None, message: Message) -> None:
        """Answers go where the question came from: a hub that came anew counts from 1 again."""
        with self._sending, suppress(OSError):
            if connection is not None and connection is self._connection:
                connection.sendall(frame(message))

    def _stage(self, message: Stage, connection: socket.socket) -> None:
        try:
            if not self._staging.is_wanted(message.ticket):
                return
            hashes = split_hashes(message.hashes)
            fetched = self._store.fetch(message.session, hashes, message.first_block)
        except StoreClosed:
            return
        except Exception:  # the edge of this thread: a defect here costs a prefill, no more
            logger.exception("a session could not be staged")
            fetched = Fetched(message.first_block, [], None, "unavailable")
        with self._sending:  # no other connection may begin here
            if connection is not self._connection:
                return
            self._staging.put(message.ticket, fetched)
        staged = Staged(
            message.ticket, fetched.end_block, fetched.tier, fetched.reason, fetched.part
        )
        self._send_on(connection, staged)

    def _peek(self, message: Peek, connection: socket.socket) -> None:
        hashes, first = split_hashes(message.hashes), message.first_block
        try:
            end, reason = self._store.peek(message.session, hashes, first)
        except StoreClosed:
            return
        except Exception:  # the edge of this thread: the request then waits in line
            logger.exception("a session could not be looked up")
            end, reason = len(hashes) + 1, None
        self._send_on(connection, Staged(message.ticket, end, None, reason))

    def _answer(self, message: Ask, connection: socket.socket) -> None:
        try:
            records = self._obey(message.verb)
            stats = self._stats() if isinstance(message.verb, GetStats) else None
            codec = self._codecs.report if isinstance(message.verb, GetStats | Adopt) else None
            answer = RankAnswer(message.number, [self.session(x) for x in records], stats, codec)
        except StoreClosed:
            return
        except PinLimit as error:
            answer = RankAnswer(message.number, [], pin_limit=str(error))
        except Exception as error:  # the edge of this thread: whoever asks gets an answer
            logger.exception("%s failed", type(message.verb).__name__)
            answer = RankAnswer(message.number, [], error=f"{type(error).__name__}: {error}")
        for page in pages(answer):
            self._send_on(connection, page)

    def _adopt(self) -> None:
        self._codecs.renew(self._store.adopt)
        packed = packed_bytes_per_token(self._store)
        self._hello = msgspec.structs.replace(
            self._hello, codec=self._codecs.codecs.ram.id, packed_bytes_per_token=packed
        )
        self.send(self._hello)  # how much a restore will bring is reckoned by it

    def _obey(self, verb: Verb | Look) -> list[BlockRecord]:
        """Obeys; gives the records that the answer is about."""
        match verb:
            case ListSessions():
                return self._store.records()
            case Adopt():
                self._adopt()
                return []
            case Demote(session, tier) if tier is not None:
                self._store.demote(session, tier)
            case Prefetch(session):
                self._store.warm(session)
            case Pin(session) | Unpin(session):
                self._wait_saved(session, SETTLE_S)  # what was never saved cannot be pinned
                self._store.pin(session, isinstance(verb, Pin))
            case Forget(session):
                # Or the save would bring back a part of it.
                if not self._wait_saved(session, FORGET_S):
                    raise TimeoutError("a save of the session does not end")
                self._store.forget(session)
            case Look(session, settled=True):
                self._wait_saved(session, SETTLE_S)
            case Look() | Demote():
                pass
            case _:
                return []
        record = self._store.record(verb.session)
        return [record] if record else []
